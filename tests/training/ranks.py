"""Runs test functions in several processes that are connected by gloo on the loopback."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from slipstream.training.fsdp2 import Ranks


def on_ranks(size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Run `work(ranks, *args)` in `size` processes and return the results by rank. `work` must be a
    function of a module."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The server imports the modules once, for all processes of all tests.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["slipstream.training.fsdp2", "tests.training.helpers"])
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_run, args=(rank, size, port, pipes[rank][1], work, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    try:
        found = [_received(end, timeout_s) for end, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for ok, value in found:
        assert ok, value
    return [value for _, value in found]


def _received(end: Connection, timeout_s: float) -> tuple[bool, Any]:
    if not end.poll(timeout_s):
        return False, f"no result in {timeout_s} s"
    try:
        received: tuple[bool, Any] = pickle.loads(end.recv_bytes())
    except EOFError:
        return False, "the process died"
    return received


def _run(
    rank: int, size: int, port: int, end: Connection, work: Callable[..., Any], args: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        ranks = Ranks(mesh=mesh, objects=mesh.get_group())
        # Not `send`: torch would pass tensors as shared files of this process, which ends.
        end.send_bytes(pickle.dumps((True, work(ranks, *args))))
        dist.destroy_process_group()
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
