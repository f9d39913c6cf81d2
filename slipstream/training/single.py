"""Training in one process: fp32 master weights, bf16 or fp32 compute, one compute thread.

Implements `protocol.TrainingBackend`. It does not know where batches come from, who receives the
published weights, or the layout of checkpoints on disk. `build` makes it.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.algorithms.full_kl import KLDirection
from slipstream.algorithms.log_probs import DEFAULT_KEEP_BYTES
from slipstream.checkpoint.saved import Saved, check_finite
from slipstream.checkpoint.tree import load_tree
from slipstream.errors import ConfigError, TrainingError
from slipstream.heap import keep_freed_memory
from slipstream.metrics.resident import FreedMemory
from slipstream.models.decoder import Decoder
from slipstream.models.hf_policy import HFPolicy
from slipstream.models.lora import (
    base_digest,
    base_weights_only,
    lora_layers,
    value_of,
)
from slipstream.models.lora_io import save_adapter
from slipstream.models.policy import (
    PackedPolicy,
    Policy,
    load_weights,
    load_weights_from,
    needs_padding,
    pack,
    policy_weights,
    save_policy,
)
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.guarded import WEIGHT_VERSION, GuardedOptimizer
from slipstream.training.lora import adapter_state, check_adapter_state, load_adapter_state
from slipstream.training.losses import LossFn, rollout_difference, sft_loss
from slipstream.training.optim import OptimSettings, PolicyOptimizer
from slipstream.training.packing import MicroBatch, check_batch, fill_rows
from slipstream.training.protocol import StateTree, TrainFuture
from slipstream.training.publish import WeightSnapshot
from slipstream.training.step import (
    ForwardResult,
    ForwardSettings,
    FullKL,
    MetricSums,
    batch_normalizers,
    forward,
    hand_over,
    kept_ids,
    kept_of_sampler,
    loss_inputs,
    micro_batches,
    sum_pi_squared,
    whole_kl,
)
from slipstream.types import (
    FeatureSink,
    KVPolicy,
    PolicyVersion,
    SamplingParams,
    TrainBatch,
    WeightUpdate,
)

T = TypeVar("T")

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


class SingleProcessBackend:
    """A `TrainingBackend` over one policy. The backend owns the policy's parameters.

    If the decoder has a LoRA adapter (`models.lora.add_lora`), only the adapter is trained, and
    published weights are merged. `optim` is a `PolicyOptimizer` over the decoder's parameters, or
    the settings to make one. `grad_clip` is the maximum norm of the whole gradient, None for no
    limit. An update with a non-finite loss or gradient is skipped; more than `max_nonfinite_steps`
    of them in a row are an error. `compute` may be shared with other backends; if it is None, the
    backend makes its own thread. `metrics_prefix` is the prefix of `/grad_norm` and `/lr`.
    """

    _may_end_early = True
    """Whether a pass may end at a non-finite loss; not if other processes wait for the rest."""

    _keeps_freed_memory = True
    """Whether freed memory that the next step needs is kept. With gradient
    checkpointing it is always returned, because that setting saves memory at the cost of time."""

    def __init__(
        self,
        decoder: Policy,
        *,
        optim: OptimSettings | PolicyOptimizer,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_tokens_per_micro_batch: int | None = 16384,
        max_rows_per_micro_batch: int | None = None,
        grad_clip: float | None = 1.0,
        gradient_checkpointing: bool = False,
        max_nonfinite_steps: int = 3,
        log_prob_chunk: int = 512,
        log_prob_keep_bytes: int = DEFAULT_KEEP_BYTES,
        metrics_prefix: str = "actor",
        loss: LossFn | None = None,
        share_prompts: bool = False,
        compute: ComputeThread | None = None,
    ) -> None:
        """`loss` is the default loss of `forward_backward`; None is cross-entropy.

        With `share_prompts`, `forward_backward` computes a prompt, the tokens before the first
        target token, once for all rows of a micro-batch that begin with it. It does so if that
        saves enough (`packing.LEAST_SHARED`) and sequences need no padding.
        """
        if dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"compute dtype {dtype} is not one of float32 and bfloat16")
        self._settings = ForwardSettings(
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_rows_per_micro_batch=max_rows_per_micro_batch,
            log_prob_chunk=log_prob_chunk,
            log_prob_keep_bytes=log_prob_keep_bytes,
            gradient_checkpointing=gradient_checkpointing,
        )
        self.decoder = decoder.to(torch.device(device))
        self._lora = bool(lora_layers(self.decoder))
        self._base_digest: str | None = None
        if isinstance(optim, OptimSettings):
            optim = PolicyOptimizer(self.decoder.named_parameters(), optim, dtype=dtype)
        self._guarded = GuardedOptimizer(
            optim,
            grad_clip=grad_clip,
            max_nonfinite_steps=max_nonfinite_steps,
            prefix=metrics_prefix,
            causes="advantages or recorded log-probs",
        )
        self._dtype, self._share_prompts = dtype, share_prompts
        self._loss = loss or sft_loss()
        self._reference: tuple[Policy | None] | None = None
        self._full_kl: KLDirection | None = None
        self._compute = compute or ComputeThread()
        self._owns_compute = compute is None
        self._snapshots: weakref.WeakSet[WeightSnapshot] = weakref.WeakSet()
        self._pending_changes = 0
        keeps = self._keeps_freed_memory and not gradient_checkpointing
        if keeps:
            keep_freed_memory()
        self._freed_of_micro_batches = FreedMemory(limit_bytes=None if keeps else 0)
        # Its own object, because a return after a micro-batch would delay one after the step. The
        # next micro-batch needs memory that is kept.
        self._freed_of_steps = None if keeps else FreedMemory(limit_bytes=0)
        self._lock = threading.Lock()
        self._weight_version = 0

    @property
    def weight_version(self) -> PolicyVersion:
        """The number of published weight updates."""
        return self._weight_version

    def forward_backward(
        self, batch: TrainBatch, loss: LossFn | None = None, *, sink: FeatureSink | None = None
    ) -> TrainFuture[dict[str, float]]:
        """Add the gradient of `loss` over `batch`, and return the metrics of the mini-batch.

        `loss` None is the backend's default loss. `sink.receive` is called on the compute thread,
        before the weights change. After a non-finite loss the pass ends, and the next `optim_step`
        skips its update.

        Raises (when awaited):
            DataError: the batch is invalid.
        """
        chosen = loss or self._loss
        return self._compute.submit(lambda: self._forward_backward(batch, chosen, sink))

    def optim_step(self, schedule_step: int | None = None) -> TrainFuture[dict[str, float]]:
        """Clip the gradients, update the weights, and clear the gradients.

        `schedule_step` is the step of the learning rate schedule, from 0; None for the number of
        calls so far.

        Metrics: `<prefix>/grad_norm` (before clipping; absent if the loss was not finite),
        `<prefix>/lr`, `<prefix>/muon_lr` with Muon, and `training/skipped_steps`, the number of
        updates skipped so far because loss or gradient norm was not finite.

        Raises (when awaited):
            TrainingError: there are no gradients, or too many non-finite updates in a row.
        """
        return self._change(lambda: self._optim_step(schedule_step))

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """Log-probs (T,) of the target tokens at the batch's temperature.

        Aligned with the batch's tokens; 0.0 at tokens that are no target. Bitwise the ones
        that `forward_backward` works with.
        """
        return self._compute.submit(lambda: self._compute_log_probs(batch, sink))

    def compute_sum_pi_squared(self, batch: TrainBatch) -> TrainFuture[Tensor]:
        """The sum of squared probabilities of the distribution at each target token, at the batch's
        temperature; aligned as `compute_log_probs`."""
        return self._compute.submit(lambda: self._compute_sum_pi_squared(batch))

    def compute_full_kl(self, batch: TrainBatch, direction: KLDirection) -> TrainFuture[Tensor]:
        """The KL over the whole vocabulary between the present policy and the reference of
        `use_full_kl` at each target token, in nats at the batch's temperature; aligned as
        `compute_log_probs`.

        Raises (when awaited):
            TrainingError: there is no reference.
        """
        return self._compute.submit(lambda: self._compute_full_kl(batch, direction))

    def compute_kept_ids(
        self, batch: TrainBatch, cuts: SamplingParams
    ) -> TrainFuture[list[list[array[int]]]]:
        """The ids that a sampler with top-k, top-p and min-p of `cuts` keeps under the present
        weights at each target token, one list per row; empty where no target token is. In exact
        mode those that the engine with these weights draws from."""
        return self._compute.submit(lambda: self._compute_kept_ids(batch, cuts))

    def use_full_kl(self, reference: Policy | None, in_loss: KLDirection | None = None) -> None:
        """Set the reference of the KL over the full vocabulary; None is the base weights under a
        LoRA adapter. With `in_loss` the KL is an input of losses (`LossInputs.full_kl`).

        Raises:
            ConfigError: there are no base weights, or the vocabularies differ.
        """
        if reference is None and not self._lora:
            raise ConfigError(
                "use_full_kl(None): all weights are trained, so there are no base weights; pass a "
                "frozen copy of the model as the reference"
            )
        own = self.decoder.config.vocab_size
        if reference is not None and reference.config.vocab_size != own:
            raise ConfigError(
                f"the KL over the full vocabulary needs equal vocabularies, but the policy has "
                f"{own} tokens and the reference {reference.config.vocab_size}; set another "
                "reference (actor_rollout_ref.ref.path), or set "
                "actor_rollout_ref.actor.kl_loss_type=low_var_kl"
            )
        self._reference, self._full_kl = (reference,), in_loss

    def compute_base_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """`compute_log_probs` without the LoRA adapter.

        Raises (when awaited):
            TrainingError: all weights are trained, so that there are no base weights.
        """

        def compute() -> Tensor:
            if not self._lora:
                raise TrainingError(
                    "there are no base weights: all weights are trained (lora_rank=0); compare "
                    "with a frozen copy of the model instead"
                )
            with base_weights_only(self.decoder):
                return self._compute_log_probs(batch, sink)

        return self._compute.submit(compute)

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """Copies of all weights under their Hugging Face names, merged with a LoRA adapter."""
        return self._compute.submit(
            lambda: {n: value_of(w).clone() for n, w in policy_weights(self.decoder)}
        )

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace all weights. The optimizer keeps its state.

        Raises (when awaited):
            CheckpointError: a tensor is missing, unknown, not finite or of the wrong shape.
            TrainingError: a LoRA adapter is trained, so the base weights must not change.
        """

        def load() -> None:
            if self._lora:
                raise TrainingError(
                    "load_weights() replaces all weights, but this backend trains a LoRA adapter; "
                    "make a backend with those weights and add an adapter"
                )
            self._freeze_snapshots()
            load_weights(self.decoder, weights, source="load_weights")

        return self._change(load)

    def publish(self, *, advance: bool = True, kv_policy: KVPolicy = KVPolicy.KEEP) -> WeightUpdate:
        """The current weights with the next version number (`advance=False`: the current one).

        Buckets are detached copies. Each is made when it is requested, or before the weights
        change.

        Raises:
            TrainingError: an update of the weights is running; await it first.
        """
        with self._lock:
            if self._pending_changes:
                raise TrainingError(
                    "publish() while optim_step() or load_weights() is running would send a "
                    "mixture of two versions; await it first"
                )
            self._weight_version += int(advance)
            snapshot = WeightSnapshot(policy_weights(self.decoder))
            self._snapshots.add(snapshot)
            return WeightUpdate(version=self._weight_version, buckets=snapshot, kv_policy=kv_policy)

    def state_dict(self) -> StateTree:
        """Optimizer state, counts and LoRA adapter, after all submitted work. Blocks, so do not
        call it on an event loop.

        Raises:
            TrainingError: there are gradients, which are not part of the state.
        """
        return self._compute.run(self._state_dict)

    def load_state_dict(self, state: StateTree) -> None:
        """Restore `state_dict()`. Blocks, so do not call it on an event loop.

        Raises:
            CheckpointError: the state belongs to another optimizer, model, adapter or version of
                Slipstream.
        """
        self._compute.run(lambda: self._load_state_dict(state))

    def load_training_state(self, file: Path) -> bool:
        """Restore `state_dict()` from a file of `checkpoint.tree`. Returns True if it contains the
        trained weights, those of a LoRA adapter. Blocks, so do not call it on an event loop.

        Raises:
            CheckpointError: the file cannot be read, or as in `load_state_dict`.
        """
        state = load_tree(file)
        self.load_state_dict(state)
        return "lora" in state

    def save_policy(
        self, folder: Path, save_tokenizer: Callable[[str], object] | None = None
    ) -> None:
        """Write the weights in fp32 as a Hugging Face folder, merged with a LoRA adapter. Blocks,
        so do not call it on an event loop."""
        self._compute.run(lambda: save_policy(self.decoder, folder, save_tokenizer=save_tokenizer))

    def load_policy(self, folder: Path) -> None:
        """Replace all weights by those of a Hugging Face folder. The optimizer keeps its state.
        Blocks, so do not call it on an event loop.

        Raises:
            CheckpointError: the folder is missing or corrupt, belongs to another model, or has
                weights that are NaN or infinite.
        """

        def load() -> None:
            self._freeze_snapshots()
            load_weights_from(self.decoder, folder)
            check_finite(self.decoder.named_parameters())

        self._compute.run(load)

    def save_adapter(self, folder: Path, base_model: Path | None = None) -> None:
        """Write the LoRA adapter as a folder for peft, with `base_model` as its base. Does nothing
        if all weights are trained. Blocks, so do not call it on an event loop."""
        base, decoder = None if base_model is None else str(base_model.absolute()), self.decoder
        if self._lora and isinstance(decoder, Decoder):
            self._compute.run(lambda: save_adapter(decoder, folder, base_model=base))

    def close(self) -> None:
        """Wait for submitted work and end the thread, if it is the backend's own."""
        if self._owns_compute:
            self._compute.close()

    def _change(self, work: Callable[[], T]) -> TrainFuture[T]:
        """Submit work that changes the weights, and count it as pending until it is done."""

        def counted() -> T:
            try:
                return work()
            finally:
                with self._lock:
                    self._pending_changes -= 1

        with self._lock:
            self._pending_changes += 1
        return self._compute.submit(counted)

    def _freeze_snapshots(self) -> None:
        for snapshot in list(self._snapshots):
            snapshot.freeze()
        self._snapshots.clear()

    def _check(self, batch: TrainBatch) -> None:
        c = self.decoder.config
        check_batch(batch, vocab_size=c.vocab_size, limit=c.context_limit)

    def _forward_backward(
        self, batch: TrainBatch, loss: LossFn, sink: FeatureSink | None
    ) -> dict[str, float]:
        self._check(batch)
        selected = sink.select(batch) if sink is not None else set()
        normalizers = batch_normalizers(batch)
        metrics = MetricSums()
        self._guarded.has_gradients = True
        try:
            for result in self._forward(batch, selected, sink):
                if result.micro.filler:
                    (result.log_probs.sum() * 0).backward()  # type: ignore[no-untyped-call]
                    continue
                inputs = loss_inputs(batch, result, normalizers)
                outputs = loss(inputs)
                metrics.add(outputs.sums, outputs.maxima)
                if inputs.rollout_log_probs is not None:
                    difference = rollout_difference(inputs)
                    metrics.add(difference.sums, difference.maxima)
                if not math.isfinite(outputs.loss.item()):
                    self._guarded.finite = False
                    if self._may_end_early:
                        break
                if sink is not None:
                    hand_over(
                        sink,
                        batch,
                        result,
                        selected=selected,
                        optimizer_step=self._guarded.optimizer_steps,
                    )
                outputs.loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._guarded.forget_gradients()
            raise
        return self._of_all(metrics).values()

    def _of_all(self, metrics: MetricSums) -> MetricSums:
        """The metrics of all processes. Overridden for several processes."""
        return metrics

    def _all_rows(self, batch: TrainBatch, out: list[T]) -> list[T]:
        """`out`, one entry per row of `batch`, completed with the rows of other processes.
        Overridden for several processes."""
        return out

    def _all_tokens(self, batch: TrainBatch, out: Tensor) -> Tensor:
        """`out` (T,), with the values of all rows of `batch`."""
        return out

    def _forward(
        self, batch: TrainBatch, selected: set[int], sink: FeatureSink | None
    ) -> Iterator[ForwardResult]:
        if sink is not None and isinstance(self.decoder, HFPolicy):
            raise TrainingError(
                f"this {self.decoder.config.family} is computed by transformers' class, which "
                "returns no hidden states for a feature sink; train without a sink"
            )
        aux_layers = sink.aux_layers if sink is not None else ()
        packed = None
        full_kl = None
        if self._full_kl is not None and torch.is_grad_enabled():
            full_kl = FullKL(reference=self._packed_reference(), direction=self._full_kl)
        for micro in self._micro_batches(batch, selected):
            # With gradients, each micro-batch needs its own graph down to the parameters.
            if packed is None or torch.is_grad_enabled():
                packed = pack(self.decoder, self._dtype)
            yield forward(
                packed,
                micro,
                temperature=batch.temperature,
                settings=self._settings,
                aux_layers=aux_layers if selected.intersection(micro.indices) else (),
                full_kl=full_kl,
                kept=kept_ids(batch, micro),
            )
            # The backward pass is done. Without this, each micro-batch adds gaps to the heap.
            self._freed_of_micro_batches.give_back()

    def _micro_batches(self, batch: TrainBatch, also: set[int]) -> Iterator[MicroBatch]:
        c, padded = self.decoder.config, needs_padding(self.decoder, self._dtype)
        return micro_batches(
            batch,
            also=also,
            settings=self._settings,
            pad_id=c.pad_token_id or 0,
            max_positions=c.context_limit.tokens,
            device=self.decoder.device,
            padded=padded,
            share_prompts=self._share_prompts and not padded and torch.is_grad_enabled(),
        )

    def _packed_reference(self) -> PackedPolicy:
        if self._reference is None:
            raise TrainingError(
                "the KL over the full vocabulary has no reference; call use_full_kl() first"
            )
        (reference,) = self._reference
        with torch.no_grad():
            if reference is not None:
                return pack(reference, self._dtype)
            with base_weights_only(self.decoder):
                return pack(self.decoder, self._dtype)

    def _compute_full_kl(self, batch: TrainBatch, direction: KLDirection) -> Tensor:
        self._check(batch)
        full_kl = FullKL(reference=self._packed_reference(), direction=direction)
        with torch.no_grad():
            packed = pack(self.decoder, self._dtype)
            return self._by_tokens(
                batch,
                lambda micro: whole_kl(
                    packed,
                    micro,
                    full_kl,
                    temperature=batch.temperature,
                    settings=self._settings,
                ),
            )

    def _compute_kept_ids(self, batch: TrainBatch, cuts: SamplingParams) -> list[list[array[int]]]:
        self._check(batch)
        out = [[array("i") for _ in range(length)] for length in batch.lengths]
        with torch.no_grad():
            packed = pack(self.decoder, self._dtype)
            for micro in self._micro_batches(batch, set()):
                kept = kept_of_sampler(
                    packed,
                    micro,
                    temperature=batch.temperature,
                    cuts=cuts,
                    settings=self._settings,
                )
                width = micro.mask.shape[1]
                for slot, ids in zip(micro.target_slots.tolist(), kept, strict=True):
                    out[micro.indices[slot // width]][slot % width] = ids
        return self._all_rows(batch, out)

    def _compute_sum_pi_squared(self, batch: TrainBatch) -> Tensor:
        self._check(batch)
        with torch.no_grad():
            packed = pack(self.decoder, self._dtype)
            return self._by_tokens(
                batch,
                lambda micro: sum_pi_squared(
                    packed, micro, temperature=batch.temperature, settings=self._settings
                ),
            )

    def _by_tokens(self, batch: TrainBatch, compute: Callable[[MicroBatch], Tensor]) -> Tensor:
        """(T,): what `compute` returns for each micro-batch (its rows, T)."""
        out = torch.zeros(batch.num_tokens)
        for micro in self._micro_batches(batch, set()):
            fill_rows(out, batch, micro, compute(micro))
        return self._all_tokens(batch, out)

    def _compute_log_probs(self, batch: TrainBatch, sink: FeatureSink | None) -> Tensor:
        self._check(batch)
        selected = sink.select(batch) if sink is not None else set()
        out = torch.zeros(batch.num_tokens)
        with torch.no_grad():
            for result in self._forward(batch, selected, sink):
                fill_rows(out, batch, result.micro, result.micro.scatter(result.log_probs))
                if sink is not None and not result.micro.filler:
                    hand_over(
                        sink,
                        batch,
                        result,
                        selected=selected,
                        optimizer_step=self._guarded.optimizer_steps,
                    )
        return self._all_tokens(batch, out)

    def _optim_step(self, schedule_step: int | None) -> dict[str, float]:
        metrics = self._guarded.step(self._freeze_snapshots, schedule_step=schedule_step)
        if self._freed_of_steps is not None:
            self._freed_of_steps.give_back()
        metrics["training/skipped_steps"] = float(self._guarded.skipped_steps)
        return metrics

    def _state_dict(self) -> StateTree:
        state = self._guarded.state_dict()
        state["counts"][WEIGHT_VERSION] = self._weight_version
        if self._lora:
            state["lora"] = adapter_state(self.decoder, self._base())
        return state

    def _base(self) -> str:
        """The digest of the base weights, computed once, because they never change."""
        if self._base_digest is None:
            self._base_digest = base_digest(self.decoder)
        return self._base_digest

    def _load_state_dict(self, state: StateTree) -> None:
        # `GuardedOptimizer` checks the other entries.
        version = Saved(state).field("counts").field(WEIGHT_VERSION).count()
        lora = state.get("lora")
        check_adapter_state(self.decoder, lora, self._base() if self._lora else "")
        self._guarded.load_state_dict(state)
        if lora is not None:
            self._freeze_snapshots()
            load_adapter_state(self.decoder, lora)
        self._weight_version = version
