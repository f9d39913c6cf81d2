"""Environments written for tinker-cookbook: classes derived from its `Env`.

    class Game:
        async def initial_observation(self): return observation, stop_condition
        async def step(self, action_ids): return StepResult(...)

They read and write token ids. An observation is the whole context, as an object with `to_ints()`,
and must begin with all tokens so far. One object runs one episode. If an episode is stopped, a new
object gets the recorded turns again. Knows engines by `Generate` only.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

import anyio

from slipstream.environment.adapters.columns import columns_of
from slipstream.environment.protocol import Answer, CallProblem, InfrastructureError, within
from slipstream.environment.tools.function import accepted, call_either
from slipstream.environment.tools.protocol import numbers_in
from slipstream.errors import ConfigError, SlipstreamError, shortened
from slipstream.reading import reason, shown
from slipstream.rollout.agents.session import PolicySession
from slipstream.rollout.agents.verifiers import LOAD_ENVIRONMENT
from slipstream.rollout.episode import (
    CRASH,
    TOKENS,
    EpisodeError,
    EpisodeLimits,
    Generate,
    count_answer,
    count_problem,
    truncate,
    used_up,
)
from slipstream.types import Prompt, Sample, Status

KIND = "environment"

TIMEOUT_S = 600.0
"""Time limit of the constructor, `initial_observation` and `step`, in seconds."""

_METHODS = ("initial_observation", "step")

log = logging.getLogger(__name__)


def is_tinker_environment(found: Any) -> bool:
    """Return whether a class has the methods of tinker's `Env`, or `found` is a function. What a
    function returns is not known before; with the name `load_environment` it is one of the library
    verifiers."""
    if inspect.isfunction(found):
        return found.__name__ != LOAD_ENVIRONMENT
    return inspect.isclass(found) and all(callable(getattr(found, m, None)) for m in _METHODS)


class TinkerEpisodes:
    """An `EpisodeRunner` of tinker environments."""

    def __init__(
        self,
        make: Callable[..., Any],
        limits: EpisodeLimits,
        *,
        kwargs: Mapping[str, Any],
        tokenizer: Any,
        ends: Collection[int | str],
        key: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`make` gets those columns of a row, `tokenizer` and `kwargs` that it has as parameters.
        `ends` are the token ids and strings at which the engine ends a turn. `key` is the section
        of the settings."""
        self._make = make
        self._limits = limits
        self._kwargs = kwargs
        self._tokenizer = tokenizer
        self._ends = ends
        self._key = key
        self._clock = clock

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        *,
        seed: int,
        stop: anyio.Event | None = None,
    ) -> bool:
        """Run an episode, or continue one that was stopped (see `EpisodeRunner`)."""
        used = 0.0 if sample.episode is None else sample.episode.tool_seconds
        session = PolicySession(
            sample,
            generate,
            kind=KIND,
            max_tokens=self._limits.max_tokens,
            max_prompt_tokens=self._limits.max_prompt_tokens,
        )
        session.record.tool_seconds = used

        async def call() -> None:
            await self._episode(sample, row, session)
            session.check_replayed()
            if self._limits.scores_itself:
                session.record.score = 0.0

        return await session.run(KIND, call)

    async def _episode(self, sample: Sample, row: Prompt, session: PolicySession) -> None:
        environment = await self._timed(session, "constructor", partial(self._made, row))
        begin = partial(call_either, environment.initial_observation)
        start = await self._timed(session, "initial_observation", begin)
        if not isinstance(start, tuple):
            raise EpisodeError(
                f"initial_observation returned {type(start).__name__}, so the policy cannot begin; "
                "raise the environment's limit on tokens, or shorten its prompt"
            )
        observation, stop = start
        while True:
            self._check_stop(stop)
            turn = await session.turn(observation.to_ints())
            if turn is None:
                truncate(sample, TOKENS)
                return
            cut = sample.status is Status.TRUNCATED
            extra = accepted(environment.step, {"extra": {"stop_reason": _REASONS[cut]}})
            step = partial(call_either, environment.step, list(turn.ids), **extra)
            try:
                result = await self._timed(session, "step", step)
            except (InfrastructureError, SlipstreamError):
                raise
            except Exception as error:
                # Otherwise a policy could avoid a bad reward by crashing its environment.
                log.warning("sample %s: step: %s", sample.uid, shortened(reason(error)))
                count_problem(session.record, CallProblem.RAISED)
                truncate(sample, CRASH)
                return
            reward = float(result.reward)
            answer = Answer(
                rewards={KIND: reward} if reward else {},
                done=bool(result.episode_done),
                metrics=numbers_in(result.metrics),
            )
            count_answer(session.record, answer, place=sample.num_tokens - 1)
            if cut:
                truncate(sample, TOKENS)
                return
            if answer.done:
                sample.status = Status.COMPLETED
                return
            if (budget := used_up(session.record, self._limits)) is not None:
                truncate(sample, budget)
                return
            observation, stop = result.next_observation, result.next_stop_condition

    async def _made(self, row: Prompt) -> Any:
        """The environment of an episode. Raises ConfigError if it cannot be made of the row, or is
        no environment."""
        columns = {**columns_of(row), "tokenizer": self._tokenizer}
        arguments = {**accepted(self._make, columns), **self._kwargs}
        try:
            inspect.signature(self._make).bind(**arguments)
        except TypeError as error:
            raise ConfigError(
                f"{self._key}: {self._make.__name__} cannot be called with "
                f"{', '.join(arguments)}: {error}; set {self._key}.kwargs to its other arguments, "
                "or add columns to the data"
            ) from error
        made = await call_either(self._make, **arguments)
        for method in _METHODS:
            if not callable(getattr(made, method, None)):
                raise ConfigError(
                    f"{self._key}.name: {self._make.__name__} made an object without a method "
                    f"{method!r}; a function must return an environment in tinker's form"
                )
        return made

    def _check_stop(self, stop: Any) -> None:
        """Raise ConfigError if a turn should end at something that is no end for the engine."""
        for end in [stop] if isinstance(stop, str) else stop or ():
            if end not in self._ends:
                name = "stop" if isinstance(end, str) else "stop_token_ids"
                raise ConfigError(
                    f"{self._key}: the environment ends turns at {shown(end)}, but the engine does "
                    f"not; add it to actor_rollout_ref.rollout.{name}"
                )

    async def _timed(
        self, session: PolicySession, what: str, call: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Await a call of the environment. Its time counts, unless it is replayed."""
        started, replayed = self._clock(), session.replays
        try:
            return await within(TIMEOUT_S, what, call)
        finally:
            if not replayed:
                session.record.tool_seconds += self._clock() - started

    async def discard(self, sample: Sample) -> None:
        return None

    async def close(self) -> None:
        return None


_REASONS = {False: "stop", True: "length"}
"""Why a turn ended, by whether it was cut off."""
