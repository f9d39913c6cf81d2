"""The contract suite on a real vLLM server (`make peers`, `make test-peers`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import pytest
import torch

import tests.inference.contract_updates  # noqa: F401 (adds its cases to CASES)
from slipstream.errors import EngineError
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import ServerProcess
from slipstream.inference.servers.weights import WeightFolder
from slipstream.types import Generation
from tests.inference.contract import CASES, Case, Harness, endless
from tests.inference.helpers import EOS, update_from
from tests.inference.servers.real import PYTHON, decoder, engine_on, gate, launch, make_check, rpc

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make peers"),
]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = launch(tmp_path_factory.mktemp("vllm"))
    yield running
    running.close()


@pytest.fixture
def harness(process: ServerProcess) -> Iterator[Harness]:
    gate(process, 0)
    engine = engine_on(process)
    yield Harness(engine, partial(gate, process), decoder)
    gate(process, 0)
    engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(harness: Harness, case: Case) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await case(harness)

    anyio.run(bounded)


def test_the_check_tells_right_weights_from_wrong_ones(process: ServerProcess) -> None:
    gate(process, 0)
    policy = decoder(0, eos=EOS)

    async def work(engine: ServedEngine) -> None:
        for version in (1, 2):
            for parameter in policy.parameters():
                parameter.data.mul_(1 + 1e-4)
            await engine.update_weights(update_from(policy, version))
        # The server gets weights that the engine does not know of.
        other = WeightFolder(decoder(0), torch.float32)
        old = other.write(update_from(decoder(0), 2))
        rpc(process, "slipstream_load", str(old.path))
        other.close()
        engine._unchecked = True
        await engine.resume()

    with ThreadPoolExecutor(1) as executor:
        engine = engine_on(process, check=make_check(policy), on_compute=executor)
        with pytest.raises(EngineError, match=f"{process.url}, policy version 2: it has log-probs"):
            anyio.run(work, engine)
        engine.close()


def test_a_worker_that_is_killed_is_started_again(process: ServerProcess) -> None:
    """The last test of this module: the server ends. Its requests get the status 500 first."""
    gate(process, 0.05)
    results: list[Generation] = []

    async def work(engine: ServedEngine) -> None:
        async def one(name: str, stop: tuple[str, ...]) -> None:
            results.append(await engine.generate(endless(name, 60, stop=stop)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "a", ())
            tasks.start_soon(one, "b", ("none",))
            await anyio.sleep(1)
            pid = rpc(process, "slipstream_probe")[0]["pid"]
            os.kill(pid, signal.SIGKILL)

    engine = engine_on(process, owned=True)
    url = process.url
    anyio.run(work, engine)
    assert process.url != url
    assert [(r.error, len(r.token_ids)) for r in results] == [(None, 60)] * 2
    engine.close()
