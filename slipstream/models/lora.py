"""LoRA: low-rank updates of frozen matrices (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    W' = W + alpha / r * B A        W (out, in) frozen, A (r, in) and B (out, r) trained

Layers of a `Decoder` are replaced by `LoraLinear`, whose `weight` is the merged W', differentiable
in A and B. So packing, kernels and forward pass are those of any decoder, and what is published to
engines is W' too: rollout and trainer multiply by the same bits. Knows nothing about files
(`lora_io`) or optimizers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, did_you_mean
from slipstream.models.decoder import Decoder
from slipstream.models.sharded import full

ALL_LINEAR = "all-linear"
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Rank r and alpha, and which matrices they are of; names as in VERL and peft.

    A target is a name (`q_proj`), or the end of a dotted one (`0.self_attn.q_proj`); `all-linear`
    is every linear layer but the LM head. `exclude_modules` are taken out again.

    Raises:
        ConfigError: a rank below 1, an alpha that is not positive, no targets.
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
            raise ConfigError(f"target_modules is empty; {ALL_LINEAR} takes every linear layer")

    @property
    def scale(self) -> float:
        """alpha / r, what B A is multiplied with."""
        return self.alpha / self.rank


class LoraLinear(nn.Module):
    """In the place of a linear layer that it takes over, frozen. B starts at zero, so W' at W."""

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
        """(out, in): W', or W while the adapter is off. Differentiable in A and B."""
        return self.merged() if self.enabled else self.base_weight

    def merged(self) -> Tensor:
        """W', whether the adapter is on or off."""
        # Not by `addmm`, whose last bits depend, for some shapes, on the number of threads.
        return self.base_weight + self.config.scale * (self.lora_B @ self.lora_A)


def add_lora(decoder: Decoder, config: LoraConfig, *, seed: int = 0) -> Decoder:
    """Freeze `decoder` and give it the adapter of `config`; returns it.

    A is drawn as in peft, uniform with bound 1 / sqrt(in) (Kaiming with a = sqrt(5)), as a function
    of `seed` alone.

    Raises:
        ConfigError: a name matches no linear layer, none is left, or there is an adapter already.
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
    """Dotted names of the linear layers that `config` is of, in the decoder's order. Raises as
    `add_lora` does."""
    linear = [name for name, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    targets = _matching("target_modules", config.target_modules, linear)
    excluded = _matching("exclude_modules", config.exclude_modules, linear)
    names = [name for name in linear if name in targets and name not in excluded]
    if not names:
        raise ConfigError(
            f"exclude_modules={list(config.exclude_modules)} leaves none of target_modules="
            f"{list(config.target_modules)}; take names out of it"
        )
    return names


def _matching(key: str, wanted: tuple[str, ...], linear: list[str]) -> set[str]:
    found: set[str] = set()
    for target in wanted:
        if target == ALL_LINEAR:
            found.update(name for name in linear if name != _HEAD)
            continue
        matches = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not matches:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"{key}={target} matches no linear layer of this model"
                f"{did_you_mean(target, known)} (it has {', '.join(known)}; {ALL_LINEAR} takes all "
                f"but {_HEAD})"
            )
        found.update(matches)
    return found


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter by their dotted names; empty where all weights are trained."""
    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLinear)}


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor | LoraLinear]]:
    """All weights under their Hugging Face names, in the order of a module without adapter.

    Where there is an adapter the layer itself stands for its merged weight, which takes memory as
    soon as it is computed: see `value_of`.
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
    """The values of one of `named_weights`, without gradients. Not a copy where it is a tensor of
    this process; one that is spread over several is gathered (collective)."""
    return full(weight.merged() if isinstance(weight, LoraLinear) else weight.detach())


def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """`named_weights` with their values."""
    return {name: value_of(weight) for name, weight in named_weights(module)}


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give `target`, without adapter, the weights of `source`, merged."""
    own = dict(target.named_parameters())
    for name, weight in named_weights(source):
        own[name].copy_(value_of(weight))


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A and B of all layers, detached, under the names of their parameters."""
    return {
        f"{name}.{part}": full(getattr(layer, part).detach())
        for name, layer in lora_layers(module).items()
        for part in ("lora_A", "lora_B")
    }


@contextlib.contextmanager
def base_weights_only(module: nn.Module) -> Iterator[None]:
    """The module computes with W alone in the body. Not for several threads at once."""
    layers = lora_layers(module).values()
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def base_digest(module: nn.Module) -> str:
    """A fingerprint of everything that an adapter leaves as it is."""
    digest = hashlib.blake2b(digest_size=16)
    trained = adapter_tensors(module).keys()
    for name, parameter in module.named_parameters():
        if name not in trained:
            digest.update(name.encode())
            digest.update(full(parameter.detach()).cpu().contiguous().numpy().data)
    return digest.hexdigest()
