"""How much to draft: a point of the grid that selectors choose from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from slipstream.errors import ConfigError
from slipstream.tree_size import candidate_count


@dataclass(frozen=True, slots=True, order=True)
class DraftPlan:
    """Draft `steps` deep, `topk` tokens wide, and verify `verify_tokens` rows a request: of trees,
    on average over the batch, and those of the drafts that are most likely to be right.

    The rows include the one of the last known token, as in SGLang and FastRL: a chain of n drafts
    is `n_1_(n+1)`. Written `8_4_32`; `OFF` is `0_0_1`. Raises ConfigError for a shape that cannot
    be.
    """

    steps: int
    topk: int
    verify_tokens: int

    def __post_init__(self) -> None:
        if (self.steps, self.topk, self.verify_tokens) == (0, 0, 1):
            return
        if self.steps < 1 or self.topk < 1:
            raise ConfigError(f"draft plan {self}: steps and topk must be at least 1, or 0_0_1")
        if self.topk == 1 and self.verify_tokens != self.steps + 1:
            raise ConfigError(
                f"draft plan {self}: a chain of {self.steps} drafts is verified in "
                f"{self.steps + 1} rows; write {self.steps}_1_{self.steps + 1}"
            )
        most = self.candidates
        if not 2 <= self.verify_tokens <= most + 1:
            raise ConfigError(
                f"draft plan {self}: {self.steps} steps of {self.topk} give at most {most} drafts, "
                f"so verify_tokens must be from 2 to {most + 1}"
            )

    @property
    def candidates(self) -> int:
        """Drafts among which those to verify are chosen."""
        return candidate_count(self.steps, self.topk)

    @property
    def draft_rows(self) -> int:
        """What the drafter computes of a request: the last known token, and all that is followed
        to give more."""
        return 1 + (self.steps - 1) * self.topk if self.steps else 0

    def most_drafts(self, requests: int) -> int:
        """What one of so many requests may have to verify, beyond its last known token: of a chain
        all have as much, and of trees those whose drafts promise more have more."""
        return min(self.candidates, requests * (self.verify_tokens - 1))

    @classmethod
    def chain(cls, drafts: int) -> DraftPlan:
        """`drafts` tokens one after the other; OFF for none."""
        return _chain(drafts)

    @classmethod
    def parse(cls, text: str) -> DraftPlan:
        """From `steps_topk_verify`. Raises ConfigError for another form."""
        match = re.fullmatch(r"(\d+)_(\d+)_(\d+)", text)
        if match is None:
            raise ConfigError(f"draft plan {text!r}: expected steps_topk_verify, for example 3_1_4")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.steps}_{self.topk}_{self.verify_tokens}"


OFF = DraftPlan(0, 0, 1)
"""Plain decoding, a plan like any other."""


@cache
def _chain(drafts: int) -> DraftPlan:
    # Every step of a run asks for one.
    return DraftPlan(drafts, 1, drafts + 1) if drafts else OFF
