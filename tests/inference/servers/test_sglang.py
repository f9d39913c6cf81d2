"""SGLang's client on the contract server: the contract suite, faults, and what is particular to
SGLang."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import tests.inference.contract_updates  # noqa: F401 (adds its cases to CASES)
from slipstream.errors import EngineError
from slipstream.inference.servers import sglang
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.protocol import Answer
from slipstream.inference.servers.sglang import SGLangServer, sampling_problem
from slipstream.inference.servers.weights import WeightFolder
from slipstream.sampling.truncate import truncate
from slipstream.types import GenerateRequest, Generation, SamplingParams, StopReason, VersionSpan
from tests.inference.contract import CASES, Case, Harness, endless, gather
from tests.inference.helpers import VOCAB, trainer_log_probs
from tests.inference.servers.local import plant
from tests.inference.servers.real import decoder
from tests.inference.servers.sglang_fleet import SGLangFleet, post
from tests.inference.servers.test_engine import greedy_tokens, run


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
def harness(fleet: SGLangFleet, tmp_path: Path) -> Iterator[Harness]:
    process = fleet.processes[0]
    # One of the cases closes the engine, and the engine removes its folder.
    weights = WeightFolder(fleet.policy, torch.float32, tmp_path)
    with fleet.engine(0, attached=True, weights=weights) as engine:
        yield Harness(engine, partial(plant, process, "delay"), decoder)
    plant(process, "delay", 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(harness: Harness, case: Case) -> None:
    async def bounded() -> None:
        with anyio.fail_after(120):
            await case(harness)

    anyio.run(bounded)


@pytest.mark.parametrize(
    ("fault", "value", "text"),
    [
        ("version", "0.5.22.post1", r"version 0\.5\.22\.post1; SGLang 0\.5\.23 or newer"),
        ("version", "dev", r"version dev; SGLang 0\.5\.23 or newer"),
        ("original_log_probs", True, "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("info", {"dp_size": 2}, "--dp-size 2"),
        ("info", {"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ("info", {"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ("info", {"enable_metrics": False}, "start it with --enable-metrics"),
        ("garbage", "/generate", "not JSON"),
        ("hang", "/server_info", "does not answer"),
        ("hang", "/generate", "does not answer"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(
    fleet: SGLangFleet, fault: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 0.3 if fault == "hang" else 60
    monkeypatch.setattr(sglang, "CONTROL_S", limit)
    process = fleet.processes[0]
    plant(process, fault, value)
    with pytest.raises(EngineError, match=f"{process.url}.*{text}"):
        anyio.run(SGLangServer(process.url, update_s=limit).check)


def test_a_right_server_is_accepted_even_if_it_was_left_paused(fleet: SGLangFleet) -> None:
    process = fleet.processes[0]
    post(process, "/pause_generation", {"mode": "in_place"}).raise_for_status()
    server = SGLangServer(process.url, update_s=30)
    anyio.run(server.check)
    anyio.run(server.check_model, fleet.policy.config.to_hf(), 96, "float32")
    assert anyio.run(server.version) == "0.5.23"


def test_a_version_is_read_from_the_older_route(fleet: SGLangFleet) -> None:
    process = fleet.processes[0]
    plant(process, "server_info", False)
    plant(process, "version", "0.4.9")
    assert anyio.run(SGLangServer(process.url).version) == "0.4.9"


@pytest.mark.parametrize(
    ("fault", "value", "text"),
    [
        ("info", {"max_req_input_len": 95}, "up to 95 tokens.*--context-length 104"),
        ("info", {"dtype": "bfloat16"}, "computes in bfloat16.*--dtype float32"),
        ("model_info", {"model_type": "llama"}, "its model_type is llama.*--model-path"),
    ],
)
def test_a_server_of_another_model_is_refused(
    fleet: SGLangFleet, fault: str, value: Any, text: str
) -> None:
    process = fleet.processes[0]
    plant(process, fault, value)
    server = SGLangServer(process.url)
    with pytest.raises(EngineError, match=f"{process.url}.*{text}"):
        anyio.run(server.check_model, fleet.policy.config.to_hf(), 96, "float32")


@pytest.mark.parametrize("stop", [(), ("none",)])
@pytest.mark.parametrize("fault", ["die_after", "core_dies_after"])
def test_a_server_that_dies_in_a_batch_is_started_again_with_the_newest_weights(
    fleet: SGLangFleet, fault: str, stop: tuple[str, ...]
) -> None:
    fleet.move(0.3)
    expected = greedy_tokens(fleet, 30)

    async def work() -> dict[str, Generation]:
        with fleet.engine(0, 1) as engine:
            await engine.update_weights(fleet.update(3))
            plant(fleet.processes[0], fault, 40)
            requests = [endless(f"r{i}", 30, temperature=0.0, stop=stop) for i in range(6)]
            return await gather(engine, *requests)

    url = fleet.processes[0].url
    results = run(work)
    assert fleet.processes[0].url != url
    for result in results.values():
        assert result.error is None
        assert result.token_ids == expected
        assert result.spans == [VersionSpan(3, 0, 30)]


@pytest.mark.parametrize("fault", ["die_in_update", "skip_load"])
def test_a_server_that_fails_in_an_update_is_started_again_with_the_new_weights(
    fleet: SGLangFleet, fault: str
) -> None:
    plant(fleet.processes[0], fault)
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


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("skip_load", "still computes with the weights before the update"),
        ("forget_head", "its log-probs|has log-probs"),
        ("stale_cache", "its log-probs|has log-probs"),
    ],
)
def test_a_server_that_misses_a_part_of_an_update_is_found(
    fleet: SGLangFleet, fault: str, text: str
) -> None:
    plant(fleet.processes[1], fault)

    async def work() -> None:
        with fleet.engine(0, 1, attached=True, checked=True) as engine:
            await engine.generate(endless("a", 3))
            fleet.move(1e-4)
            await engine.update_weights(fleet.update(1))

    url = fleet.processes[1].url
    with pytest.raises(EngineError, match=f"{url}, policy version 1: it.*({text})"):
        run(work)


def test_a_server_with_another_model_is_refused_at_its_first_use(fleet: SGLangFleet) -> None:
    fleet.move(0.3)
    other = fleet.weights.write(fleet.update(0))
    fleet.load(fleet.processes[1], other.path)
    fleet.renew_trainer()

    async def work() -> None:
        with fleet.engine(0, 1, attached=True, checked=True) as engine:
            await engine.generate(endless("a"))

    with pytest.raises(EngineError, match=f"{fleet.processes[1].url}, policy version 0: .*differ"):
        run(work)


@pytest.mark.parametrize(
    ("fault", "value", "text"),
    [
        ("hang", "/pause_generation", "does not answer"),
        ("hang", "/update_weights_from_disk", "does not answer"),
        ("garbage", "/update_weights_from_disk", "not JSON"),
        ("garbage", "/update_weight_version", "not JSON"),
    ],
)
def test_an_update_that_fails_at_an_attached_server_is_an_error_that_names_it(
    fleet: SGLangFleet, fault: str, value: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 0.3 if fault == "hang" else 60
    process = fleet.processes[0]

    async def work() -> None:
        with fleet.engine(0, attached=True) as engine:
            await engine.generate(endless("a", 1))
            plant(process, fault, value)
            monkeypatch.setattr(sglang, "CONTROL_S", limit)
            for replica in engine._replicas:
                assert isinstance(replica.server, SGLangServer)
                replica.server._update_s = limit
            await engine.update_weights(fleet.update(1))

    with pytest.raises(EngineError, match=rf"(?s){process.url}.*{text}.*server\.urls"):
        run(work)


@pytest.mark.parametrize(
    ("fault", "value", "stop", "text"),
    [
        ("garbage", "/generate", (), "not JSON"),
        ("error_after", 3, ("none",), "the planted error"),
        ("version", "0.5.19", (), "weight versions per token; SGLang 0.5.23 or newer"),
        ("version", "0.5.19", ("none",), "weight versions per token; SGLang 0.5.23 or newer"),
    ],
)
def test_a_bad_answer_is_an_error_of_its_request(
    fleet: SGLangFleet, fault: str, value: Any, stop: tuple[str, ...], text: str
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


def test_a_broken_connection_to_a_healthy_server_does_not_start_it_again(
    fleet: SGLangFleet,
) -> None:
    process = fleet.processes[0]
    plant(process, "drop", 1)

    async def work() -> Any:
        with fleet.engine(0) as engine:
            return await engine.generate(endless("a", 9))

    url = process.url
    assert len(run(work).token_ids) == 9
    assert process.url == url


def ask(server: SGLangServer, request: GenerateRequest, **more: Any) -> Any:
    """A coroutine with the answer to a request."""
    own = {"seed": 5, "stop_token_ids": [], "salt": "s", "ends": None, **more}
    return server.generate(request, f"{request.request_id}-0", **own)


def test_computed_tokens_are_counted(fleet: SGLangFleet) -> None:
    server = SGLangServer(fleet.processes[0].url)

    async def work() -> list[float]:
        await server.set_version(0)
        before = await server.progress()
        await ask(server, endless("a", 9))
        return [before, await server.progress()]

    before, after = run(work)
    assert after - before >= 9


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {}])
@pytest.mark.parametrize("stop", [(), ("none",)])
def test_both_log_probs_are_those_of_their_distributions(
    fleet: SGLangFleet, settings: dict[str, Any], stop: tuple[str, ...]
) -> None:
    request = endless("a", 20, stop=stop, **settings)

    async def work() -> Any:
        with fleet.engine(0) as engine:
            return await engine.generate(request)

    result = run(work)
    assert result.error is None
    full = trainer_log_probs(fleet.policy, torch.float32, request, result)
    assert result.log_probs == pytest.approx(full, abs=1e-4)
    p = request.params
    kept = []
    for end in range(20):
        ids = [*request.prompt_ids, *result.token_ids[:end]]
        rows = [
            trainer_log_probs(
                fleet.policy,
                torch.float32,
                endless("a", 1, prompt=tuple(ids), **settings),
                Generation(
                    request_id="a",
                    token_ids=[token],
                    log_probs=[],
                    sampling_log_probs=[],
                    spans=[],
                    stop_reason=StopReason.LENGTH,
                ),
            )[0]
            for token in range(VOCAB)
        ]
        row = torch.tensor([rows])
        support = truncate(
            row, torch.tensor([p.top_k]), torch.tensor([p.top_p]), torch.tensor([p.min_p])
        )
        kept.append(float(torch.where(support, row, -math.inf).logsumexp(-1)))
    expected = [value - norm for value, norm in zip(full, kept, strict=True)]
    assert result.sampling_log_probs == pytest.approx(expected, abs=1e-4)
    assert (result.sampling_log_probs != result.log_probs) == bool(settings)


def test_a_support_that_reaches_the_servers_limit_is_an_error(fleet: SGLangFleet) -> None:
    plant(fleet.processes[0], "info", {"sampling_mask_max_tokens": 3})
    server = SGLangServer(fleet.processes[0].url, update_s=30)

    async def work() -> None:
        await server.check()
        await server.set_version(0)
        await ask(server, endless("b", 20, top_k=3))
        with pytest.raises(EngineError, match=r"top_k=4: .*--sampling-mask-max-tokens"):
            await ask(server, endless("c", 20, top_k=4))
        await ask(server, endless("a", 20, top_p=0.99))

    with pytest.raises(EngineError, match=r"sampled from 3 tokens.*set top_k to less than 3"):
        run(work)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"temperature": 0.7, "top_k": 1}, "set temperature=0"),
        ({"top_k": 4097}, "at most 4096"),
        ({"min_p": 0.1, "top_p": 0.9}, "set top_k"),
        ({"min_p": 0.1, "deterministic": True}, "enable_deterministic_inference"),
        ({"temperature": 1.0, "top_k": 1}, None),
        ({"temperature": 0.0, "top_k": 1, "min_p": 0.1}, None),
        ({"min_p": 0.1}, None),
        ({"min_p": 0.1, "top_p": 0.9, "top_k": 40}, None),
        ({"top_p": 0.9, "deterministic": True}, None),
    ],
)
def test_sampling_without_log_probs_is_refused(settings: dict[str, Any], key: str | None) -> None:
    deterministic = settings.pop("deterministic", False)
    found = sampling_problem(
        SamplingParams(max_tokens=1, **settings), deterministic=deterministic, support=4096
    )
    if key is None:
        assert found is None
    else:
        assert found is not None
        assert key in found


def test_a_request_that_would_end_the_server_is_an_error_instead(fleet: SGLangFleet) -> None:
    """With --enable-deterministic-inference, an assertion of SGLang's sampler fails for min_p."""
    process = fleet.processes[0]
    server = SGLangServer(process.url, update_s=30)
    anyio.run(server.check)
    with pytest.raises(EngineError, match=r"'a': min_p=0\.2"):
        run(lambda: ask(server, endless("a", 3, min_p=0.2)))
    assert process.alive


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_the_server_cuts_is_an_error(fleet: SGLangFleet, stream: bool) -> None:
    server = SGLangServer(fleet.processes[0].url)
    ends = (lambda new: False) if stream else None
    request = endless("a", 44, prompt=(3,) * 60)

    async def work() -> None:
        await server.set_version(0)
        await ask(server, request, ends=ends)

    # Of a context of 104 tokens, a sequence can use 102.
    with pytest.raises(EngineError, match=r"after 42 of 44 tokens.*--context-length"):
        run(work)


