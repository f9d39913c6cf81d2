"""Shard a decoder's parameters over processes with PyTorch's FSDP2 (`fully_shard`).

Each process keeps a slice of every parameter. FSDP2 gathers a layer's weights just before the layer
runs, forward and backward, and frees them afterwards. Embedding, last norm and LM head stay
gathered for the whole pass. Gradients are reduced to slices.

All calls here are collective: every process of the mesh makes the same calls in the same order.
Slices are torch's `DTensor`s. The rest of `models` and `training` handles them only through `full`,
`slice_like` and `assign`. This module knows no optimizers and no batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slipstream.models.linear import PackedLinear

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from slipstream.models.decoder import Decoder, HiddenStates


def shard(decoder: Decoder, mesh: DeviceMesh) -> Decoder:
    """Shard the parameters of `decoder` over the one-dimensional `mesh`; return the decoder.

    Every process must pass the same parameters. Gradients are summed over the processes, not
    averaged, because losses are normalized by counts of the whole batch.
    """
    # Imported here, because the import takes a second and a run in one process does not need it.
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for layer in decoder.model.layers:
        fully_shard(layer, mesh=mesh)
    # Embedding, norm and head stay gathered, because the backward pass needs them first.
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Only NCCL applies the divide factor; other backends need a plain sum.
            module.set_force_sum_reduction_for_comms(True)
    return decoder


def is_sharded(module: object) -> bool:
    """Return whether `shard` was applied to the module."""
    return hasattr(module, "reshard")


def free_gathered(module: object) -> None:
    """Free the weights that a pass has gathered, if any. An update would make them stale."""
    if is_sharded(module):
        cast(Any, module).reshard()


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all processes if it is sharded (collective)."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast(Tensor, gather())


def whole_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the whole tensor, in host memory if it is sharded, to save GPU memory."""
    return full(tensor).cpu() if hasattr(tensor, "full_tensor") else tensor.clone()


def slice_like(value: Tensor, spread: Tensor) -> Tensor:
    """Return this process's slice of `value`, sharded as `spread` is.

    Every process must pass the same `value`. If `spread` is not sharded, the result is `value`.
    """
    if not hasattr(spread, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    spread = cast(DTensor, spread)
    value = value.to(spread.device)
    return distribute_tensor(value, spread.device_mesh, spread.placements, src_data_rank=None)


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy `value`, the same on every process, into `parameter`, sharded or not."""
    parameter.copy_(slice_like(value, parameter))


@dataclass(frozen=True, slots=True)
class ShardedDecoder:
    """The compute form of a sharded decoder, as `PackedDecoder` is of a whole one.

    It packs each layer's weights when they are gathered.
    """

    decoder: Decoder
    compute_dtype: torch.dtype
    base_only: bool = False
    """Whether to compute without the LoRA adapter."""

    @property
    def head(self) -> tuple[Tensor, PackedLinear]:
        """As `PackedDecoder.head`. Valid after `forward`, until `free_gathered` is called."""
        with self._weights():
            weight = self.decoder.lm_head_weight.to(self.compute_dtype)
        return weight, PackedLinear.of(weight)

    def _weights(self) -> AbstractContextManager[None]:
        from slipstream.models.lora import base_weights_only

        return base_weights_only(self.decoder) if self.base_only else nullcontext()

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        lengths: Sequence[int] | None = None,
        aux_layers: Sequence[int] = (),
        recompute: bool = False,
    ) -> HiddenStates:
        """Return what `PackedDecoder.forward` returns, bit for bit. Collective."""
        from slipstream.models.decoder import HiddenStates

        with self._weights():
            final, aux_inputs = self.decoder(
                self.compute_dtype,
                ids_BT,
                positions_BT,
                lengths=lengths,
                aux_layers=tuple(aux_layers),
                recompute=recompute,
            )
        # Reshaped here, because FSDP2 attaches its hooks to the tensors that the module returns.
        return HiddenStates(final, aux_inputs).in_sequences(len(ids_BT))
