"""A decoder whose parameters are spread over processes by PyTorch's FSDP2 (`fully_shard`).

Each process keeps a slice of every parameter. A layer's weights are gathered when its turn comes,
forward and backward, and given up again; embedding, last norm and LM head stay for the pass. Sums
of gradients come back as slices. Everything here is collective: all processes of the mesh make the
same calls in the same order. Slices are torch's `DTensor`s, which the rest of `models` and
`training` meets only through `full`, `slice_like` and `assign`. Knows no optimizers and no batches.
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
    """Spread the parameters of `decoder`, which every process has alike, over `mesh` (one
    dimension); returns it. Gradients are summed over the processes, not averaged: losses are
    normalised by counts of the whole batch."""
    # Imported here: it takes a second, and one process needs none of it.
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for layer in decoder.model.layers:
        fully_shard(layer, mesh=mesh)
    # What is gathered stays for the backward pass, in which it is needed at once.
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Factors are multiplied in by NCCL alone.
            module.set_force_sum_reduction_for_comms(True)
    return decoder


def is_sharded(module: object) -> bool:
    """Whether `shard` has been here."""
    return hasattr(module, "reshard")


def give_up(module: object) -> None:
    """Give up the weights that a pass has gathered, if any: they are none of the next update."""
    if is_sharded(module):
        cast(Any, module).reshard()


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over processes; collective where it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast(Tensor, gather())


def whole_copy(tensor: Tensor) -> Tensor:
    """A copy of the whole; of one that is spread in the host's memory, where there is room."""
    return full(tensor).cpu() if hasattr(tensor, "full_tensor") else tensor.clone()


def slice_like(value: Tensor, spread: Tensor) -> Tensor:
    """This process's part of `value`, which every process has alike, spread as `spread` is."""
    if not hasattr(spread, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    spread = cast(DTensor, spread)
    value = value.to(spread.device)
    return distribute_tensor(value, spread.device_mesh, spread.placements, src_data_rank=None)


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy `value`, which every process has alike, into `parameter`, spread or not."""
    parameter.copy_(slice_like(value, parameter))


@dataclass(frozen=True, slots=True)
class ShardedDecoder:
    """What `Decoder.pack` is for a whole decoder: weights are packed as they are gathered."""

    decoder: Decoder
    compute_dtype: torch.dtype
    base_only: bool = False
    """Whether a LoRA adapter was off when this was made, as it then is whenever it computes."""

    @property
    def head(self) -> tuple[Tensor, PackedLinear]:
        """As `PackedDecoder.head`; after `forward`, before the weights are given up."""
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
        """As `PackedDecoder.forward`, to the bit; collective."""
        from slipstream.models.decoder import HiddenStates

        with self._weights():
            final, tapped = self.decoder(
                self.compute_dtype,
                ids_BT,
                positions_BT,
                lengths=lengths,
                aux_layers=tuple(aux_layers),
                recompute=recompute,
            )
        # Not viewed as sequences in there: FSDP2 hangs its hooks on what comes out.
        return HiddenStates(final, tapped).in_sequences(len(ids_BT))
