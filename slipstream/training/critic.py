"""The critic: computes values, and learns them from returns.

    V_t: the expected return before token t, computed from the hidden state of token t - 1

It packs rows and computes like the policy's backend, on a compute thread that they may share. It
does not know how returns are computed (`algorithms`). The RL loop calls it in each step:

    batch.values = await critic.values(batch)
    ...                                  advantages and batch.returns, by GAE
    for mini in mini_batches: metrics = await critic.update(mini)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.algorithms.aggregation import LossAggMode
from slipstream.algorithms.losses.value import value_loss
from slipstream.errors import ConfigError, DataError
from slipstream.models.critic_io import save_critic
from slipstream.models.decoder import supports_varlen
from slipstream.models.value_model import ValueModel
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.guarded import GuardedOptimizer
from slipstream.training.optim import OptimSettings, PolicyOptimizer
from slipstream.training.packing import MicroBatch, check_batch, column, fill_rows
from slipstream.training.protocol import StateTree, TrainFuture
from slipstream.training.single import COMPUTE_DTYPES
from slipstream.training.step import ForwardSettings, MetricSums, batch_normalizers, micro_batches
from slipstream.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossSettings:
    """Settings of `algorithms.value_loss`.

    `cliprange_value` is the distance from the value at the start of the update beyond which the
    loss is clipped. `loss_agg_mode` aggregates token losses over the mini-batch.
    `loss_scale_factor` is the horizon of `seq-mean-token-sum-norm`.

    Raises:
        ConfigError: a range that is not positive, an unknown mode, or a missing horizon.
    """

    cliprange_value: float = 0.5
    loss_agg_mode: str = LossAggMode.TOKEN_MEAN
    loss_scale_factor: float | None = None

    def __post_init__(self) -> None:
        if not self.cliprange_value > 0:
            raise ConfigError(
                f"critic.cliprange_value={self.cliprange_value} must be > 0, or values could not "
                "change; the usual value is 0.5"
            )
        if self.loss_agg_mode not in list(LossAggMode):
            raise ConfigError(
                f"critic.loss_agg_mode={self.loss_agg_mode} is unknown; known: "
                f"{', '.join(LossAggMode)}"
            )
        if self.loss_agg_mode == LossAggMode.SEQ_MEAN_TOKEN_SUM_NORM and not self.loss_scale_factor:
            raise ConfigError(
                f"critic.loss_agg_mode={self.loss_agg_mode} divides by a constant length, but "
                f"loss_scale_factor is {self.loss_scale_factor}; set it, usually to "
                "data.max_response_length"
            )


class Critic:
    """A value model and its optimizer. The critic owns the model's parameters.

    `optim`, `dtype`, `grad_clip`, `max_nonfinite_steps` and the limits of micro-batches are as in
    `SingleProcessBackend`. All work runs on `compute` in the order of the calls; if it is None, the
    critic makes its own thread.
    """

    def __init__(
        self,
        model: ValueModel,
        *,
        optim: OptimSettings | PolicyOptimizer,
        loss: ValueLossSettings | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_tokens_per_micro_batch: int | None = 16384,
        max_rows_per_micro_batch: int | None = None,
        grad_clip: float | None = 1.0,
        gradient_checkpointing: bool = False,
        max_nonfinite_steps: int = 3,
        compute: ComputeThread | None = None,
    ) -> None:
        if dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"compute dtype {dtype} is not one of float32 and bfloat16")
        self._settings = ForwardSettings(
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_rows_per_micro_batch=max_rows_per_micro_batch,
            gradient_checkpointing=gradient_checkpointing,
        )
        self.model = model.to(torch.device(device))
        self._dtype = dtype
        self._loss = loss or ValueLossSettings()
        if isinstance(optim, OptimSettings):
            optim = PolicyOptimizer(self.model.named_parameters(), optim, dtype=dtype)
        self._guarded = GuardedOptimizer(
            optim,
            grad_clip=grad_clip,
            max_nonfinite_steps=max_nonfinite_steps,
            prefix="critic",
            causes="returns or recorded values",
        )
        self._compute = compute or ComputeThread()
        self._owns_compute = compute is None

    def values(self, batch: TrainBatch) -> TrainFuture[Tensor]:
        """V_t under the current weights (T,), aligned with the batch's tokens.

        The values are 0.0 at tokens that are not targets. They do not depend on the split into
        micro-batches.

        Raises (when awaited):
            DataError: the batch is invalid.
        """
        return self._compute.submit(lambda: self._values(batch))

    def update(
        self, batch: TrainBatch, schedule_step: int | None = None
    ) -> TrainFuture[dict[str, float]]:
        """Take one optimizer step on a mini-batch. It needs `returns`, and `values` from the start
        of the update. `schedule_step` is the step of the learning rate schedule, from 0; None for
        the number of calls so far.

        Metrics: `critic/vf_loss`, `critic/vf_clipfrac` and `critic/vpred_mean` of `value_loss`;
        `critic/grad_norm` before clipping; `critic/lr`; and `critic/skipped_steps`, the number of
        updates skipped so far because loss or gradient norm was not finite.

        Raises (when awaited):
            DataError: the batch is invalid or lacks a column.
            TrainingError: too many non-finite updates in a row.
        """
        return self._compute.submit(lambda: self._update(batch, schedule_step))

    def state_dict(self) -> StateTree:
        """Optimizer state and counts, after all submitted work. The weights are saved separately.
        Blocks, so do not call it on an event loop."""
        return self._compute.run(self._guarded.state_dict)

    def load_state_dict(self, state: StateTree) -> None:
        """Restore `state_dict()`. Together with the weights saved with it (`load_critic`), training
        continues bitwise equal. Blocks, so do not call it on an event loop.

        Raises:
            CheckpointError: the state is incomplete, or belongs to another optimizer or model.
        """
        self._compute.run(lambda: self._guarded.load_state_dict(state))

    def save(self, folder: Path, save_tokenizer: Callable[[str], object] | None = None) -> None:
        """Write the weights in fp32 for `load_critic` and transformers. Blocks, so do not call it
        on an event loop."""
        self._compute.run(lambda: save_critic(self.model, folder, save_tokenizer=save_tokenizer))

    def close(self) -> None:
        """Wait for submitted work and end the thread, if it is the critic's own."""
        if self._owns_compute:
            self._compute.close()

    def _check(self, batch: TrainBatch) -> None:
        c = self.model.config
        check_batch(batch, vocab_size=c.vocab_size, limit=c.context_limit)

    def _forward(self, batch: TrainBatch) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield micro-batches with the values (B, T) of their target tokens."""
        c = self.model.config
        packed = head = None
        for micro in micro_batches(
            batch,
            also=(),
            settings=self._settings,
            pad_id=c.pad_token_id or 0,
            max_positions=c.context_limit.tokens,
            device=self.model.device,
            padded=not supports_varlen(c, self._dtype, self.model.device),
        ):
            # With gradients every micro-batch needs its own graph down to the parameters.
            if packed is None or head is None or torch.is_grad_enabled():
                packed, head = self.model.pack(self._dtype), self.model.score.pack()
            hidden = packed.forward(
                micro.ids,
                micro.positions,
                lengths=micro.lengths,
                recompute=self._settings.gradient_checkpointing and torch.is_grad_enabled(),
            )
            rows = hidden.final.flatten(0, 1).index_select(0, micro.head_rows)
            values = head(rows.to(torch.float32)).squeeze(-1)
            yield micro, micro.scatter(values[: len(micro.target_slots)])

    def _values(self, batch: TrainBatch) -> Tensor:
        self._check(batch)
        out = torch.zeros(batch.num_tokens)
        with torch.no_grad():
            for micro, values in self._forward(batch):
                fill_rows(out, batch, micro, values)
        return out

    def _update(self, batch: TrainBatch, schedule_step: int | None) -> dict[str, float]:
        self._check(batch)
        _check_columns(batch)
        normalizers = batch_normalizers(batch)
        if self._loss.loss_scale_factor:
            normalizers = replace(normalizers, horizon=self._loss.loss_scale_factor)
        sums = MetricSums()
        self._guarded.has_gradients = True
        try:
            for micro, vpreds in self._forward(batch):
                returns = column(batch.returns, batch, micro.indices, vpreds)
                values = column(batch.values, batch, micro.indices, vpreds)
                assert returns is not None
                assert values is not None
                mask = micro.mask.to(vpreds.dtype)
                if micro.layout is not None:
                    vpreds, returns, values, mask = map(
                        micro.layout.apply, (vpreds, returns, values, mask)
                    )
                loss, metrics = value_loss(
                    vpreds,
                    returns,
                    values,
                    mask,
                    cliprange_value=self._loss.cliprange_value,
                    loss_agg_mode=self._loss.loss_agg_mode,
                    normalizers=normalizers,
                )
                sums.add({"critic/vf_loss": loss.detach(), **metrics}, {})
                if not math.isfinite(loss.item()):
                    self._guarded.finite = False
                    break
                loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._guarded.forget_gradients()
            raise
        metrics_of_step = sums.values() | self._guarded.step(schedule_step=schedule_step)
        metrics_of_step["critic/skipped_steps"] = float(self._guarded.skipped_steps)
        return metrics_of_step


def explained_variance(batch: TrainBatch) -> float | None:
    """The explained variance 1 - Var(R - V) / (Var(R) + 1e-5) over target tokens.

    R are the `returns`, V the `values`. It is 1 for perfect values, 0 for values that
    explain nothing, and negative for values worse than a constant. None for fewer than 2 tokens.
    Use a whole batch, because the returns of one mini-batch may all be equal.

    Raises:
        DataError: the batch has no returns or no values.
    """
    returns, values = _check_columns(batch)
    targets = batch.targets
    returns = returns[targets].double()
    if len(returns) < 2:
        return None
    spread = torch.stack([returns - values[targets].double(), returns]).var(-1)
    return 1.0 - float(spread[0] / (spread[1] + 1e-5))


def _check_columns(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    for name in ("returns", "values"):
        if getattr(batch, name) is None:
            raise DataError(
                f"the batch has no {name}, and a critic learns from both values and returns; set "
                "values from Critic.values before the update, and returns from the advantage "
                "estimator (gae)"
            )
    assert batch.returns is not None
    assert batch.values is not None
    return batch.returns, batch.values
