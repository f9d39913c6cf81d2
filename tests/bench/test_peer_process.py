"""Peers in separate processes: the protocol, tested with a small scripted process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slipstream.bench.peer_process import PeerProcess, peer_command
from slipstream.errors import ConfigError, EngineError

SCRIPT = """
import json, sys, time
print("chatter on standard error", file=sys.stderr, flush=True)
for line in sys.stdin:
    command = json.loads(line)
    op = command["op"]
    if op == "quit":
        break
    elif op == "echo":
        text = json.dumps({"ok": True, "heard": command}) + "\\n"
        for piece in (text[:3], text[3:]):
            print(piece, end="", flush=True)
            time.sleep(0.01)
    elif op == "two":
        print('{"ok": true, "n": 1}\\n{"ok": true, "n": 2}', flush=True)
    elif op == "silent":
        pass
    elif op == "refuse":
        print('{"ok": false, "error": "ValueError: no"}', flush=True)
    elif op == "babble":
        print("INFO loading", flush=True)
    elif op == "die":
        sys.exit(3)
"""


def start(timeout: float = 60.0) -> PeerProcess:
    return PeerProcess("scripted", [sys.executable, "-c", SCRIPT], timeout=timeout)


def test_answers_are_complete_and_in_order() -> None:
    with start() as peer:
        assert peer.ask("echo", prompts=((1, 2), (3,)), text="é\n")["heard"] == {
            "op": "echo",
            "prompts": [[1, 2], [3]],
            "text": "é\n",
        }
        assert peer.ask("two")["n"] == 1
        assert peer.ask("silent")["n"] == 2


@pytest.mark.parametrize(
    ("op", "what"),
    [
        ("refuse", "peer scripted, refuse: ValueError: no"),
        ("babble", "peer scripted, babble: it answered 'INFO loading'"),
        ("die", "peer scripted, die: its process has ended"),
    ],
)
def test_failures_name_the_command_and_show_the_log(op: str, what: str) -> None:
    with start() as peer, pytest.raises(EngineError) as failed:
        peer.ask(op)
    assert str(failed.value).startswith(what)
    assert "chatter on standard error" in str(failed.value)


def test_asking_an_ended_process_is_an_error() -> None:
    with start() as peer:
        for _ in range(2):
            with pytest.raises(EngineError, match="its process has ended"):
                peer.ask("die")


def test_a_missing_answer_is_an_error_after_the_timeout() -> None:
    with start(timeout=0.5) as peer, pytest.raises(EngineError, match=r"no answer within 0\.5 s"):
        peer.ask("silent")


def test_leaving_the_context_ends_the_process() -> None:
    with start() as peer:
        peer.ask("echo")
    assert peer._process.returncode == 0


def test_a_missing_environment_is_refused_with_the_remedy(tmp_path: Path) -> None:
    def find() -> tuple[str, ...]:
        return peer_command(".venv-x", "x_peer.py", remedy="run `make x`", root=tmp_path)

    (tmp_path / "x_peer.py").touch()
    (tmp_path / ".venv-x").mkdir()
    with pytest.raises(ConfigError, match=r"\.venv-x/\.installed does not exist; run `make x`"):
        find()
    (tmp_path / ".venv-x" / ".installed").touch()
    assert find() == (f"{tmp_path}/.venv-x/bin/python", f"{tmp_path}/x_peer.py")
