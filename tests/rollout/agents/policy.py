"""A scripted policy for tests of agents."""

from __future__ import annotations

from slipstream.types import Generation, Sample, StopReason, VersionSpan


class Policy:
    """Writes two tokens per turn, and stops once in the turn `stop_in` after one token."""

    def __init__(self, stop_in: int | None = None, fail: bool = False) -> None:
        self.stop_in, self.fail = stop_in, fail
        self.limits: list[int | None] = []

    async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
        self.limits.append(max_tokens)
        last = sample.segments[-1]
        done = len(last.ids)
        # The segment of the turn that begins or continues is already there.
        segments = [segment for branch in sample.branches for segment in branch.segments]
        turn = sum(segment.role == "assistant" for segment in segments) - 1
        ids = [10 * (turn + 1), 10 * (turn + 1) + 1][done:]
        reason = StopReason.ERROR if self.fail else StopReason.EOS
        if turn == self.stop_in:
            self.stop_in, ids, reason = None, ids[:1], StopReason.ABORT
        return Generation(
            request_id="r",
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            sampling_log_probs=[-1.0] * len(ids),
            spans=[VersionSpan(0, 0, len(ids))],
            stop_reason=reason,
            error="no memory" if self.fail else None,
        )
