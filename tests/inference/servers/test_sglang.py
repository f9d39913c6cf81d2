"""SGLang's client on the contract server: the contract suite, and what is particular to SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import anyio
import pytest

import tests.inference.contract_updates  # noqa: F401 (adds its cases to CASES)
from tests.inference.contract import CASES, Case, Harness
from tests.inference.servers.local import plant
from tests.inference.servers.real import decoder
from tests.inference.servers.sglang_fleet import SGLangFleet


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangFleet]:
    fleet = SGLangFleet(tmp_path_factory.mktemp("fleet"), 2)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(servers: SGLangFleet) -> SGLangFleet:
    servers.renew()
    return servers


@pytest.fixture
def harness(fleet: SGLangFleet) -> Iterator[Harness]:
    process = fleet.processes[0]
    with fleet.engine(0, attached=True) as engine:
        yield Harness(engine, partial(plant, process, "delay"), decoder)
    plant(process, "delay", 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(harness: Harness, case: Case) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await case(harness)

    anyio.run(bounded)
