"""The contract suite on a real vLLM server (`make peers`, `make test-peers`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import anyio
import pytest

import tests.inference.contract_updates  # noqa: F401 (adds its cases to CASES)
from slipstream.inference.servers.process import ServerProcess
from tests.inference.contract import CASES, Case, Harness
from tests.inference.servers.real import PYTHON, decoder, engine_on, gate, launch

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
