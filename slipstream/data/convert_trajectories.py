"""`slipstream data trajectories`: selects finished trajectories and writes samples for SFT or RL.

Knows which trajectories to keep and what to print; `trajectories` reads and converts them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.checkpoint.files import write_text_atomic
from slipstream.data.conversation import tokenize_conversation
from slipstream.data.sample_file import save_samples
from slipstream.data.tokenizer import load_tokenizer
from slipstream.data.trajectories import Trajectory, read_trajectories, to_sample, to_sft
from slipstream.errors import ConfigError, DataError
from slipstream.reading import reading
from slipstream.types import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Target = Literal["sft", "rl"]
Truncated = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The trajectories to convert, in their order, and the number of others by reason."""

    kept: list[Trajectory] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def select(
    trajectories: Sequence[Trajectory],
    *,
    min_reward: float | None = None,
    best_of_group: int | None = None,
    truncated: Truncated = "drop",
) -> Selection:
    """Choose trajectories: neither failed nor aborted, with a reward of at least `min_reward`, and
    of each group the `best_of_group` with the highest rewards. Of equal rewards the first counts.

    Raises DataError for a trajectory without the reward or group that this needs.
    """
    chosen = Selection()
    groups: dict[Hashable, list[Trajectory]] = {}
    for one in trajectories:
        if one.status in (Status.FAILED, Status.ABORTED):
            chosen.dropped[one.status.value] += 1
        elif one.status is Status.TRUNCATED and truncated == "drop":
            chosen.dropped["truncated"] += 1
        elif min_reward is not None and _reward(one, "--min-reward") < min_reward:
            chosen.dropped[f"reward below {min_reward:g}"] += 1
        else:
            chosen.kept.append(one)
            groups.setdefault(one.group, []).append(one)
    if best_of_group is None:
        return chosen
    if None in groups:
        raise DataError(
            f"{groups[None][0].where}: --best-of-group needs a 'group'; give all trajectories of "
            "one prompt the same text or integer"
        )
    best: set[int] = set()
    for group in groups.values():
        ranked = sorted(group, key=lambda one: -_reward(one, "--best-of-group"))
        best.update(id(one) for one in ranked[:best_of_group])
    kept = [one for one in chosen.kept if id(one) in best]
    chosen.dropped[f"not among the best {best_of_group} of the group"] += len(chosen.kept) - len(
        kept
    )
    return Selection(kept=kept, dropped=chosen.dropped)


def group_indices(trajectories: Sequence[Trajectory]) -> list[tuple[int | None, int]]:
    """Return the number of each trajectory's group, None without one, and its place in the group.

    Groups count from 0 in the order in which they appear.
    """
    numbers: dict[Hashable, int] = {}
    sizes: Counter[Hashable] = Counter()
    found: list[tuple[int | None, int]] = []
    for one in trajectories:
        if one.group is None:
            found.append((None, 0))
            continue
        found.append((numbers.setdefault(one.group, len(numbers)), sizes[one.group]))
        sizes[one.group] += 1
    return found


def convert(
    files: Sequence[Path],
    to: Target,
    output: Path,
    *,
    min_reward: float | None = None,
    best_of_group: int | None = None,
    truncated: Truncated | None = None,
    tokenizer_path: Path | None = None,
) -> list[str]:
    """Write the samples of all trajectories in `files` to `output`. Returns the lines of a summary.

    `truncated` None means drop for SFT, because the loss of SFT covers an end token that the policy
    did not write, and keep for RL. With the folder of a tokenizer, conversations for SFT are
    rendered and tokenized as in training, and ids for RL must be in its vocabulary.

    Raises ConfigError for filters that RL cannot use, and DataError that names file and line.
    """
    if to == "rl" and (min_reward is not None or best_of_group is not None):
        raise ConfigError(
            "--min-reward and --best-of-group cannot be combined with --to rl, because advantages "
            "compare all rewards of a group; leave them out, or use --to sft"
        )
    if min_reward is not None and not math.isfinite(min_reward):
        raise ConfigError(
            f"--min-reward {min_reward} must be a finite number; leave it out for all"
        )
    if output.expanduser().resolve() in [file.expanduser().resolve() for file in files]:
        raise ConfigError(f"--output {output} is one of the files to read; give another name")
    tokenizer = None
    if tokenizer_path is not None:
        try:
            tokenizer = load_tokenizer(tokenizer_path, require_chat_template=to == "sft")
        except DataError as error:
            raise DataError(f"--tokenizer: {error}") from error
    read = read_trajectories(files)
    selection = select(
        read,
        min_reward=min_reward,
        best_of_group=best_of_group,
        truncated=truncated or ("drop" if to == "sft" else "keep"),
    )
    lines = [f"{len(read):>8,} trajectories read"]
    lines += [f"{n:>8,} dropped: {reason}" for reason, n in selection.dropped.items() if n]
    if not selection.kept:
        raise DataError(
            f"no trajectory is left of {len(read)} ({', '.join(map(str.strip, lines[1:]))}); relax "
            "--min-reward or --truncated, or give other files"
        )
    write = _write_sft if to == "sft" else _write_rl
    return [*lines, *write(selection.kept, output.expanduser(), tokenizer)]


def _reward(trajectory: Trajectory, flag: str) -> float:
    if trajectory.reward is None:
        raise DataError(f"{trajectory.where}: {flag} needs a 'reward'; add it, or leave {flag} out")
    return trajectory.reward


def _write_sft(
    kept: Sequence[Trajectory], output: Path, tokenizer: PreTrainedTokenizerBase | None
) -> list[str]:
    rows = [to_sft(one) for one in kept]
    tokens = 0
    for one, row in zip(kept, rows, strict=True):
        if tokenizer is not None:
            tokens += _trained_tokens(row, tokenizer, one.where)
    with reading(output, DataError, "give another --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(output, "".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [f"{len(rows):>8,} rows for sft.train_files  {output}"]
    return lines if tokenizer is None else [*lines, f"{tokens:>8,} tokens with loss"]


def _trained_tokens(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> int:
    try:
        made = tokenize_conversation(row["messages"], tokenizer, tools=row.get("tools"))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return sum(map(bool, made.loss_mask))


def _write_rl(
    kept: Sequence[Trajectory], output: Path, tokenizer: PreTrainedTokenizerBase | None
) -> list[str]:
    samples: list[Sample] = []
    places = group_indices(kept)
    for one, (group, index) in zip(kept, places, strict=True):
        made = to_sample(one, group_index=group, index=index)
        if tokenizer is not None:
            _check_vocabulary(made, len(tokenizer), one.where)
        samples.append(made)
    save_samples(output, samples)
    branches = [branch for sample in samples for branch in sample.branches]
    lone = sum(group is None for group, _ in places)
    lines = [
        f"{len(samples):>8,} samples  {output}",
        f"{sum(sum(map(bool, branch.loss_mask)) for branch in branches):>8,} tokens with loss",
        f"{len({group for group, _ in places if group is not None}):>8,} groups",
    ]
    if len(branches) > len(samples):
        lines.append(f"{len(branches) - len(samples):>8,} further branches of samples")
    if lone:
        lines.append(f"{lone:>8,} trajectories have no 'group', which GRPO needs")
    return lines


def _check_vocabulary(sample: Sample, size: int, where: str) -> None:
    largest = max(max(branch.tokens) for branch in sample.branches)
    if largest >= size:
        raise DataError(
            f"{where}: the token id {largest} is outside the vocabulary of {size} tokens; give the "
            "--tokenizer of the policy that wrote the trajectory"
        )
