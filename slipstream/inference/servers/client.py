"""What the clients of all kinds of servers have in common: the connection, the process behind it,
and the command line that starts it."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import anyio

from slipstream.errors import EngineError
from slipstream.inference.servers.http import JsonClient
from slipstream.inference.servers.process import ServerProcess

CONTROL_S = 60.0
"""Time limit of calls that control the server, in seconds."""


class ServerClient:
    """The part of a `Server` that does not depend on its routes."""

    KIND: ClassVar[str]
    """The program that serves, as messages name it."""

    def __init__(
        self,
        url: str | None = None,
        *,
        process: ServerProcess | None = None,
        api_key: str | None = None,
        update_s: float = 300.0,
        weights: Path | None = None,
    ) -> None:
        """Either attach to `url`, or use a `process`, which is running. `update_s` limits the time
        of a weight update in seconds. `weights` is a file that the server gets after each restart;
        None: it finds them in its model folder."""
        if url is None:
            assert process is not None, "give a URL or a process"
            url = process.url
        self._process = process
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._update_s = update_s
        self._weights = weights
        self._stopped = threading.Event()
        self._http = JsonClient(url, headers=self._headers)

    @property
    def name(self) -> str:
        return f"the {self.KIND} server at {self._http.url}"

    async def check(self) -> None:
        """Raise EngineError if the server is too old, or was started without what is needed."""
        if problems := await self.problems():
            raise EngineError("; ".join(problems))

    async def problems(self) -> list[str]:
        """Why the server cannot be used, with remedies; empty if it can. Raises EngineError if
        there is no such server."""
        raise NotImplementedError

    async def load(self, path: Path) -> Mapping[str, int] | None:
        """See `Server`."""
        raise NotImplementedError

    async def restart(self) -> None:
        process = self._process
        if process is None:
            raise EngineError(
                f"{self.name} is one of actor_rollout_ref.rollout.server.urls, which the run "
                "cannot start; start it, and start the run again"
            )
        await anyio.to_thread.run_sync(process.start, self._stopped, abandon_on_cancel=True)
        self._http = JsonClient(process.url, headers=self._headers)
        if self._weights is not None:
            await self.load(self._weights)

    def close(self) -> None:
        self._stopped.set()
        if self._process is not None:
            self._process.close()

    @contextmanager
    def _understood(self, route: str) -> Iterator[None]:
        """Turn errors about the contents of an answer into EngineError."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError(
                f"{self.name} gave an answer to {route} that is not {self.KIND}'s "
                f"({type(error).__name__}: {error}); check that the URL is that of a {self.KIND} "
                "server, and that nobody else has started it again or changed its weights"
            ) from error


async def ask_all(
    contexts: Sequence[Sequence[int]], ask: Callable[[int], Awaitable[list[float]]]
) -> list[list[float]]:
    """Return what `ask` returns for the index of each context, or raise its first EngineError.

    The longest context is first. The others, which are asked for together, can take the beginning
    that they have in common from the cache.
    """
    found: list[list[float]] = [[] for _ in contexts]
    failures: list[EngineError] = []

    async def one(index: int) -> None:
        try:
            found[index] = await ask(index)
        except EngineError as error:
            failures.append(error)

    longest = max(range(len(contexts)), key=lambda index: len(contexts[index]))
    await one(longest)
    async with anyio.create_task_group() as tasks:
        for index in range(len(contexts)):
            if index != longest:
                tasks.start_soon(one, index)
    if failures:
        raise failures[0]
    return found


def command_line(
    python: Path, module: str, options: Mapping[str, Any], *, off: str | None
) -> list[str]:
    """The command line that runs `module` with command line options, which have underscores.

    `off` is what stands before the name of a flag that is False; None: the flag is left out. So
    are options whose value is None.
    """
    line = [str(python), "-m", module]
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if value is True:
            line.append(f"--{dashed}")
        elif value is False:
            line += [] if off is None else [f"--{off}{dashed}"]
        elif value is not None:
            line += [
                f"--{dashed}",
                json.dumps(value) if isinstance(value, dict | list) else str(value),
            ]
    return line
