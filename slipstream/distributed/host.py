"""What a process does that another one leads: it holds parts, and calls their methods when told.

Orders are numbered and carried out one after the other, in their order, whatever order they arrive
in; calls of the engine are begun in theirs and go on side by side, on an event loop of their own,
and their answers are fetched. Knows no transport (`placement` makes an actor of it) and no parts: a
function makes them here. Nothing here is a coroutine for Ray: it would run pieces of Python on
stacks of 128 KB, and what overflows there breaks the heap.
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
"""Of a call of the engine: its name, what it returned or raised, and the engine's counters."""

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
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Callable[[], Any], Future[Any]]] = {}
        self._next = 0
        self._parts: Parts = {}
        self._early: dict[int, Coroutine[Any, Any, None]] = {}
        self._begun = 0
        self._calls: dict[str, asyncio.Future[Any] | None] = {}
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._ranks: Ranks | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()

    def ready(self) -> None:
        """It has been made."""

    def join(self, address: str, rank: int, size: int, device: str, timeout_s: float) -> None:
        """See `join`."""
        self._ranks = self._orders.submit(join, address, rank, size, device, timeout_s).result()

    def make_parts(self, make: Callable[..., Parts], *given: Any) -> None:
        """Put what `make(ranks, *given)` returns in the place of the parts."""
        self._parts = {}
        # Engines and trainers are in cycles, and two of each might not fit.
        give_back()
        self._parts = make(self._ranks, *given)

    def order(self, number: int, part: str, method: str, given: tuple[Any, ...]) -> None:
        """Call a method of a part, or of this host, when all orders of lower numbers are done;
        returns when this one is."""

        def work() -> None:
            result = getattr(self if part == HOST else self._parts[part], method)(*given)
            if isinstance(result, TrainFuture):
                result.wait()
            elif inspect.iscoroutine(result):
                asyncio.run_coroutine_threadsafe(result, self._loop).result()

        done: Future[Any] = Future()
        with self._lock:
            self._waiting[number] = work, done
            while self._next in self._waiting:
                self._orders.submit(_settle, *self._waiting.pop(self._next))
                self._next += 1
        done.result()

    def engine(self, number: int, call: str, method: str, given: tuple[Any, ...]) -> None:
        """Call a method of the engine, when all calls of lower numbers have been begun, and without
        waiting for them: an `abort` is of what was asked for before. See `answers`."""
        with self._lock:
            self._early[number] = _answer(self, call, method, given)
            while self._begun in self._early:
                asyncio.run_coroutine_threadsafe(self._early.pop(self._begun), self._loop)
                self._begun += 1

    def withdraw(self, call: str) -> None:
        """Cancel a call of the engine, which may have come or not: its answer is None."""
        self._loop.call_soon_threadsafe(self._cancel, call)

    def answers(self, patience_s: float) -> list[Answer]:
        """Of the calls that have been done since the last time; waits for one, but not for ever."""
        found: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._answers.get(timeout=patience_s))
            while True:
                found.append(self._answers.get_nowait())
        return found

    def _cancel(self, call: str) -> None:
        work = self._calls.setdefault(call, None)
        if work is not None:
            work.cancel()


async def _answer(host: Host, call: str, method: str, given: tuple[Any, ...]) -> None:
    """Outside the class: Ray takes a class with one coroutine for a class of coroutines."""
    result, failure, stats = None, None, EngineStats()
    try:
        # In here, too: a call without an answer would be waited for for ever.
        own: OwnEngine = host._parts["engine"]
        stats = own.engine.stats()
        if call not in host._calls:
            result = getattr(own.engine, method)(*given)
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
