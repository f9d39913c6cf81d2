"""Counted time and memory, from made-up readings and clocks."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slipstream.rewards.sandbox import watched
from slipstream.rewards.sandbox.memory_cgroup import CgroupError, MemoryGroup
from slipstream.rewards.sandbox.watched import (
    PATIENCE,
    Bounds,
    Command,
    Ended,
    Meter,
    Reading,
    Usage,
)


@dataclass
class Machine:
    """A clock, and processes whose times a test sets."""

    now: float = 100.0
    own: float = 7.0
    memory: int = 0
    processes: dict[int, Usage] = field(default_factory=dict)

    def read(self) -> Reading:
        return Reading(dict(self.processes), self.memory)

    def own_wait(self) -> float:
        return self.own

    def meter(self) -> Meter:
        return Meter(self, clock=lambda: self.now)

    def passes(self, meter: Meter, seconds: float, **usage: Usage) -> None:
        """Let time pass, after which the processes have these times, and look."""
        self.now += seconds
        self.processes = {int(name.removeprefix("pid_")): times for name, times in usage.items()}
        meter.look()


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_program_that_sleeps_is_charged_the_wall_clock(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(0.01))
    machine.passes(meter, 2.0, pid_5=Usage(0.02))
    assert meter.seconds() == 3.0
    machine.now += 0.5  # without a look
    assert meter.seconds() == 3.5


def test_a_program_that_waits_for_a_cpu_is_not_charged(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(0.2, waited=0.8))
    machine.passes(meter, 10.0, pid_5=Usage(0.3, waited=10.7))
    assert meter.seconds() == pytest.approx(0.3)
    # What it waited before it was measured does not count for the time after.
    machine.passes(meter, 1.0, pid_5=Usage(0.3, waited=10.7))
    assert meter.seconds() == pytest.approx(1.3)


def test_a_wait_is_at_most_the_time_that_passed(machine: Machine) -> None:
    """Many threads can wait at once. They earn no time for later."""
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(0.0, waited=8.0), pid_6=Usage(0.0, waited=8.0))
    machine.passes(meter, 2.0, pid_5=Usage(0.0, waited=8.0), pid_6=Usage(0.0, waited=8.0))
    assert meter.seconds() == pytest.approx(2.0)


def test_the_cpu_time_of_all_processes_is_charged(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(1.0), pid_6=Usage(0.9), pid_7=Usage(0.5))
    assert meter.seconds() == pytest.approx(2.4)
    # Waiting does not reduce it.
    machine.passes(meter, 1.0, pid_5=Usage(1.5, waited=0.5), pid_6=Usage(0.9), pid_7=Usage(0.5))
    assert meter.seconds() == pytest.approx(2.9)


def test_a_caller_that_waits_for_a_cpu_is_not_charged(machine: Machine) -> None:
    meter = machine.meter()
    machine.own += 3.5
    machine.passes(meter, 4.0, pid_5=Usage(0.1))
    assert meter.seconds() == pytest.approx(0.5)


@pytest.mark.parametrize("seen", [True, False], ids=["at once", "after a zombie"])
def test_the_time_of_an_ended_child_is_counted_once(machine: Machine, seen: bool) -> None:
    """Its parent gets the time when it collects the child, which may be later."""
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(0.1), pid_6=Usage(0.9))
    machine.passes(meter, 1.0, pid_5=Usage(0.2), pid_6=Usage(1.8))
    if not seen:
        machine.passes(meter, 0.1, pid_5=Usage(0.2))
    machine.passes(meter, 0.1, pid_5=Usage(0.2, children_cpu=1.9))
    machine.passes(meter, 0.1, pid_5=Usage(0.3, children_cpu=1.9))
    assert meter._spent == pytest.approx(0.3 + 1.9)


def test_the_time_of_children_that_nobody_collects_stays_counted(machine: Machine) -> None:
    meter = machine.meter()
    for pid in range(10, 20):
        machine.passes(meter, 1.0, pid_5=Usage(0.1), **{f"pid_{pid}": Usage(0.9)})
    assert meter._spent == pytest.approx(0.1 + 10 * 0.9)


def test_children_that_live_shorter_than_a_look_are_counted(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(0.1, children_cpu=4.0))
    machine.passes(meter, 1.0, pid_5=Usage(0.1, children_cpu=9.0))
    assert meter.seconds() == pytest.approx(9.1)


def test_children_after_an_ended_child_are_counted(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(0.0), pid_6=Usage(1.0))
    machine.passes(meter, 1.0, pid_5=Usage(0.0, children_cpu=1.0))
    machine.passes(meter, 1.0, pid_5=Usage(0.0, children_cpu=1.7))
    assert meter._spent == pytest.approx(1.7)


def test_a_grandchild_is_counted_once(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(0.1), pid_6=Usage(0.2), pid_7=Usage(0.7))
    machine.passes(meter, 1.0, pid_5=Usage(0.1), pid_6=Usage(0.2, children_cpu=1.7))
    machine.passes(meter, 1.0, pid_5=Usage(0.1, children_cpu=1.9))
    assert meter._spent == pytest.approx(2.0)


def test_an_id_that_is_used_again_takes_nothing_back(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 1.0, pid_5=Usage(3.0, 1.0, 2.0))
    machine.passes(meter, 1.0, pid_5=Usage(0.5))
    assert meter._spent == pytest.approx(4.0)


def test_restarted_meters_count_from_then_on(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 5.0, pid_5=Usage(5.0, waited=1.0))
    meter.restart()
    assert meter.seconds() == 0.0
    machine.passes(meter, 2.0, pid_5=Usage(5.5, waited=1.5))
    assert meter.seconds() == pytest.approx(1.5)


def test_waits_before_a_restart_do_not_count_after_it(machine: Machine) -> None:
    meter = machine.meter()
    machine.now += 9.0
    meter.restart()
    machine.passes(meter, 1.0, pid_5=Usage(0.0, waited=9.0))
    machine.passes(meter, 1.0, pid_5=Usage(0.0, waited=9.0))
    assert meter.seconds() == pytest.approx(1.0)


def test_limits_of_counted_time_and_of_the_wall_clock(machine: Machine) -> None:
    meter = machine.meter()
    machine.passes(meter, 2.0, pid_5=Usage(1.0, waited=1.0))
    assert not meter.over(1.5)
    assert meter.over(1.0)
    # A starved program ends at last.
    machine.passes(meter, 1.5 * PATIENCE - 2.1, pid_5=Usage(1.0, waited=99.0))
    assert not meter.over(1.5)
    machine.now += 0.2
    assert meter.over(1.5)


def test_looks_have_a_distance_and_return_the_memory(machine: Machine) -> None:
    machine.memory = 4096
    meter = machine.meter()
    due = [meter.due]
    machine.now += 0.06
    due.append(meter.due)
    assert meter.look() == 4096
    due.append(meter.due)
    assert due == [False, True, False]


# Readings of this machine.


def test_waits_of_all_threads_are_added(tmp_path: Path) -> None:
    for thread, text in (("11", "500 2000000000 7"), ("12", "1 500000000 7")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert watched._delay_seconds(str(tmp_path)) == pytest.approx(2.5)
    assert watched._delay_seconds(str(tmp_path), "12") == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["", "1", "a b c"])
def test_unknown_waits_are_0(tmp_path: Path, text: str) -> None:
    (tmp_path / "11").mkdir()
    (tmp_path / "11" / "schedstat").write_text(text)
    assert watched._delay_seconds(str(tmp_path)) == 0.0
    assert watched._delay_seconds(str(tmp_path / "nowhere")) == 0.0


def test_readings_have_the_process_and_its_descendants() -> None:
    command = Command(["sh", "-c", "sleep 60 & echo started; wait"], {"PATH": os.environ["PATH"]})
    with watched._started(command, subprocess.DEVNULL) as running:
        assert running.process.stdout is not None
        os.set_blocking(running.process.stdout.fileno(), True)
        assert running.process.stdout.readline() == b"started\n"
        reading = watched._Commands([running]).read()
        assert running.process.pid in reading.processes
        assert len(reading.processes) == 2
        assert reading.memory > 0
    assert watched._Commands([running]).read().processes == {}


def test_processes_of_a_group_are_its_members(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "cgroup.procs").write_text(f"0\n{os.getpid()}\n{ended.pid}\n")
    (tmp_path / "tasks").touch()
    command = Command(["true"], {"PATH": os.environ["PATH"]}, group=MemoryGroup(tmp_path, 1))
    with watched._started(command, subprocess.DEVNULL) as running:
        assert running.process.wait() == 0
        assert list(watched._Commands([running]).read().processes) == [os.getpid()]
    assert (tmp_path / "tasks").read_text() == "0\n"


def test_the_own_wait_is_that_of_the_calling_thread() -> None:
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():
        pytest.skip("this kernel has no statistics of its scheduler")
    before = 1e-9 * int(path.read_text().split()[1])
    own = watched._Commands([]).own_wait()
    after = 1e-9 * int(path.read_text().split()[1])
    assert before <= own <= after


@pytest.mark.parametrize(("kills", "verdict"), [(0, "ok"), (1, "memory")])
def test_a_kill_by_the_kernel_is_the_verdict_even_if_the_command_ends(
    tmp_path: Path, kills: int, verdict: str
) -> None:
    (tmp_path / "memory.oom_control").write_text(f"under_oom 0\noom_kill {kills}\n")
    (tmp_path / "tasks").touch()
    command = Command(["true"], {"PATH": os.environ["PATH"]}, group=MemoryGroup(tmp_path, 1))
    ended = watched.run_watched(command, Bounds(60.0, 1024, 1024), stdin=b"")
    assert ended.verdict == verdict


def test_a_judge_that_the_kernel_kills_ends_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    (tmp_path / "tasks").touch()
    environment = {"PATH": os.environ["PATH"]}
    judge = Command(["true"], environment, group=MemoryGroup(tmp_path, 1))
    bounds = Bounds(60.0, 1024, 1024)
    (end,) = watched.run_conversation(Command(["cat"], environment), judge, bounds, mark=b"x")
    assert isinstance(end, Ended)
    assert end.verdict == "memory"


def unjoinable(folder: Path) -> MemoryGroup:
    """Return a group whose file for joining cannot be written, even by root."""
    (folder / "tasks").mkdir()
    return MemoryGroup(folder, 1)


def test_a_command_that_cannot_join_its_group_has_no_verdict(tmp_path: Path) -> None:
    command = Command(["true"], {"PATH": os.environ["PATH"]}, group=unjoinable(tmp_path))
    with pytest.raises(CgroupError, match=r"could not join .*/tasks"):
        watched.run_watched(command, Bounds(60.0, 1024, 1024), stdin=b"")


@pytest.mark.parametrize("place", [0, 1], ids=["program", "judge"])
def test_a_conversation_without_one_of_its_two_commands_has_no_verdict(
    tmp_path: Path, place: int
) -> None:
    environment = {"PATH": os.environ["PATH"]}
    commands = [Command(["cat"], environment), Command(["cat"], environment)]
    commands[place] = replace(commands[place], group=unjoinable(tmp_path))
    program, judge = commands
    with pytest.raises(CgroupError, match=r"could not join .*/tasks"):
        list(watched.run_conversation(program, judge, Bounds(60.0, 1024, 1024), mark=b"x"))
