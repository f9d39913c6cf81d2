"""What a drafter that rests has missed, and how long it will be of use once it begins again.

To begin, it has to take in what was written meanwhile; it pays if the batch lasts long enough. The
batches of rollouts shrink until the next one begins, each about like the one before. Used by
`selector`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_SOON = 32.0
"""Tokens of a request that a batch is held to last for at least, where none like it has ended."""

_SHARE = 0.02
"""What taking in a token takes, before it has been seen: of what a row of the policy takes."""

_TRUST = 1000.0
"""Tokens taken in that count as much as that."""

_FADE = 0.9


@dataclass(slots=True)
class Rest:
    """Counts tokens of each of the `running` requests, `written` by the batch and `missed` by the
    drafter."""

    running: int = 0
    missed: float = 0.0
    written: float = 0.0
    _taken_in: float = 0.0
    _seconds: float = 0.0
    # The class of batch sizes that there is now, since when, and how long each has lasted.
    _bucket: int = 0
    _since: float = 0.0
    _lasted: dict[int, float] = field(default_factory=dict)

    def batch(self, running: int, bucket: int) -> None:
        """A step of so many requests comes; `bucket` stands for batches of about that size."""
        if running > self.running:
            # New requests bring what there is to know of them.
            self.missed *= self.running / running
        self.running = running
        if bucket != self._bucket:
            if self._bucket:
                lasted = self.written - self._since
                before = self._lasted.get(self._bucket, lasted)
                self._lasted[self._bucket] = (before + lasted) / 2
            self._bucket, self._since = bucket, self.written

    def stepped(self, made: float, drafted: bool) -> None:
        """The step has written `made` tokens a request."""
        self.written += made
        self.missed = 0.0 if drafted else self.missed + made

    def took_in(self, seconds: float, row: float) -> None:
        """It took `seconds` to catch up in the step that comes, where a row takes `row`."""
        tokens = self.missed * self.running
        self._taken_in = _FADE * self._taken_in + tokens
        # More than what the policy itself would have taken is something else that ran.
        self._seconds = _FADE * self._seconds + min(max(seconds, 0.0), row * tokens)

    def cost(self, row: float) -> float:
        """Seconds to catch up now, where a row takes `row`."""
        known = self._seconds + _SHARE * row * _TRUST
        return self.missed * self.running * known / (self._taken_in + _TRUST)

    def horizon(self, drafts: Callable[[int], bool]) -> float:
        """Tokens of a request that drafts will be of use for from now on: while the batch is about
        as large as now and, where it `drafts` at smaller sizes too, as far down as it does."""
        now = self.written - self._since
        lasted = self._lasted.get(self._bucket)
        # One that has outlived the others lasts on as long as it has outlived them.
        found = max(_SOON, now) if lasted is None else abs(lasted - now)
        for smaller in sorted((b for b in self._lasted if b < self._bucket), reverse=True):
            if not drafts(smaller):
                break
            found += self._lasted[smaller]
        return found
