"""Drafting that is recorded once for each plan and shape, and replayed after that: what
`engine.graphs` does for decode steps.

To draft is several passes of one layer, each of some dozens of small operations, one after another:
more than anything else it is the CPU starting them that a GPU waits for. What a head takes in
before is the first of these passes, and filled up to what a plan may bring.

Shapes: N requests, D hidden width, W columns of what is taken in, F width of features.
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
"""Slots that are attended to come in sizes of `bucket` times so many."""


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What drafts begin with: the slots (N,) of a head's cache that each request has filled, the
    states (N, D) that the head predicts next, and a scale of scores ()."""

    ends_N: Tensor
    hidden_ND: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class PrefillInput:
    """What waits to be taken in before: `numbers` (N, 2 + W) are the slots of each request that are
    filled, how many tokens come, and these; `features` (N, W, F) those before them. Beyond the
    tokens that come there is anything. And a scale of scores ()."""

    numbers: Tensor
    features: Tensor
    scale: Tensor

    @property
    def width(self) -> int:
        return self.features.shape[1]


Drafting = Callable[[DraftBatch, PrefillInput, int], tuple[Tensor, ...]]
"""From a batch, what waits, and a number of slots beyond all that are used, drafts: tensors of N
rows. Of the batch it knows positions, keys, temperatures and weights alone, and to be recorded it
must not wait for the device."""


def most_columns(plan: DraftPlan) -> int:
    """What a head takes in after a step by `plan`: a token after each draft that was right."""
    return 1 + plan.steps


@dataclass(frozen=True, slots=True)
class _DraftShape:
    plan: DraftPlan
    requests: int
    keys: int
    # `SamplingRows.kinds`.
    law: tuple[bool, bool, bool]


@dataclass(frozen=True, slots=True)
class _Draft:
    inputs: Inputs
    recorded: Recorded


class DraftGraphs:
    """The recordings of one draft head."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._drafts: dict[_DraftShape, _Draft] = {}
        self._habits = Habits()
        # Addresses that recordings are made for.
        self._at: tuple[int, ...] = ()
        self.memory = RecordedMemory("draft graph")
        self.replayed = 0

    def clear(self) -> None:
        """Let go of all recordings: the head's cache gives its memory back."""
        self._at = ()
        if self._drafts:
            self._drafts.clear()
            self.memory.clear()
            self._habits.fade()

    def draft(
        self,
        drafting: Drafting,
        batch: DraftBatch,
        plan: DraftPlan,
        given: PrefillInput,
        kv: Tensor,
        num_keys: int,
    ) -> tuple[Tensor, ...]:
        """What `drafting` gives, of a plan, into the cache `kv` (2, rows, H, S, K): by a recording,
        where there is one. Then all levels are drafted, whatever a draft is worth, and the next
        drafts are written over these. There is room for as many columns as `most_columns` of the
        plan."""
        columns = most_columns(plan)
        if given.width > columns:
            # Requests that have just begun, or were not drafted for.
            return drafting(batch, given, num_keys)
        at = tuple(t.data_ptr() for t in (kv, batch.policy.embedding, batch.policy.lm_head.weight))
        at = (*at, *kv.shape)
        if at != self._at:
            self.clear()
            self._at = at
        _, rows, _, slots, _ = kv.shape
        N = len(given.numbers)
        num_keys += columns - given.width
        requests = min(bucket_of_requests(N), rows)
        keys = min(_KEYS * bucket(-(-num_keys // _KEYS)), slots)
        shape = _DraftShape(plan, requests, keys, batch.rows.kinds)
        self._habits.came(shape, plan, requests)
        recording = self._drafts.get(shape)
        if recording is not None:
            recording.inputs.fill(_values(batch, given))
            self.memory.stepped()
        elif self._habits.stays(shape, plan, requests):
            recording = self._drafts[shape] = self._recorded(drafting, batch, given, shape)
            self.memory.add(plan.verify_tokens, recording.recorded.nbytes)
        else:
            self.memory.stepped()
            return drafting(batch, given, num_keys)
        recording.recorded.replay()
        self.replayed += 1
        return tuple(result[:N] for result in recording.recorded.results)

    def _recorded(
        self, drafting: Drafting, batch: DraftBatch, given: PrefillInput, shape: _DraftShape
    ) -> _Draft:
        values = _values(batch, given)
        N, columns = shape.requests, most_columns(shape.plan)
        wide = [(N, 2 + columns), (N, columns, given.features.shape[2]), ()]
        # Of padding all is zero: it goes to rows that nobody holds.
        inputs = Inputs([*wide, *((N, *value.shape[1:]) for value in values[3:])], values)
        numbers, features, scale, positions, keys, temperature = inputs.buffers
        settings = batch.rows.without_truncation(keys, temperature)
        steady = replace(batch, positions_N=positions, rows=settings, min_acceptance=0.0)
        held = PrefillInput(numbers, features, scale)
        return _Draft(inputs, self._record(lambda: drafting(steady, held, shape.keys)))


def _values(batch: DraftBatch, given: PrefillInput) -> list[Tensor]:
    rows = batch.rows
    drawn = [batch.positions_N, rows.keys_N2, rows.temperature_N]
    return [given.numbers, given.features, given.scale, *drawn]
