"""Records answers of TRL 1.16 about a tiny model, for tests that run without TRL.

    python -m tests.bench.trl_record

needs the environment that `make peers` makes. It writes to `FOLDER`:

    the model
    answers.json              the batch, old log-probs of off-policy cases, and TRL's loss and
                              advantages for each of `CASES`
    answers.safetensors       TRL's gradients, as `<case>/<weight>`
    updates.json              the batches of several optimizer steps, and their gradient norms
    updates.safetensors       the weights after these steps
    tools.json                a batch of episodes with a tool, and TRL's loss and advantages for
                              each of `TOOL_CASES`
    tools.safetensors         their gradients, as `<case>/<weight>`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
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
from slipstream.data.lookup import LookupTask
from slipstream.data.sft import tokenize_conversation
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import save_checkpoint

FOLDER = Path(__file__).parent / "data" / "trl"

TOOL_CASES = CASES[:2]
"""Cases with different means over tokens."""

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
"""Settings of the optimizer steps. Some of their gradient norms are above `grad_clip`."""


def recorded() -> tuple[FixedBatch, list[list[float]], dict[str, Any]]:
    """The batch, old log-probs of off-policy cases, and TRL's answers by case."""
    content = json.loads((FOLDER / "answers.json").read_text())
    return FixedBatch(**content["batch"]), content["old_log_probs"], content["cases"]


def answered(case: Case) -> ParityOutcome:
    """TRL's answer for a case."""
    _, _, cases = recorded()
    return _outcome(case, cases, "answers")


def recorded_tools() -> tuple[FixedBatch, dict[str, ParityOutcome]]:
    """The batch with a tool, and TRL's answers by case."""
    content = json.loads((FOLDER / "tools.json").read_text())
    answers = {case.name: _outcome(case, content["cases"], "tools") for case in TOOL_CASES}
    return FixedBatch(**content["batch"]), answers


def _outcome(case: Case, cases: dict[str, Any], name: str) -> ParityOutcome:
    prefix = f"{case.name}/"
    gradients = load_file(FOLDER / f"{name}.safetensors")
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
    """The batches of the optimizer steps, and TRL's result."""
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
    _write("answers", batch, old, CASES)
    _write("tools", tool_batch(), None, TOOL_CASES)
    steps = [
        make_batch(task, task.tokenizer, groups=2, group_size=3, first=100 * step)
        for step in range(4)
    ]
    with PeerProcess("trl", trl_command()) as process:
        trained = their_updates(process, FOLDER, steps, UPDATE_SETTINGS, threads=1)
    content: dict[str, object] = {
        "batches": [asdict(batch) for batch in steps],
        "grad_norms": trained.grad_norms,
    }
    (FOLDER / "updates.json").write_text(json.dumps(content) + "\n")
    save_file(dict(trained.weights), FOLDER / "updates.safetensors")
    for file in FOLDER.iterdir():
        # Only TRL needs the tokenizer.
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            file.unlink()


def _write(
    name: str, batch: FixedBatch, old: list[list[float]] | None, cases: Sequence[Case]
) -> None:
    """Ask TRL and write its answers and gradients."""
    found: dict[str, ParityOutcome] = {}
    with PeerProcess("trl", trl_command()) as process:
        for case in cases:
            given = old if case.off_policy else None
            found[case.name] = theirs(process, FOLDER, batch, case, given, threads=1)
    content = {
        "batch": asdict(batch),
        "old_log_probs": old,
        "cases": {
            case: {"loss": outcome.loss, "advantages": outcome.advantages}
            for case, outcome in found.items()
        },
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(content) + "\n")
    gradients = {
        f"{case}/{weight}": gradient
        for case, outcome in found.items()
        for weight, gradient in outcome.gradients.items()
    }
    save_file(gradients, FOLDER / f"{name}.safetensors")


def tool_batch() -> FixedBatch:
    """Demonstrations of the lookup task, three for each of two problems. A reward is 1 less a cost
    per look-up."""
    task = LookupTask(1, max_steps=2, waste=0.6)
    prompts, completions, masks, rewards = [], [], [], []
    for index in range(2):
        for variant in range(3):
            messages = task.demonstration("train", index, variant=variant)
            whole = tokenize_conversation(messages, task.tokenizer)
            start = next(place for place, mask in enumerate(whole.loss_mask) if mask)
            prompts.append(list(whole.ids[:start]))
            completions.append(list(whole.ids[start:]))
            masks.append([int(mask) for mask in whole.loss_mask[start:]])
            calls = sum(message["role"] == "tool" for message in messages)
            rewards.append(1.0 - task.cost * calls)
    shifts = [[0.0] * len(ids) for ids in completions]
    return FixedBatch(
        group_size=3,
        prompt_ids=prompts,
        completion_ids=completions,
        rewards=rewards,
        shifts=shifts,
        masks=masks,
    )


def _model(task: CountdownTask) -> Decoder:
    """One layer with two heads, and weights so large that its distributions are not flat."""
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
