"""Training over several processes with sharded parameters, gradients and optimizer state (FSDP2).

Every process gets the same batch and computes its share of the rows. Results and metrics are those
of the whole batch. Each call is collective: all processes make the same calls in the same order. If
only one process fails, the others wait for it until their deadline (`deadlines`). Losses are
normalized by counts of the whole mini-batch, so the update equals that of one process, except for
the order of sums. This module knows torch's process groups; `distributed` starts and commands the
processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.metrics.resident import FreedMemory
from slipstream.models.decoder import Decoder
from slipstream.models.policy import needs_padding
from slipstream.models.sharded import free_gathered, is_sharded, shard
from slipstream.training.columns import rows_of_column
from slipstream.training.packing import MicroBatch, build_micro_batch, sequence_of
from slipstream.training.single import SingleProcessBackend
from slipstream.training.step import MetricSums, plan_rows, wanted_rows
from slipstream.types import TrainBatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that train together: a mesh for tensors, and a gloo group for Python
    objects."""

    mesh: DeviceMesh
    objects: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.mesh.size()

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, by rank. Collective."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.objects)
        return found


def shares(lengths: Mapping[int, int], ranks: int) -> list[list[int]]:
    """Distribute rows, given as index -> length, over `ranks` processes. Returns indices by rank.

    Rows are assigned from the longest to the shortest, each to the process with the fewest tokens
    (ties: the lowest rank).
    """
    out: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        rank = tokens.index(min(tokens))
        out[rank].append(index)
        tokens[rank] += lengths[index]
    return out


class ShardedBackend(SingleProcessBackend):
    """A `TrainingBackend` that is sharded over several processes."""

    _may_end_early = False
    # Each layer's gathered weights are freed between activations that stay, which leaves gaps.
    _keeps_freed_memory = False

    def __init__(self, decoder: Decoder, ranks: Ranks, **settings: Any) -> None:
        """Shard `decoder`, which must be equal in all processes, unless it is sharded already.
        `settings` are those of `SingleProcessBackend`."""
        self._ranks = ranks
        if not is_sharded(decoder):
            # The decoder may be on any device: layers move to the mesh's device one by one.
            shard(decoder, ranks.mesh)
        super().__init__(decoder, **settings)
        # The hook also runs when the backward pass recomputes a layer.
        freed = FreedMemory(limit_bytes=0)

        def give_back(*_: object) -> None:
            freed.give_back()

        for layer in decoder.model.layers:
            layer.register_forward_pre_hook(give_back)

    def _shares(self, batch: TrainBatch) -> list[dict[int, int]]:
        """Index -> length of the rows of each process."""
        lengths = wanted_rows(batch)
        units: dict[int, list[int]] = {}
        of_row = sequence_of(batch)
        for index in lengths:
            units.setdefault(of_row[index], []).append(index)
        sizes = {n: sum(lengths[i] for i in rows) for n, rows in units.items()}
        return [
            {i: lengths[i] for n in share for i in units[n]}
            for share in shares(sizes, self._ranks.size)
        ]

    def _micro_batches(self, batch: TrainBatch, also: set[int]) -> Iterator[MicroBatch]:
        """Yield this process's micro-batches, and then fillers until all processes have the same
        number. Rows `also` without target tokens are skipped."""
        c = self.decoder.config
        padded = needs_padding(self.decoder, self._dtype)

        def build(indices: list[int]) -> MicroBatch:
            return build_micro_batch(
                batch,
                indices,
                pad_id=c.pad_token_id or 0,
                max_positions=c.context_limit.tokens,
                device=self.decoder.device,
                padded=padded,
            )

        plans = [
            plan_rows(batch, part, self._settings, padded=padded) for part in self._shares(batch)
        ]
        own, most = plans[self._ranks.rank], max(map(len, plans))
        try:
            for indices in own:
                yield build(indices)
            for indices in islice(cycle(own or next(filter(None, plans), [])), most - len(own)):
                yield replace(build(indices), filler=True)
        finally:
            free_gathered(self.decoder)
            for reference in self._reference or ():
                free_gathered(reference)

    def _of_all(self, metrics: MetricSums) -> MetricSums:
        joined = MetricSums()
        finite = True
        for theirs, is_finite in self._ranks.gather((metrics, self._guarded.finite)):
            joined.join(theirs)
            finite = finite and is_finite
        self._guarded.finite = finite
        return joined

    def _all_rows(self, batch: TrainBatch, out: list[T]) -> list[T]:
        own = self._shares(batch)[self._ranks.rank]
        for theirs in self._ranks.gather({index: out[index] for index in own}):
            for index, row in theirs.items():
                out[index] = row
        return out

    def _all_tokens(self, batch: TrainBatch, out: Tensor) -> Tensor:
        parts = [[batch.slice_of(index) for index in share] for share in self._shares(batch)]
        own = torch.cat([out[:0], *(out[place] for place in parts[self._ranks.rank])])
        for places, theirs in zip(parts, self._ranks.gather(own), strict=True):
            starts = [0, *accumulate(place.stop - place.start for place in places)]
            for place, values in zip(places, rows_of_column(theirs, starts), strict=True):
                out[place] = values
        return out
