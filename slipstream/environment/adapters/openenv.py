"""OpenEnv environments: a session of a server, reached over a WebSocket.

    class Game(EnvClient):                          of openenv.core; or GenericEnvClient as it is
        def action_from_text(self, text): ...       the action of a turn
        def text_from_observation(self, observation): ...    optional

A turn of the policy is an action. The observation is the answer of a user. The rewards of the steps
are rewards of the turns. A session ends with its connection. After a lost connection the next call
opens a new session, and repeats the reset and all actions in it. Needs the package `openenv`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from slipstream.environment.protocol import (
    Answer,
    CallProblem,
    CallRecord,
    InfrastructureError,
    Start,
    Turn,
    within,
)
from slipstream.environment.tools.function import accepted
from slipstream.environment.tools.protocol import clean
from slipstream.errors import ConfigError, shortened
from slipstream.reading import reason
from slipstream.types import Message, Prompt

TIMEOUT_S = 600.0
"""Time limit to connect, and of `reset` and `step`, in seconds. The client has shorter ones of its
own: `connect_timeout_s` and `message_timeout_s`."""

_CODE = re.compile(r"\(code: (\w+)\)$")
"""The code at the end of the client's message about an error of the server."""

_NO_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Codes of a server that cannot open a session."""

_NO_TEXT = ("metadata", "reward", "done")
"""Fields of an observation that the policy does not read."""


def is_openenv_client(cls: Any) -> bool:
    """Return whether a class is derived from OpenEnv's `EnvClient`."""
    return inspect.isclass(cls) and "EnvClient" in _openenv_bases(cls)


def check_openenv_client(cls: Any, key: str) -> None:
    """Raise ConfigError, which names the option `key`, if nothing makes an action of a text."""
    if not hasattr(cls, "action_from_text") and "GenericEnvClient" not in _openenv_bases(cls):
        raise ConfigError(
            f"{key}: the client {cls.__name__} needs a method action_from_text(self, text) that "
            "returns the action of a turn"
        )


def _openenv_bases(cls: Any) -> list[str]:
    """The names of a class and its bases that OpenEnv defines."""
    return [base.__name__ for base in cls.__mro__ if base.__module__.startswith("openenv.core.")]


class OpenEnvEnvironment:
    """An `Environment` of one session."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make` returns a client, which is not connected yet."""
        self._make = make
        self._client: Any = None
        self._socket: Any = None
        """The connection of the session. A client that lost it opens another one silently."""
        self._id = str(uuid4())
        self._columns: dict[str, Any] = {}
        self._done: list[tuple[Any, str]] = []
        """The actions so far, each with the observation after it."""

    async def reset(self, row: Prompt, seed: int) -> Start:
        await self._drop()
        given = {**row.extra_info, "seed": seed, "episode_id": self._id}
        self._columns, self._done = clean(given), []
        text = await self._open()
        return Start(prompt_text=f"\n{text}" if text else "")

    async def step(self, turn: Turn) -> Answer:
        if self._client is None:
            await self._reopen()
        try:
            action = self._action(turn.message.content)
        except ValueError as error:
            return _refusal(reason(error))
        try:
            result = await self._call("step", action)
        except RuntimeError as error:
            if _code(error) != "VALIDATION_ERROR":
                raise
            return _refusal(str(error))
        text = self._text(result.observation)
        self._done.append((action, text))
        return Answer(
            messages=[_message(text)],
            rewards={"environment": float(result.reward)} if result.reward else {},
            done=bool(result.done),
        )

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        await self._drop()

    async def _open(self) -> str:
        """Open a session and reset it. Returns the first observation."""
        self._client = self._make()
        await self._call("connect")
        self._socket = self._client._ws
        columns = accepted(self._client.reset, self._columns)
        result = await self._call("reset", **columns)
        return self._text(result.observation)

    async def _reopen(self) -> None:
        """Open a session and repeat the actions so far. Raises InfrastructureError if an
        observation differs."""
        try:
            await self._open()
            for action, text in self._done:
                result = await self._call("step", action)
                if self._text(result.observation) != text:
                    raise InfrastructureError(
                        "OpenEnv: after a lost connection, a new session with the same seed and "
                        "actions gave another observation"
                    )
        except Exception:
            await self._drop()
            raise

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the client. Raises InfrastructureError after a lost connection."""
        from websockets.exceptions import WebSocketException

        client = self._client
        call = partial(getattr(client, method), *args, **kwargs)
        try:
            result = await within(TIMEOUT_S, method, call)
        except (InfrastructureError, OSError, WebSocketException) as error:
            raise await self._lost(f"{method}: {reason(error)}") from error
        except RuntimeError as error:
            if _code(error) in _NO_SESSION:
                raise await self._lost(str(error)) from error
            if method == "connect" or client._ws is self._socket:
                raise
            raise await self._lost(f"{method}: the connection was lost") from error
        if method != "connect" and client._ws is not self._socket:
            raise await self._lost(f"{method}: the connection was lost")
        return result

    async def _lost(self, why: str) -> InfrastructureError:
        await self._drop()
        return InfrastructureError(f"OpenEnv: {shortened(why)}")

    async def _drop(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # the server may be gone
                await client.close()

    def _action(self, text: str) -> Any:
        convert = getattr(self._client, "action_from_text", None)
        return {"message": text} if convert is None else convert(text)

    def _text(self, observation: Any) -> str:
        convert = getattr(self._client, "text_from_observation", _plain)
        return str(convert(observation))


def _plain(observation: Any) -> str:
    """The text of an observation: its only field if that is a text, else its fields as JSON."""
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump(mode="json")
    if not isinstance(observation, Mapping):
        return str(observation)
    fields = {name: value for name, value in observation.items() if name not in _NO_TEXT}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False)


def _code(error: RuntimeError) -> str | None:
    found = _CODE.search(str(error))
    return None if found is None else found[1]


def _refusal(why: str) -> Answer:
    """The answer to a turn that is no action."""
    return Answer(
        messages=[_message(f"Error: {shortened(why)}")],
        calls=[CallRecord(name="environment", problem=CallProblem.WRONG_ARGUMENTS)],
    )


def _message(text: str) -> Message:
    return {"role": "user", "content": text}
