"""The first signal requests a stop; the second Ctrl-C interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from slipstream.checkpoint.interrupt import GracefulInterrupt


def test_first_sigint_sets_requested_and_second_raises(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with GracefulInterrupt("saving step 3") as interrupt:
        seen = [interrupt.requested]
        os.kill(os.getpid(), signal.SIGINT)
        seen.append(interrupt.requested)
        assert seen == [False, True]
        assert interrupt.signal == signal.SIGINT
        assert "SIGINT: saving step 3. Press Ctrl-C again" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_repeated_sigterm_does_not_interrupt(capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulInterrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM
        assert capfd.readouterr().err.count("SIGTERM") == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signal_handlers_are_restored_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), GracefulInterrupt():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) == before


def test_outside_the_main_thread_only_request_sets_the_flag() -> None:
    seen: list[bool] = []

    def work() -> None:
        with GracefulInterrupt() as interrupt:
            seen.append(interrupt.requested)
            interrupt.request()
            seen.append(interrupt.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]


def test_a_process_finishes_its_loop_after_sigterm() -> None:
    program = """
import signal, time
from slipstream.checkpoint.interrupt import GracefulInterrupt
with GracefulInterrupt() as interrupt:
    print("ready", flush=True)
    while not interrupt.requested:
        time.sleep(0.01)
    print("finished", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "finished\n"
    assert run.returncode == 0
