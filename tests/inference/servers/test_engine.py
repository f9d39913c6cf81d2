"""`ServedEngine` over two servers, and what happens when they fail."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
import torch

from slipstream.errors import EngineError
from slipstream.inference.servers import vllm
from slipstream.inference.servers.check import CONTEXTS
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import ServerProcess
from slipstream.inference.servers.vllm import VLLMServer
from slipstream.inference.servers.vllm_worker import _start
from slipstream.types import Generation, KVPolicy, StopReason, VersionSpan
from tests.inference.contract import endless, gather, until
from tests.inference.helpers import make_engine, trainer_log_probs
from tests.inference.servers.fleet import Fleet
from tests.inference.servers.local import plant
from tests.inference.servers.real import CLIENT, metric, rpc


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), 2)
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


def greedy_tokens(fleet: Fleet, count: int) -> list[int]:
    """The greedy response of the trainer's policy, from the embedded engine."""
    return make_engine(fleet.policy).run([endless("a", count, temperature=0.0)])[0].token_ids


def tokens(process: ServerProcess) -> float:
    """The number of tokens that a server has generated since the test began."""
    return metric(process, "vllm:generation_tokens_total")


def placed(engine: ServedEngine) -> dict[str, str]:
    """The server of each request that runs."""
    return {name: call.server.key for name, call in engine._calls.items() if call.server}


def test_requests_go_to_the_server_with_the_least_load(fleet: Fleet) -> None:
    found: dict[str, str] = {}

    async def work() -> None:
        for process in fleet.processes:
            plant(process, "delay", 0.02)
        with fleet.engine(0, 1) as engine:
            async with anyio.create_task_group() as tasks:
                for name, tokens in (("a", 60), ("b", 20), ("c", 20), ("d", 30)):
                    tasks.start_soon(engine.generate, endless(name, tokens))
                    await until(lambda name=name: name in placed(engine))  # type: ignore[misc]
                found.update(placed(engine))
                await engine.abort()

    run(work)
    # The load is the number of tokens: 60 | 20, then 60 | 40, then 60 | 70.
    assert found == {"a": "0", "b": "1", "c": "1", "d": "1"}


def test_requests_of_a_group_stay_on_one_server(fleet: Fleet) -> None:
    found: dict[str, str] = {}

    async def work() -> None:
        for process in fleet.processes:
            plant(process, "delay", 0.02)
        with fleet.engine(0, 1) as engine:
            async with anyio.create_task_group() as tasks:
                for name in ("a0", "b0", "a1", "a2", "b1"):
                    tasks.start_soon(engine.generate, replace(endless(name, 40), group=name[0]))
                    await until(lambda name=name: name in placed(engine))  # type: ignore[misc]
                found.update(placed(engine))
                await engine.abort()

    run(work)
    assert found == {"a0": "0", "a1": "0", "a2": "0", "b0": "1", "b1": "1"}


