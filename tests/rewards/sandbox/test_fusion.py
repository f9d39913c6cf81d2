"""`FusionSandbox` against a real server with replies like those of Sandbox Fusion."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.rewards.sandbox import conversation
from slipstream.rewards.sandbox.fusion import FusionSandbox
from slipstream.rewards.sandbox.local import UnisolatedSandbox
from slipstream.rewards.sandbox.protocol import Program, ProgramLimits, ProgramResult, SandboxError
from slipstream.rewards.scorers.code import compute_score
from tests.rewards.server import Answer, serving

LIMITS = ProgramLimits(run_timeout_s=3, compile_timeout_s=4, memory_mb=77)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def reply(
    status: str = "Success",
    run: dict[str, Any] | None = None,
    compiled: dict[str, Any] | None = None,
    **more: Any,
) -> Answer:
    body = {"status": status, "run_result": run, "compile_result": compiled, **more}
    return 200, {}, json.dumps(body).encode()


def result(
    status: str = "Finished", code: int | None = 0, out: str = "", err: str = ""
) -> dict[str, Any]:
    ran = {"status": status, "execution_time": 0.25, "stdout": out, "stderr": err}
    return ran if code is None else {**ran, "return_code": code}


def runs(url: str, *stdins: str, pauses: list[float] | None = None) -> list[ProgramResult]:
    slept = [] if pauses is None else pauses
    sandbox = FusionSandbox(url, LIMITS, sleep=slept.append)
    return list(sandbox.run(Program("print(1)"), stdins or ("",)))


def test_requests_have_the_services_fields() -> None:
    with serving(reply(run=result(out="1\n"))) as server:
        assert runs(server.url, "a", "b") == [ProgramResult("ok", "1\n", "", 0.25)] * 2
    assert server.seen == [
        {
            "code": "print(1)",
            "language": "python",
            "stdin": stdin,
            "compile_timeout": 4,
            "run_timeout": 3,
            "memory_limit_MB": 77,
            "files": {},
            "fetch_files": [],
        }
        for stdin in ("a", "b")
    ]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (reply(run=result()), "ok"),
        (reply("Failed", result(code=1, err="no")), "failed"),
        (reply("Failed", result("Error", None)), "failed"),
        (reply("Failed", result("TimeLimitExceeded", None)), "time"),
        (reply("Failed", None, result("Error", 1, err="no")), "compile"),
        (reply("Failed", None, result("TimeLimitExceeded", None)), "compile"),
        (reply("Success", result(), result()), "ok"),
    ],
)
def test_replies_are_converted_to_verdicts(answer: Answer, verdict: str) -> None:
    with serving(answer) as server:
        (ran,) = runs(server.url)
    assert ran.verdict == verdict


def test_a_compile_error_ends_the_runs() -> None:
    with serving(reply("Failed", None, result("Error", 1))) as server:
        assert len(runs(server.url, "a", "b", "c")) == 1
    assert len(server.seen) == 1


def test_gateway_timeouts_are_retried_twice() -> None:
    pauses: list[float] = []
    with serving((504, {}, b"late"), (504, {}, b"late"), reply(run=result())) as server:
        assert runs(server.url, pauses=pauses)[0].verdict == "ok"
    assert pauses == [1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "message", "requests"),
    [
        ((504, {}, b"late"), "HTTP 504: late after 3 attempts", 3),
        ((500, {}, b"oh"), "HTTP 500: oh", 1),
        ((429, {}, b"slow"), "HTTP 429: slow", 1),
        ((200, {}, b"<html>"), "no JSON: '<html>'", 1),
        ((200, {}, b"[1]"), r"not a mapping: '\[1\]'", 1),
        ((200, {}, b""), "RemoteProtocolError", 1),
        (reply("SandboxError", None, message="full"), "SandboxError: full", 1),
        (reply("Success", None), "no run_result", 1),
    ],
)
def test_service_errors_raise_sandbox_error(answer: Answer, message: str, requests: int) -> None:
    with serving(answer) as server, pytest.raises(SandboxError, match=message):
        runs(server.url)
    assert len(server.seen) == requests


def test_an_unreachable_service_raises_sandbox_error() -> None:
    with pytest.raises(SandboxError, match="ConnectError"):
        runs("http://127.0.0.1:9/run_code")


def test_at_once_is_max_concurrent_and_survives_pickling() -> None:
    sandbox = FusionSandbox("https://127.0.0.1:9/run_code", LIMITS, max_concurrent=2)
    assert pickle.loads(pickle.dumps(sandbox)).at_once == sandbox.at_once == 2


@pytest.mark.parametrize("url", ["localhost:8080/run_code", "ftp://x", ""])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not an address; give one like"):
        FusionSandbox(url)


def test_max_concurrent_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        FusionSandbox("http://x", max_concurrent=0)


# Assertions, replayed by a service that runs programs.


def service(request: dict[str, Any]) -> Answer:
    """Run the program of a request, not isolated, like the service does."""
    limits = ProgramLimits(run_timeout_s=request["run_timeout"])
    program = Program(request["code"], request["language"])
    (ran,) = UnisolatedSandbox(limits).run(program, [request["stdin"]])
    late = ran.verdict == "time"
    return reply(
        "Success" if ran.verdict == "ok" else "Failed",
        result("TimeLimitExceeded" if late else "Finished", None if late else ran.verdict != "ok")
        | {"stdout": ran.stdout, "stderr": ran.stderr},
    )


@pytest.mark.parametrize(
    ("code", "passed", "errors", "timeouts"),
    [
        ("def f(x): return [x + 1]", 3, 0, 0),
        ("def f(x): return [2]", 1, 0, 0),
        ("import os\ndef f(x): return [x + 1] if x != 2 else os._exit(0)", 2, 1, 0),
        ("class A:\n def __eq__(self, o): return True\ndef f(x): return [A()]", 0, 3, 0),
        # The judge adds up without end, in its own process or with a call for each value.
        ("def f(x): return range(10**12) if x == 1 else [x + 1]", 2, 0, 1),
        ("def f(x): return iter(int, 1) if x == 1 else [x + 1]", 2, 0, 1),
    ],
    ids=["right", "wrong", "ends", "equals all", "stops the judge", "endless"],
)
def test_assertions_are_judged_by_replay(
    code: str, passed: int, errors: int, timeouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "_MAX_ROUNDS", 8)
    tests = ["assert sum(f(1)) == 2", "assert sum(f(2)) == 3", "assert sum(f(3)) == 4"]
    with serving(service) as server:
        scored = compute_score(
            "apps",
            f"```python\n{code}\n```",
            {"assert_case": tests},
            sandbox=FusionSandbox(server.url, replace(LIMITS, run_timeout_s=1.0)),
        )
    assert scored == {
        "score": passed / 3,
        "passed": passed,
        "tests": 3,
        "timeouts": timeouts,
        "errors": errors,
        "not_run": 0,
    }
