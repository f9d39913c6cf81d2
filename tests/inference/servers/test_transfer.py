"""Each transport of weights, with contract servers at the other end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.servers.protocol import Server
from slipstream.inference.servers.transfer import KEY, Transport, make_transfer
from slipstream.types import Generation, VersionSpan
from tests.inference.contract import endless, gather
from tests.inference.helpers import make_decoder, make_engine, update_from
from tests.inference.servers.fleet import Fleet
from tests.inference.servers.local import plant
from tests.inference.servers.test_engine import full_disk


@pytest.fixture(scope="module", params=Transport)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), 2, transport=request.param)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(servers: Fleet) -> Fleet:
    servers.renew()
    return servers


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        with anyio.fail_after(120):
            return await work()

    return anyio.run(bounded)


def greedy_tokens(fleet: Fleet) -> list[int]:
    return make_engine(fleet.policy).run([endless("a", 9, temperature=0.0)])[0].token_ids


def greedy(count: int) -> list[Any]:
    return [endless(f"r{i}", 9, temperature=0.0) for i in range(count)]


def test_updates_reach_all_servers(fleet: Fleet) -> None:
    expected = []

    async def work() -> list[dict[str, Generation]]:
        found = []
        with fleet.engine(0, 1, checked=True) as engine:
            for version in (1, 2, 3):
                fleet.move(0.3, seed=version)
                expected.append(greedy_tokens(fleet))
                await engine.update_weights(fleet.update(version))
                found.append(await gather(engine, *greedy(4)))
        return found

    urls = [process.url for process in fleet.processes]
    for version, results in enumerate(run(work), start=1):
        for result in results.values():
            assert result.spans == [VersionSpan(version, 0, 9)]
            assert result.token_ids == expected[version - 1]
    assert [process.url for process in fleet.processes] == urls


def test_a_server_that_dies_after_an_update_is_started_again_with_its_weights(
    fleet: Fleet,
) -> None:
    async def work() -> tuple[dict[str, Generation], dict[str, Generation]]:
        with fleet.engine(0, 1) as engine:
            for version in (1, 2):
                fleet.move(0.3, seed=version)
                await engine.update_weights(fleet.update(version))
            before = greedy_tokens(fleet)
            plant(fleet.processes[0], "die_after", 5)
            second = await gather(engine, *greedy(4))
            assert {tuple(result.token_ids) for result in second.values()} == {tuple(before)}
            fleet.move(0.3, seed=3)
            await engine.update_weights(fleet.update(3))
            return second, await gather(engine, *greedy(4))

    url = fleet.processes[0].url
    second, third = run(work)
    assert fleet.processes[0].url != url
    assert [r.spans for r in second.values()] == [[VersionSpan(2, 0, 9)]] * 4
    assert [r.spans for r in third.values()] == [[VersionSpan(3, 0, 9)]] * 4
    assert [r.token_ids for r in third.values()] == [greedy_tokens(fleet)] * 4


@pytest.mark.parametrize(
    ("fault", "value"), [("broken_read", "die"), ("broken_read", "raise"), ("wrong_sum", True)]
)
def test_a_server_that_fails_in_an_update_is_started_again_with_the_new_weights(
    fleet: Fleet, fault: str, value: Any
) -> None:
    async def work() -> tuple[dict[str, Generation], dict[str, Generation]]:
        with fleet.engine(0, 1) as engine:
            await engine.generate(endless("a", 3))
            plant(fleet.processes[0], fault, value)
            found = []
            for version in (1, 2):
                fleet.move(0.3, seed=version)
                await engine.update_weights(fleet.update(version))
                expected = greedy_tokens(fleet)
                results = await gather(engine, *greedy(4))
                assert [r.token_ids for r in results.values()] == [expected] * 4
                found.append(results)
            return found[0], found[1]

    url, other = (process.url for process in fleet.processes)
    first, second = run(work)
    assert fleet.processes[0].url != url
    assert fleet.processes[1].url == other
    assert [r.spans for r in first.values()] == [[VersionSpan(1, 0, 9)]] * 4
    assert [r.spans for r in second.values()] == [[VersionSpan(2, 0, 9)]] * 4


def test_an_attached_server_that_fails_in_an_update_is_named(fleet: Fleet) -> None:
    plant(fleet.processes[0], "broken_read", "raise")

    async def work() -> None:
        with fleet.engine(0, attached=True) as engine:
            await engine.update_weights(fleet.update(1))

    with pytest.raises(EngineError, match=f"{fleet.processes[0].url}.*the planted failure"):
        run(work)


def test_tensors_that_do_not_fit_are_refused(fleet: Fleet) -> None:
    async def work() -> None:
        with fleet.engine(0) as engine:
            before = await engine.generate(endless("a", 9))
            bad = fleet.update(1)
            next(iter(bad.buckets))[0][1][0, 0] = float("nan")
            with pytest.raises(EngineError, match=r"version 1 refused.*NaN"):
                await engine.update_weights(bad)
            assert await engine.generate(endless("a", 9)) == before

    run(work)


def test_new_weights_can_be_prepared_while_no_server_is_there(tmp_path: Path) -> None:
    for transport in Transport:
        transfer = make_transfer(transport, make_decoder(0), torch.bfloat16, tmp_path)
        found = transfer.prepare(update_from(make_decoder(1), 1))
        for name, parameter in make_decoder(1).named_parameters():
            assert torch.equal(found[name], parameter.bfloat16())
        transfer.close()
    assert list(tmp_path.iterdir()) == []


class FileServer:
    """A server that takes weights from files only."""

    name = "the server"


@pytest.mark.parametrize("transport", [Transport.SHARED_MEMORY, Transport.COLLECTIVE])
def test_a_server_that_needs_files_is_told_so(tmp_path: Path, transport: Transport) -> None:
    transfer = make_transfer(transport, make_decoder(0), torch.float32, tmp_path)
    transfer.prepare(update_from(make_decoder(1), 1))
    server: Server = FileServer()  # type: ignore[assignment]
    with pytest.raises(EngineError, match=f"the server .* set {KEY}=file"):
        anyio.run(transfer.deliver, server)
    transfer.close()


def removed(fleet: Fleet) -> list[Path]:
    """Remove the shared memory, as another program might."""
    paths = sorted(fleet.weights.path.glob("weights-*"))
    for path in paths:
        path.unlink()
    return paths


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("sharing"), 1, transport="shared_memory")
    yield fleet
    fleet.close()


def test_shared_memory_that_was_removed_is_made_again(
    sharing: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        with sharing.engine(0) as engine:
            for version in (1, 2):
                sharing.move(0.3, seed=version)
                await engine.update_weights(sharing.update(version))
                result = await engine.generate(greedy(1)[0])
                assert result.token_ids == greedy_tokens(sharing)
                gone.append(removed(sharing))

    gone: list[list[Path]] = []
    sharing.renew()
    url = sharing.processes[0].url
    with caplog.at_level(logging.WARNING):
        run(work)
    assert sharing.processes[0].url == url
    assert len(gone[0]) == len(gone[1]) > 1  # several buckets
    assert str(gone[0][0]) in caplog.text


def test_shared_memory_that_is_removed_in_an_update_leaves_the_weights(
    sharing: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps its old weights. The run starts it again with the new ones."""
    sharing.renew()
    prepare = sharing.weights.prepare

    def then_remove(update: Any) -> Any:
        found = prepare(update)
        removed(sharing)
        return found

    async def work() -> Generation:
        with sharing.engine(0) as engine:
            await engine.generate(endless("a", 3))
            sharing.move(0.3)
            monkeypatch.setattr(sharing.weights, "prepare", then_remove)
            await engine.update_weights(sharing.update(1))
            return await engine.generate(greedy(1)[0])

    url = sharing.processes[0].url
    result = run(work)
    assert sharing.processes[0].url != url
    assert result.token_ids == greedy_tokens(sharing)
    assert result.spans == [VersionSpan(1, 0, 9)]


def test_without_room_for_shared_memory_the_old_weights_stay(sharing: Fleet) -> None:
    async def work() -> None:
        with sharing.engine(0) as engine:
            before = await engine.generate(endless("a", 9))
            sharing.move(0.3)
            key = r"actor_rollout_ref\.rollout\.server\.transfer_dir"
            removed(sharing)
            with full_disk(1 << 10), pytest.raises(EngineError, match=f"version 1 refused.*{key}"):
                await engine.update_weights(sharing.update(1))
            assert removed(sharing) == []
            assert await engine.generate(endless("a", 9)) == before
            await engine.update_weights(sharing.update(1))
            after = await engine.generate(greedy(1)[0])
            assert after.spans == [VersionSpan(1, 0, 9)]
            assert after.token_ids == greedy_tokens(sharing)

    sharing.renew()
    run(work)
