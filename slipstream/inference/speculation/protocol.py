"""The seam between the engine and whoever drafts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.inference.speculation.plan import DraftPlan


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed continuations of one request. Node 0 is its last known token.

    `parents[i]` < i is the node that node i follows; the root's is -1. A chain has i - 1 there.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, last: int, drafts: Sequence[int]) -> DraftTree:
        """`drafts` one after the other."""
        return cls([last, *drafts], range(-1, len(drafts)))

    def __len__(self) -> int:
        return len(self.tokens)


class Proposer(Protocol):
    """Drafts for running requests. Called on the engine's thread, between forward passes.

    What it proposes never changes what a request generates, only how soon.
    """

    def begin(self, request_id: str, prompt: Sequence[int], context: Sequence[int]) -> None:
        """A request starts to run; `context` begins with `prompt` and may hold earlier tokens."""
        ...

    def propose(self, request_ids: Sequence[str], plan: DraftPlan) -> list[list[int]]:
        """For each request a chain of at most `plan.steps` tokens; none where it has no idea."""
        ...

    def observe(self, request_id: str, tokens: Sequence[int]) -> None:
        """The request has generated `tokens`."""
        ...

    def end(self, request_id: str) -> None:
        """The request has ended, or was sent back to the queue. Unknown ids are ignored."""
        ...
