"""Evaluates and exports checkpoints, for `slipstream eval` and `slipstream export`."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import torch
from safetensors import safe_open

from slipstream.build.data import (
    make_decode,
    make_reward_manager,
    make_task,
    make_tokenizer,
    validation_prompts,
)
from slipstream.build.engine import make_engine
from slipstream.build.policy import make_policy, model_config
from slipstream.build.process import import_external, set_threads
from slipstream.build.rollouts import eval_settings
from slipstream.checkpoint.layout import head_folder, policy_folder
from slipstream.checkpoint.state import RunState, huggingface_folder, state_file
from slipstream.config.schema import Config
from slipstream.config.tree import from_dict
from slipstream.data.end_tokens import end_token_ids
from slipstream.data.tokenizer import load_tokenizer
from slipstream.deadlines import Deadlines, close_parts
from slipstream.errors import CheckpointError, ConfigError
from slipstream.inference.protocol import InferenceEngine
from slipstream.loops.evaluate import Evaluation
from slipstream.loops.evaluate import evaluate as run_evaluation
from slipstream.models.draft.files import is_draft_head, load_draft_head
from slipstream.models.draft.layouts import LAYOUTS, export_draft_head
from slipstream.models.hf_io import read_json
from slipstream.models.policy import Implementation, add_end_tokens, load_policy, save_policy
from slipstream.reading import reading
from slipstream.run.console import accuracies
from slipstream.run.rollout_dump import dump_groups
from slipstream.training.compute_thread import ComputeThread

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def evaluate(config: Config, checkpoint: Path, problems: int | None, output: Path | None) -> int:
    """Evaluate a checkpoint, or the newest one of a run, on the held-out prompts. Returns the exit
    status."""
    set_threads(config)
    import_external(config)
    source = policy_folder(checkpoint)
    tokenizer = make_tokenizer(config, source if _has_tokenizer(source) else None)
    task = make_task(config, tokenizer)
    prompts = validation_prompts(config, tokenizer, task, count=problems)
    if not prompts:
        raise ConfigError(
            "there is nothing to evaluate on; set data.val_files=FILE or data.task=countdown"
        )
    compute = ComputeThread()
    rewards = make_reward_manager(config, tokenizer, compute=compute)

    def make() -> InferenceEngine:
        model_config(config, tokenizer, source)
        policy = make_policy(config, tokenizer, source, trained=False)
        return make_engine(config, policy, tokenizer, compute, trained=False)

    engine = compute.run(make)

    async def work() -> Evaluation:
        return await run_evaluation([engine], prompts, rewards, eval_settings(config, tokenizer))

    print(f"evaluating {source} on {len(prompts)} problems", file=sys.stderr)
    try:
        result = anyio.run(work)
    finally:
        close_parts(Deadlines(), engine, compute)
    for name, value in result.metrics.items():
        print(f"{name:<48} {value:.4f}")
    for text in accuracies(result.metrics):
        print(text)
    if output is not None:
        dump_groups(output, result.groups, tokenizer, 0, make_decode(config, tokenizer))
        print(f"responses    {output}")
    return 0


def export(checkpoint: Path, output: Path, dtype: str, draft: str | None = None) -> int:
    """Export the policy of a checkpoint as a Hugging Face folder, or its draft head in the layout
    `draft` of an engine (`models.draft.layouts`). Returns the exit status."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"{output} exists and is not an empty folder; choose another --output"
        )
    if draft is not None:
        _export_draft(checkpoint, output, dtype, draft)
        return 0
    source = policy_folder(checkpoint)
    policy = load_policy(source, _implementation(source))
    save_tokenizer: Any = None
    if _has_tokenizer(source):
        tokenizer = load_tokenizer(source)
        # A checkpoint of an earlier version may lack the token that its template ends turns with.
        add_end_tokens(policy, end_token_ids(tokenizer))
        save_tokenizer = tokenizer.save_pretrained
    kind = stored_dtype(source) if dtype == "auto" else _DTYPES[dtype]
    with _aside(output) as folder:
        save_policy(
            policy,
            folder,
            dtype=kind,
            generation=_generation_defaults(source),
            save_tokenizer=save_tokenizer,
        )
    name = str(kind).removeprefix("torch.")
    print(f"model  {output} ({policy.config.family}, {name}, from {source})")
    if save_tokenizer is None:
        print(
            f"note: {source} has no tokenizer, so {output} has no tokenizer either", file=sys.stderr
        )
    return 0


def _export_draft(checkpoint: Path, output: Path, dtype: str, layout: str) -> None:
    source = _head_source(checkpoint)
    head = load_draft_head(source)
    kind = stored_dtype(source) if dtype == "auto" else _DTYPES[dtype]
    with _aside(output) as folder:
        export_draft_head(head, folder, layout, dtype=kind)
    name = str(kind).removeprefix("torch.")
    wanted = LAYOUTS[layout]
    print(f"draft head  {output} ({wanted.engine}, {head.config.family}, {name}, from {source})")
    print(f"for example: {wanted.command(head, policy='MODEL', folder=output)}")


def _head_source(checkpoint: Path) -> Path:
    """The draft head of a checkpoint or run: the co-trained one, otherwise the one that
    `slipstream draft` trained."""
    for place in (checkpoint, checkpoint / "draft"):
        folder = head_folder(place)
        if is_draft_head(folder):
            return folder
    raise CheckpointError(
        f"{checkpoint} has no draft head; train one with `slipstream draft --checkpoint "
        f"{checkpoint}`, or pass the folder of a draft head as --checkpoint"
    )


@contextlib.contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """A temporary folder that becomes `output` at the end. So an interrupted export leaves nothing
    that looks like a complete model."""
    aside = output.with_name(f".{output.name}.exporting")
    shutil.rmtree(aside, ignore_errors=True)
    yield aside
    if output.exists():
        output.rmdir()
    aside.rename(output)


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the floating-point weights in a Hugging Face folder; the widest if they
    differ."""
    found: set[torch.dtype] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with (
            reading(file, CheckpointError, "give a safetensors file"),
            safe_open(file, framework="pt") as opened,
        ):
            found |= {opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118
    found = {dtype for dtype in found if dtype.is_floating_point}
    if len(found) == 1 and next(iter(found)) in _DTYPES.values():
        return found.pop()
    return torch.float32


def _implementation(source: Path) -> Implementation:
    """The implementation (decoder or transformers) of the run whose checkpoint holds `source`."""
    folder = source.absolute()
    checkpoint = folder.parent.parent
    if huggingface_folder(checkpoint) != folder or not state_file(checkpoint).exists():
        return "auto"
    config, _ = from_dict(RunState.load(checkpoint).config)
    return config.actor_rollout_ref.model.implementation


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def _generation_defaults(folder: Path) -> dict[str, Any]:
    """The sampling defaults in the checkpoint; token ids come from the model instead."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    values = read_json(path)
    return {name: value for name, value in values.items() if not name.endswith("_token_id")}
