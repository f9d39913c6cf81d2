"""The interface between the engine and its proposers of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Protocol, runtime_checkable

from torch import Tensor

from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.decoder import PackedDecoder, supports_varlen
from slipstream.sampling.choose import SamplingRows
from slipstream.types import WeightUpdate


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed continuations of one request. Node 0 is its last known token.

    `parents[i]` < i is the node that node i follows; the root's is -1. In a chain it is i - 1.
    `by_head`: number of drafts that a draft head proposed, including those that the history
    proposed too. `scores`: for each draft, the logarithm of the estimated probability that it and
    all drafts before it on its path are accepted; None if unknown. `left_out`: the draft that would
    continue the chain of first children from the root. It was drafted, but is not in the tree.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    by_head: int = 0
    scores: Sequence[float] | None = None
    left_out: int | None = None

    @classmethod
    def chain(cls, last: int, drafts: Sequence[int], *, by_head: bool = False) -> DraftTree:
        """A chain of `drafts`; either all or none of them come from a head."""
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

    def straight(self, path: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
        """The length of the chain of first children from the root, and the number of its drafts
        that were accepted. `path`: the accepted nodes, from the root on. `tokens`: the new tokens
        of the request.

        `left_out` counts as part of the chain if the policy drew a token at its position. Drafts
        that are left out are unlikely ones. Without them, chains would seem better than they are.
        """
        parents, length = self.parents, 0
        while length + 1 < len(parents) and parents[length + 1] == length:
            length += 1
        accepted = sum(node == depth for depth, node in enumerate(path[1:], 1))
        if self.left_out is not None and accepted == length < len(tokens):
            return length + 1, accepted + (tokens[length] == self.left_out)
        return length, accepted

    def is_first_child(self, node: int) -> bool:
        """Whether no earlier node has the same parent."""
        parents = self.parents
        return isinstance(parents, range) or parents[node] not in parents[1:node]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """The running batch of N requests, as a proposer sees it.

    `last`: the last known token of each request. `positions_N`: the position of the next token.
    `rows`: the sampling settings. `policy`: the weights that will verify the drafts.
    """

    request_ids: Sequence[str]
    last: Sequence[int]
    positions_N: Tensor
    rows: SamplingRows
    policy: PackedDecoder
    min_acceptance: float = 0.0
    """Drafts of a tree with a lower estimated acceptance probability are not verified."""
    kv: KeyBlocks | None = None
    """The policy's KV cache if the compiled kernels compute, else None. Request i is in row i. From
    the slot of its last known token on, a proposer may write to the slots of the plan's drafts: the
    policy does so itself before it reads them."""

    @property
    def as_matrix(self) -> bool:
        """Whether all requests are padded to the same number of tokens to verify."""
        policy = self.policy
        device = policy.embedding.device
        return not supports_varlen(policy.config, policy.compute_dtype, device)

    @property
    def min_log_probability(self) -> float:
        """Logarithm of `min_acceptance`."""
        return log(self.min_acceptance) if self.min_acceptance > 0 else -inf

    def chains(self, drafts: Sequence[Sequence[int]]) -> list[DraftTree]:
        """A chain for each request."""
        pairs = zip(self.last, drafts, strict=True)
        return [DraftTree.chain(last, chain) for last, chain in pairs]


class Proposer(Protocol):
    """Drafts for running requests. The engine calls it on its thread, between forward passes.

    Drafts never change the tokens of a request, only its speed. A proposer can mirror the engine's
    rows: a new request gets the next row, and the last row moves to the row of a request that ends.
    """

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """A request starts to run. `context`: all known tokens, `prompt` first. `features_TD`: the
        policy's features of all context tokens except the last one. If the first ones are missing,
        it has the last T; if all are missing, it is None. Features are final hidden states, or the
        concatenated inputs of the proposer's auxiliary layers (`UsesAuxLayers`)."""
        ...

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """A tree within `plan` for each request; the root alone if nothing is proposed."""
        ...

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """The running requests, in the order of their rows, have generated `tokens`. Row i of
        `features_NWD` starts with the features from which its tokens were sampled: feature j is
        that of the token before token j. A row may have more features than tokens."""
        ...

    def end(self, request_id: str) -> None:
        """The request has ended or was preempted. Unknown ids are ignored."""
        ...

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """A request without drafts has generated `context[known:]`. History proposers may use it
        for other requests."""
        ...


@runtime_checkable
class UsesAuxLayers(Protocol):
    """A proposer that may need other features than final hidden states."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Auxiliary layers: their inputs are the features. Empty for final hidden states."""
        ...


def aux_layers_of(proposer: Proposer | None) -> tuple[int, ...]:
    """The auxiliary layers of a proposer."""
    return proposer.aux_layers if isinstance(proposer, UsesAuxLayers) else ()


@runtime_checkable
class LearningProposer(Proposer, UsesAuxLayers, Protocol):
    """A proposer whose weights are trained elsewhere."""

    def policy_changed(self) -> None:
        """The policy has new weights; later drafts use them."""
        ...

    def update(self, update: WeightUpdate) -> None:
        """Load new weights, even while requests run; later drafts use them.

        Raises EngineError, and changes nothing, if the update does not fit.
        """
        ...
