"""Runs programs through a Sandbox Fusion service (ByteDance) over HTTP.

One run is one POST request. The service isolates programs, and supports more languages than this
machine.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx2

from slipstream.errors import ConfigError
from slipstream.rewards.sandbox.conversation import conversations, replayed
from slipstream.rewards.sandbox.protocol import (
    DEFAULT_LIMITS,
    Program,
    ProgramLimits,
    ProgramResult,
    SandboxError,
    Verdict,
)

_ATTEMPTS = 3
_BUSY = 504
"""The only status that is retried: the service's gateway timed out."""

_GRACE_S = 10.0
"""Seconds that a reply may take in addition to the time limits of its program."""


class FusionSandbox:
    """Runs programs at `url`, the address of `/run_code`.

    At most `max_concurrent` programs should run at once; callers enforce that (`at_once`).
    """

    def __init__(
        self,
        url: str,
        limits: ProgramLimits = DEFAULT_LIMITS,
        *,
        max_concurrent: int = 64,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"reward_model.sandbox_fusion.url={url!r} is not an address; give one like "
                "http://localhost:8080/run_code"
            )
        if max_concurrent < 1:
            raise ConfigError(
                f"reward_model.sandbox_fusion.max_concurrent={max_concurrent} must be at least 1"
            )
        self._url, self._limits, self._sleep = url, limits, sleep
        self.at_once = max_concurrent

    def knows(self, language: str) -> bool:
        """Return True: the service itself reports unknown languages."""
        return True

    def run(self, program: Program, stdins: Sequence[str]) -> Iterator[ProgramResult]:
        """Yield the result of the program for each standard input (see `Sandbox.run`)."""
        secure = ssl.create_default_context() if self._url.startswith("https") else False
        timeout = self._limits.compile_timeout_s + self._limits.run_timeout_s + _GRACE_S
        with httpx2.Client(verify=secure, timeout=timeout) as client:
            deadline = time.monotonic() + self._limits.total_timeout_s
            for place, stdin in enumerate(stdins):
                if place and time.monotonic() >= deadline:
                    return
                result = self._result(self._post(client, self._request(program, stdin)))
                yield result
                if result.verdict == "compile":
                    return

    def converse(
        self, program: Program, judge_from: Callable[[int], Program], count: int
    ) -> Iterator[ProgramResult]:
        """Yield the results of tests that a judge makes (see `Sandbox.converse`).

        The service runs a program on a whole input, so the conversation is replayed for each call.
        """

        def run(program: Program, stdin: str) -> ProgramResult:
            (result,) = self.run(program, [stdin])
            return result

        total = self._limits.total_timeout_s
        return conversations(
            lambda judge: replayed(run, program, judge, total_timeout_s=total),
            judge_from,
            count,
            self._limits,
        )

    def _request(self, program: Program, stdin: str) -> dict[str, Any]:
        limits = self._limits
        return {
            "code": program.code,
            "language": program.language,
            "stdin": stdin,
            "compile_timeout": limits.compile_timeout_s,
            "run_timeout": limits.run_timeout_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }

    def _post(self, client: httpx2.Client, request: Mapping[str, Any]) -> Mapping[str, Any]:
        problem = ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                response = client.post(self._url, json=request)
            except httpx2.HTTPError as error:
                raise SandboxError(f"{self._url}: {type(error).__name__}: {error}") from error
            problem = f"{self._url}: HTTP {response.status_code}: {response.text[:200].strip()}"
            if response.status_code == _BUSY:
                if attempt < _ATTEMPTS:
                    self._sleep(float(attempt))
                continue
            if response.status_code != 200:
                raise SandboxError(problem)
            try:
                reply = response.json()
            except ValueError as error:
                raise SandboxError(f"{self._url}: no JSON: {response.text[:200]!r}") from error
            if not isinstance(reply, Mapping):
                raise SandboxError(f"{self._url}: not a mapping: {response.text[:200]!r}")
            return reply
        raise SandboxError(f"{problem} after {_ATTEMPTS} attempts")

    def _result(self, reply: Mapping[str, Any]) -> ProgramResult:
        """Convert a reply to a result.

        The status of a program that fails is "Failed" too. If the program could not be run at all,
        the status is "SandboxError", or results are missing.
        """
        status = reply.get("status")
        if status not in ("Success", "Failed"):
            raise SandboxError(f"{self._url}: {status}: {reply.get('message', '')}")
        compiled, ran = reply.get("compile_result"), reply.get("run_result")
        if isinstance(compiled, Mapping) and (
            compiled.get("status") != "Finished" or compiled.get("return_code")
        ):
            return _program_result("compile", compiled)
        if not isinstance(ran, Mapping):
            raise SandboxError(f"{self._url}: the reply has no run_result ({status})")
        if ran.get("status") == "TimeLimitExceeded":
            return _program_result("time", ran)
        good = ran.get("status") == "Finished" and not ran.get("return_code")
        return _program_result("ok" if good else "failed", ran)


def _program_result(verdict: Verdict, result: Mapping[str, Any]) -> ProgramResult:
    return ProgramResult(
        verdict,
        stdout=str(result.get("stdout") or ""),
        stderr=str(result.get("stderr") or ""),
        seconds=float(result.get("execution_time") or 0.0),
    )