def test_the_client_sends_every_field_that_the_server_knows(fleet: SGLangFleet) -> None:
    answer = post(fleet.processes[0], "/generate", {"input_ids": [3], "sampling_params": {"x": 1}})
    assert answer.status_code == 400
    text = answer.json()["error"]
    assert text.startswith("unknown field `x`, expected one of ")
    known = set(text.partition("one of ")[2].replace("`", "").split(", "))
    body = sglang._body([3], SamplingParams(max_tokens=1), seed=0, stops=[])
    assert known - set(body["sampling_params"]) == {"watermark", "choice"}
    assert not set(body["sampling_params"]) - known


def test_no_id_at_the_server_is_the_beginning_of_another_one() -> None:
    names = ["a-1", "a-10", "a-1.b-2", "1:a-1", "", "a", "3:a-1"]
    for first, second in itertools.permutations(map(sglang._rid, names), 2):
        assert not second.startswith(first)


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_queued_request_that_is_aborted_returns_each_token_once(
    fleet: SGLangFleet, cumulative: bool
) -> None:
    process = fleet.processes[0]
    server = SGLangServer(process.url)
    plant(process, "cumulative", cumulative)
    plant(process, "delay", 0.02)
    request = endless("a", 60)

    async def work() -> tuple[Answer, Answer]:
        await server.set_version(0)
        plant(process, "delay", 0)
        whole = await ask(server, request, ends=lambda new: False)
        plant(process, "delay", 0.02)
        some, found = anyio.Event(), []

        def ends(new: Answer) -> bool:
            found.extend(new.token_ids)
            if len(found) >= 4:
                some.set()
            return False

        parts: list[Answer] = []

        async def one() -> None:
            parts.append(await ask(server, request, ends=ends))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await some.wait()
            await server.pause()
            await server.abort(["a-0"])
        await server.resume()
        return whole, parts[0]

    whole, part = run(work)
    count = len(part.token_ids)
    assert 4 <= count < 60
    assert part.aborted
    assert part.token_ids == whole.token_ids[:count]
    assert part.log_probs == pytest.approx(whole.log_probs[:count])
    assert part.spans == [VersionSpan(0, 0, count)]


