"""The tool `python` runs programs in a sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio
import pytest

from slipstream.environment.protocol import AssistantMessage, InfrastructureError, ToolCall, Turn
from slipstream.environment.tools.environment import Toolbox, ToolEnvironment
from slipstream.environment.tools.sandboxed import PythonTool
from slipstream.errors import RewardError
from slipstream.rewards.sandbox.local import UnisolatedSandbox
from slipstream.rewards.sandbox.protocol import (
    Program,
    ProgramLimits,
    ProgramResult,
    Sandbox,
    SandboxError,
)
from slipstream.types import Prompt

LIMITS = ProgramLimits(run_timeout_s=0.5)


def run(code: str, sandbox: Sandbox | None = None) -> str:
    async def work() -> str:
        tool = PythonTool(sandbox=sandbox or UnisolatedSandbox(LIMITS))
        environment = ToolEnvironment(Toolbox([tool]))
        await environment.reset(Prompt(uid="q", ids=[1]), 0)
        call = ToolCall(id="a", name="python", arguments={"code": code})
        turn = Turn(message=AssistantMessage(text="", tool_calls=(call,)), number=1)
        answer = await environment.step(turn)
        await environment.close()
        return str(answer.messages[0]["content"])

    return anyio.run(work)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print(6 * 7)", ["42"]),
        ("", []),
        ("print(1)\n1 / 0", ["1\nError: the program failed", "ZeroDivisionError"]),
        ("while True: pass", ["time limit"]),
        ("x = (", ["SyntaxError"]),
    ],
)
def test_the_policy_gets_what_a_program_prints(code: str, words: list[str]) -> None:
    text = run(code)
    assert [word for word in words if word not in text] == []


class Broken(UnisolatedSandbox):
    """A sandbox that raises."""

    error: Exception = SandboxError("no answer")

    def run(self, program: Program, stdins: Sequence[str]) -> Iterator[ProgramResult]:
        raise self.error


def test_a_broken_sandbox_is_a_failure_of_the_infrastructure() -> None:
    with pytest.raises(InfrastructureError, match="no answer"):
        run("print(1)", Broken())


def test_a_missing_package_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "error", RewardError("install bubblewrap"))
    with pytest.raises(RewardError, match="bubblewrap"):
        run("print(1)", Broken())
