"""What a process does that another one leads: it holds parts, and calls their methods when told.

Orders are numbered and carried out one after the other, in their order, whatever order they arrive
in; calls of the engine are carried out at once, side by side. Knows no transport (`placement` makes
an actor of it) and no parts: a function makes them here.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slipstream.distributed.engines import OwnEngine
from slipstream.inference.protocol import EngineStats
from slipstream.training.fsdp2 import Ranks
from slipstream.training.protocol import TrainFuture

Parts = Mapping[str, Any]

HOST = "host"
"""The part that is the host itself."""


def join(address: str, rank: int, size: int, device: str, timeout_s: float) -> Ranks:
    """Meet the other processes at `address` (host:port), each with a `rank` of its own."""
    cuda, patience = device == "cuda", timedelta(seconds=timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=size,
        timeout=patience,
    )
    return Ranks(mesh=init_device_mesh(device, (size,)), objects=dist.new_group(backend="gloo"))


class Host:
    """A process that another one leads."""

    def __init__(self, folder: str, paths: list[str], threads: int | None) -> None:
        """It works in `folder` and imports from `paths`, as the first process does."""
        os.chdir(folder)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        if threads is not None:
            torch.set_num_threads(threads)
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="orders")
        self._waiting: dict[int, tuple[Callable[[], Any], Future[Any]]] = {}
        self._next = 0
        self._parts: Parts = {}
        self._calls: dict[str, asyncio.Future[Any] | None] = {}
        self._ranks: Ranks | None = None

    async def ready(self) -> None:
        """It has been made."""

    async def join(self, address: str, rank: int, size: int, device: str, timeout_s: float) -> None:
        """See `join`."""
        work = partial(join, address, rank, size, device, timeout_s)
        self._ranks = await asyncio.wrap_future(self._orders.submit(work))

    def make_parts(self, make: Callable[..., Parts], *given: Any) -> None:
        """Put what `make(ranks, *given)` returns in the place of the parts."""
        self._parts = {}
        # Engines and trainers are in cycles, and two of each might not fit.
        give_back()
        self._parts = make(self._ranks, *given)

    async def order(self, number: int, part: str, method: str, given: tuple[Any, ...]) -> None:
        """Call a method of a part, or of this host, when all orders of lower numbers are done."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            result = getattr(self if part == HOST else self._parts[part], method)(*given)
            if isinstance(result, TrainFuture):
                result.wait()
            elif inspect.iscoroutine(result):
                asyncio.run_coroutine_threadsafe(result, loop).result()

        done: Future[Any] = Future()
        self._waiting[number] = work, done
        while self._next in self._waiting:
            self._orders.submit(_settle, *self._waiting.pop(self._next))
            self._next += 1
        await asyncio.wrap_future(done)

    async def engine(
        self, call: str, method: str, given: tuple[Any, ...]
    ) -> tuple[Any, EngineStats]:
        """Call a method of the engine, now; None where the call was withdrawn."""
        own: OwnEngine = self._parts["engine"]
        result = getattr(own.engine, method)(*given) if call not in self._calls else None
        if inspect.isawaitable(result):
            self._calls[call] = work = asyncio.ensure_future(result)
            try:
                result = await work
            except asyncio.CancelledError:
                result = None
        self._calls.pop(call, None)
        return result, own.engine.stats()

    async def withdraw(self, call: str) -> None:
        """Cancel a call of the engine, which may have come or not."""
        work = self._calls.setdefault(call, None)
        if work is not None:
            work.cancel()


def give_back() -> None:
    """Let go of what nobody refers to any more, at once."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _settle(work: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
