"""What training keeps of a LoRA adapter, and the reference policy under one.

Knows the adapter's tensors and their place in a training state; the mathematics is `models.lora`.
Called by the backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.lora import adapter_tensors, lora_layers
from slipstream.models.sharded import assign
from slipstream.training.protocol import TrainFuture, TrainingBackend
from slipstream.types import FeatureSink, TrainBatch


class BaseWeights:
    """The policy without its adapter, as the reference of KL terms: no second copy of the model."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend

    def compute_log_probs(
        self, batch: TrainBatch, *, sink: FeatureSink | None = None
    ) -> TrainFuture[Tensor]:
        """`TrainingBackend.compute_log_probs` under the base weights."""
        return self._backend.compute_base_log_probs(batch, sink=sink)


def adapter_state(module: nn.Module, base: str) -> dict[str, Any]:
    """Copies of A and B, and what they are an adapter of; `base` is its `base_digest`."""
    config = next(iter(lora_layers(module).values())).config
    return {
        "rank": config.rank,
        "alpha": config.alpha,
        "base": base,
        "tensors": {name: tensor.clone() for name, tensor in adapter_tensors(module).items()},
    }


def check_adapter_state(module: nn.Module, state: dict[str, Any] | None, base: str) -> None:
    """Refuse a state that is not of this module's adapter on these base weights; `state` is None
    where the checkpoint has all weights trained.

    Raises:
        CheckpointError: it names what differs.
    """
    own = adapter_tensors(module)
    if state is None and not own:
        return
    if state is None:
        raise CheckpointError(
            "the checkpoint was made with all weights trained and this run trains a LoRA adapter; "
            "resume with actor_rollout_ref.model.lora_rank=0, or start a new run from its weights"
        )
    if not own:
        raise CheckpointError(
            f"the checkpoint was made with a LoRA adapter of rank {state['rank']} and this run "
            "trains all weights; resume with the same actor_rollout_ref.model.lora_rank, or start "
            "a new run from its merged weights"
        )
    config = next(iter(lora_layers(module).values())).config
    for name, theirs, ours in (
        ("lora_rank", state["rank"], config.rank),
        ("lora_alpha", state["alpha"], config.alpha),
    ):
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint was made with actor_rollout_ref.model.{name}={theirs:g} and this "
                f"run has {ours:g}; resume with the same"
            )
    tensors: dict[str, Tensor] = state["tensors"]
    if odd := sorted(tensors.keys() ^ own.keys()):
        raise CheckpointError(
            f"the checkpoint's LoRA adapter and this run's disagree about {odd[0]}; resume with "
            "the same actor_rollout_ref.model.target_modules and exclude_modules"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint and "
                f"{tuple(own[name].shape)} here; it is of another model"
            )
    if state["base"] != base:
        raise CheckpointError(
            "the checkpoint's LoRA adapter was trained on other base weights than this run has; "
            "resume with the same actor_rollout_ref.model.path (after SFT: with its checkpoint in "
            "the run folder), or start a new run from the merged weights"
        )


@torch.no_grad()
def load_adapter_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Go on from an `adapter_state` that `check_adapter_state` has let pass."""
    parameters = dict(module.named_parameters())
    for name, tensor in state["tensors"].items():
        assign(parameters[name], tensor)
