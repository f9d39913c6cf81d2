"""A draft plan: how deep and wide to draft, and how many tokens to verify. Selectors choose one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from slipstream.errors import ConfigError
from slipstream.tree_size import candidate_count


@dataclass(frozen=True, slots=True, order=True)
class DraftPlan:
    """Draft `steps` deep, follow `topk` tokens per level, and verify `verify_tokens` per request.

    For trees, `verify_tokens` is a mean over the batch; the drafts with the highest estimated
    acceptance probability are verified. `verify_tokens` includes the last known token, as in SGLang
    and FastRL: a chain of n drafts is `n_1_(n+1)`. Plans are written like `8_4_32`; `OFF` is
    `0_0_1`. Raises ConfigError for an impossible shape.
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
                f"draft plan {self}: a chain of {self.steps} drafts needs verify_tokens="
                f"{self.steps + 1}; write {self.steps}_1_{self.steps + 1}"
            )
        most = self.candidates
        if not 2 <= self.verify_tokens <= most + 1:
            raise ConfigError(
                f"draft plan {self}: {self.steps} steps of {self.topk} give at most {most} drafts, "
                f"so verify_tokens must be from 2 to {most + 1}"
            )

    @property
    def candidates(self) -> int:
        """The number of candidate draft tokens of a request, from which those to verify are
        selected."""
        return candidate_count(self.steps, self.topk)

    @property
    def draft_rows(self) -> int:
        """Tokens of a request in the drafter's forward passes: the last known token, and all drafts
        that are expanded."""
        return 1 + (self.steps - 1) * self.topk if self.steps else 0

    def most_drafts(self, requests: int) -> int:
        """Most draft tokens that one request of a batch of `requests` may have to verify. The trees
        of a batch share its total, so one of them may have many."""
        return min(self.candidates, requests * (self.verify_tokens - 1))

    @classmethod
    def chain(cls, drafts: int) -> DraftPlan:
        """A chain of `drafts` tokens; OFF for 0."""
        return _chain(drafts)

    @classmethod
    def parse(cls, text: str) -> DraftPlan:
        """Parse `steps_topk_verify`. Raises ConfigError for any other form."""
        match = re.fullmatch(r"(\d+)_(\d+)_(\d+)", text)
        if match is None:
            raise ConfigError(f"draft plan {text!r}: expected steps_topk_verify, for example 3_1_4")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.steps}_{self.topk}_{self.verify_tokens}"


OFF = DraftPlan(0, 0, 1)
"""Plain decoding."""


@cache
def _chain(drafts: int) -> DraftPlan:
    # Called in every decode step.
    return DraftPlan(drafts, 1, drafts + 1) if drafts else OFF
