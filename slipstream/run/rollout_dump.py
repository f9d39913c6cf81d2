"""Writes rollouts to disk: one JSON line per sample, with verl's field names and some of ours.

For the report it also writes the tokens of a few samples, and marks those that were drafted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint.files import is_disk_full, write_text_atomic
from slipstream.data.response_text import response_decoder
from slipstream.data.sample_file import segment_rows
from slipstream.errors import CheckpointError
from slipstream.rewards.protocol import REWARD_EXTRAS, Decode, response_text
from slipstream.run.conversation import parts_of
from slipstream.types import Group, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHOWN_GROUPS = 4
"""The report can show one response of this many groups per step."""

MOST_PIECES_OF_A_CHARACTER = 4
"""A UTF-8 character has at most this many bytes, and so at most this many tokens."""


def dump_groups(
    path: Path,
    groups: Sequence[Group],
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    decode: Decode | None = None,
) -> None:
    """Write all samples of `groups` to `path`, and replace an existing file atomically.

    `decode` turns responses into the text that is scored (None: `response_decoder`).

    A ground truth that JSON cannot express (a date, a decimal) is written as text. Numbers that are
    not finite become null.

    Raises CheckpointError if the file cannot be written; earlier checkpoints stay.
    """
    samples = [sample for group in groups for sample in group.samples]
    decode = decode or response_decoder(tokenizer)
    records = [record(sample, tokenizer, step, decode) for sample in samples]
    lines = [_json(one) for one in records]
    _write(path, lines, step)


def dump_tokens(
    folder: Path, groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, step: int
) -> list[dict[str, Any]]:
    """Write `folder/N.jsonl` for step N: token records of the first sample of up to `SHOWN_GROUPS`
    groups. Returns the records.

    These files differ between equal runs, because which tokens were drafted depends on measured
    times. The files of `dump_groups` are equal. Raises CheckpointError if writing fails.
    """
    chosen = min(SHOWN_GROUPS, len(groups))
    shown = [groups[i * len(groups) // chosen].samples[0] for i in range(chosen)]
    records = [token_record(sample, tokenizer) for sample in shown]
    _write(folder / f"{step}.jsonl", [_json(record) for record in records], step)
    return records


def token_record(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A response, token by token, as JSON values.

    `pieces` are the texts of the tokens; `log_probs` is null for values that are not finite;
    `drafted` has "1" for tokens that were drafted; `masked` has "1" for tokens that the policy did
    not generate. The responses of an episode's branches follow each other. `parts` (for episodes
    with an environment) are its turns and answers: the index of the first token, the role, the
    number of the branch, and the rewards of the turn by name.
    """
    branches = sample.branches
    starts = [len(branch.prompt_ids) for branch in branches]
    texts, log_probs, drafted, masked = list[str](), list[float](), "", ""
    for branch, start in zip(branches, starts, strict=True):
        texts += pieces(branch.response_ids, tokenizer)
        log_probs += branch.rollout_log_probs[start:]
        places = set(branch.drafted)
        drafted += "".join("1" if i in places else "0" for i in range(start, branch.num_tokens))
        masked += "".join("0" if mask else "1" for mask in branch.loss_mask[start:])
    return {
        "uid": sample.uid,
        "index": sample.index,
        "input": tokenizer.decode(branches[0].prompt_ids),
        "pieces": texts,
        "log_probs": [round(x, 4) if math.isfinite(x) else None for x in log_probs],
        "drafted": drafted,
        "masked": masked,
        **({} if sample.episode is None else {"parts": _parts(sample)}),
        "score": sample.reward,
        "gts": None if sample.ground_truth is None else str(sample.ground_truth),
        "status": sample.status.value,
        "stop_reason": None if sample.stop_reason is None else sample.stop_reason.value,
        "failure": sample.failure or sample.metadata.get("reward_failure"),
    }


def _parts(sample: Sample) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    at = 0
    for part in parts_of(sample):
        given = {one.name: one.value for one in part.rewards}
        role, branch = part.segment.role, part.branch
        found.append({"at": at, "role": role, "branch": branch, "rewards": given})
        at += len(part.segment.ids)
    return found


def pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds. If tokens split a character, the last of them gets it."""
    found: list[str] = []
    known = begin = 0
    for end in range(1, len(ids) + 1):
        # Decoded with a few tokens of context, because the text of a token may depend on them.
        before, text = tokenizer.decode(ids[begin:known]), tokenizer.decode(ids[begin:end])
        cut = text.endswith("\N{REPLACEMENT CHARACTER}")
        # No character has more tokens than this; the replacement character is shown then.
        if cut and end < len(ids) and end - known < MOST_PIECES_OF_A_CHARACTER:
            found.append("")
            continue
        found.append(text[len(before) :])
        begin, known = known, end
    return found


def _write(path: Path, lines: Sequence[str], step: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "\n".join(lines) + "\n")
    except OSError as error:
        remedy = "make room" if is_disk_full(error) else "see to the folder"
        raise CheckpointError(
            f"step {step}: the samples cannot be written to {path} ({error}); {remedy} and run the "
            "same command again: it resumes from the last checkpoint"
        ) from error


def _json(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return `value` with null for numbers that are not finite, because JSON has none."""
    if isinstance(value, dict):
        return {_finite_key(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite_key(key: Any) -> Any:
    return str(key) if isinstance(key, float) and not math.isfinite(key) else key


def table_row(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, step: int, decode: Decode
) -> dict[str, str | float]:
    """A row for a logger's table of generations."""
    entry = record(sample, tokenizer, step, decode)
    return {
        "step": step,
        "data_source": sample.data_source,
        "prompt": entry["input"],
        "response": entry["text"],
        "ground_truth": str(sample.ground_truth),
        "score": sample.reward,
    }


def record(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, step: int, decode: Decode
) -> dict[str, Any]:
    """A sample as JSON values: `input`, `output`, `gts`, `score`, `step` as in verl.

    `text` is the response that reward functions get, `messages` the prompt if it has messages,
    `episode` the counts and rewards of its turns if it has an environment. `segments` say who wrote
    the tokens of the response, and which of them the policy sampled under which version.
    Log-probs that are not finite become null.
    """
    return {
        "input": tokenizer.decode(sample.prompt_ids),
        "messages": sample.prompt if isinstance(sample.prompt, list) else None,
        "output": tokenizer.decode(sample.response_ids),
        "text": response_text(sample, decode),
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
        "log_probs": _log_probs(sample),
        "loss_mask": sample.loss_mask[len(sample.prompt_ids) :],
        "segments": segment_rows(sample.answer_segments),
        "versions": sorted({v for branch in sample.branches for v in branch.versions} - {-1}),
        **_episode(sample),
        **_logged(sample),
    }


def _episode(sample: Sample) -> dict[str, Any]:
    """The counts of an episode with an environment, without times; its earlier branches, if any;
    and its rewards, each with the index of its last token in the `response_ids` of its branch."""
    record = sample.episode
    if record is None:
        return {}
    starts = [len(branch.prompt_ids) for branch in sample.branches]
    earlier = [
        {
            "prompt_ids": branch.prompt_ids,
            "response_ids": branch.response_ids,
            "log_probs": _log_probs(branch),
            "loss_mask": branch.loss_mask[len(branch.prompt_ids) :],
            "segments": segment_rows(branch.answer_segments),
        }
        for branch in sample.earlier
    ]
    return {
        "episode": {
            "turns": record.turns,
            "calls": record.calls,
            "problems": dict(sorted(record.problems.items())),
            "truncated_by": record.truncated_by,
            "rewards": [
                {
                    "name": one.name,
                    "value": one.value,
                    "branch": one.branch,
                    "place": one.place - starts[one.branch],
                }
                for one in record.rewards
            ],
            "metrics": record.metrics,
            **({"earlier": earlier} if earlier else {}),
        }
    }


def _log_probs(sample: Sample) -> list[float | None]:
    """The log-probs of a response; null for values that are not finite."""
    values = sample.rollout_log_probs[len(sample.prompt_ids) :]
    return [x if math.isfinite(x) else None for x in values]


def _logged(sample: Sample) -> dict[str, Any]:
    """The texts that the reward function logged (TRL's `log_extra`), if any."""
    extras = sample.metadata.get(REWARD_EXTRAS)
    return {} if extras is None else {REWARD_EXTRAS: extras}
