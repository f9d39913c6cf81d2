"""A training backend whose calls run in all processes.

In process 0 the loops call it, and each call also runs in the other processes. There the same class
executes the calls, with a team that has no members. `training.fsdp2` does the FSDP2 work, `team`
reaches the other processes. `build` makes the objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.algorithms.full_kl import KLDirection
from slipstream.checkpoint.tree import load_tree
from slipstream.distributed.team import Team
from slipstream.errors import TrainingError
from slipstream.models.decoder import Decoder
from slipstream.models.lora import adapter_tensors
from slipstream.models.policy import policy_weights
from slipstream.models.sharded import full
from slipstream.training.fsdp2 import ShardedBackend
from slipstream.training.lora import adapter_state
from slipstream.training.losses import LossFn
from slipstream.training.protocol import StateTree, TrainFuture
from slipstream.training.publish import named_buckets
from slipstream.types import (
    FeatureSink,
    KVPolicy,
    SamplingParams,
    TrainBatch,
    WeightBucket,
    WeightUpdate,
)


class TeamBackend(ShardedBackend):
    """A `TrainingBackend` over all processes of `team`; `part` is its name in each process.

    A feature sink receives only the rows that this process computes.
    """

    def __init__(self, decoder: Decoder, team: Team, part: str, **settings: Any) -> None:
        super().__init__(decoder, team.ranks, **settings)
        self._team = team
        self._part = part
        self._unsent: list[GatheredWeights] = []

    def forward_backward(
        self, batch: TrainBatch, loss: LossFn | None = None, *, sink: FeatureSink | None = None
    ) -> TrainFuture[dict[str, float]]:
        with self._team.collective(self._part, "forward_backward", batch, loss) as call:
            return call.joined(super().forward_backward(batch, loss, sink=sink))

    def optim_step(self, schedule_step: int | None = None) -> TrainFuture[dict[str, float]]:
        with self._team.collective(self._part, "optim_step", schedule_step) as call:
            return call.joined(super().optim_step(schedule_step))

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        with self._team.collective(self._part, "compute_log_probs", batch) as call:
            return call.joined(super().compute_log_probs(batch, sink=sink))

    def compute_base_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        with self._team.collective(self._part, "compute_base_log_probs", batch) as call:
            return call.joined(super().compute_base_log_probs(batch, sink=sink))

    def compute_sum_pi_squared(self, batch: TrainBatch) -> TrainFuture[Tensor]:
        with self._team.collective(self._part, "compute_sum_pi_squared", batch) as call:
            return call.joined(super().compute_sum_pi_squared(batch))

    def compute_full_kl(self, batch: TrainBatch, direction: KLDirection) -> TrainFuture[Tensor]:
        with self._team.collective(self._part, "compute_full_kl", batch, direction) as call:
            return call.joined(super().compute_full_kl(batch, direction))

    def compute_kept_ids(
        self, batch: TrainBatch, cuts: SamplingParams
    ) -> TrainFuture[list[list[array[int]]]]:
        with self._team.collective(self._part, "compute_kept_ids", batch, cuts) as call:
            return call.joined(super().compute_kept_ids(batch, cuts))

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        with self._team.collective(self._part, "_gather_for_others") as call:
            return call.joined(super().get_weights())

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        with self._team.collective(self._part, "load_weights", weights) as call:
            return call.joined(super().load_weights(weights))

    def load_policy(self, folder: Path) -> None:
        with self._team.collective(self._part, "load_policy", folder) as call:
            super().load_policy(folder)
            call.wait()

    def state_dict(self) -> StateTree:
        with self._team.collective(self._part, "_state_for_others") as call:
            state = super().state_dict()
            call.wait()
            return state

    def load_state_dict(self, state: StateTree) -> None:
        with self._team.collective(self._part, "load_state_dict", state) as call:
            super().load_state_dict(state)
            call.wait()

    def load_training_state(self, file: Path) -> bool:
        """Like `SingleProcessBackend.load_training_state`. Each process reads the file and keeps
        only its shard."""
        with self._team.collective(self._part, "load_training_state", file) as call:
            state = load_tree(file, mapped=True)
            super().load_state_dict(state)
            call.wait()
        return "lora" in state

    def save_policy(
        self, folder: Path, save_tokenizer: Callable[[str], object] | None = None
    ) -> None:
        with self._team.collective(self._part, "_gather_for_others") as call:
            super().save_policy(folder, save_tokenizer)
            call.wait()

    def save_adapter(self, folder: Path, base_model: Path | None = None) -> None:
        if not self._lora:
            return
        with self._team.collective(self._part, "_adapter_for_others") as call:
            super().save_adapter(folder, base_model)
            call.wait()

    def publish(self, *, advance: bool = True, kv_policy: KVPolicy = KVPolicy.KEEP) -> WeightUpdate:
        """Like `SingleProcessBackend.publish`. The buckets are gathered when they are iterated,
        which must happen before the weights change."""
        weights = GatheredWeights(self)
        self._unsent.append(weights)
        return replace(super().publish(advance=advance, kv_policy=kv_policy), buckets=weights)

    def gather_vocab(self) -> TrainFuture[None]:
        """Take part when process 0 gathers LM head and embedding
        (`drafter.sequences.PolicyEnds`)."""

        def gather() -> None:
            assert isinstance(self.decoder, Decoder)
            full(self.decoder.lm_head_weight.detach())
            full(self.decoder.model.embed_tokens.weight.detach())

        return self._compute.submit(gather)

    def gathered(self) -> Iterator[WeightBucket]:
        """Gather the current weights bucket by bucket, for a receiver in each process. Must run on
        the compute thread."""
        return named_buckets(policy_weights(self.decoder))

    def _freeze_snapshots(self) -> None:
        # Gathering is collective, and the other processes do not take part at this moment.
        for weights in self._unsent:
            weights.stale = True
        self._unsent.clear()

    def _gather_for_others(self) -> TrainFuture[None]:
        """Take part in gathering weights that another process uses."""

        def gather() -> None:
            for _ in self.gathered():
                pass

        return self._compute.submit(gather)

    def _state_for_others(self) -> TrainFuture[None]:
        def gather() -> None:
            self._guarded.optimizer.gather()
            if self._lora:
                adapter_state(self.decoder, self._base())

        return self._compute.submit(gather)

    def _adapter_for_others(self) -> TrainFuture[int]:
        return self._compute.submit(lambda: len(adapter_tensors(self.decoder)))


class GatheredWeights:
    """Buckets of weights that all processes gather collective. They are consumed once: in this
    process, or by the engine of each process (`EngineTeam`)."""

    def __init__(self, backend: TeamBackend) -> None:
        self.backend = backend
        self.stale = False

    def check(self) -> None:
        """Raise TrainingError if the weights have changed since they were published."""
        if self.stale:
            raise TrainingError(
                "these weights were published before the last update; weights that are sharded "
                "over processes are not copied, so publish again after each update"
            )

    def __iter__(self) -> Iterator[WeightBucket]:
        self.check()
        backend = self.backend
        with backend._team.collective(backend._part, "_gather_for_others") as call:
            pass
        yield from backend.gathered()
        call.wait()
