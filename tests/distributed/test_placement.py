"""Two processes on one machine: collective calls, failures, and one engine over both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from typing import Any

import anyio
import pytest

from slipstream.config.engines import FAKE
from slipstream.distributed.engines import EngineTeam, OwnEngine, RemoteEngine
from slipstream.distributed.host import HOST, Host
from slipstream.distributed.placement import Cluster
from slipstream.distributed.team import Team
from slipstream.errors import DataError, TrainingError
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.fsdp2 import Ranks
from tests.inference.contract import CASES, Case, Harness
from tests.inference.helpers import make_request
from tests.inference.test_contract import fake, slow_down


class Recorder:
    """A part that records the values that it is called with."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.compute = ComputeThread()
        self.seen: list[Any] = []

    def note(self, value: Any) -> Any:
        return self.compute.submit(lambda: self.seen.append(value))

    def compare(self) -> list[list[Any]]:
        return self.ranks.gather(self.seen)

    def fail(self, error: BaseException) -> None:
        raise error

    async def slowly(self, value: Any) -> None:
        await anyio.sleep(0.2)
        self.seen.append(value)

    def die(self) -> None:
        os._exit(1)


class Gate:
    def __init__(self, gate: Callable[[float], None]) -> None:
        self.set = gate


def parts(ranks: Ranks) -> Mapping[str, Any]:
    engine = fake()
    own = OwnEngine(engine, None)  # type: ignore[arg-type]
    return {"notes": Recorder(ranks), "engine": own, "gate": Gate(slow_down(engine))}


@pytest.fixture
def failures() -> list[BaseException]:
    return []


@pytest.fixture
def team(failures: list[BaseException]) -> Iterator[Team]:
    with two_processes(failures.append) as team:
        yield team


@pytest.fixture(scope="module")
def shared_team() -> Iterator[Team]:
    """A team that tests share if they do not break its processes."""
    with two_processes(lambda error: None) as team:
        yield team


@contextlib.contextmanager
def two_processes(on_failure: Callable[[BaseException], None]) -> Iterator[Team]:
    cluster = Cluster(2, device="cpu", timeout_s=60, threads=1, on_failure=on_failure)
    try:
        with cluster.team.collective(HOST, "make_parts", parts) as call:
            call.wait()
        yield cluster.team
    finally:
        cluster.close()


def test_commands_run_in_order_and_failures_are_raised_here(team: Team) -> None:
    own = Recorder(team.ranks)
    with team.collective("notes", "slowly", "first") as first:
        own.seen.append("first")
    with team.collective("notes", "note", "second") as second:
        future = second.joined(own.note("second"))
    assert future.wait() is None
    first.wait()
    with team.collective("notes", "compare") as call:
        found = own.compare()
        call.wait()
    assert found == [["first", "second"]] * 2
    # Two commands that arrive in the wrong order.
    (late,) = team._send(team._next + 1, "notes", "note", ("fourth",))
    assert not wait([late], timeout=0.3).done
    (early,) = team._send(team._next, "notes", "note", ("third",))
    early.result()
    late.result()
    team._next += 2
    with (
        pytest.raises(DataError, match="no good"),
        team.collective("notes", "fail", DataError("no good")) as call,
    ):
        call.wait()


def test_dead_process_is_reported(team: Team, failures: list[BaseException]) -> None:
    with (
        pytest.raises(TrainingError, match="another process of the run has died"),
        team.collective("notes", "die"),
    ):
        raise RuntimeError("connection closed by peer")
    with pytest.raises(TrainingError, match="has died"):
        anyio.run(RemoteEngine(team.members[0], FAKE).generate, make_request("a", max_tokens=4))
    assert not failures


BREAK_THE_CORE = {
    "a_failing_step_reaches_every_caller",
    "a_core_that_cannot_give_up_reaches_every_caller",
    "lost_requests_are_errors",
    "a_closed_engine_says_so",
}
"""Cases that patch the core of an engine, which is in the other process here."""


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.__name__ not in BREAK_THE_CORE],
    ids=lambda case: case.__name__,
)
def test_contract(shared_team: Team, case: Case) -> None:
    """`EngineTeam` over two engines fulfils the contract of an engine."""
    with shared_team.collective(HOST, "make_parts", parts) as made:
        made.wait()
    own = fake()
    slow_own = slow_down(own)

    def gate(seconds: float) -> None:
        slow_own(seconds)
        with shared_team.collective("gate", "set", seconds) as call:
            call.wait()

    team: Any = EngineTeam(own, shared_team)
    assert team.capabilities == FAKE
    assert [engine.capabilities for engine in team._engines] == [FAKE, FAKE]

    async def bounded() -> None:
        with anyio.fail_after(20):
            await case(Harness(team, gate))

    anyio.run(bounded)
    team.close()


def test_engine_calls_start_in_order_and_each_gets_an_answer() -> None:
    host = Host(os.getcwd(), [], None)
    engine = fake()
    host.make_parts(lambda ranks: {"engine": OwnEngine(engine, None)})  # type: ignore[arg-type]
    # All tokens would take eight seconds, so the request still runs when it is aborted.
    slow_down(engine)(0.1)
    request = make_request("a", max_tokens=80, ignore_eos=True)
    host.engine(1, "abort", "abort", (None,))
    assert host.answers(0.2) == []
    host.engine(0, "generate", "generate", (request,))
    answers: dict[str, Any] = {}
    while len(answers) < 2:
        answers.update({call: result for call, result, _, _ in host.answers(10)})
    assert answers["abort"] == [answers["generate"]]
    host.make_parts(lambda ranks: {})
    host.engine(2, "late", "stats", ())
    ((call, result, failure, _),) = host.answers(10)
    assert (call, result, type(failure)) == ("late", None, KeyError)
