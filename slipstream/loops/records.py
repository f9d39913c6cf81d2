"""Rollouts on disk: one JSON line per sample, in VERL's field names, with ours added."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint.files import is_disk_full, write_text_atomic
from slipstream.errors import CheckpointError
from slipstream.types import Group, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def dump_groups(
    path: Path, groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, step: int
) -> None:
    """Write all samples of `groups` to `path`, replacing it in one rename.

    A ground truth that JSON has no value for (a date, a decimal) is written as text. Raises
    CheckpointError where the file cannot be written: the checkpoints before stay.
    """
    samples = [sample for group in groups for sample in group.samples]
    lines = [json.dumps(record(sample, tokenizer, step), default=str) for sample in samples]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "\n".join(lines) + "\n")
    except OSError as error:
        remedy = "make room" if is_disk_full(error) else "see to the folder"
        raise CheckpointError(
            f"step {step}: the samples cannot be written to {path} ({error}); {remedy} and run the "
            "same command again: it goes on from the last checkpoint"
        ) from error


def table_row(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, step: int
) -> dict[str, str | float]:
    """What tables of generations have of a sample."""
    entry = record(sample, tokenizer, step)
    return {
        "step": step,
        "data_source": sample.data_source,
        "prompt": entry["input"],
        "response": entry["text"],
        "ground_truth": str(sample.ground_truth),
        "score": sample.reward,
    }


def record(sample: Sample, tokenizer: PreTrainedTokenizerBase, step: int) -> dict[str, Any]:
    """A sample as JSON values: `input`, `output`, `gts`, `score`, `step` as in VERL; `text` is the
    response as reward functions are given it.

    JSON has no number for what is not finite: such a log-prob is null.
    """
    return {
        "input": tokenizer.decode(sample.prompt_ids),
        "output": tokenizer.decode(sample.response_ids),
        "text": tokenizer.decode(sample.response_ids, skip_special_tokens=True),
        "gts": sample.ground_truth,
        "data_source": sample.data_source,
        "extra_info": sample.extra_info,
        "score": sample.reward,
        "step": step,
        "uid": sample.uid,
        "group": sample.group_index,
        "index": sample.index,
        "status": sample.status.value,
        "stop_reason": None if sample.stop_reason is None else sample.stop_reason.value,
        "failure": sample.failure or sample.metadata.get("reward_failure"),
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "log_probs": [
            x if math.isfinite(x) else None
            for x in sample.rollout_log_probs[len(sample.prompt_ids) :]
        ],
        "versions": sorted(set(sample.versions) - {-1}),
    }
