"""The seam to training: what a backend offers, and the futures that it answers with.

A backend owns the policy's weights, its optimizer and the place where they are computed on. It
does not know where batches come from or who receives the weights. Called by the loops and by
checkpointing; the names follow the `rollouts` design (`forward_backward`, `optim_step`, futures in
Tinker's style), so that work can be submitted first and awaited later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from slipstream.algorithms.full_kl import KLDirection
from slipstream.threads import arrival
from slipstream.training.losses import LossFn
from slipstream.types import (
    FeatureSink,
    KVPolicy,
    PolicyVersion,
    SamplingParams,
    TrainBatch,
    WeightUpdate,
)

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.models.policy import Policy

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

StateTree = dict[str, Any]
"""Nested string-keyed dictionaries whose leaves are tensors, numbers, strings or None."""


class TrainFuture(Generic[T_co]):
    """The result of work that runs elsewhere: `await` it, or ask `result()` once it is `done()`.

    Awaiting suspends only the task that awaits, and any number of tasks may. A failure of the work
    is raised where the future is awaited. Cancelling a task that awaits does not stop the work.
    """

    def __init__(self, work: Future[T_co]) -> None:
        self._work = work

    def done(self) -> bool:
        """Whether there is a result or a failure."""
        return self._work.done()

    def result(self) -> T_co:
        """The result, or the failure raised. Never waits.

        Raises:
            RuntimeError: the work is not done yet.
        """
        if not self._work.done():
            raise RuntimeError(
                "this TrainFuture is not done; `await` it (or `wait()` in code without event loop)"
            )
        return self._work.result()

    def wait(self, timeout: float | None = None) -> T_co:
        """The result, blocking the calling thread for at most `timeout` seconds.

        For scripts without an event loop; inside one, `await` the future.
        """
        return self._work.result(timeout)

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._arrive().__await__()

    async def _arrive(self) -> T_co:
        await arrival(self._work)
        return self._work.result()


class ImmediateTrainFuture(TrainFuture[T]):
    """A future that is done from the start."""

    def __init__(self, value: T) -> None:
        work: Future[T] = Future()
        work.set_result(value)
        super().__init__(work)


class ReferencePolicy(Protocol):
    """What a KL term compares with: any policy that stands still."""

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """As `TrainingBackend.compute_log_probs`."""
        ...


class TrainingBackend(Protocol):
    """Owner of the policy during training.

    Work is done in the order of the calls. Between two `optim_step` calls, `forward_backward` may
    be called several times: gradients add up, each batch normalised by its own counts.
    """

    @property
    def weight_version(self) -> PolicyVersion:
        """How many weight updates have been published."""
        ...

    def forward_backward(
        self, batch: TrainBatch, loss: LossFn | None = None, *, sink: FeatureSink | None = None
    ) -> TrainFuture[dict[str, float]]:
        """Add the gradient of `loss` over `batch`; the metrics of that pass.

        Without `loss` it is the backend's own: cross-entropy where it was made without another.
        """
        ...

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        """Clip, update the weights and forget the gradients; gradient norm and learning rate."""
        ...

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """Log-probs (T,) of the target tokens under the present weights.

        Aligned with the batch's tokens; 0.0 at tokens that are no target.
        """
        ...

    def compute_base_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """`compute_log_probs` without the LoRA adapter.

        Raises (when awaited):
            TrainingError: all weights are trained, so that there are no base weights.
        """
        ...

    def compute_sum_pi_squared(self, batch: TrainBatch) -> TrainFuture[Tensor]:
        """Of the distribution at each target token, the sum of its squared probabilities; aligned
        as `compute_log_probs`."""
        ...

    def use_full_kl(self, reference: Policy | None, in_loss: KLDirection | None = None) -> None:
        """Set the reference of `compute_full_kl`; None: the base weights under a LoRA adapter. With
        `in_loss`, losses get that KL.

        Raises:
            ConfigError: there are no base weights, or the vocabularies differ.
        """
        ...

    def compute_full_kl(self, batch: TrainBatch, direction: KLDirection) -> TrainFuture[Tensor]:
        """The KL over the whole vocabulary between the present policy and the reference of
        `use_full_kl`, at each target token; aligned as `compute_log_probs`."""
        ...

    def compute_kept_ids(
        self, batch: TrainBatch, cuts: SamplingParams
    ) -> TrainFuture[list[list[array[int]]]]:
        """The ids that a sampler with the cuts of `cuts` keeps at each target token, one list per
        row; empty where no target token is."""
        ...

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """Copies of all weights under their Hugging Face names."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace all weights; names and shapes are checked before anything changes."""
        ...

    def publish(self, *, advance: bool = True, kv_policy: KVPolicy = KVPolicy.KEEP) -> WeightUpdate:
        """The present weights as an update for engines, under the next version.

        With `advance=False` under the present version: for an engine that starts or restarts. The
        update keeps its values when the next optimizer step changes the weights.
        """
        ...

    def state_dict(self) -> StateTree:
        """Everything but the weights that a bitwise equal continuation needs; with an entry
        `lora`, where an adapter is all that is trained, no weights are needed besides."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from `state_dict()`; the weights are loaded separately."""
        ...

    def load_training_state(self, file: Path) -> bool:
        """`load_state_dict` from a file of `checkpoint.tree`; whether it has the trained weights,
        too."""
        ...

    def save_policy(
        self, folder: Path, save_tokenizer: Callable[[str], object] | None = None
    ) -> None:
        """Write the weights in fp32 as a Hugging Face folder."""
        ...

    def load_policy(self, folder: Path) -> None:
        """Replace all weights by those of a Hugging Face folder."""
        ...

    def save_adapter(self, folder: Path, base_model: Path | None = None) -> None:
        """Write a LoRA adapter as a folder that peft loads, on the model in `base_model`; nothing
        where all weights are trained."""
        ...

    def close(self) -> None:
        """Wait for submitted work and give back threads. The backend is unusable afterwards."""
        ...
