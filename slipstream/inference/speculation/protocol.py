"""The seam between the engine and whoever drafts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Protocol, runtime_checkable

from torch import Tensor

from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models.decoder import PackedDecoder, supports_varlen
from slipstream.sampling.choose import SamplingRows
from slipstream.types import WeightUpdate


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed continuations of one request. Node 0 is its last known token.

    `parents[i]` < i is the node that node i follows; the root's is -1. A chain has i - 1 there.
    `by_head`: how many of the drafts are a model's, and not only found in earlier texts. `scores`:
    of each draft the logarithm of the chance that the policy will choose all tokens down to it, as
    far as is known; None where nothing is.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    by_head: int = 0
    scores: Sequence[float] | None = None

    @classmethod
    def chain(cls, last: int, drafts: Sequence[int], *, by_head: bool = False) -> DraftTree:
        """`drafts` one after the other, all of them or none by a head."""
        return cls([last, *drafts], range(-1, len(drafts)), len(drafts) if by_head else 0)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Drafts on the longest path from the root."""
        if isinstance(self.parents, range):
            return len(self.parents) - 1
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return max(depths)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        parents = self.parents
        return isinstance(parents, range) or all(p == i - 1 for i, p in enumerate(parents))

    def straight(self, path: Sequence[int]) -> tuple[int, int]:
        """How many drafts follow one another from the root on, each the first after the one before,
        and how many of these are on `path`, the nodes from the root that were accepted."""
        parents, line = self.parents, 0
        while line + 1 < len(parents) and parents[line + 1] == line:
            line += 1
        return line, sum(node == depth for depth, node in enumerate(path[1:], 1))

    def is_first_child(self, node: int) -> bool:
        """Whether no earlier node follows the same one."""
        parents = self.parents
        return isinstance(parents, range) or parents[node] not in parents[1:node]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """What a proposer may know of the running batch of N requests.

    `last` is the last known token of each, and `positions_N` where the next will stand. `rows` are
    their sampling settings and `policy` the weights that will verify.
    """

    request_ids: Sequence[str]
    last: Sequence[int]
    positions_N: Tensor
    rows: SamplingRows
    policy: PackedDecoder
    worth: float = 0.0
    """The chance of being right that a draft of a tree must have to be worth its row."""

    @property
    def as_matrix(self) -> bool:
        """Whether all requests have as many rows to verify as the one that has most, filled up."""
        policy = self.policy
        device = policy.embedding.device
        return not supports_varlen(policy.config, policy.compute_dtype, device)

    @property
    def least(self) -> float:
        """The logarithm of `worth`."""
        return log(self.worth) if self.worth > 0 else -inf

    def chains(self, drafts: Sequence[Sequence[int]]) -> list[DraftTree]:
        """A chain for each request."""
        pairs = zip(self.last, drafts, strict=True)
        return [DraftTree.chain(last, chain) for last, chain in pairs]


class Proposer(Protocol):
    """Drafts for running requests. Called on the engine's thread, between forward passes.

    What it proposes never changes what a request generates, only how soon. Requests begin and end
    in the order in which the engine's rows are taken and given up, so that a proposer may keep
    rows of its own: a new request takes the next row, and where one ends the last row moves in.
    """

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """A request starts to run. `context` begins with `prompt` and holds all that is known;
        `features_TD` are the policy's features over all of it but the last token, or over the end
        of that where earlier ones are not at hand; None where none is. Features are final hidden
        states, or the inputs of the layers that the proposer reads (`UsesAuxLayers`), side by
        side."""
        ...

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """For each request a tree within `plan`; its root alone where there is no idea."""
        ...

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """The running requests, all of them in the order of rows, have generated `tokens`. Row i of
        `features_NWD` begins with the features that its tokens were sampled from, so the first
        belongs to the token before them; rows may be longer."""
        ...

    def end(self, request_id: str) -> None:
        """The request has ended, or was sent back to the queue. Unknown ids are ignored."""
        ...

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """A request that was not drafted for has written what is in `context` from `known` on:
        what it may teach of others."""
        ...


@runtime_checkable
class UsesAuxLayers(Protocol):
    """A proposer that may ask for other features than final hidden states."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the policy whose inputs are its features; none: final hidden states are."""
        ...


def aux_layers_of(proposer: Proposer | None) -> tuple[int, ...]:
    """What `proposer` asks for."""
    return proposer.aux_layers if isinstance(proposer, UsesAuxLayers) else ()


@runtime_checkable
class LearningProposer(Proposer, UsesAuxLayers, Protocol):
    """A proposer whose weights are trained elsewhere."""

    def update(self, update: WeightUpdate) -> None:
        """Take new weights, also while requests run: later drafts come from them.

        Raises EngineError, and changes nothing, when the update does not fit.
        """
        ...
