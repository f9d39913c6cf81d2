"""Drafts chains or trees of tokens with an EAGLE or EAGLE-3 head.

The head predicts each draft token from its own state at the token before it, as in EAGLE (Li et
al., https://arxiv.org/abs/2401.15077). It has its own KV cache with one row per running request.
Cached keys and values come from features of the policy only; those of draft tokens are written
after them and overwritten by the next draft.

Features that arrive while the engine decodes without drafts are pending. Before the next draft the
head processes them in one prefill (draft catch-up). If the first features of a request are unknown,
its cache starts with the first known one, and rotary positions of the head count from there.

Shapes: N requests, W tokens of the prefill per request, T pending tokens of all requests, F width
of the policy's features, D hidden size of the head, C candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError, EngineError
from slipstream.inference.engine.kv_blocks import BlockStore
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.recorder import Recorder
from slipstream.inference.speculation.batched_trees import draft_chain_batched, draft_tree_batched
from slipstream.inference.speculation.draft_graphs import (
    DraftGraphs,
    Drafting,
    DraftInputs,
    PrefillInput,
    most_new_tokens,
)
from slipstream.inference.speculation.draft_temperature import DraftTemperature
from slipstream.inference.speculation.pending_features import (
    ENDED,
    PendingFeatureQueue,
    PendingFeatures,
    PendingRequest,
)
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.inference.weights import checked_tensors
from slipstream.kernels.draft.tree import WIDTH
from slipstream.models.copy_in_place import copy_in_place
from slipstream.models.cpu_attention import KeyBlocks
from slipstream.models.draft.forward import DraftPass, Ints, TreeDrafter
from slipstream.models.draft.model import (
    DRAFT_TOKENS,
    DraftModel,
    PackedDraft,
    check_end_tokens,
    check_tokens,
)
from slipstream.models.hf_io import copy_tensors
from slipstream.models.linear import PackedLinear
from slipstream.models.numerics import activation_dtype
from slipstream.sampling.tree import Candidates
from slipstream.types import WeightUpdate

_log = logging.getLogger(__name__)

_PREFILL_CHUNK = 64
"""Most tokens per request in one forward pass of the prefill. The attention mask grows with it."""


class EagleProposer:
    """A `Proposer` that drafts with an EAGLE head."""

    def __init__(
        self,
        head: DraftModel,
        *,
        dtype: torch.dtype,
        kv_budget_bytes: int = 1 << 30,
        pending_bytes: int = 1 << 28,
        free_cache: bool = True,
        record: Recorder | None = None,
    ) -> None:
        """`kv_budget_bytes` limits the KV cache of the head. While the running batch needs more,
        nothing is drafted, and one warning is logged.

        `pending_bytes` limits the pending features of decode steps, and separately those that
        requests start with. Beyond the limit the oldest ones are dropped, and the cache of their
        requests starts again after them. With `free_cache`, the KV cache is freed when no request
        is left. `record` captures drafting as CUDA graphs, one for each frequent plan and shape.
        """
        self._head = head
        device = head.device
        self._dtype, self._features_dtype = dtype, activation_dtype(dtype, device)
        self._width = head.config.hidden_size * max(1, len(head.aux_layers))
        with torch.no_grad():
            self._packed: PackedDraft = head.pack(dtype)
        one_layer = replace(head.config, num_layers=1)
        self._store: BlockStore | KVStore
        if self._packed.fused is None:
            self._store = KVStore(one_layer, dtype, device, kv_budget_bytes)
        else:
            self._store = BlockStore(one_layer, dtype, kv_budget_bytes)
        self._rows: dict[str, PendingRequest] = {}
        self._order: list[str] = []
        # Cache of `_rows_of`: the rows in `_order`, and the engine's list of their ids. The list
        # object stays the same while the batch does. None after a change.
        self._batch: list[PendingRequest] | None = None
        self._batch_ids: Sequence[str] = ()
        self._pending = PendingFeatureQueue(pending_bytes)
        self._temperature = DraftTemperature()
        self._drafter: TreeDrafter | None = None
        # The LM head over the draft vocabulary, for drafting with torch's operations. It is stale
        # if the policy or the draft vocabulary has changed since. A stale one is overwritten if
        # graphs refer to its memory.
        self._lm_head: PackedLinear | None = None
        self._is_lm_head_stale = False
        # Candidates of the trees that the policy verifies in this step.
        self._last_candidates: Candidates | None = None
        self._graphs = None if record is None else DraftGraphs(record)
        # The draft temperature, as a number and as a tensor on the device.
        self._scale: tuple[float, Tensor] | None = None
        self._short_of_memory = False
        self._free_cache = free_cache

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The auxiliary layers of the head; empty for EAGLE."""
        return self._head.aux_layers

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        """Add a request. Its features are pending until the next draft.

        Raises EngineError if features have another width or dtype than the head needs.
        """
        row = self._rows[request_id] = PendingRequest(len(self._order))
        self._order.append(request_id)
        self._batch = None
        kept = None if features_TD is None else self._newest_that_fit(self._checked(features_TD))
        if kept is not None:
            row.features_TD, row.tokens = kept, context[len(context) - len(kept) :]

    def _newest_that_fit(self, features_TD: Tensor) -> Tensor | None:
        """The last features of a new request, within the byte limit for all requests; None if none
        fits."""
        initial = (row.features_TD for row in self._rows.values())
        room = self._pending.limit - sum(f.nbytes for f in initial if f is not None)
        count = room // (features_TD.shape[1] * features_TD.element_size())
        if count >= len(features_TD):
            return features_TD
        # Without a copy, the memory of the others would stay allocated.
        return features_TD[-count:].clone() if count > 0 else None

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        """Add the features of a step to the pending ones, and calibrate the draft temperature with
        the accepted drafts.

        Raises EngineError without features, or if their width, dtype or requests do not match.
        """
        if features_NWD is None:
            raise EngineError("an EAGLE head needs features of the policy, but this step has none")
        if self._last_candidates is not None:
            best = zip(self._last_candidates.tokens_NC[:, 0].tolist(), tokens, strict=True)
            # A request that failed in this step has no new tokens.
            accepted = [bool(new) and new[0] == token for token, new in best]
            self._temperature.learn(self._last_candidates.gaps_NW, accepted)
            self._last_candidates = None
        self._pending.add(self._rows_of(request_ids), tokens, self._checked(features_NWD))

    def end(self, request_id: str) -> None:
        """Remove a request; the last row of the batch moves to its place."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        # None if the request itself was the last row.
        last = self._rows.get(self._order[-1])
        if last is None:
            self._store.end(row.index, row.index, 0)
        else:
            self._store.end(row.index, last.index, last.cached)
            self._order[row.index] = self._order[-1]
            last.index = row.index
        # A preempted request starts again with all of its features.
        row.index = ENDED
        self._order.pop()
        self._batch = None
        if not self._order:
            self._pending.clear()
            # They refer to weights that an update may replace before the next request.
            self._drafter = None
            if self._graphs is None:
                self._lm_head = None
            if self._free_cache:
                if self._graphs is not None:
                    self._graphs.clear()
                self._store.release()

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None:
        """Does nothing: the trainer trains the head, not the engine."""

    def update(self, update: WeightUpdate) -> None:
        """Load new weights of the head. Cached keys and values of the old weights are dropped, so
        the caches of running requests start again with their pending features.

        Raises EngineError, and changes nothing, if the update does not fit the head.
        """
        what = "draft head update"
        named = list(update.tensors())
        weights = [(name, tensor) for name, tensor in named if name != DRAFT_TOKENS]
        tokens = [tensor for name, tensor in named if name == DRAFT_TOKENS]
        tensors = checked_tensors(
            self._head, replace(update, buckets=[weights]), self._dtype, what=what
        )
        self._check_tokens(tokens, f"{what} to version {update.version} refused")
        copy_tensors(self._head, tensors)
        size = self._head.draft_vocab_size
        if tokens:
            self._head.set_tokens(tokens[0])
        with torch.no_grad():
            packed = self._head.pack(self._dtype)
        if self._graphs is None:
            self._packed = packed
        elif self._head.draft_vocab_size == size:
            copy_in_place(self._packed, packed)
        else:
            self._graphs.clear()
            self._packed, self._lm_head = packed, None
        self._is_lm_head_stale = True
        for row in self._rows.values():
            row.cached = 0

    def _check_tokens(self, found: Sequence[Tensor], refused: str) -> None:
        """Raise EngineError unless `found`, the draft vocabularies in an update, fit the head: one
        if it has one, else none. Only an EAGLE head can change their number of tokens."""
        own, config = self._head.draft_tokens, self._head.config
        size = None if own is None else len(own)
        if self._head.algorithm == "EAGLE" and own is not None:
            fits = len(found) == 1 and found[0].dtype == torch.int64 and found[0].ndim == 1
            remedy = "send one int64 tensor with one dimension"
        else:
            expected = [] if size is None else [(torch.int64, (size,))]
            fits = [(t.dtype, tuple(t.shape)) for t in found] == expected
            remedy = "send that number, or start a run with another draft head"
        if not fits:
            shapes = [f"{t.dtype} {tuple(t.shape)}" for t in found]
            raise EngineError(
                f"{refused}: its {DRAFT_TOKENS} are {shapes}, but the head's draft vocabulary has "
                f"{size or 'all'} tokens; {remedy}"
            )
        for tokens in found:
            try:
                check_tokens(tokens.tolist(), config.vocab_size)
                check_end_tokens(tokens.tolist(), config.eos_token_ids)
            except ConfigError as error:
                raise EngineError(f"{refused}: {error}") from error

    def policy_changed(self) -> None:
        """Note that the policy has new weights, so that rows copied from its LM head are
        renewed."""
        self._drafter = None
        self._is_lm_head_stale = True

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        """Process all pending features, then draft a chain or a tree for each request.

        Proposes nothing if a request has no pending features or if the KV budget is too small.
        Raises EngineError if head and policy compute in different dtypes.
        """
        rows = self._rows_of(batch.request_ids)
        head_dtype, policy_dtype = self._packed.dtype, batch.policy.compute_dtype
        if head_dtype != policy_dtype:
            # The kernels would read beyond the end of one of the arrays.
            raise EngineError(
                f"the policy computes in {policy_dtype}, but the draft head in {head_dtype}; both "
                "need the same dtype"
            )
        pending = self._pending.of(rows)
        if pending is None:
            # A request started without features. One step without drafts brings its first ones.
            return batch.chains([()] * len(rows))
        starts_N = np.array([row.cached for row in rows])
        ends_N = starts_N + pending.counts_N
        width_N = pending.counts_N
        if self._packed.fused is None or batch.rows.any_truncated:
            # The new tokens are padded to a common width.
            width = int(width_N.max())
            if self._graphs is not None:
                width = max(width, most_new_tokens(plan))
            width_N = np.full_like(width_N, width)
        lengths = (starts_N + width_N + max(plan.steps - 1, 1) * plan.topk).tolist()
        if not self._store.fits(lengths):
            self._warn_short_of_memory(len(rows), max(lengths))
            return batch.chains([()] * len(rows))
        self._store.reserve(lengths)
        trees = self._drafts(batch, plan, starts_N, pending)
        for row, end in zip(rows, ends_N.tolist(), strict=True):
            row.cached, row.features_TD, row.tokens = end, None, ()
        self._pending.clear()
        return trees

    def _drafts(
        self, batch: DraftBatch, plan: DraftPlan, starts_N: Ints, pending: PendingFeatures
    ) -> list[DraftTree]:
        """Draft with the fused kernel if the head has one, else with torch operations. `starts_N`:
        filled slots of the head's cache, per request."""
        packed = self._packed
        has_kernel = packed.fused is not None
        if plan.topk == 1 and (not has_kernel or batch.rows.any_truncated):
            drafts = self._batched_chains(batch, plan, starts_N, pending).tolist()
            pairs = zip(batch.last, drafts, strict=True)
            return [DraftTree.chain(last, chain, by_head=True) for last, chain in pairs]
        if has_kernel:
            candidates = self._fused_candidates(packed, batch, plan, starts_N, pending)
        else:
            candidates = self._batched_candidates(batch, plan, starts_N, pending)
        if plan.topk == 1:
            # A chain is verified in full, so its scores are neither used nor calibrated.
            pairs = zip(batch.last, candidates.tokens_NC.tolist(), strict=True)
            return [DraftTree.chain(last, chain, by_head=True) for last, chain in pairs]
        self._last_candidates = candidates
        # Trees ignore top-k, top-p and min-p: the tokens that these exclude are seldom among the
        # best candidates.
        if not batch.as_matrix:
            best = candidates.best(
                len(batch.last) * (plan.verify_tokens - 1), batch.min_log_probability
            )
        else:
            best = candidates.best_of_each(plan.verify_tokens - 1, batch.min_log_probability)
        return [
            DraftTree([last, *tokens], [-1, *parents], len(tokens), scores, left_out)
            for last, (tokens, parents, scores, left_out) in zip(batch.last, best, strict=True)
        ]

    def _fused_candidates(
        self,
        packed: PackedDraft,
        batch: DraftBatch,
        plan: DraftPlan,
        starts_N: Ints,
        pending: PendingFeatures,
    ) -> Candidates:
        """Prefill and all candidates by one call of the CPU kernel."""
        drafter = self._drafter
        if drafter is None or drafter.head is not packed or drafter.policy is not batch.policy:
            drafter = self._drafter = TreeDrafter(packed, batch.policy)
        return Candidates(
            *drafter(
                self._blocks(),
                starts_N,
                pending.counts_N,
                pending.tokens_T,
                pending.addresses(),
                batch.rows.keys_N2,
                batch.positions_N,
                batch.rows.temperature_N,
                plan.steps,
                plan.topk,
                batch.min_log_probability if plan.topk > 1 else -inf,
                self._temperature.value,
            )
        )

    def _cache(self) -> Tensor | KeyBlocks:
        """The KV cache of the head in the form that its forward pass needs."""
        return self._blocks() if isinstance(self._store, BlockStore) else self._rectangle()

    def _blocks(self) -> KeyBlocks:
        assert isinstance(self._store, BlockStore), "the head has kernels"
        return self._store.blocks

    def _rectangle(self) -> Tensor:
        assert isinstance(self._store, KVStore), "torch computes the head"
        return self._store.data[0]

    def _rows_of(self, request_ids: Sequence[str]) -> list[PendingRequest]:
        """The rows of the running requests. Raises EngineError if the engine has others, or another
        order."""
        if self._batch is None or request_ids is not self._batch_ids:
            if list(request_ids) != self._order:
                raise EngineError(
                    f"the engine's rows {list(request_ids)} do not match the draft head's rows "
                    f"{self._order}"
                )
            self._batch = [self._rows[name] for name in self._order]
            self._batch_ids = request_ids
        return self._batch

    def _batched_chains(
        self, batch: DraftBatch, plan: DraftPlan, starts_N: Ints, pending: PendingFeatures
    ) -> Tensor:
        """Chains (N, steps): the prefill drafts the first token, one forward pass each further
        one."""

        def draft(batch: DraftBatch, prefill: PrefillInput, num_keys: int) -> tuple[Tensor, ...]:
            inputs, kv = self._prefill(batch, prefill, num_keys), self._cache()
            return (
                draft_chain_batched(self._packed, lm_head, kv, batch, inputs, num_keys, plan.steps),
            )

        lm_head = self._draft_lm_head(batch)
        (drafts,) = self._run(draft, batch, plan, starts_N, pending)
        return drafts

    def _batched_candidates(
        self, batch: DraftBatch, plan: DraftPlan, starts_N: Ints, pending: PendingFeatures
    ) -> Candidates:
        """Candidates of trees, with one forward pass per tree level."""

        def draft(batch: DraftBatch, prefill: PrefillInput, num_keys: int) -> tuple[Tensor, ...]:
            inputs, kv = self._prefill(batch, prefill, num_keys), self._rectangle()
            shape = num_keys, plan.steps, plan.topk
            parts = draft_tree_batched(self._packed, lm_head, kv, batch, inputs, *shape)
            # One tensor, because the copy of each tensor to the host waits for the GPU. float64
            # holds token ids exactly.
            return (torch.cat([part.double() for part in parts], 1),)

        lm_head = self._draft_lm_head(batch)
        (together,) = self._run(draft, batch, plan, starts_N, pending)
        numbers = together.cpu().numpy()
        compared = min(WIDTH, batch.policy.config.vocab_size)
        tokens, parents, scores = np.split(numbers[:, :-compared], 3, 1)
        return Candidates(
            tokens.astype(np.int64), parents.astype(np.int64), scores, numbers[:, -compared:]
        )

    def _draft_lm_head(self, batch: DraftBatch) -> PackedLinear:
        """The LM head over the draft vocabulary, with the policy's current weights."""
        old = self._lm_head
        if old is None or self._is_lm_head_stale:
            new = self._packed.draft_lm_head(batch.policy.lm_head)
            if old is None or self._graphs is None:
                self._lm_head = old = new
            else:
                copy_in_place(old, new)
            self._is_lm_head_stale = False
        return old

    def _run(
        self,
        drafting: Drafting,
        batch: DraftBatch,
        plan: DraftPlan,
        starts_N: Ints,
        pending: PendingFeatures,
    ) -> tuple[Tensor, ...]:
        """The results of `drafting` on the pending features; by a CUDA graph if there is one."""
        ids_NW, features_NWF = pending.padded()
        device, width = features_NWF.device, ids_NW.shape[1]
        numbers = np.concatenate([starts_N[:, None], pending.counts_N[:, None], ids_NW], 1)
        if self._scale is None or self._scale[0] != self._temperature.value:
            scale = self._temperature.value
            self._scale = scale, torch.tensor(scale, dtype=torch.float64, device=device)
        prefill = PrefillInput(torch.from_numpy(numbers).to(device), features_NWF, self._scale[1])
        num_keys = int(starts_N.max()) + width + (plan.steps - 1) * plan.topk
        # Truncated sampling (top-k, top-p, min-p) has data-dependent shapes, so no graph.
        if self._graphs is None or batch.rows.any_truncated:
            return drafting(batch, prefill, num_keys)
        return self._graphs.draft(drafting, batch, plan, prefill, self._rectangle(), num_keys)

    def _prefill(self, batch: DraftBatch, prefill: PrefillInput, num_keys: int) -> DraftInputs:
        """Run the head over the pending tokens and fill its KV cache. Returns the inputs of the
        first draft: filled slots, and the head's state at the last token of each request."""
        starts_N, counts_N = prefill.numbers[:, 0], prefill.numbers[:, 1]
        ids_NW, width = prefill.numbers[:, 2:], prefill.width
        states_NWD = self._packed.to_states(prefill.features)
        slots_NW = starts_N[:, None] + torch.arange(width, device=starts_N.device)
        hidden: list[Tensor] = []
        for start in range(0, width, _PREFILL_CHUNK):
            part = slice(start, start + _PREFILL_CHUNK)
            kv, columns = self._cache(), slots_NW[:, part]
            run = DraftPass(self._packed, batch.policy.embedding, kv, columns, num_keys)
            hidden.append(run.run(0, ids_NW[:, part].contiguous(), states_NWD[:, part]))
        all_hidden = torch.cat(hidden, 1) if len(hidden) > 1 else hidden[0]
        # Padding rows have no tokens.
        lasts_N11 = (counts_N - 1).clamp(min=0)[:, None, None]
        last_ND = all_hidden.gather(1, lasts_N11.expand(-1, 1, all_hidden.shape[-1]))[:, 0]
        return DraftInputs(starts_N + counts_N, last_ND, prefill.scale)

    def _checked(self, features: Tensor) -> Tensor:
        """The features, contiguous, because the kernel reads them by address. Raises EngineError
        for another width or dtype than the head needs."""
        found, expected = (features.shape[-1], features.dtype), (self._width, self._features_dtype)
        if found != expected:
            raise EngineError(
                f"features have width {found[0]} and {found[1]}, but the draft head needs width "
                f"{expected[0]} and {expected[1]} (auxiliary layers {list(self.aux_layers)})"
            )
        return features.contiguous()

    def _warn_short_of_memory(self, requests: int, length: int) -> None:
        if not self._short_of_memory:
            _log.warning(
                "no drafts while %d requests with up to %d tokens run: the KV cache of the draft "
                "head would exceed its budget; raise kv_budget_bytes (in a run: "
                "actor_rollout_ref.rollout.kv_cache_bytes)",
                requests,
                length,
            )
        self._short_of_memory = True
