"""Rollouts on disk: one JSON line per sample, in VERL's field names, with ours added."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint.files import write_text_atomic
from slipstream.types import Group, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def dump_groups(
    path: Path, groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, step: int
) -> None:
    """Write all samples of `groups` to `path`, replacing it in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(record(sample, tokenizer, step)) for group in groups for sample in group.samples
    ]
    write_text_atomic(path, "\n".join(lines) + "\n")


def record(sample: Sample, tokenizer: PreTrainedTokenizerBase, step: int) -> dict[str, Any]:
    """A sample as JSON values: `input`, `output`, `gts`, `score`, `step` as in VERL.

    JSON has no number for what is not finite: such a log-prob is null.
    """
    return {
        "input": tokenizer.decode(sample.prompt_ids),
        "output": tokenizer.decode(sample.response_ids),
        "gts": sample.ground_truth,
        "score": sample.reward,
        "step": step,
        "uid": sample.uid,
        "group": sample.group_index,
        "index": sample.index,
        "status": sample.status.value,
        "stop_reason": None if sample.stop_reason is None else sample.stop_reason.value,
        "failure": sample.failure or sample.metadata.get("reward_failure"),
        "response_ids": sample.response_ids,
        "log_probs": [
            x if math.isfinite(x) else None
            for x in sample.rollout_log_probs[len(sample.prompt_ids) :]
        ],
        "versions": sorted(set(sample.versions) - {-1}),
    }
