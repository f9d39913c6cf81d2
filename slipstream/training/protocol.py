"""The protocol of training backends, and the futures that their methods return.

A backend owns the policy's weights, its optimizer and its device. It does not know where batches
come from or who receives the weights. The loops and checkpointing call it. The names are Tinker's
(`forward_backward`, `optim_step`). Methods return futures, so that callers can submit work first
and await it later.
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
"""Nested dictionaries with string keys. Leaves are tensors, numbers, strings or None."""


class TrainFuture(Generic[T_co]):
    """The result of work on another thread: `await` it, or call `result()` once it is `done()`.

    Any number of tasks may await it. A failure of the work is raised in each of them. Cancelling an
    awaiting task does not stop the work.
    """

    def __init__(self, work: Future[T_co]) -> None:
        self._work = work

    def done(self) -> bool:
        """Whether there is a result or a failure."""
        return self._work.done()

    def result(self) -> T_co:
        """The result. Raises the failure of the work, and never waits.

        Raises:
            RuntimeError: the work is not done yet.
        """
        if not self._work.done():
            raise RuntimeError(
                "this TrainFuture is not done; `await` it, or call `wait()` without an event loop"
            )
        return self._work.result()

    def wait(self, timeout: float | None = None) -> T_co:
        """The result, after blocking the calling thread for at most `timeout` seconds.

        This is for scripts without an event loop; with one, `await` the future.
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
    """A policy that does not change during training, for KL terms."""

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """Like `TrainingBackend.compute_log_probs`."""
        ...


class TrainingBackend(Protocol):
    """Owns the policy during training, and computes on it.

    Work is done in the order of the calls. `forward_backward` may be called several times before
    an `optim_step`: gradients add up, and each batch is normalized by its own counts.
    """

    @property
    def weight_version(self) -> PolicyVersion:
        """The number of published weight updates."""
        ...

    def forward_backward(
        self, batch: TrainBatch, loss: LossFn | None = None, *, sink: FeatureSink | None = None
    ) -> TrainFuture[dict[str, float]]:
        """Add the gradient of `loss` over `batch`, and return the metrics of this pass.

        If `loss` is None, the backend's own loss is used, cross-entropy by default.
        """
        ...

    def optim_step(self, schedule_step: int | None = None) -> TrainFuture[dict[str, float]]:
        """Clip the gradients, update the weights and clear the gradients. Returns gradient norm and
        learning rate as metrics.

        `schedule_step` is the step of the learning rate schedule, from 0; None for the number of
        calls so far.
        """
        ...

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """Log-probs (T,) of the target tokens under the current weights.

        Aligned with the batch's tokens; 0.0 at tokens that are not targets.
        """
        ...

    def compute_base_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """Like `compute_log_probs`, without the LoRA adapter.

        Raises (when awaited):
            TrainingError: all weights are trained, so there are no base weights.
        """
        ...

    def compute_sum_pi_squared(self, batch: TrainBatch) -> TrainFuture[Tensor]:
        """The sum of squared probabilities of the distribution at each target token, aligned like
        `compute_log_probs`."""
        ...

    def use_full_kl(self, reference: Policy | None, in_loss: KLDirection | None = None) -> None:
        """Set the reference of `compute_full_kl`. None means the base weights under a LoRA adapter.
        With `in_loss`, the loss gets that KL.

        Raises:
            ConfigError: there are no base weights, or the vocabularies differ.
        """
        ...

    def compute_full_kl(self, batch: TrainBatch, direction: KLDirection) -> TrainFuture[Tensor]:
        """The KL over the full vocabulary between the current policy and the reference of
        `use_full_kl`, at each target token, aligned like `compute_log_probs`."""
        ...

    def compute_kept_ids(
        self, batch: TrainBatch, cuts: SamplingParams
    ) -> TrainFuture[list[list[array[int]]]]:
        """The token ids that a sampler with top-k, top-p and min-p of `cuts` keeps at each target
        token, one list per row; empty for tokens that are no targets."""
        ...

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """Copies of all weights under their Hugging Face names."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace all weights. Names and shapes are checked before anything changes."""
        ...

    def publish(self, *, advance: bool = True, kv_policy: KVPolicy = KVPolicy.KEEP) -> WeightUpdate:
        """The current weights as an update for engines, with the next version number.

        With `advance=False` it has the current version number, for an engine that starts or
        restarts. A later optimizer step does not change the values of the update.
        """
        ...

    def state_dict(self) -> StateTree:
        """The state that a bitwise equal continuation needs, except the weights. If only a LoRA
        adapter is trained, the entry `lora` has its weights."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Restore `state_dict()`. The weights are loaded separately."""
        ...

    def load_training_state(self, file: Path) -> bool:
        """Restore `state_dict()` from a file of `checkpoint.tree`. Returns True if it contains the
        trained weights (of a LoRA adapter)."""
        ...

    def save_policy(
        self, folder: Path, save_tokenizer: Callable[[str], object] | None = None
    ) -> None:
        """Write the weights in fp32 as a Hugging Face folder."""
        ...

    def load_policy(self, folder: Path) -> None:
        """Replace all weights by the weights of a Hugging Face folder."""
        ...

    def save_adapter(self, folder: Path, base_model: Path | None = None) -> None:
        """Write the LoRA adapter as a folder for peft, with `base_model` as its base. Does nothing
        if all weights are trained."""
        ...

    def close(self) -> None:
        """Wait for submitted work and end the threads. The backend cannot be used afterwards."""
        ...
