"""The training state of a LoRA adapter, and the base weights as the reference policy.

The backends call this module. `models.lora` has the computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checkpoint.saved import Saved
from slipstream.errors import CheckpointError
from slipstream.models.lora import adapter_tensors, lora_layers
from slipstream.models.sharded import assign
from slipstream.training.protocol import TrainFuture, TrainingBackend
from slipstream.types import FeatureSink, TrainBatch


class BaseWeights:
    """The policy without its adapter, as the reference of KL terms. It needs no second copy of the
    model."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """Like `TrainingBackend.compute_log_probs`, with the base weights."""
        return self._backend.compute_base_log_probs(batch, sink=sink)


def adapter_state(module: nn.Module, base: str) -> dict[str, Any]:
    """Copies of the adapter's tensors A and B, with rank, alpha and `base`, the digest of the base
    weights (`base_digest`)."""
    config = next(iter(lora_layers(module).values())).config
    return {
        "rank": config.rank,
        "alpha": config.alpha,
        "base": base,
        "tensors": {name: tensor.clone() for name, tensor in adapter_tensors(module).items()},
    }


def check_adapter_state(module: nn.Module, state: dict[str, Any] | None, base: str) -> None:
    """Check that a state belongs to this module's adapter and base weights.

    `state` is None if the checkpoint comes from a run that trained all weights. `base` is the
    digest of this run's base weights.

    Raises:
        CheckpointError: the state does not fit; the message names the difference.
    """
    own = adapter_tensors(module)
    if state is None and not own:
        return
    if state is None:
        raise CheckpointError(
            "the checkpoint's run trained all weights, but this run trains a LoRA adapter; resume "
            "with actor_rollout_ref.model.lora_rank=0, or start a new run from its weights"
        )
    saved = Saved(state, "lora").fields("rank", "alpha", "base", "tensors")
    rank, alpha = saved["rank"].count(), saved["alpha"].number()
    if not own:
        raise CheckpointError(
            f"the checkpoint's run trained a LoRA adapter of rank {rank}, but this run "
            "trains all weights; resume with the same actor_rollout_ref.model.lora_rank, or start "
            "a new run from its merged weights"
        )
    config = next(iter(lora_layers(module).values())).config
    for name, theirs, ours in (
        ("lora_rank", rank, config.rank),
        ("lora_alpha", alpha, config.alpha),
    ):
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint has actor_rollout_ref.model.{name}={theirs:g}, but this run has "
                f"{ours:g}; resume with actor_rollout_ref.model.{name}={theirs:g}"
            )
    tensors = dict(saved["tensors"].items())
    if odd := sorted(tensors.keys() ^ own.keys()):
        raise CheckpointError(
            f"the checkpoint's LoRA adapter and this run's disagree about {odd[0]}; resume with "
            "the same actor_rollout_ref.model.target_modules and exclude_modules"
        )
    for name, tensor in tensors.items():
        tensor.tensor(own[name])
    if saved["base"].text() != base:
        raise CheckpointError(
            "the checkpoint's LoRA adapter was trained on other base weights than this run's; "
            "resume with the same actor_rollout_ref.model.path (after SFT: with its checkpoint in "
            "the run folder), or start a new run from the merged weights"
        )


@torch.no_grad()
def load_adapter_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Load an `adapter_state` that passed `check_adapter_state`."""
    parameters = dict(module.named_parameters())
    for name, tensor in state["tensors"].items():
        assign(parameters[name], tensor)
