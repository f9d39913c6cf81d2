"""Transports of new weights to servers.

file            weights.py     one safetensors file in memory-backed storage
shared_memory   staged.py      memory that run and servers map, written in place
collective      collective.py  broadcasts of a process group per server
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from slipstream.errors import EngineError
from slipstream.inference.servers.protocol import Server
from slipstream.types import WeightUpdate

KEY = "actor_rollout_ref.rollout.server.transport"
"""The option that selects a transport."""

BUCKET_BYTES = 512 << 20
"""Largest bucket of tensors, unless one tensor is larger."""


class WeightTransfer(Protocol):
    """Brings weights into servers. An update is prepared once, and then delivered to each server,
    to several of them at the same time."""

    @property
    def path(self) -> Path:
        """The model folder from which servers start."""
        ...

    @property
    def file(self) -> Path:
        """The weights in the model folder."""
        ...

    def prepare(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """Check the tensors of an update, and make them ready for `deliver`.

        Returns them as the servers get them, on the CPU. The next call may overwrite them. Raises
        EngineError if they do not fit the policy, or if there is no room for them; the update
        before it stays the prepared one then.
        """
        ...

    async def deliver(self, server: Server) -> None:
        """Bring the prepared weights into a server, which is paused.

        Raises EngineError if the server fails, or answers with other checksums than the trainer's.
        """
        ...

    def store(self) -> None:
        """Bring the prepared weights into the model folder, for a server that is started again.

        Threads may call it at the same time. Raises EngineError if there is no room for them.
        """
        ...

    def guard(self) -> None:
        """Have the model folder, with all that is in it, removed if this process is killed."""
        ...

    def close(self) -> None:
        """Remove the model folder, and whatever else was made."""
        ...


@runtime_checkable
class DirectServer(Protocol):
    """A `Server` that takes weights in other ways than from a file. `source` says where the tensors
    lie. `load_...` return the checksum of each tensor that it received, as `Server.load` does."""

    @property
    def name(self) -> str: ...

    async def load_shared(self, source: Mapping[str, Any]) -> Mapping[str, int]:
        """Load weights from shared memory."""
        ...

    async def join(self, spec: Mapping[str, Any]) -> None:
        """Let all workers join the process group of `spec`. Returns when they have."""
        ...

    async def load_sent(self, source: Mapping[str, Any]) -> Mapping[str, int]:
        """Load weights that the trainer sends to the process group meanwhile."""
        ...

    async def workers(self) -> int:
        """The number of the server's workers."""
        ...

    @property
    def address(self) -> tuple[str, int]:
        """The server's host and port."""
        ...


def direct(server: Server) -> DirectServer:
    """The server, if it takes weights in other ways than from a file; else raises EngineError."""
    if not isinstance(server, DirectServer):
        raise EngineError(f"{server.name} takes weights from files only; set {KEY}=file")
    return server


class Transport(StrEnum):
    FILE = "file"
    SHARED_MEMORY = "shared_memory"
    COLLECTIVE = "collective"


def make_transfer(
    transport: str,
    module: nn.Module,
    dtype: torch.dtype,
    parent: Path | None = None,
    *,
    device: torch.device | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 300.0,
) -> WeightTransfer:
    """Make the transport with this name.

    `module` gives the names and shapes that an update must have; weights travel as `dtype`.
    `parent` is the folder to make the model folder in; None: memory-backed storage. `device` is
    that of the trainer, and `timeout_s` limits the time of a collective.
    """
    from slipstream.inference.servers.collective import CollectiveWeights
    from slipstream.inference.servers.staged import SharedWeights
    from slipstream.inference.servers.weights import WeightFolder

    match Transport(transport):
        case Transport.FILE:
            return WeightFolder(module, dtype, parent)
        case Transport.SHARED_MEMORY:
            return SharedWeights(module, dtype, parent, bucket_bytes=bucket_bytes)
        case Transport.COLLECTIVE:
            return CollectiveWeights(
                module,
                dtype,
                parent,
                bucket_bytes=bucket_bytes,
                device=device or torch.device("cpu"),
                timeout_s=timeout_s,
            )
