"""Samples for RL in a JSON Lines file: writes them, and reads them back as they were.

One line is one sample. `ids`, `loss_mask` and `log_probs` have one entry per token, prompt
included. `segments` says who wrote the tokens, in order; the `spans` of a segment are the tokens
that the policy sampled, each with the version of the policy. `earlier` has the same fields for the
earlier branches of an episode.

Knows samples, not where they come from. Called by `convert_trajectories`, and `run.rollout_dump`
writes the same segments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.checkpoint.files import write_text_atomic
from slipstream.errors import DataError
from slipstream.reading import reading, shown
from slipstream.types import EpisodeRecord, PlacedReward, Sample, Segment, Status, VersionSpan

MOST_LOG_PROB = 1e-4
"""Log-probs computed in float32 can be this far above 0."""

_MOST_ID = 1 << 31


def segment_rows(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """Return role, number of tokens and spans of segments as JSON values.

    A span is [start, end, version]; start and end count within the segment.
    """
    return [
        {
            "role": segment.role,
            "tokens": len(segment.ids),
            "spans": [[span.start, span.end, span.version] for span in segment.spans],
        }
        for segment in segments
    ]


def segments_of(rows: Any, ids: Any, loss_mask: Any, log_probs: Any, where: str) -> list[Segment]:
    """Return the segments that `segment_rows` described. Raises DataError that names `where`."""
    ids, log_probs = token_ids(ids, f"{where}: ids"), log_prob_list(log_probs, where)
    mask = numbers(loss_mask, f"{where}: loss_mask")
    if not all(0.0 <= one <= 1.0 for one in mask):
        raise DataError(f"{where}: loss_mask has a number outside 0 to 1; write 0 or 1")
    if not len(ids) == len(mask) == len(log_probs):
        raise DataError(
            f"{where}: ids, loss_mask and log_probs must have equal length, got {len(ids)}, "
            f"{len(mask)} and {len(log_probs)}; convert the trajectories again"
        )
    made, start = [], 0
    for row in rows:
        end = start + int(row["tokens"])
        spans = [VersionSpan(int(v), int(a), int(b)) for a, b, v in row["spans"]]
        if any(not 0 <= span.start <= span.end <= end - start for span in spans):
            raise DataError(f"{where}: a span is outside its segment; convert again")
        made.append(
            Segment(
                role=str(row["role"]),
                ids=ids[start:end],
                loss_mask=mask[start:end],
                log_probs=log_probs[start:end],
                sampling_log_probs=log_probs[start:end],
                spans=spans,
            )
        )
        start = end
    if start != len(ids):
        raise DataError(f"{where}: segments have {start} tokens, ids {len(ids)}; convert again")
    return made


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples to `path`, and replace an existing file atomically.

    Raises DataError if the file cannot be written.
    """
    lines = [json.dumps(_record(sample), allow_nan=False) for sample in samples]
    with reading(path, DataError, "give another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "\n".join(lines) + "\n")


def load_samples(path: str | Path) -> list[Sample]:
    """Return the samples of a file that `slipstream data trajectories --to rl` wrote.

    `rollout.functional.prepare_grpo_batch` makes a training batch of them. The log-probs of
    truncated sampling (top-k, top-p, min-p) are those of the full vocabulary. Raises DataError that
    names file and line.
    """
    path = Path(path).expanduser()
    remedy = "give a file of `slipstream data trajectories --to rl`"
    samples = []
    with reading(path, DataError, remedy):
        for place, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            where = f"{path}:{place}"
            if line.strip():
                with reading(where, DataError, remedy):
                    samples.append(_sample(json.loads(line), where))
    if not samples:
        raise DataError(f"{path} has no samples; {remedy}")
    return samples


def token_ids(value: Any, what: str) -> list[int]:
    """Return token ids. Raises DataError that begins with `what` for anything else."""
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} must be a list of token ids, got {shown(value, 80)}")
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < _MOST_ID:
            raise DataError(f"{what} must be token ids of at least 0, got {shown(one)}; correct it")
    return list(value)


def log_prob_list(value: Any, where: str) -> list[float]:
    """Return log-probs. Raises DataError that names `where` for NaN and for numbers above 0."""
    found = numbers(value, f"{where}: log-probs")
    wrong = next((x for x in found if not x <= MOST_LOG_PROB), None)
    if wrong is not None:
        raise DataError(
            f"{where}: a log-prob is {wrong}, but the natural logarithm of a probability is at "
            "most 0; write log-probs, not probabilities"
        )
    return found


def numbers(value: Any, what: str) -> list[float]:
    """Return finite numbers. Raises DataError that begins with `what` for anything else."""
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} must be a list of numbers, got {shown(value, 80)}")
    return [number(x, what) for x in value]


def number(value: Any, what: str) -> float:
    """Return a finite number. Raises DataError that begins with `what` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{what} must be a finite number, got {shown(value)}; correct it")
    return float(value)


def placed_rewards(rows: Any, starts: Sequence[int], where: str) -> list[PlacedReward]:
    """Return rewards of turns; `place` in `rows` counts from the token in `starts` of the row's
    branch."""
    what = f"{where}: the reward of a turn"
    found = []
    for row in rows:
        branch = int(row["branch"])
        place = starts[branch] + int(row["place"])
        found.append(PlacedReward(place, str(row["name"]), number(row["value"], what), branch))
    return found


def _record(sample: Sample) -> dict[str, Any]:
    turns = [] if sample.episode is None else sample.episode.rewards
    return {
        **_branch_record(sample),
        "earlier": [_branch_record(branch) for branch in sample.earlier],
        "turn_rewards": [
            {"name": r.name, "value": r.value, "branch": r.branch, "place": r.place} for r in turns
        ],
    }


def _branch_record(sample: Sample) -> dict[str, Any]:
    return {
        "uid": sample.uid,
        "group": sample.group_index,
        "index": sample.index,
        "branch": sample.branch,
        "parent": sample.parent,
        "reward": sample.reward,
        "status": sample.status.value,
        "messages": sample.prompt,
        "ids": sample.tokens,
        "loss_mask": sample.loss_mask,
        "log_probs": sample.rollout_log_probs,
        "segments": segment_rows(sample.segments),
        "metadata": sample.metadata,
    }


def _sample(row: Mapping[str, Any], where: str) -> Sample:
    sample = _branch(row, where)
    sample.earlier = [_branch(one, where) for one in row["earlier"]]
    turns = placed_rewards(row["turn_rewards"], [0] * len(sample.branches), where)
    sample.episode = EpisodeRecord(rewards=turns) if turns else None
    return sample


def _branch(row: Mapping[str, Any], where: str) -> Sample:
    return Sample(
        prompt=row["messages"],
        segments=segments_of(
            row["segments"], row["ids"], row["loss_mask"], row["log_probs"], where
        ),
        status=Status(row["status"]),
        reward=number(row["reward"], f"{where}: the reward"),
        uid=str(row["uid"]),
        group_index=row["group"],
        index=row["index"],
        branch=row["branch"],
        parent=row["parent"],
        metadata=row["metadata"],
    )
