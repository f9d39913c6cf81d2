"""Small prompts and samples for tests."""

from __future__ import annotations

from slipstream.types import Prompt, Sample, Segment, Status, VersionSpan


def make_prompt(uid: str, ids: list[int] | None = None) -> Prompt:
    return Prompt(uid=uid, ids=ids or [1, 2])


def respond(sample: Sample, ids: list[int], *, version: int = 0) -> Sample:
    """Append the response `ids` of policy `version`, with log-probs -0.1, -0.2, ..."""
    log_probs = [-0.1 * (i + 1) for i in range(len(ids))]
    sample.append(
        Segment(
            role="assistant",
            ids=ids,
            loss_mask=[1.0] * len(ids),
            log_probs=log_probs,
            sampling_log_probs=log_probs,
            spans=[VersionSpan(version, 0, len(ids))],
        )
    )
    sample.status = Status.COMPLETED
    return sample


def make_sample(
    group: int, reward: float = 0.0, ids: list[int] | None = None, *, index: int = 0
) -> Sample:
    """A finished sample of group `group`: prompt [1, 2], response `ids`."""
    sample = Sample.from_prompt(make_prompt(f"p{group}"), group_index=group, index=index)
    respond(sample, [7, 8] if ids is None else ids)
    sample.reward = reward
    return sample
