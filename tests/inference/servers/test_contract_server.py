"""The contract suite on the contract server, and what the server takes over from vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest

import tests.inference.contract_updates  # noqa: F401 (adds its cases to CASES)
from slipstream.inference.servers.process import ServerProcess
from tests.inference.contract import CASES, Case, Harness
from tests.inference.servers.local import launch, plant
from tests.inference.servers.real import CLIENT, decoder, engine_on

GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = launch(tmp_path_factory.mktemp("server"))
    yield running
    running.close()


@pytest.fixture
def harness(process: ServerProcess) -> Iterator[Harness]:
    engine = engine_on(process)
    yield Harness(engine, partial(plant, process, "delay"), decoder)
    plant(process, "delay", 0)
    engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(harness: Harness, case: Case) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await case(harness)

    anyio.run(bounded)


SAMPLING: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "seed": 5,
    "ignore_eos": True,
    "stop_token_ids": [],
    "logprobs": 0,
    "detokenize": False,
}


def generate(process: ServerProcess, prompt: tuple[int, ...] = (3, 4, 5), **more: Any) -> Any:
    body = {
        "request_id": "a",
        "token_ids": list(prompt),
        "sampling_params": {**SAMPLING, **more},
    }
    return CLIENT.post(process.url + GENERATE, json=body)


def choice(process: ServerProcess, **more: Any) -> Any:
    answer = generate(process, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def post(process: ServerProcess, route: str, body: Any = None) -> httpx2.Response:
    return CLIENT.post(process.url + route, json=body)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": 3.0}, "temperature must be in [0, 2]"),
        ({"logprobs": 21}, "21"),
        ({"logprobs": 1, "logprob_token_ids": [3, 4]}, "must equal"),
        ({"logprob_token_ids": [64]}, "out-of-vocab"),
        ({"stop": ["x"]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": (3,) * 96}, "96"),
    ],
)
def test_requests_that_vllm_refuses(process: ServerProcess, change: Any, text: str) -> None:
    answer = generate(process, **change)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_a_long_response_is_cut_to_the_context_without_an_error(process: ServerProcess) -> None:
    found = choice(process, max_tokens=200)
    assert (len(found["token_ids"]), found["finish_reason"]) == (93, "length")


def test_fields_that_a_client_forgets_change_the_response(process: ServerProcess) -> None:
    full = choice(process, max_tokens=20)
    for name in ("temperature", "top_p", "top_k", "seed"):
        body = {"token_ids": [3, 4, 5], "sampling_params": {**SAMPLING, "max_tokens": 20}}
        del body["sampling_params"][name]  # type: ignore[attr-defined]
        found = post(process, GENERATE, body).json()["choices"][0]
        assert found["token_ids"] != full["token_ids"], name


def test_log_probs_of_given_tokens_are_cut_as_vllm_does(process: ServerProcess) -> None:
    assert choice(process, logprobs=None, logprob_token_ids=[1, 2])["logprobs"] is None
    sampled = choice(process)["token_ids"][0]
    wanted = [i for i in range(1, 4) if i != sampled]
    found = choice(process, logprobs=len(wanted), logprob_token_ids=wanted)
    ids = [entry["token_id"] for entry in found["logprobs"]["content"][0]["top_logprobs"]]
    assert ids == [sampled, *wanted[:-1]]


def test_ids_without_their_prefix_abort_nothing(process: ServerProcess) -> None:
    plant(process, "delay", 0.02)
    body = {"request_id": "b", "token_ids": [3], "sampling_params": {**SAMPLING, "max_tokens": 40}}
    lines: list[str] = []
    with CLIENT.stream("POST", process.url + GENERATE, json={**body, "stream": True}) as events:
        for line in events.iter_lines():
            lines += [line] if line else []
            if len(lines) == 2:
                answer = post(process, "/inference/v1/abort_requests", {"request_ids": ["b"]})
                assert (answer.status_code, answer.text) == (200, "")
            if len(lines) == 8:
                ids = {"request_ids": ["generate-tokens-b"]}
                post(process, "/inference/v1/abort_requests", ids)
    plant(process, "delay", 0)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    count = sum(len(chunk["token_ids"]) for chunk in chunks)
    assert 7 < count < 40
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == "abort"
    # Only the last part has the versions.
    assert {chunk["weight_versions"] and 1 for chunk in chunks[:-1]} == {None}
    assert [span["end"] for span in chunks[-1]["weight_versions"]] == [count]


def test_routes_are_hidden_unless_they_are_switched_on(process: ServerProcess) -> None:
    assert post(process, "/collective_rpc", {"method": "nope"}).status_code == 500
    assert "nope" in post(process, "/collective_rpc", {"method": "nope"}).text
    plant(process, "dev_mode", False)
    plant(process, "scale_out", False)
    known = CLIENT.get(process.url + "/openapi.json").json()["paths"]
    assert sorted(known) == ["/health", "/metrics", "/openapi.json", "/version"]
    assert post(process, "/pause?mode=keep").status_code == 404
    assert generate(process).status_code == 403
    plant(process, "dev_mode")
    plant(process, "scale_out")
    assert generate(process).status_code == 200


def test_pause_aborts_waits_or_keeps(process: ServerProcess) -> None:
    assert post(process, "/pause?mode=bad").status_code == 400
    for mode, reason in (("abort", "abort"), ("wait", "length"), ("keep", "length")):
        plant(process, "delay", 0.02)
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(choice, process, max_tokens=20)
            time.sleep(0.1)
            assert post(process, f"/pause?mode={mode}").json() == {"status": "paused"}
            plant(process, "delay", 0)
            assert CLIENT.get(process.url + "/is_paused").json() == {"is_paused": True}
            post(process, "/resume")
            assert running.result()["finish_reason"] == reason


def test_a_failed_load_and_unknown_ids_end_the_server(process: ServerProcess) -> None:
    """The last test of this module: it restarts the server once."""
    answer = post(process, "/collective_rpc", {"method": "slipstream_load", "args": ["/missing"]})
    assert (answer.status_code, "missing has no safetensors" in answer.text) == (500, True)
    assert process.alive
    assert generate(process).status_code == 500
    deadline = time.monotonic() + 30
    while process.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.alive
