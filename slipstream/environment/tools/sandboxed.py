"""The tool `python`: runs programs that the policy writes, in the sandbox that also scores code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slipstream.environment.protocol import InfrastructureError, ToolSchema
from slipstream.environment.tools.function import call_either
from slipstream.environment.tools.protocol import ToolInfo, ToolResult, ToolSession
from slipstream.rewards.sandbox.protocol import Program, ProgramResult, Sandbox, SandboxError

SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}

_ENDS = {
    "failed": "the program failed",
    "time": "the program exceeded its time limit",
    "memory": "the program exceeded its memory limit",
    "output": "the program printed too much",
    "compile": "the program does not compile",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTool(ToolInfo):
    """Runs each program alone: nothing remains for the next one.

    The sandbox has limits of its own. `timeout_s` must be longer than its limits.
    """

    sandbox: Sandbox
    schema: ToolSchema = field(default_factory=lambda: SCHEMA)

    async def open(self, kwargs: Mapping[str, Any]) -> ToolSession:
        return _PythonSession(self.sandbox)


class _PythonSession:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        program = Program(str(arguments["code"]))
        try:
            result = await call_either(partial(_first, self._sandbox, program))
        except SandboxError as error:
            raise InfrastructureError(f"sandbox: {error}") from error
        return ToolResult(text=_text(result))

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        return None


def _first(sandbox: Sandbox, program: Program) -> ProgramResult:
    return next(iter(sandbox.run(program, [""])))


def _text(result: ProgramResult) -> str:
    """What the program printed; if it did not end normally, also why, and its error output."""
    if result.verdict == "ok":
        return result.stdout
    parts = [result.stdout.rstrip("\n"), f"Error: {_ENDS[result.verdict]}", result.stderr.strip()]
    return "\n".join(part for part in parts if part)
