"""The contract server of SGLang: answers that a client in the wrong order gets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.inference.servers.process import ServerProcess
from tests.inference.servers.local import plant
from tests.inference.servers.real import CLIENT
from tests.inference.servers.sglang_fleet import SGLangFleet, post

SAMPLING: dict[str, Any] = {
    "max_new_tokens": 30,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "sampling_seed": 5,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangFleet]:
    fleet = SGLangFleet(tmp_path_factory.mktemp("fleet"), 1)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(servers: SGLangFleet) -> SGLangFleet:
    servers.renew()
    return servers


@pytest.fixture
def process(fleet: SGLangFleet) -> ServerProcess:
    return fleet.processes[0]


def body(rid: str, **more: Any) -> dict[str, Any]:
    sampling = {**SAMPLING, **more.pop("sampling", {})}
    return {"rid": rid, "input_ids": [3, 4], "sampling_params": sampling, **more}


def start(threads: ThreadPoolExecutor, process: ServerProcess, *rids: str) -> list[Future[Any]]:
    """Start slow requests, and return when they run."""
    plant(process, "delay", 0.05)
    found = [threads.submit(slow, process, rid) for rid in rids]
    while not set(rids) <= set(CLIENT.get(process.url + "/test/running").json()):
        time.sleep(0.01)
    return found


def slow(process: ServerProcess, rid: str) -> Any:
    """The answer to a request for 90 tokens."""
    request = body(rid, sampling={"max_new_tokens": 90})
    return post(process, "/generate", request).json()


def reason(answer: Any) -> str:
    return str(answer["meta_info"]["finish_reason"]["type"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sampling": {"temprature": 1.0}}, "unknown field `temprature`"),
        ({"sampling": {"temperature": -1.0}}, "temperature must be a non-negative"),
        ({"sampling": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1"),
        ({"sampling": {"stop": ["x"]}}, "is unavailable when skip_tokenizer_init=True"),
        ({"sampling": {"max_new_tokens": 103}}, "exceeds the model's maximum context length"),
        ({"input_ids": [3] * 98}, "exceeds the model's maximum context length"),
        ({"input_ids": [3] * 98, "sampling": {"max_new_tokens": 1}}, "maximum allowed length"),
        ({"token_ids_logprob": [64]}, "out-of-vocabulary"),
        ({"return_sampling_mask": True}, "requires top_k=1 for greedy sampling or finite"),
        ({"sampling_logprobs_mode": "selected"}, "return_sampling_mask=true"),
    ],
)
def test_requests_that_sglang_refuses(
    process: ServerProcess, change: dict[str, Any], text: str
) -> None:
    answer = post(process, "/generate", body("a", **change))
    assert answer.status_code == 400
    assert text in answer.text


def test_a_field_that_is_left_out_has_another_value(process: ServerProcess) -> None:
    whole = post(process, "/generate", body("a")).json()["output_ids"]
    for name in ("temperature", "top_p", "top_k", "sampling_seed"):
        less = body("a")
        del less["sampling_params"][name]
        assert post(process, "/generate", less).json()["output_ids"] != whole, name


def test_ignore_eos_ignores_stop_tokens(process: ServerProcess) -> None:
    whole = post(process, "/generate", body("a")).json()["output_ids"]
    stops: dict[str, Any] = {"stop_token_ids": [whole[4]]}
    assert post(process, "/generate", body("a", sampling=stops)).json()["output_ids"] == whole
    stops["ignore_eos"] = False
    part = post(process, "/generate", body("a", sampling=stops)).json()
    assert part["output_ids"] == whole[: whole.index(whole[4]) + 1]
    assert part["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[4]}


def test_an_abort_takes_all_ids_that_begin_so(process: ServerProcess) -> None:
    with ThreadPoolExecutor(3) as threads:
        running = start(threads, process, "r1", "r10", "r2")
        for rid in ("", "unknown", "r1"):
            assert post(process, "/abort_request", {"rid": rid}).status_code == 200
        plant(process, "delay", 0)
        assert [reason(one.result()) for one in running] == ["abort", "abort", "length"]


def test_two_requests_cannot_have_one_id(process: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as threads:
        start(threads, process, "twin")
        answer = post(process, "/generate", body("twin"))
        plant(process, "delay", 0)
    assert (answer.status_code, "Duplicate request ID" in answer.text) == (400, True)


def test_an_update_waits_for_requests_unless_the_server_is_paused(
    fleet: SGLangFleet, process: ServerProcess
) -> None:
    update = {"model_path": str(fleet.weights.path), "flush_cache": False}
    route = "/update_weights_from_disk"
    with ThreadPoolExecutor(2) as threads:
        (running,) = start(threads, process, "a")
        loaded = threads.submit(post, process, route, update)
        time.sleep(0.3)
        assert not loaded.done()
        plant(process, "delay", 0)
        assert loaded.result().json()["success"] is True
        assert reason(running.result()) == "length"
        (running,) = start(threads, process, "b")
        post(process, "/pause_generation", {"mode": "in_place"})
        assert post(process, route, update).json()["success"] is True
        assert not running.done()
        # The weights change, but the answer is an error.
        answer = post(process, route, {"model_path": str(fleet.weights.path)})
        assert (answer.status_code, answer.json()["success"]) == (400, False)
        assert "Weights were updated, but the cache was not flushed" in answer.json()["message"]
        plant(process, "delay", 0)
        post(process, "/continue_generation", {})
        assert reason(running.result()) == "length"


def test_the_cache_can_be_flushed_only_without_running_requests(process: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as threads:
        (running,) = start(threads, process, "a")
        assert post(process, "/flush_cache").status_code == 400
        post(process, "/pause_generation", {"mode": "in_place"})
        assert post(process, "/flush_cache").status_code == 400
        post(process, "/pause_generation", {"mode": "retract"})
        assert post(process, "/flush_cache").status_code == 200
        plant(process, "delay", 0)
        post(process, "/continue_generation", {})
        assert len(running.result()["output_ids"]) == 90


def test_a_new_version_aborts_requests_unless_told_otherwise(process: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as threads:
        (kept,) = start(threads, process, "a")
        version = {"new_version": "7", "abort_all_requests": False}
        assert post(process, "/update_weight_version", version).json()["success"] is True
        time.sleep(0.3)
        (aborted,) = start(threads, process, "b")
        post(process, "/update_weight_version", {"new_version": "8"})
        plant(process, "delay", 0)
        assert reason(kept.result()) == reason(aborted.result()) == "abort"
    spans = kept.result()["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "7"]
    assert spans[0]["end"] == spans[1]["start"]
    assert kept.result()["meta_info"]["weight_version"] == "7"
    assert CLIENT.get(process.url + "/model_info").json()["weight_version"] == "8"


def test_a_pause_aborts_by_default(process: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as threads:
        (running,) = start(threads, process, "a")
        assert post(process, "/pause_generation", {}).json()["status"] == "ok"
        assert reason(running.result()) == "abort"
        waiting = threads.submit(post, process, "/generate", body("b"))
        time.sleep(0.3)
        assert not waiting.done()
        # The abort of a request that waits is lost.
        post(process, "/abort_request", {"rid": "b"})
        plant(process, "delay", 0)
        post(process, "/continue_generation", {})
        assert reason(waiting.result().json()) == "length"


@pytest.mark.parametrize(
    ("route", "wrong"),
    [
        ("/pause_generation", {"mode": "keep"}),
        ("/pause_generation", None),
        ("/continue_generation", None),
        ("/update_weights_from_disk", {}),
        ("/update_weight_version", {}),
        ("/begin_weight_update", {"selector": "both"}),
        ("/abort_request", None),
        ("/generate", None),
    ],
)
def test_bodies_that_sglang_refuses(process: ServerProcess, route: str, wrong: Any) -> None:
    assert post(process, route, wrong).status_code == 400


def test_a_session_has_a_begin_and_an_end(process: ServerProcess) -> None:
    tensors = {"serialized_named_tensors": ["x"]}
    assert "must run between" in post(process, "/update_weights_from_tensor", tensors).text
    assert "no weight-update session is open" in post(process, "/end_weight_update", {}).text
    assert post(process, "/begin_weight_update", {}).json()["success"] is True
    again = post(process, "/begin_weight_update", {})
    assert (again.status_code, "already open" in again.text) == (400, True)
    assert post(process, "/end_weight_update", {}).json()["success"] is True


def test_a_failed_load_keeps_the_old_weights(process: ServerProcess) -> None:
    before = post(process, "/weights_checker", {"action": "checksum"}).json()
    for folder in ("/missing", ""):
        answer = post(process, "/update_weights_from_disk", {"model_path": folder})
        assert (answer.status_code, answer.json()["success"]) == (400, False)
    after = post(process, "/weights_checker", {"action": "checksum"}).json()
    assert after["per_engine_checksum"] == before["per_engine_checksum"]


def test_events_of_a_stream_are_segments_or_all_tokens(process: ServerProcess) -> None:
    whole = post(process, "/generate", body("a")).json()["output_ids"]
    for cumulative in (False, True):
        plant(process, "cumulative", cumulative)
        request = body("a", stream=True, return_logprob=True)
        with CLIENT.stream("POST", process.url + "/generate", json=request) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        ids = [event["output_ids"] for event in events]
        assert (ids[-1] if cumulative else [i for part in ids for i in part]) == whole
        for event in events:
            entries = event["meta_info"]["output_token_logprobs"]
            assert [entry[1] for entry in entries] == event["output_ids"]
        reasons = [event["meta_info"]["finish_reason"] for event in events]
        assert reasons[:-1] == [None] * (len(events) - 1)
        assert reasons[-1] == {"type": "length", "length": 30}
        assert ["weight_versions" in event["meta_info"] for event in events][:-1] == [False] * (
            len(events) - 1
        )


def test_an_id_outside_the_vocabulary_ends_the_server(process: ServerProcess) -> None:
    """The last test of this module."""
    with pytest.raises(Exception, match=r"disconnected|reset|refused"):
        post(process, "/generate", {**body("a"), "input_ids": [64]})
    deadline = time.monotonic() + 30
    while process.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.alive