def test_a_request_whose_abort_the_server_loses_ends(
    fleet: SGLangFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang loses the abort of a request that waits for the end of a pause."""
    monkeypatch.setattr(sglang, "ABORTED_S", 0.2)
    server = SGLangServer(fleet.processes[0].url)

    async def work() -> Answer:
        await server.set_version(0)
        await server.pause()
        answers: list[Answer] = []

        async def one() -> None:
            answers.append(await ask(server, endless("a", 60)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await anyio.sleep(0.2)
            for _ in range(3):
                await server.abort(["a-0"])
        await server.resume()
        return answers[0]

    assert run(work) == Answer(aborted=True)


def test_requests_get_new_noise_without_deterministic_inference(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    class Plain(SGLangFleet):
        settings = {  # noqa: RUF012
            name: value
            for name, value in SGLangFleet.settings.items()
            if name != "enable_deterministic_inference"
        }

    fleet = Plain(tmp_path_factory.mktemp("plain"), 1)

    async def work() -> list[Generation]:
        with fleet.engine(0, checked=True) as engine:
            assert isinstance(engine, ServedEngine)
            settings = {"min_p": 0.05}
            return [await engine.generate(endless("a", 20, **settings)) for _ in range(2)]

    try:
        first, second = run(work)
    finally:
        fleet.close()
    assert first.error is None
    assert first.token_ids != second.token_ids
