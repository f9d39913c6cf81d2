"""Records what TRL 1.16 answers about a tiny model, for tests that have no TRL to ask.

    python -m tests.bench.trl_record

needs the environment that `make peers` makes. Writes `FOLDER`: the model, the batch with the
old log-probs of off-policy cases, TRL's loss and advantages of each of `CASES` in answers.json,
its gradients in gradients.safetensors as `<case>/<weight>`, the batches of several optimizer steps
with the norms of their gradients in updates.json, and the weights after them in
updates.safetensors.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from bench.trl_parity import (
    CASES,
    Case,
    FixedBatch,
    ParityOutcome,
    Updated,
    make_batch,
    old_log_probs,
    their_updates,
    theirs,
)
from bench.trl_runs import trl_command
from slipstream.bench.peer_process import PeerProcess
from slipstream.data.countdown import CountdownTask
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import save_checkpoint

FOLDER = Path(__file__).parent / "data" / "trl"


UPDATE_SETTINGS: dict[str, Any] = {
    "max_completion_length": 144,
    "lr": 0.01,
    "warmup_steps": 2,
    "betas": [0.9, 0.99],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
    "loss_type": "grpo",
    "epsilon": 0.2,
    "scale_rewards": "group",
}
"""Of the optimizer steps: some of their gradients are longer than `grad_clip`."""


def recorded() -> tuple[FixedBatch, list[list[float]], dict[str, Any]]:
    """The batch, old log-probs of off-policy cases, and what TRL answered by case."""
    content = json.loads((FOLDER / "answers.json").read_text())
    return FixedBatch(**content["batch"]), content["old_log_probs"], content["cases"]


def answered(case: Case) -> ParityOutcome:
    """What TRL answered."""
    _, _, cases = recorded()
    prefix = f"{case.name}/"
    gradients = load_file(FOLDER / "gradients.safetensors")
    return ParityOutcome(
        loss=cases[case.name]["loss"],
        advantages=cases[case.name]["advantages"],
        gradients={
            name.removeprefix(prefix): gradient
            for name, gradient in gradients.items()
            if name.startswith(prefix)
        },
    )


def updated() -> tuple[list[FixedBatch], Updated]:
    """The batches of the optimizer steps, and what TRL made of them."""
    content = json.loads((FOLDER / "updates.json").read_text())
    return (
        [FixedBatch(**batch) for batch in content["batches"]],
        Updated(
            grad_norms=content["grad_norms"], weights=load_file(FOLDER / "updates.safetensors")
        ),
    )


def main() -> None:
    task = CountdownTask(0)
    batch = make_batch(task, task.tokenizer, groups=2, group_size=3)
    shutil.rmtree(FOLDER, ignore_errors=True)
    save_checkpoint(_model(task), FOLDER, save_tokenizer=task.tokenizer.save_pretrained)
    old = old_log_probs(FOLDER, batch)
    found: dict[str, ParityOutcome] = {}
    with PeerProcess("trl", trl_command()) as process:
        for case in CASES:
            given = old if case.off_policy else None
            found[case.name] = theirs(process, FOLDER, batch, case, given, threads=1)
    steps = [
        make_batch(task, task.tokenizer, groups=2, group_size=3, first=100 * step)
        for step in range(4)
    ]
    with PeerProcess("trl", trl_command()) as process:
        moved = their_updates(process, FOLDER, steps, UPDATE_SETTINGS, threads=1)
    content: dict[str, object] = {
        "batches": [asdict(batch) for batch in steps],
        "grad_norms": moved.grad_norms,
    }
    (FOLDER / "updates.json").write_text(json.dumps(content) + "\n")
    save_file(dict(moved.weights), FOLDER / "updates.safetensors")
    content = {
        "batch": asdict(batch),
        "old_log_probs": old,
        "cases": {
            name: {"loss": outcome.loss, "advantages": outcome.advantages}
            for name, outcome in found.items()
        },
    }
    (FOLDER / "answers.json").write_text(json.dumps(content) + "\n")
    gradients = {
        f"{case}/{name}": gradient
        for case, outcome in found.items()
        for name, gradient in outcome.gradients.items()
    }
    save_file(gradients, FOLDER / "gradients.safetensors")
    for file in FOLDER.iterdir():
        # Only TRL reads text.
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            file.unlink()


def _model(task: CountdownTask) -> Decoder:
    """Two heads of one layer, with weights large enough that it has opinions."""
    decoder = Decoder(
        ModelConfig(
            family="qwen3",
            vocab_size=224,
            hidden_size=16,
            intermediate_size=32,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_position_embeddings=160,
            initializer_range=0.3,
            eos_token_id=task.tokenizer.eos_token_id,
            pad_token_id=task.tokenizer.pad_token_id,
        )
    )
    decoder.init_weights(0)
    return decoder


if __name__ == "__main__":
    main()
