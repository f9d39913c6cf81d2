"""Factory functions for training backends and their parts, for scripts and notebooks.

`create_pytorch_backend` makes a backend in one call. The other functions make its parts: model,
optimizer, schedule and loss. The command line makes the same classes from its configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.errors import ConfigError
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.models.numerics import dtype_from_name
from slipstream.training.losses import LossFn, sft_loss
from slipstream.training.optim import (
    LearningRateFactor,
    OptimSettings,
    PolicyOptimizer,
)
from slipstream.training.single import SingleProcessBackend

if TYPE_CHECKING:
    from slipstream.training.compute_thread import ComputeThread


def load_hf_model(folder: str | Path, *, device: torch.device | str = "cpu") -> Decoder:
    """Load a `Decoder` with fp32 parameters from a Hugging Face folder.

    Raises:
        CheckpointError: the folder is missing or corrupt, or its architecture is not supported.
    """
    return load_checkpoint(Path(folder), device=torch.device(device))


def create_adamw_optimizer(
    model: Decoder,
    *,
    lr: float = 1e-6,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    scheduler: LearningRateFactor | None = None,
) -> PolicyOptimizer:
    """AdamW over all parameters of `model`, without weight decay for norms and biases.

    `scheduler` maps the number of an update to a factor of `lr`; None keeps `lr` constant.
    """
    settings = OptimSettings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    return PolicyOptimizer(model.named_parameters(), settings, schedule=scheduler)


def create_warmup_cosine_scheduler(
    *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0
) -> LearningRateFactor:
    """A schedule with linear warm-up and cosine decay to `min_lr_ratio` at `total_steps`
    (`lr_factor`)."""
    return OptimSettings(
        lr=1.0,
        schedule="cosine",
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        min_lr_ratio=min_lr_ratio,
    ).factor


def create_cross_entropy_loss() -> LossFn:
    """Cross-entropy, averaged over target tokens, with metrics under `sft/`."""
    return sft_loss()


def create_pytorch_backend(
    model: Decoder | str | Path,
    *,
    optimizer: OptimSettings | PolicyOptimizer | None = None,
    lr: float = 1e-6,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    max_tokens_per_micro_batch: int = 16384,
    grad_clip: float | None = 1.0,
    gradient_checkpointing: bool = False,
    loss: LossFn | None = None,
    lora: LoraConfig | None = None,
    compute: ComputeThread | None = None,
) -> SingleProcessBackend:
    """Make a backend in one call, for example `create_pytorch_backend("Qwen/folder", lr=1e-5)`.

    `model` is a Hugging Face folder or a `Decoder`. `optimizer` None is AdamW at `lr`. `loss` is
    the default loss of `forward_backward`; None is cross-entropy. `dtype` is `auto`, `bfloat16` or
    `float32`; `auto` is bf16 if the hardware has bf16 matrix products. With `lora` the model is
    frozen, and an adapter with this configuration is added and trained.
    """
    device = torch.device(device)
    if not isinstance(model, Decoder):
        model = load_hf_model(model, device=device)
    if lora is not None:
        if isinstance(optimizer, PolicyOptimizer):
            raise ConfigError(
                "create_pytorch_backend(lora=...) adds parameters that the given optimizer does "
                "not know; pass OptimSettings, or call add_lora before making the optimizer"
            )
        add_lora(model, lora)
    return SingleProcessBackend(
        model,
        optim=optimizer or OptimSettings(lr=lr),
        dtype=dtype_from_name(dtype, device),
        device=device,
        max_tokens_per_micro_batch=max_tokens_per_micro_batch,
        grad_clip=grad_clip,
        gradient_checkpointing=gradient_checkpointing,
        loss=loss,
        compute=compute,
    )
