"""Process groups of trainer and servers, with workers in other processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.servers.collective import CollectiveWeights
from slipstream.inference.servers.http import ServerGoneError, ServerRefusedError
from slipstream.inference.servers.transfer import KEY
from slipstream.inference.servers.vllm_worker import Group, checksum
from tests.inference.helpers import make_decoder, update_from

_GROUPS: dict[str, Group] = {}
"""The groups of a worker process."""


def join(spec: Mapping[str, Any]) -> None:
    _GROUPS[spec["name"]] = Group(spec, 1)


def receive(source: Mapping[str, Any], most: int) -> dict[str, int]:
    """Receive tensors, and fail after the number `most`."""
    found: dict[str, int] = {}
    group = _GROUPS[source["group"]]
    try:
        for name, tensor in group.tensors(source, torch.device("cpu")):
            found[name] = checksum(tensor)
            if len(found) == most:
                raise ServerRefusedError("the worker failed", 500)
    finally:
        if len(found) == most:
            group.close()
    return found


class GroupServer:
    """A server whose worker is a process of this program."""

    name = "the server"
    address = ("127.0.0.1", 1)

    def __init__(self, worker: ProcessPoolExecutor) -> None:
        self._worker = worker
        self.joined: list[str] = []
        self.most = -1
        self.refuses: type[EngineError] | None = None

    async def workers(self) -> int:
        return 1

    async def join(self, spec: Mapping[str, Any]) -> None:
        if self.refuses is ServerGoneError:
            raise ServerGoneError("the server is gone")
        if self.refuses is not None:
            raise ServerRefusedError("no such method", 500)
        self.joined.append(spec["name"])
        await asyncio.wrap_future(self._worker.submit(join, dict(spec)))

    async def load_sent(self, source: Mapping[str, Any]) -> dict[str, int]:
        return await asyncio.wrap_future(self._worker.submit(receive, dict(source), self.most))

    async def load_shared(self, source: Mapping[str, Any]) -> dict[str, int]:
        raise NotImplementedError


@pytest.fixture
def server() -> Iterator[Any]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as worker:
        yield GroupServer(worker)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[CollectiveWeights]:
    made = CollectiveWeights(
        make_decoder(0),
        torch.bfloat16,
        tmp_path,
        bucket_bytes=1 << 14,
        device=torch.device("cpu"),
        timeout_s=30,
    )
    yield made
    made.close()


def test_a_server_joins_once_and_gets_each_update(server: Any, weights: CollectiveWeights) -> None:
    async def work() -> None:
        for version in (1, 2, 3):
            weights.prepare(update_from(make_decoder(version), version))
            await weights.deliver(server)  # compares checksums

    anyio.run(work)
    assert len(server.joined) == 1
    assert weights._layout.sizes[1:] != []


def test_after_a_failure_trainer_and_server_form_a_new_group(
    server: Any, weights: CollectiveWeights
) -> None:
    async def work() -> None:
        for version, most in ((1, -1), (2, 1), (3, -1)):
            server.most = most
            weights.prepare(update_from(make_decoder(version), version))
            if most < 0:
                await weights.deliver(server)
            else:
                with pytest.raises(ServerRefusedError, match="the worker failed"):
                    await weights.deliver(server)

    anyio.run(work)
    assert len(server.joined) == len(set(server.joined)) == 2


@pytest.mark.parametrize(
    ("error", "text"), [(ServerRefusedError, f"gloo.*set {KEY}="), (ServerGoneError, "is gone")]
)
def test_a_server_that_does_not_join_is_an_error(
    server: Any, weights: CollectiveWeights, error: type[EngineError], text: str
) -> None:
    server.refuses = error
    weights.prepare(update_from(make_decoder(1), 1))
    with pytest.raises(EngineError, match=text) as caught:
        anyio.run(weights.deliver, server)
    assert isinstance(caught.value, ServerGoneError) == (error is ServerGoneError)
