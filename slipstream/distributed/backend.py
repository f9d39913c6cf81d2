"""A trainer that takes the other processes along: each call is made by all of them.

In the first process it is what the loops are given, and in the others the same class carries out
what it is told (there its team has no members). Knows FSDP2 by `training.fsdp2` and the others by
`team`. Made by the loops' wiring.
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
    """A `TrainingBackend` over all processes of `team`; `part` is its name there.

    A feature sink gets the rows that this process computes, no others.
    """

    def __init__(self, decoder: Decoder, team: Team, part: str, **settings: Any) -> None:
        super().__init__(decoder, team.ranks, **settings)
        self._team = team
        self._part = part
        self._unsent: list[GatheredWeights] = []

    def forward_backward(
        self, batch: TrainBatch, loss: LossFn | None = None, *, sink: FeatureSink | None = None
    ) -> TrainFuture[dict[str, float]]:
        with self._team.together(self._part, "forward_backward", batch, loss) as all_of_us:
            return all_of_us.joined(super().forward_backward(batch, loss, sink=sink))

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        with self._team.together(self._part, "optim_step") as all_of_us:
            return all_of_us.joined(super().optim_step())

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        with self._team.together(self._part, "compute_log_probs", batch) as all_of_us:
            return all_of_us.joined(super().compute_log_probs(batch, sink=sink))

    def compute_base_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        with self._team.together(self._part, "compute_base_log_probs", batch) as all_of_us:
            return all_of_us.joined(super().compute_base_log_probs(batch, sink=sink))

    def compute_sum_pi_squared(self, batch: TrainBatch) -> TrainFuture[Tensor]:
        with self._team.together(self._part, "compute_sum_pi_squared", batch) as all_of_us:
            return all_of_us.joined(super().compute_sum_pi_squared(batch))

    def compute_full_kl(self, batch: TrainBatch, direction: KLDirection) -> TrainFuture[Tensor]:
        with self._team.together(self._part, "compute_full_kl", batch, direction) as all_of_us:
            return all_of_us.joined(super().compute_full_kl(batch, direction))

    def compute_kept_ids(
        self, batch: TrainBatch, cuts: SamplingParams
    ) -> TrainFuture[list[list[array[int]]]]:
        with self._team.together(self._part, "compute_kept_ids", batch, cuts) as all_of_us:
            return all_of_us.joined(super().compute_kept_ids(batch, cuts))

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        with self._team.together(self._part, "_gather_for_others") as all_of_us:
            return all_of_us.joined(super().get_weights())

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        with self._team.together(self._part, "load_weights", weights) as all_of_us:
            return all_of_us.joined(super().load_weights(weights))

    def load_policy(self, folder: Path) -> None:
        with self._team.together(self._part, "load_policy", folder) as all_of_us:
            super().load_policy(folder)
            all_of_us.wait()

    def state_dict(self) -> StateTree:
        with self._team.together(self._part, "_state_for_others") as all_of_us:
            state = super().state_dict()
            all_of_us.wait()
            return state

    def load_state_dict(self, state: StateTree) -> None:
        with self._team.together(self._part, "load_state_dict", state) as all_of_us:
            super().load_state_dict(state)
            all_of_us.wait()

    def load_training_state(self, file: Path) -> bool:
        """As `SingleProcessBackend.load_training_state`: each process reads the file by itself, and
        keeps no more than its part."""
        with self._team.together(self._part, "load_training_state", file) as all_of_us:
            state = load_tree(file, mapped=True)
            super().load_state_dict(state)
            all_of_us.wait()
        return "lora" in state

    def save_policy(
        self, folder: Path, save_tokenizer: Callable[[str], object] | None = None
    ) -> None:
        with self._team.together(self._part, "_gather_for_others") as all_of_us:
            super().save_policy(folder, save_tokenizer)
            all_of_us.wait()

    def save_adapter(self, folder: Path, base_model: Path | None = None) -> None:
        if not self._lora:
            return
        with self._team.together(self._part, "_adapter_for_others") as all_of_us:
            super().save_adapter(folder, base_model)
            all_of_us.wait()

    def publish(self, *, advance: bool = True, kv_policy: KVPolicy = KVPolicy.KEEP) -> WeightUpdate:
        """As `SingleProcessBackend.publish`; buckets are gathered when they are asked for, which
        has to be before the weights change."""
        weights = GatheredWeights(self)
        self._unsent.append(weights)
        return replace(super().publish(advance=advance, kv_policy=kv_policy), buckets=weights)

    def gather_ends(self) -> TrainFuture[None]:
        """Help another process to copy LM head and embedding (`drafter.sequences.PolicyEnds`)."""

        def gather() -> None:
            assert isinstance(self.decoder, Decoder)
            full(self.decoder.lm_head_weight.detach())
            full(self.decoder.model.embed_tokens.weight.detach())

        return self._compute.submit(gather)

    def gathered(self) -> Iterator[WeightBucket]:
        """The present weights, on the way to a receiver in each process; on the compute thread."""
        return named_buckets(policy_weights(self.decoder))

    def _freeze_snapshots(self) -> None:
        # Nothing is gathered now: the others would not know.
        for weights in self._unsent:
            weights.stale = True
        self._unsent.clear()

    def _gather_for_others(self) -> TrainFuture[None]:
        """Take part in a gathering of weights that another process makes use of."""

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
    """Buckets of weights that all processes gather; consumed once, here or (`EngineTeam`) in each
    process by its own engine."""

    def __init__(self, backend: TeamBackend) -> None:
        self.backend = backend
        self.stale = False

    def check(self) -> None:
        """Raise TrainingError where the weights have changed since they were published."""
        if self.stale:
            raise TrainingError(
                "these weights were published before the last update, and weights that are spread "
                "over processes are not kept; publish again"
            )

    def __iter__(self) -> Iterator[WeightBucket]:
        self.check()
        backend = self.backend
        with backend._team.together(backend._part, "_gather_for_others") as all_of_us:
            pass
        yield from backend.gathered()
        all_of_us.wait()
