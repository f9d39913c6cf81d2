"""Drafts chains with a quantized copy of the policy (self-speculation).

The copy is made from the policy's weights without training, and made again after each weight
update, when the next draft is needed. It reads and writes the policy's KV cache
(`models.quantized`), so a request needs no draft catch-up and no memory of its own. QuantSpec
(Tiwari et al. 2025, https://arxiv.org/abs/2502.10424) drafts with 4-bit weights of the policy, too.

Shapes: N requests, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import EngineError
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.models.quantized import LARGEST_WEIGHT, QuantizedPolicy
from slipstream.models.quantized_linear import Bits
from slipstream.sampling.choose import choose, draw, tempered
from slipstream.types import WeightUpdate

_log = logging.getLogger(__name__)


class QuantizedProposer:
    """A `LearningProposer` that drafts with a quantized copy of the policy."""

    def __init__(self, bits: Bits = 8, lm_head_bits: Bits = 8) -> None:
        self._copy = QuantizedPolicy(bits, lm_head_bits)
        self.version = 0
        """Number of times that the copy was made."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """None: features are not used."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized matrices."""
        return self._copy.nbytes

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None = None,
    ) -> None:
        """Does nothing: the policy's KV cache has all that drafting needs."""

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None = None,
    ) -> None:
        """Does nothing, as `begin`."""

    def end(self, request_id: str) -> None:
        """Does nothing, as `begin`."""

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """Does nothing, as `begin`."""

    def policy_changed(self) -> None:
        """Make the copy again before the next draft."""
        self._copy.forget()

    def update(self, update: WeightUpdate) -> None:
        """Raise EngineError: the copy follows the policy's updates and has no others."""
        raise EngineError(
            f"draft head update to version {update.version} refused: a quantized copy of the "
            "policy drafts (speculative.spec_strategy), which has no weights of its own"
        )

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """A chain of `plan.steps` tokens for each request; nothing if the policy has weights that
        are not a number or too large.

        Raises EngineError if the engine offers no KV cache.
        """
        kv = batch.kv
        if kv is None:
            raise EngineError("a quantized copy of the policy drafts on the engine's KV cache")
        if self._copy.renew(batch.policy):
            self.version += 1
            if not self._copy.is_usable:
                _log.warning(
                    "no drafts until the next weight update: a weight of the policy is above %g or "
                    "not a number",
                    LARGEST_WEIGHT,
                )
        if not self._copy.is_usable:
            return batch.chains([()] * len(batch.last))
        rows, V = torch.arange(len(batch.last)), batch.policy.config.vocab_size
        last_position = batch.policy.config.max_position_embeddings - 1
        ids_N, slots_N = torch.tensor(batch.last), batch.positions_N - 1
        longest = int(batch.positions_N.max())
        drafts: list[Tensor] = []
        for step in range(plan.steps):
            places = kv.places(rows, slots_N, longest + step)
            positions_N = slots_N.clamp(max=last_position)
            scores_NV = self._copy.logits(ids_N, positions_N, places)[:, :V]
            slots_N = slots_N + 1
            if batch.rows.any_truncated:
                ids_N = choose(scores_NV, slots_N, batch.rows).tokens
            else:
                ids_N = draw(tempered(scores_NV, batch.rows), slots_N, batch.rows)
            drafts.append(ids_N)
        chains = torch.stack(drafts, 1).tolist()
        pairs = zip(batch.last, chains, strict=True)
        return [DraftTree.chain(last, chain, by_head=True) for last, chain in pairs]
