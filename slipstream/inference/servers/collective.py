"""The transport `collective`: the trainer broadcasts its weights to the workers of each server.

Each server has a process group of its own, so one that fails leaves the others alone. The trainer
is rank 0. The backend is NCCL if the trainer computes on a GPU, and gloo otherwise.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream.errors import EngineError
from slipstream.inference.servers.http import ServerGoneError
from slipstream.inference.servers.protocol import Server
from slipstream.inference.servers.staged import StagedWeights
from slipstream.inference.servers.transfer import KEY, DirectServer, direct
from slipstream.inference.servers.vllm_worker import broadcast, facing, make_group
from slipstream.reading import reason

POLL_S = 0.005


@dataclass(slots=True)
class _Joined:
    """The process group of a server. `store` is where its ranks meet. `updates` counts what was
    sent."""

    name: str
    size: int
    group: Any
    store: TCPStore
    updates: int = 0

    async def all_here(self, *parts: object) -> None:
        """Return when all workers are at a place of the protocol."""
        keys = ["/".join(map(str, (self.name, rank, *parts))) for rank in range(1, self.size)]
        while not self.store.check(keys):  # noqa: ASYNC110
            await anyio.sleep(POLL_S)


class CollectiveWeights(StagedWeights):
    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        parent: Path | None,
        *,
        bucket_bytes: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        super().__init__(module, dtype, parent, bucket_bytes=bucket_bytes)
        self._device = device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout_s = timeout_s
        self._groups: dict[str, _Joined] = {}
        """By the server's name, which has its port: a server that was started again has another."""

    def close(self) -> None:
        self._groups.clear()
        super().close()

    def _allocate(self, sizes: list[int]) -> list[Tensor]:
        pinned = self._device.type == "cuda"
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    async def _send(self, server: Server) -> Mapping[str, int]:
        name, found = server.name, direct(server)
        joined = self._groups.get(name)
        if joined is None:
            joined = self._groups[name] = await self._join(found)
        joined.updates += 1
        source = {
            "group": joined.name,
            "number": joined.updates,
            "backend": self._backend,
            "buckets": self._layout.sizes,
            "tensors": self._layout.entries,
        }
        failures: list[Exception] = []
        received: list[Mapping[str, int]] = []

        async def receive() -> None:
            try:
                received.append(await found.load_sent(source))
            except EngineError as error:
                failures.insert(0, error)
                tasks.cancel_scope.cancel()

        async def send() -> None:
            await joined.all_here(joined.updates)
            try:
                await anyio.to_thread.run_sync(self._broadcast, joined, self._buckets)
            except RuntimeError as error:
                failures.append(error)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                tasks.start_soon(send)
        finally:
            if failures or not received:
                # A part of a bucket may be on its way: the group cannot be used again.
                self._groups.pop(name, None)
        if failures and not isinstance(failures[0], EngineError):
            raise EngineError(f"{name}: a broadcast of weights failed ({reason(failures[0])})")
        if failures:
            raise failures[0]
        return received[0]

    def _broadcast(self, joined: _Joined, buckets: list[Tensor]) -> None:
        for bucket in buckets:
            broadcast(joined.group, bucket.to(self._device))

    async def _join(self, server: DirectServer) -> _Joined:
        """Make the process group of a server. Its workers and the trainer meet in a store, which
        listens where the server can reach it."""
        limit = timedelta(seconds=self._timeout_s)
        address = facing(*server.address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listening:
            port = listening.getsockname()[1]
            store = TCPStore(
                address,
                port,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        spec = {
            "name": f"slipstream-{uuid.uuid4().hex}",
            "host": address,
            "port": port,
            "backend": self._backend,
            "size": 1 + await server.workers(),
            "seconds": self._timeout_s,
        }
        joined = _Joined(spec["name"], spec["size"], None, store)
        failures: list[Exception] = []

        async def join() -> None:
            try:
                await server.join(spec)
            except EngineError as error:
                failures.insert(0, error)
                tasks.cancel_scope.cancel()

        async def meet() -> None:
            # Making the group blocks, so it begins when the workers are there.
            await joined.all_here()
            try:
                joined.group = await anyio.to_thread.run_sync(
                    make_group, store, spec, 0, address, limit
                )
            except RuntimeError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(join)
            tasks.start_soon(meet)
        if failures and not isinstance(failures[0], ServerGoneError):
            raise EngineError(
                f"{server.name} and the run cannot form a process group of {self._backend} "
                f"({reason(failures[0])}); both machines must reach each other on all ports, or "
                f"set {KEY}=file"
            ) from failures[0]
        if failures:
            raise failures[0]
        return joined