@pytest.mark.parametrize("fault", ["die_after", "core_dies_after"])
def test_a_server_that_dies_in_a_batch_is_started_again_with_the_newest_weights(
    fleet: Fleet, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.move(0.3)
    expected = greedy_tokens(fleet, 30)

    async def work() -> dict[str, Generation]:
        with fleet.engine(0, 1) as engine:
            await engine.update_weights(fleet.update(3))
            plant(fleet.processes[0], fault, 40)
            requests = [
                endless(f"r{i}", 30, temperature=0.0, stop=("none",) if i % 4 > 1 else ())
                for i in range(8)
            ]
            return await gather(engine, *requests)

    url = fleet.processes[0].url
    results = run(work)
    assert fleet.processes[0].url != url
    assert all(process.alive for process in fleet.processes)
    assert url in caplog.text
    for result in results.values():
        assert result.error is None
        assert result.token_ids == expected
        assert result.spans == [VersionSpan(3, 0, 30)]


def test_a_server_that_dies_in_an_update_is_started_again_with_the_new_weights(
    fleet: Fleet,
) -> None:
    for process in fleet.processes:
        plant(process, "delay", 0.02)
    plant(fleet.processes[0], "die_in_update")

    async def work() -> tuple[dict[str, Generation], list[Generation]]:
        results: dict[str, Generation] = {}
        with fleet.engine(0, 1, checked=True) as engine:
            async with anyio.create_task_group() as tasks:

                async def one(name: str) -> None:
                    results[name] = await engine.generate(endless(name, 40))

                for name in ("a", "b"):
                    tasks.start_soon(one, name)
                await until(lambda: len(placed(engine)) == 2)
                # The check of the first use takes a token for each context.
                await until(lambda: all(tokens(p) > CONTEXTS + 2 for p in fleet.processes))
                fleet.move(0.3)
                await engine.update_weights(fleet.update(1))
            after = [await engine.generate(endless(f"c{i}", 9, temperature=0.0)) for i in range(2)]
            return results, after

    results, after = run(work)
    assert [span.version for span in results["a"].spans] == [1]  # begun again
    assert [span.version for span in results["b"].spans] == [0, 1]
    assert {name: len(result.token_ids) for name, result in results.items()} == {"a": 40, "b": 40}
    assert [result.token_ids for result in after] == [greedy_tokens(fleet, 9)] * 2


@pytest.mark.parametrize(
    ("fault", "value", "text"),
    [
        ("version", "0.22.0", r"0\.22\.0; vLLM 0\.28 or newer"),
        ("version", "dev", "version dev"),
        ("dev_mode", False, "VLLM_SERVER_DEV_MODE=1"),
        ("scale_out", False, "--enable-scale-out"),
        ("extension", False, "--worker-extension-cls slipstream_vllm_worker.SlipstreamWorker"),
        ("garbage", "/version", "not JSON"),
        ("garbage", "/openapi.json", "not JSON"),
        ("hang", "/version", "does not answer"),
        ("hang", "/collective_rpc", "does not answer"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(
    fleet: Fleet, fault: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 0.3 if fault == "hang" else 60
    monkeypatch.setattr(vllm, "CONTROL_S", limit)
    process = fleet.processes[0]
    plant(process, fault, value)
    with pytest.raises(EngineError, match=f"{process.url}.*{text}"):
        anyio.run(VLLMServer(process.url, update_s=limit).check)


def test_a_server_of_another_run_is_refused(fleet: Fleet) -> None:
    process = fleet.processes[0]
    server, other = VLLMServer(process.url), VLLMServer(process.url)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as run:
        other._owner = {**other._owner, "pid": run.pid, "start": _start(run.pid), "host": "h"}
        anyio.run(other.check)
        text = f"{process.url} is in use by another run, process {run.pid} on h.*server.urls"
        with pytest.raises(EngineError, match=text):
            anyio.run(server.check)
        server.close()  # It is not the owner.
        with pytest.raises(EngineError, match=text):
            anyio.run(server.check)
        other.close()
        anyio.run(server.check)
        server.close()
        anyio.run(other.check)
        run.kill()
    # A run that was killed releases nothing.
    anyio.run(server.check)
    server.close()


def test_a_worker_extension_of_another_version_is_refused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "METHODS", vllm.METHODS | {"slipstream_new"})
    text = "slipstream_new; start it with --worker-extension-cls"
    with pytest.raises(EngineError, match=text):
        anyio.run(VLLMServer(fleet.processes[0].url).check)


def test_an_old_server_without_versions_per_token_gives_errors(fleet: Fleet) -> None:
    plant(fleet.processes[0], "version", "0.22.0")

    async def work() -> Any:
        with fleet.engine(0, attached=True) as engine:
            return await engine.generate(endless("a", 5))

    result = run(work)
    assert result.stop_reason is StopReason.ERROR
    assert "weight versions per token" in str(result.error)


@pytest.mark.parametrize(
    ("fault", "value", "stop", "text"),
    [
        ("garbage", "/inference/v1/generate", (), "not JSON"),
        ("error_after", 3, ("none",), "the planted error"),
    ],
)
def test_a_bad_answer_is_an_error_of_its_request(
    fleet: Fleet, fault: str, value: Any, stop: tuple[str, ...], text: str
) -> None:
    process = fleet.processes[0]
    plant(process, fault, value)

    async def work() -> Any:
        with fleet.engine(0) as engine:
            return await engine.generate(endless("a", 9, stop=stop))

    result = run(work)
    assert result.stop_reason is StopReason.ERROR
    assert process.url in str(result.error)
    assert text in str(result.error)
    assert process.alive


def test_a_request_that_is_never_answered_can_be_cancelled(fleet: Fleet) -> None:
    plant(fleet.processes[0], "hang", "/inference/v1/generate")

    async def work() -> None:
        with fleet.engine(0) as engine:
            with anyio.move_on_after(0.2) as scope:
                await engine.generate(endless("a"))
            assert scope.cancelled_caught
            assert engine.stats().running == engine.stats().waiting == 0
            plant(fleet.processes[0], "hang", None)
            assert len((await engine.generate(endless("a", 3))).token_ids) == 3

    run(work)


@pytest.mark.parametrize(
    ("fault", "value", "text"),
    [
        ("hang", "/pause", "does not answer"),
        ("hang", "/collective_rpc", "does not answer"),
        ("garbage", "/collective_rpc", "not JSON"),
        ("extension", False, "slipstream_load"),
        ("wrong_sum", True, "received other values of model.embed_tokens.weight"),
    ],
)
def test_an_update_that_fails_at_an_attached_server_is_an_error_that_names_it(
    fleet: Fleet, fault: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 0.3 if fault == "hang" else 60
    monkeypatch.setattr(vllm, "CONTROL_S", limit)
    process = fleet.processes[0]
    plant(process, fault, value)

    async def work() -> None:
        with fleet.engine(0, attached=True) as engine:
            for replica in engine._replicas:
                assert isinstance(replica.server, VLLMServer)
                replica.server._update_s = limit
            await engine.update_weights(fleet.update(1))

    with pytest.raises(EngineError, match=f"version 1 failed: .*{process.url}.*{text}"):
        run(work)


@contextmanager
def full_disk(size: int = 1 << 14) -> Iterator[None]:
    """No file of this process can become larger than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_for_the_weights_the_old_ones_stay(fleet: Fleet) -> None:
    async def work() -> None:
        with fleet.engine(0) as engine:
            before = await engine.generate(endless("a", 9))
            fleet.move(0.3)
            key = r"actor_rollout_ref\.rollout\.server\.transfer_dir"
            with full_disk(), pytest.raises(EngineError, match=f"version 1 refused.*{key}"):
                await engine.update_weights(fleet.update(1))
            assert await engine.generate(endless("a", 9)) == before
            await engine.update_weights(fleet.update(1))
            after = await engine.generate(endless("a", 9))
            assert after.spans == [VersionSpan(1, 0, 9)]
            assert after.token_ids != before.token_ids

    run(work)


def test_a_server_with_another_model_is_refused_at_its_first_use(fleet: Fleet) -> None:
    fleet.move(0.3)
    other = fleet.weights.write(fleet.update(0))
    rpc(fleet.processes[1], "slipstream_load", str(other.path))
    fleet.renew_trainer()

    async def work() -> None:
        with fleet.engine(0, 1, attached=True, checked=True) as engine:
            await engine.generate(endless("a"))

    with pytest.raises(EngineError, match=f"{fleet.processes[1].url}, policy version 0: .*differ"):
        run(work)


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
@pytest.mark.parametrize("policy", KVPolicy)
def test_right_servers_pass_the_check_of_small_updates(
    fleet: Fleet, rounding: float, policy: KVPolicy
) -> None:
    async def work() -> None:
        with fleet.engine(0, 1, attached=True, checked=True) as engine:
            for version, relative in enumerate((1e-4, 1e-6, 1e-6), start=1):
                fleet.move(relative, seed=version)
                await engine.update_weights(fleet.update(version, kv_policy=policy))
            assert engine.stats().version == 3

    for process in fleet.processes:
        plant(process, "rounding", rounding)
    run(work)


@pytest.mark.parametrize("relative", [1e-4, 1e-6])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("skip_load", "still computes with the weights before the update"),
        ("forget_head", "its log-probs|has log-probs"),
        ("stale_cache", "its log-probs|has log-probs"),
    ],
)
def test_a_server_that_misses_a_part_of_an_update_is_found(
    fleet: Fleet, fault: str, text: str, relative: float
) -> None:
    plant(fleet.processes[1], fault)

    async def work() -> None:
        with fleet.engine(0, 1, attached=True, checked=True) as engine:
            await engine.generate(endless("a", 3))
            fleet.move(relative)
            await engine.update_weights(fleet.update(1))

    url = fleet.processes[1].url
    with pytest.raises(EngineError, match=f"{url}, policy version 1: it.*({text})"):
        run(work)


def test_new_requests_do_not_share_prefixes_with_those_before_an_update(fleet: Fleet) -> None:
    prompt = tuple(range(3, 63))

    async def work() -> list[Generation]:
        found = []
        with fleet.engine(0) as engine:
            for version in (1, 2):
                fleet.move(0.1, seed=version)
                await engine.update_weights(fleet.update(version))
                found.append(await engine.generate(endless("a", 9, prompt=prompt)))
        return found

    last = run(work)[-1]
    request = endless("a", 9, prompt=prompt)
    expected = trainer_log_probs(fleet.policy, torch.float32, request, last)
    assert last.log_probs == pytest.approx(expected, abs=1e-4)


def test_small_updates_that_a_rounding_server_misses_add_up(fleet: Fleet) -> None:
    plant(fleet.processes[1], "rounding", 1e-5)
    plant(fleet.processes[1], "skip_load")
    done: list[int] = []

    async def work() -> None:
        with fleet.engine(1, attached=True, checked=True) as engine:
            await engine.generate(endless("a", 3))
            for version in range(1, 60):
                fleet.move(1e-7, seed=version)
                await engine.update_weights(fleet.update(version))
                done.append(version)

    with pytest.raises(EngineError, match="still computes with the weights before the update"):
        run(work)
    assert 1 <= len(done) < 59


def test_a_server_that_misses_an_update_is_started_again(fleet: Fleet) -> None:
    plant(fleet.processes[0], "skip_load")
    url = fleet.processes[0].url

    async def work() -> Any:
        with fleet.engine(0, checked=True) as engine:
            await engine.generate(endless("a", 3))
            fleet.move(0.3)
            await engine.update_weights(fleet.update(1))
            return await engine.generate(endless("a", 9, temperature=0.0))

    result = run(work)
    assert fleet.processes[0].url != url
    assert result.token_ids == greedy_tokens(fleet, 9)
    assert result.spans == [VersionSpan(1, 0, 9)]


@pytest.mark.parametrize("policy", KVPolicy)
def test_running_requests_keep_or_recompute_their_keys_and_values(
    fleet: Fleet, policy: KVPolicy
) -> None:
    """After an update with `recompute`, log-probs are those of the new policy in the whole context.
    With `keep`, they depend on keys and values of the old policy."""
    plant(fleet.processes[0], "delay", 0.02)
    request = endless("a", 60, prompt=tuple(range(3, 33)))

    async def work() -> Generation:
        results: list[Generation] = []
        with fleet.engine(0) as engine:
            async with anyio.create_task_group() as tasks:

                async def one() -> None:
                    results.append(await engine.generate(request))

                tasks.start_soon(one)
                await until(lambda: tokens(fleet.processes[0]) > 2)
                fleet.move(0.1)
                await engine.update_weights(fleet.update(1, kv_policy=policy))
        return results[0]

    result = run(work)
    assert [span.version for span in result.spans] == [0, 1]
    new = result.spans[1].start
    expected = trainer_log_probs(fleet.policy, torch.float32, request, result)[new:]
    largest = max(abs(a - b) for a, b in zip(result.log_probs[new:], expected, strict=True))
    assert (largest < 1e-4) == (policy is KVPolicy.RECOMPUTE)


def test_weights_of_the_same_version_do_not_share_prefixes(fleet: Fleet) -> None:
    prompt = tuple(range(3, 63))
    request = endless("a", 9, prompt=prompt)

    async def work() -> Generation:
        with fleet.engine(0) as engine:
            await engine.update_weights(fleet.update(1))
            await engine.generate(request)
            fleet.move(0.1)
            await engine.update_weights(fleet.update(1))
            return await engine.generate(request)

    result = run(work)
    expected = trainer_log_probs(fleet.policy, torch.float32, request, result)
    assert result.log_probs == pytest.approx(expected, abs=1e-4)


def test_two_engines_on_one_server_do_not_share_prefixes(fleet: Fleet) -> None:
    request = endless("a", 9, prompt=tuple(range(3, 63)))

    async def work() -> Generation:
        with fleet.engine(0, attached=True) as engine:
            await engine.generate(request)
        fleet.move(0.1)
        rpc(fleet.processes[0], "slipstream_load", str(fleet.weights.write(fleet.update(0)).path))
        with fleet.engine(0, attached=True) as engine:
            return await engine.generate(request)

    result = run(work)
    expected = trainer_log_probs(fleet.policy, torch.float32, request, result)
    assert result.log_probs == pytest.approx(expected, abs=1e-4)


def test_the_check_compares_with_the_weights_of_the_update(fleet: Fleet) -> None:
    """The trainer may have gone on: `trainer.sync_every`, or an update from a checkpoint."""

    async def work() -> None:
        with fleet.engine(0, attached=True, checked=True) as engine:
            await engine.generate(endless("a", 3))
            fleet.move(1e-3)
            update = fleet.update(1)
            fleet.move(0.1, seed=2)
            await engine.update_weights(update)

    run(work)


def test_requests_that_wait_for_a_server_to_start_can_be_aborted_and_cancelled(
    fleet: Fleet,
) -> None:
    """Neither ends the start: other requests wait for it."""
    process = fleet.processes[0]
    plant(process, "delay", 0.02)
    plant(process, "die_after", 3)
    url = process.url

    async def work() -> tuple[list[Generation], Generation]:
        results: dict[str, Generation] = {}
        with fleet.engine(0) as engine:

            async def one(name: str) -> None:
                results[name] = await engine.generate(endless(name, 9, temperature=0.0))

            async with anyio.create_task_group() as tasks:
                for name in ("a", "b"):
                    tasks.start_soon(one, name)
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as cancelled:
                        cancelled.start_soon(one, "c")
                        await until(lambda: engine._replicas[0].starting)
                        scope.cancel()
                aborted = await engine.abort(["a"])
                assert engine._replicas[0].starting
        return aborted, results["b"]

    aborted, other = run(work)
    assert [(r.request_id, r.token_ids) for r in aborted] == [("a", [])]
    assert process.url != url
    assert other.token_ids == greedy_tokens(fleet, 9)


def test_a_broken_connection_to_a_healthy_server_does_not_start_it_again(fleet: Fleet) -> None:
    process = fleet.processes[0]
    url = process.url
    plant(process, "drop", 2)

    async def work() -> Generation:
        with fleet.engine(0) as engine:
            return await engine.generate(endless("a", 9, temperature=0.0))

    result = run(work)
    assert process.url == url
    assert result.token_ids == greedy_tokens(fleet, 9)


def test_a_server_that_generates_nothing_is_started_again(fleet: Fleet) -> None:
    process = fleet.processes[0]
    url = process.url
    plant(process, "hang", "/inference/v1/generate")

    async def work() -> Generation:
        with fleet.engine(0, stall_s=1.0) as engine:
            return await engine.generate(endless("a", 9, temperature=0.0))

    result = run(work)
    assert process.url != url
    assert result.token_ids == greedy_tokens(fleet, 9)


def test_a_server_is_not_taken_for_stalled_while_it_works_or_is_paused(fleet: Fleet) -> None:
    process = fleet.processes[0]
    url = process.url
    plant(process, "delay", 0.1)

    async def work() -> Generation:
        results: list[Generation] = []
        with fleet.engine(0, stall_s=0.7) as engine:
            async with anyio.create_task_group() as tasks:

                async def one() -> None:
                    results.append(await engine.generate(endless("a", 30)))

                tasks.start_soon(one)
                await until(lambda: tokens(process) > 2)
                await engine.pause()
                await anyio.sleep(2.5)
                await engine.resume()
        return results[0]

    result = run(work)
    assert process.url == url
    assert len(result.token_ids) == 30


def test_a_request_that_another_client_aborts_is_begun_again(fleet: Fleet) -> None:
    process = fleet.processes[0]
    plant(process, "delay", 0.02)

    async def work() -> Generation:
        results: list[Generation] = []
        with fleet.engine(0) as engine:
            async with anyio.create_task_group() as tasks:

                async def one() -> None:
                    results.append(await engine.generate(endless("a", 20, temperature=0.0)))

                tasks.start_soon(one)
                await until(lambda: tokens(process) > 2)
                ids = [f"generate-tokens-{call.wire_id}" for call in engine._calls.values()]
                route = process.url + "/inference/v1/abort_requests"
                CLIENT.post(route, json={"request_ids": ids}).raise_for_status()
        return results[0]

    result = run(work)
    assert result.stop_reason is StopReason.LENGTH
    assert result.token_ids == greedy_tokens(fleet, 20)


def paused(fleet: Fleet) -> bool:
    found: bool = CLIENT.get(fleet.processes[0].url + "/is_paused").json()["is_paused"]
    return found


def test_a_cancelled_update_leaves_no_server_paused(fleet: Fleet) -> None:
    plant(fleet.processes[0], "hang", "/update_weight_version")

    async def work() -> Generation:
        with fleet.engine(0) as engine:
            engine._prepared = True
            fleet.move(0.3)
            with anyio.move_on_after(1.0) as scope:
                await engine.update_weights(fleet.update(1))
            assert scope.cancelled_caught
            assert not paused(fleet)
            plant(fleet.processes[0], "hang", None)
            # The weights of the server are not known: it is started again, with the new ones.
            return await engine.generate(endless("a", 9, temperature=0.0))

    url = fleet.processes[0].url
    result = run(work)
    assert fleet.processes[0].url != url
    assert result.token_ids == greedy_tokens(fleet, 9)
    assert result.spans == [VersionSpan(1, 0, 9)]


def test_an_update_that_an_attached_server_refuses_leaves_it_running(fleet: Fleet) -> None:
    plant(fleet.processes[0], "garbage", "/update_weight_version")

    async def work() -> None:
        with fleet.engine(0, attached=True) as engine:
            engine._prepared = True
            await engine.update_weights(fleet.update(1))

    with pytest.raises(EngineError, match=f"version 1 failed: .*{fleet.processes[0].url}"):
        run(work)
    assert not paused(fleet)


def test_a_server_that_fails_the_check_gets_no_more_requests(fleet: Fleet) -> None:
    plant(fleet.processes[1], "skip_load")
    found = set[str]()

    async def work() -> None:
        with fleet.engine(0, 1, attached=True, checked=True) as engine:
            await engine.generate(endless("a", 3))
            fleet.move(0.3)
            with pytest.raises(EngineError, match="still computes with the weights before"):
                await engine.update_weights(fleet.update(1))
            for process in fleet.processes:
                plant(process, "delay", 0.02)
            async with anyio.create_task_group() as tasks:
                for name in ("b", "c", "d"):
                    tasks.start_soon(engine.generate, endless(name, 20))
                await until(lambda: len(placed(engine)) == 3)
                found.update(placed(engine).values())
                await engine.abort()

    run(work)
    assert found == {"0"}


def test_requests_to_an_attached_server_that_dies_are_errors_that_name_it(fleet: Fleet) -> None:
    plant(fleet.processes[0], "die_after", 10)

    async def work() -> tuple[dict[str, Generation], dict[str, Generation]]:
        with fleet.engine(0, attached=True) as engine:
            first = await gather(engine, *(endless(f"a{i}", 30) for i in range(3)))
            return first, await gather(engine, endless("b"))

    url = fleet.processes[0].url
    for results in run(work):
        for result in results.values():
            assert result.stop_reason is StopReason.ERROR
            assert result.error is not None
            assert url in result.error
            assert "server.urls" in result.error
