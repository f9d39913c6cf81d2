"""A checkpoint reaches several servers at once, and a failure names its server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from slipstream.compat.rollouts.training.weight_sync import (
    SGLangEngine,
    VLLMEngine,
    sync_weights_to_engines,
)
from slipstream.models import save_checkpoint
from slipstream.types import VersionSpan
from tests.inference.contract import endless
from tests.inference.helpers import EOS, make_engine
from tests.inference.servers.fleet import Fleet
from tests.inference.servers.local import plant
from tests.inference.servers.real import CLIENT, decoder
from tests.inference.servers.sglang_fleet import SGLangFleet


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), 2)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(servers: Fleet) -> Fleet:
    servers.renew()
    return servers


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The weights of `decoder(1)`."""
    save_checkpoint(decoder(1, eos=EOS), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def paused(fleet: Fleet) -> list[bool]:
    return [CLIENT.get(p.url + "/is_paused").json()["is_paused"] for p in fleet.processes]


def test_all_servers_get_the_checkpoint(fleet: Fleet, checkpoint: Path) -> None:
    engines = [VLLMEngine(process.url) for process in fleet.processes]
    first = anyio.run(partial(sync_weights_to_engines, engines, str(checkpoint)))
    second = anyio.run(partial(sync_weights_to_engines, engines, checkpoint))
    assert first == [{"success": True, "version": 1}] * 2
    assert second == [{"success": True, "version": 2}] * 2
    assert paused(fleet) == [False, False]
    request = endless("a", 9, temperature=0.0)
    expected = make_engine(decoder(1, eos=EOS)).run([request])[0]
    for number in range(2):
        with fleet.engine(number) as engine:
            engine._prepared = True  # It must not name the weights.
            result = anyio.run(engine.generate, request)
        assert result.error is None
        assert result.token_ids == expected.token_ids
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert result.spans == [VersionSpan(2, 0, 9)]


def test_servers_are_updated_at_the_same_time(fleet: Fleet, checkpoint: Path) -> None:
    """A server that does not answer does not keep the other one from its update."""
    plant(fleet.processes[0], "hang", "/pause")
    engines = [VLLMEngine(process.url) for process in fleet.processes]
    url = fleet.processes[1].url

    async def work() -> None:
        with anyio.move_on_after(60) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(sync_weights_to_engines, engines, checkpoint))
                while CLIENT.get(url + "/weight_info").json()["weight_version"] != "1":  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
        assert not scope.cancelled_caught

    anyio.run(work)


def test_servers_of_both_kinds_get_the_checkpoint(
    fleet: Fleet, checkpoint: Path, tmp_path: Path
) -> None:
    sglang = SGLangFleet(tmp_path / "sglang", 1)
    try:
        engines = [VLLMEngine(fleet.processes[0].url), SGLangEngine(sglang.processes[0].url)]
        found = anyio.run(sync_weights_to_engines, engines, checkpoint)
        assert found == [{"success": True, "version": 1}] * 2
        request = endless("a", 9, temperature=0.0)
        expected = make_engine(decoder(1, eos=EOS)).run([request])[0]
        with sglang.engine(0) as engine:
            engine._prepared = True  # It must not name the weights.
            result = anyio.run(engine.generate, request)
        assert result.error is None
        assert result.token_ids == expected.token_ids
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert result.spans == [VersionSpan(1, 0, 9)]
        # SGLang's address is not that of a vLLM server.
        wrong = [SGLangEngine(fleet.processes[0].url), VLLMEngine(sglang.processes[0].url)]
        records = anyio.run(sync_weights_to_engines, wrong, checkpoint)
        for record, process in zip(records, (fleet.processes[0], sglang.processes[0]), strict=True):
            assert record["success"] is False
            assert process.url in record["error"]
    finally:
        sglang.close()


def test_a_failure_names_its_server(fleet: Fleet, checkpoint: Path) -> None:
    plant(fleet.processes[1], "wrong_sum")
    engines = [VLLMEngine(process.url) for process in fleet.processes]
    good, bad = anyio.run(partial(sync_weights_to_engines, engines, checkpoint))
    assert good == {"success": True, "version": 1}
    assert bad["success"] is False
    assert fleet.processes[1].url in bad["error"]
    assert "received other values" in bad["error"]
    assert "start it again" in bad["error"]
    assert engines[1].stats().version == 0


def test_a_server_is_not_touched_by_a_checkpoint_that_does_not_fit(
    fleet: Fleet, checkpoint: Path, tmp_path: Path
) -> None:
    save_checkpoint(decoder(1, eos=EOS, num_layers=3), tmp_path / "other")
    (tmp_path / "empty").mkdir()
    engines = [VLLMEngine(fleet.processes[0].url), VLLMEngine("http://127.0.0.1:1")]
    for path, part in (
        (tmp_path / "other", "its num_hidden_layers is 2"),
        (tmp_path / "empty", f"{tmp_path / 'empty'} cannot be read"),
    ):
        record = anyio.run(partial(sync_weights_to_engines, engines[:1], path))[0]
        assert record["success"] is False
        assert part in record["error"]
    assert paused(fleet) == [False, False]
    record = anyio.run(partial(sync_weights_to_engines, engines, checkpoint))[1]
    assert "http://127.0.0.1:1/version does not answer" in record["error"]
