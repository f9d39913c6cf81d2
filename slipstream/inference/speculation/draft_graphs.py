"""Captures drafting as CUDA graphs, one for each plan and shape, and replays them. `engine.graphs`
does the same for decode steps.

A draft is several forward passes of one layer with dozens of small operations each. Without graphs
the GPU mostly waits for the CPU to launch them. The graph includes the head's prefill, padded to
the most tokens that a step with the plan can yield.

Shapes: N requests, D hidden size, W prefill tokens per request, F width of the features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.inference.engine.graph_shapes import Habits, bucket, bucket_of_requests
from slipstream.inference.engine.recorder import Inputs, Recorded, RecordedMemory, Recorder
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch

_KEYS = 64
"""The number of KV cache slots in a graph is rounded up to this times a value of `bucket`."""


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Inputs of the first draft: numbers (N,) of filled slots in the head's KV cache, the head's
    states (N, D) at the last tokens, and the draft temperature, a scalar tensor."""

    ends_N: Tensor
    hidden_ND: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """Inputs of the head's prefill.

    `numbers` (N, 2 + W), per request: the filled slots of the KV cache, the number of pending
    tokens, and these tokens. `features` (N, W, F): the features before each of the tokens. Entries
    beyond the number of pending tokens are arbitrary. `scale`: the draft temperature, a scalar
    tensor.
    """

    numbers: Tensor
    features: Tensor
    scale: Tensor

    @property
    def width(self) -> int:
        """W, the number of prefill tokens per request."""
        return self.features.shape[1]


Drafting = Callable[[DraftBatch, PrefillInput, int], tuple[Tensor, ...]]
"""A function that drafts from a batch, its prefill, and a number of KV cache slots that is greater
than all slots in use. It returns tensors with N rows. It may use positions, noise keys,
temperatures and weights of the batch only. To be captured it must not synchronize with the GPU."""


def most_new_tokens(plan: DraftPlan) -> int:
    """The most tokens of a request that are pending after one step with `plan`: all drafts, and
    the token after the last one."""
    return 1 + plan.steps


@dataclass(frozen=True, slots=True)
class _DraftShape:
    plan: DraftPlan
    requests: int
    keys: int
    # `SamplingRows.kinds`.
    sampling: tuple[bool, bool, bool]


@dataclass(frozen=True, slots=True)
class _Draft:
    inputs: Inputs
    recorded: Recorded


class DraftGraphs:
    """The CUDA graphs of one draft head."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._drafts: dict[_DraftShape, _Draft] = {}
        self._habits = Habits()
        # Addresses of cache and weights, and the cache's shape, for which graphs were captured.
        self._addresses: tuple[int, ...] = ()
        self.memory = RecordedMemory("draft graph")
        self.replayed = 0

    def clear(self) -> None:
        """Drop all graphs. Call this before the KV cache of the head is freed."""
        self._addresses = ()
        if self._drafts:
            self._drafts.clear()
            self.memory.clear()
            self._habits.fade()

    def draft(
        self,
        drafting: Drafting,
        batch: DraftBatch,
        plan: DraftPlan,
        prefill: PrefillInput,
        kv: Tensor,
        num_keys: int,
    ) -> tuple[Tensor, ...]:
        """The results of `drafting` with `plan`, by a graph if its shape is frequent.

        `kv` is the head's cache (2, rows, H, S, K). It needs room for `most_new_tokens` of the plan
        per request. A graph ignores `batch.min_acceptance` and drafts all tree levels. The next
        graph of the same shape overwrites the returned tensors.
        """
        most = most_new_tokens(plan)
        if prefill.width > most:
            # New requests, or pending features of several steps.
            return drafting(batch, prefill, num_keys)
        policy = batch.policy
        addresses = tuple(t.data_ptr() for t in (kv, policy.embedding, policy.lm_head.weight))
        addresses = (*addresses, *kv.shape)
        if addresses != self._addresses:
            self.clear()
            self._addresses = addresses
        _, rows, _, slots, _ = kv.shape
        N = len(prefill.numbers)
        num_keys += most - prefill.width
        requests = min(bucket_of_requests(N), rows)
        keys = min(_KEYS * bucket(-(-num_keys // _KEYS)), slots)
        shape = _DraftShape(plan, requests, keys, batch.rows.kinds)
        self._habits.came(shape, plan, requests)
        recording = self._drafts.get(shape)
        if recording is not None:
            recording.inputs.fill(_values(batch, prefill))
            self.memory.stepped()
        elif self._habits.stays(shape, plan, requests):
            recording = self._drafts[shape] = self._recorded(drafting, batch, prefill, shape)
            self.memory.add(plan.verify_tokens, recording.recorded.nbytes)
        else:
            self.memory.stepped()
            return drafting(batch, prefill, num_keys)
        recording.recorded.replay()
        self.replayed += 1
        return tuple(result[:N] for result in recording.recorded.results)

    def _recorded(
        self, drafting: Drafting, batch: DraftBatch, prefill: PrefillInput, shape: _DraftShape
    ) -> _Draft:
        """Capture a graph with input buffers of the given shape."""
        values = _values(batch, prefill)
        N, most = shape.requests, most_new_tokens(shape.plan)
        padded = [(N, 2 + most), (N, most, prefill.features.shape[2]), ()]
        # Padding is all zero. It writes to cache rows that no request uses.
        inputs = Inputs([*padded, *((N, *value.shape[1:]) for value in values[3:])], values)
        numbers, features, scale, positions, keys, temperature = inputs.buffers
        settings = batch.rows.without_truncation(keys, temperature)
        # Without a threshold: comparing with it would synchronize with the GPU.
        static = replace(batch, positions_N=positions, rows=settings, min_acceptance=0.0)
        buffers = PrefillInput(numbers, features, scale)
        return _Draft(inputs, self._record(lambda: drafting(static, buffers, shape.keys)))


def _values(batch: DraftBatch, prefill: PrefillInput) -> list[Tensor]:
    rows = batch.rows
    sampling = [batch.positions_N, rows.keys_N2, rows.temperature_N]
    return [prefill.numbers, prefill.features, prefill.scale, *sampling]
