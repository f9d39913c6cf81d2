"""LoRA: low-rank updates of frozen matrices (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    W' = W + alpha / r * B A        W (out, in) frozen, A (r, in) and B (out, r) trained

`LoraLinear` replaces linear layers of a `Decoder`. Its `weight` is the merged W', differentiable in
A and B. So packing, kernels and forward pass are the same as without an adapter. Engines receive W'
too, so rollout and trainer multiply by the same bits. This module knows nothing about files
(`lora_io`) or optimizers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, did_you_mean
from slipstream.models.decoder import Decoder
from slipstream.models.digest import weights_digest
from slipstream.models.sharded import full

ALL_LINEAR = "all-linear"
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Rank r, alpha and the target layers; names as in VERL and peft.

    A target is a layer name (`q_proj`) or the end of a dotted name (`0.self_attn.q_proj`).
    `all-linear` stands for every linear layer except the LM head. Layers that match
    `exclude_modules` get no adapter.

    Raises:
        ConfigError: the rank is below 1, alpha is not positive, or there are no targets.
    """

    rank: int
    alpha: float = 16.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    exclude_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora_rank={self.rank} must be at least 1; 8 to 64 are usual")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora_alpha={self.alpha:g} must be a finite number > 0; 16 is usual")
        if not self.target_modules:
            raise ConfigError(
                f"target_modules is empty; set it to {ALL_LINEAR} for every linear layer"
            )

    @property
    def scale(self) -> float:
        """alpha / r, the factor on B A."""
        return self.alpha / self.rank


class LoraLinear(nn.Module):
    """A linear layer with an adapter. It freezes the given layer's weights.

    B starts at zero, so W' starts as W.
    """

    def __init__(self, linear: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        outs, ins = linear.weight.shape
        self.base_weight = linear.weight.requires_grad_(False)
        self.bias = None if linear.bias is None else linear.bias.requires_grad_(False)
        self.lora_A = nn.Parameter(linear.weight.new_zeros(config.rank, ins))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(outs, config.rank))
        self.config = config
        self.enabled = True

    @property
    def weight(self) -> Tensor:
        """W' (out, in), or W while the adapter is off. Differentiable in A and B."""
        return self.merged() if self.enabled else self.base_weight

    def merged(self) -> Tensor:
        """Return W', whether the adapter is on or off."""
        # Not `addmm`: for some shapes its last bits depend on the number of threads.
        return self.base_weight + self.config.scale * (self.lora_B @ self.lora_A)


def add_lora(decoder: Decoder, config: LoraConfig, *, seed: int = 0) -> Decoder:
    """Freeze `decoder` and add the adapter of `config`. Return the decoder.

    A is drawn as in peft: uniform with bound 1 / sqrt(in) (Kaiming with a = sqrt(5)). It depends on
    `seed` alone.

    Raises:
        ConfigError: a name matches no linear layer, no target is left, or the decoder already has
            an adapter.
    """
    if lora_layers(decoder):
        raise ConfigError("this model has a LoRA adapter already; merge it before adding another")
    names = target_names(decoder, config)
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        linear = decoder.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        lora = LoraLinear(linear, config)
        drawn = torch.empty(lora.lora_A.shape)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        with torch.no_grad():
            lora.lora_A.copy_(drawn)
        parent, _, own = name.rpartition(".")
        setattr(decoder.get_submodule(parent), own, lora)
    return decoder


def target_names(decoder: Decoder, config: LoraConfig) -> list[str]:
    """Return the dotted names of the target layers of `config`, in the decoder's order.

    Raises ConfigError as `add_lora` does.
    """
    linear = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    targets = _matching("target_modules", config.target_modules, linear)
    excluded = _matching("exclude_modules", config.exclude_modules, linear)
    names = [name for name in linear if name in targets and name not in excluded]
    if not names:
        raise ConfigError(
            f"exclude_modules={list(config.exclude_modules)} leaves none of target_modules="
            f"{list(config.target_modules)}; remove names from exclude_modules"
        )
    return names


def _matching(key: str, targets: tuple[str, ...], linear: list[str]) -> set[str]:
    """Return the layers that match any of the targets. `key` names the setting in errors."""
    found: set[str] = set()
    for target in targets:
        if target == ALL_LINEAR:
            found.update(name for name in linear if name != _HEAD)
            continue
        matches = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not matches:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"{key}={target} matches no linear layer of this model"
                f"{did_you_mean(target, known)} (it has {', '.join(known)}; {ALL_LINEAR} matches "
                f"all but {_HEAD})"
            )
        found.update(matches)
    return found


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter by their dotted names; empty without an adapter."""
    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLinear)}


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor | LoraLinear]]:
    """Yield all weights under their Hugging Face names, in the order of a module without adapter.

    For a layer with an adapter it yields the layer itself instead of its merged weight, because the
    merged weight needs memory once it is computed. `value_of` computes it.
    """
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(part, LoraLinear):
            yield f"{dot}weight", part
            if part.bias is not None:
                yield f"{dot}bias", part.bias
        else:
            for name, parameter in part.named_parameters(recurse=False):
                yield f"{dot}{name}", parameter


@torch.no_grad()
def value_of(weight: Tensor | LoraLinear) -> Tensor:
    """Return the values of an entry of `named_weights`, without gradients.

    A plain tensor is returned without a copy. A sharded tensor is gathered (collective).
    """
    return full(weight.merged() if isinstance(weight, LoraLinear) else weight.detach())


def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the values of all weights by name, merged with the adapter if there is one."""
    return {name: value_of(weight) for name, weight in named_weights(module)}


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the merged weights of `source` into `target`, which has no adapter."""
    own = dict(target.named_parameters())
    for name, weight in named_weights(source):
        own[name].copy_(value_of(weight))


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return A and B of all layers, detached, under their parameter names."""
    return {
        f"{name}.{part}": full(getattr(layer, part).detach())
        for name, layer in lora_layers(module).items()
        for part in ("lora_A", "lora_B")
    }


@contextlib.contextmanager
def base_weights_only(module: nn.Module) -> Iterator[None]:
    """Compute with W alone, without the adapter, in the body. Not thread-safe."""
    layers = lora_layers(module).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def base_digest(module: nn.Module) -> str:
    """Return a fingerprint of all weights that the adapter does not train."""
    return weights_digest(module, without=adapter_tensors(module))
