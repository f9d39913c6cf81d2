"""A host process: it holds parts (trainers, an engine) and calls their methods on command.

Commands are numbered. They run one after the other, by number, in whatever order they arrive. Calls
of the engine start by number, too, and then run concurrently on an event loop of their own; process
0 fetches their answers. This module knows no transport: `placement` makes a Ray actor of `Host`. It
knows no parts either: a function from process 0 makes them here. No method is a coroutine: Ray
would run it on a stack of 128 KB, and an overflow there corrupts the heap.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slipstream.distributed.engines import OwnEngine
from slipstream.inference.protocol import EngineStats
from slipstream.training.fsdp2 import Ranks
from slipstream.training.protocol import TrainFuture

Parts = Mapping[str, Any]

Answer = tuple[str, Any, Exception | None, EngineStats]
"""The answer to one engine call: call id, result, exception, and the engine's counters."""

HOST = "host"
"""Part name of the host itself."""


def join(address: str, rank: int, size: int, device: str, timeout_s: float) -> Ranks:
    """Join the process group at `address` (host:port) as process `rank` of `size`.

    Collectives fail after `timeout_s` seconds.
    """
    cuda, timeout = device == "cuda", timedelta(seconds=timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return Ranks(mesh=init_device_mesh(device, (size,)), objects=dist.new_group(backend="gloo"))


class Host:
    """Runs the commands of process 0 in another process."""

    def __init__(self, folder: str, paths: list[str], threads: int | None) -> None:
        """Work in `folder` and import from `paths`, like process 0. `threads` limits torch's
        threads; None leaves torch's default."""
        os.chdir(folder)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        if threads is not None:
            torch.set_num_threads(threads)
        self._commands = ThreadPoolExecutor(1, thread_name_prefix="commands")
        self._lock = threading.Lock()
        self._queued: dict[int, tuple[Callable[[], Any], Future[Any]]] = {}
        self._next = 0
        self._parts: Parts = {}
        self._unstarted: dict[int, Coroutine[Any, Any, None]] = {}
        self._next_call = 0
        self._calls: dict[str, asyncio.Future[Any] | None] = {}
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._ranks: Ranks | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()

    def ready(self) -> None:
        """Return once the host has been made."""

    def join(self, address: str, rank: int, size: int, device: str, timeout_s: float) -> None:
        """Join the process group (function `join`)."""
        self._ranks = self._commands.submit(join, address, rank, size, device, timeout_s).result()

    def make_parts(self, make: Callable[..., Parts], *args: Any) -> None:
        """Replace the parts by what `make(ranks, *args)` returns."""
        self._parts = {}
        # Engines and trainers are in reference cycles, and memory may not hold two of each.
        free_memory()
        self._parts = make(self._ranks, *args)

    def command(self, number: int, part: str, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of a part, or of this host, after all commands of lower numbers. Returns
        when the method is done."""

        def work() -> None:
            result = getattr(self if part == HOST else self._parts[part], method)(*args)
            if isinstance(result, TrainFuture):
                result.wait()
            elif inspect.iscoroutine(result):
                asyncio.run_coroutine_threadsafe(result, self._loop).result()

        done: Future[Any] = Future()
        with self._lock:
            self._queued[number] = work, done
            while self._next in self._queued:
                self._commands.submit(_settle, *self._queued.pop(self._next))
                self._next += 1
        done.result()

    def engine(self, number: int, call: str, method: str, args: tuple[Any, ...]) -> None:
        """Start a method of the engine after all calls of lower numbers have started, without
        waiting for their results. So an `abort` reaches the requests before it. `answers` returns
        the results."""
        with self._lock:
            self._unstarted[number] = _answer(self, call, method, args)
            while self._next_call in self._unstarted:
                asyncio.run_coroutine_threadsafe(self._unstarted.pop(self._next_call), self._loop)
                self._next_call += 1

    def withdraw(self, call: str) -> None:
        """Cancel a call of the engine, even one that has not arrived yet. Its answer is None."""
        self._loop.call_soon_threadsafe(self._cancel, call)

    def answers(self, timeout_s: float) -> list[Answer]:
        """The answers since the last call. Waits up to `timeout_s` seconds for the first one."""
        found: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._answers.get(timeout=timeout_s))
            while True:
                found.append(self._answers.get_nowait())
        return found

    def _cancel(self, call: str) -> None:
        work = self._calls.setdefault(call, None)
        if work is not None:
            work.cancel()


async def _answer(host: Host, call: str, method: str, args: tuple[Any, ...]) -> None:
    """Run one engine call and queue its answer.

    A function, not a method: Ray runs all methods of a class as coroutines if one of them is.
    """
    result, failure, stats = None, None, EngineStats()
    try:
        # Inside the try: without an answer, process 0 would wait for this call forever.
        own: OwnEngine = host._parts["engine"]
        stats = own.engine.stats()
        if call not in host._calls:
            result = getattr(own.engine, method)(*args)
            if inspect.isawaitable(result):
                host._calls[call] = work = asyncio.ensure_future(result)
                result = await work
        stats = own.engine.stats()
    except asyncio.CancelledError:
        result, stats = None, own.engine.stats()
    except Exception as error:
        result, failure = None, error
    host._calls.pop(call, None)
    host._answers.put((call, result, failure, stats))


def free_memory() -> None:
    """Collect unreachable objects and release cached GPU memory now."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _settle(work: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
