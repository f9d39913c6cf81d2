"""Episodes: one attempt at a prompt, of one or several turns.

    prompt --> engine --> turn of the policy --> environment --> messages --> engine --> ...

A response of a single turn is an episode whose environment ends it after one turn. A sample gets a
segment for each turn of the policy, and one with loss mask 0 for each answer of the environment.
Its tokens are only appended. With `rerender` a new branch begins if the chat template renders the
earlier turns differently. The branch begins with this rendering, with loss mask 0. Each sampled
token is trained on in the branch that sampled it.

A step can end before an episode does (`partial_rollout`). The episode keeps its tokens and
continues in a later step. In the same process it also keeps its environment, which may go on with
its answer between the steps. After a restart it gets a new environment, and the recorded turns are
replayed to it: tools are called again, and must answer as before.

Knows engines by their protocol only, and nothing about groups and training. Called by
`rollout.manager`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import anyio

from slipstream.data.messages import continues_message
from slipstream.environment.protocol import (
    Answer,
    AssistantMessage,
    CallProblem,
    Environment,
    EnvironmentFactory,
    InfrastructureError,
    ToolSchema,
    Turn,
)
from slipstream.errors import DataError, SlipstreamError, shortened
from slipstream.reading import reason
from slipstream.rewards.protocol import TURN_PART
from slipstream.rollout.render import Renderer
from slipstream.types import (
    EpisodeRecord,
    Generation,
    Message,
    NoiseKey,
    PlacedReward,
    Prompt,
    Sample,
    Segment,
    Status,
    StopReason,
    VersionSpan,
)

T = TypeVar("T")

log = logging.getLogger(__name__)


class Generate(Protocol):
    """Continues the last turn of a sample, or begins a new one after an answer."""

    def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Awaitable[Generation]:
        """Generate at most `max_tokens` tokens; None: what the response may still have."""
        ...


ASSISTANT = "assistant"
"""The role of segments that the policy sampled."""

STATUS = {
    StopReason.EOS: Status.COMPLETED,
    StopReason.STOP_TOKEN: Status.COMPLETED,
    StopReason.STOP_STRING: Status.COMPLETED,
    StopReason.LENGTH: Status.TRUNCATED,
    StopReason.ABORT: Status.ABORTED,
    StopReason.ERROR: Status.FAILED,
}

TOKENS, ASSISTANT_TURNS, USER_TURNS, TOOL_SECONDS, MICRO_BATCH, CRASH = (
    "tokens",
    "assistant_turns",
    "user_turns",
    "tool_seconds",
    "micro_batch",
    "environment_crash",
)
"""Budgets, and a crash that recurs, for `EpisodeRecord.truncated_by`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The budgets of an episode; None: no limit.

    `max_tokens` limits all tokens after the prompt, answers of the environment included.
    `max_assistant_turns` and `max_user_turns` limit the turns of the policy and the answers.
    `max_tool_seconds` limits the time in tools and the environment, without waiting for a tool to
    be free. `max_prompt_tokens` limits a prompt that the environment changes. `prompt_tools` are
    the tools that prompts already list. `rerender` begins a new branch where the chat template
    changes earlier turns; `max_tokens` then limits the context of each branch. `branches_fit` tells
    whether branches of given lengths can be trained on together; an episode ends before a branch
    that may not fit.

    A call of the environment that fails because of the infrastructure is repeated `retries` times.
    The first repetition waits `backoff_s` seconds, and each later one twice as long as the one
    before. `close_s` limits the time to release an environment. With `scores_itself` the rewards of
    the environment are the only ones: the reward function is not called.
    """

    max_tokens: int
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_tool_seconds: float | None = None
    max_prompt_tokens: int | None = None
    prompt_tools: Sequence[ToolSchema] = ()
    retries: int = 3
    backoff_s: float = 0.5
    close_s: float = 60.0
    rerender: bool = False
    branches_fit: Callable[[Sequence[int]], bool] | None = None
    scores_itself: bool = False


class EpisodeRunner(Protocol):
    """Runs the episodes of samples."""

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        *,
        seed: int,
        stop: anyio.Event | None = None,
    ) -> bool:
        """Run an episode, or continue one that was stopped.

        Returns True if it has ended and can be scored. A sample whose environment or engine failed
        is `FAILED`; one that was stopped stays `PENDING`. If `stop` is set, an episode that waits
        for its environment may return, too, and get the answer when it continues.
        """
        ...

    async def discard(self, sample: Sample) -> None:
        """Release what a stopped sample holds, because it will not continue."""
        ...

    async def close(self) -> None:
        """Release what all stopped samples hold."""
        ...


class SingleTurn:
    """Episodes of one turn, without an environment."""

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        *,
        seed: int,
        stop: anyio.Event | None = None,
    ) -> bool:
        return extend_sample(sample, await generate(sample))

    async def discard(self, sample: Sample) -> None:
        return None

    async def close(self) -> None:
        return None


class Episodes:
    """Episodes with an environment each."""

    def __init__(
        self,
        make_environment: EnvironmentFactory,
        renderer: Renderer,
        limits: EpisodeLimits,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make = make_environment
        self._renderer = renderer
        self._limits = limits
        self._clock = clock
        self._stopped: dict[tuple[int | None, int], _Episode] = {}
        """Episodes that were stopped in this process, by group and index."""

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        *,
        seed: int,
        stop: anyio.Event | None = None,
    ) -> bool:
        """Run an episode, or continue it (see `EpisodeRunner`)."""
        key = (sample.group_index, sample.index)
        episode = self._stopped.pop(key, None)
        if episode is None:
            episode = _Episode(self._make(), self._renderer, self._limits, self._clock)
        stopped = False
        try:
            ended = await episode.run(sample, row, generate, seed, stop)
            stopped = sample.status is Status.PENDING
            return ended
        finally:
            if stopped:
                self._stopped[key] = episode
            else:
                await episode.close()

    async def discard(self, sample: Sample) -> None:
        episode = self._stopped.pop((sample.group_index, sample.index), None)
        if episode is not None:
            await episode.close()

    async def close(self) -> None:
        """Release the environments of all stopped samples."""
        stopped, self._stopped = self._stopped, {}
        async with anyio.create_task_group() as tasks:
            for episode in stopped.values():
                tasks.start_soon(episode.close)


class EpisodeError(Exception):
    """The episode cannot continue; its text is the reason."""


class _CrashError(Exception):
    """A call of the environment raised twice."""


class _Episode:
    """One episode. `run` can be called again after the sample was stopped."""

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        limits: EpisodeLimits,
        clock: Callable[[], float],
    ) -> None:
        self._environment = environment
        self._renderer = renderer
        self._limits = limits
        self._clock = clock
        self._tools: Sequence[ToolSchema] = ()
        self._messages: list[Message] = []
        self._begun = False
        self._unanswered: Turn | None = None
        """A complete turn whose answer is missing."""
        self._answering: asyncio.Task[tuple[Answer, float]] | None = None
        """The call of the environment with this turn. It goes on while the episode is stopped."""

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        seed: int,
        stop: anyio.Event | None,
    ) -> bool:
        try:
            if not self._begun:
                await self._begin(sample, row, seed)
                self._begun = True
            while True:
                if self._unanswered is None:
                    left = self._limits.max_tokens - _used(sample)
                    generation = await generate(sample, left)
                    extend_sample(sample, generation)
                    if sample.status is Status.PENDING:
                        return False  # stopped
                    if sample.status is Status.FAILED:
                        return False
                if await self._end_turn(sample, stop):
                    break
                if self._unanswered is not None:
                    return False  # stopped
            await self._score(sample)
        except EpisodeError as error:
            sample.status, sample.failure = Status.FAILED, str(error)
            return False
        return True

    async def close(self) -> None:
        """Release the environment. An error is logged: the sample is complete without it."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._limits.close_s) as scope:
            answering, self._answering = self._answering, None
            if answering is not None and not answering.done():
                answering.cancel()
                await asyncio.wait([answering])
            if answering is not None and not answering.cancelled():
                answering.exception()  # Otherwise asyncio logs it as never retrieved.
            try:
                await self._environment.close()
            except Exception as error:
                log.warning("an environment could not be closed: %s", reason(error))
        if scope.cancelled_caught:
            log.warning("an environment was not closed within %g s", self._limits.close_s)

    async def _begin(self, sample: Sample, row: Prompt, seed: int) -> None:
        """Reset the environment. Render the prompt, or replay the turns of a sample that was
        stopped in an earlier process."""
        old, done = sample.branches, sample.episode
        recorded = [branch.segments for branch in old]
        sample.earlier, sample.branch, sample.parent = [], 0, None
        sample.segments = [*recorded[0][:1]]
        record = sample.episode = EpisodeRecord()
        started = self._clock()
        try:
            start = await self._call("reset", lambda: self._environment.reset(row, seed))
        except _CrashError as error:
            # The policy has done nothing yet, so it cannot be its mistake.
            raise EpisodeError(str(error)) from error
        record.tool_seconds += self._clock() - started
        self._tools = start.tools
        given = row.messages
        self._messages = (
            [{"role": "user", "content": given}] if isinstance(given, str) else [*given]
        )
        if start.prompt_text:
            last = self._messages[-1]
            self._messages[-1] = {**last, "content": f"{last['content']}{start.prompt_text}"}
        self._messages += start.messages
        if (
            start.prompt_text
            or start.messages
            or list(start.tools) != list(self._limits.prompt_tools)
        ):
            sample.segments[0] = Segment.given("prompt", self._prompt(row))
        if done is not None:
            if sample.segments[0] != recorded[0][0]:
                raise EpisodeError("replay: the environment began with another prompt than before")
            await self._replay(sample, recorded, done)

    async def _replay(
        self, sample: Sample, recorded: Sequence[Sequence[Segment]], done: EpisodeRecord
    ) -> None:
        """Give the recorded turns, by branch, to the environment again. If no answer follows the
        last turn, it is incomplete, or was stopped while it waited for its answer."""
        record = _record(sample)
        turns = [one for branch in recorded for one in branch if one.role == ASSISTANT]
        last = recorded[-1][-1].role == ASSISTANT
        for turn in turns[:-1] if last else turns:
            sample.append(turn)
            sample.status = Status.COMPLETED
            record.tool_seconds = 0.0  # The replay does not use up the budget.
            if await self._end_turn(sample):
                raise EpisodeError("replay: the environment answered otherwise than before")
        if last:
            sample.append(turns[-1])
            if sample.stop_reason is not StopReason.ABORT and self._take_turn(sample):
                raise EpisodeError("replay: the last turn had another end than before")
        if [branch.segments for branch in sample.branches] != list(recorded):
            raise EpisodeError("replay: the environment answered otherwise than before")
        sample.status = Status.PENDING
        record.tool_seconds = done.tool_seconds

    def _prompt(self, row: Prompt) -> list[int]:
        """Render the prompt with what the environment adds."""
        if isinstance(row.messages, str):
            raise EpisodeError(
                "the environment adds messages or tools, but the prompt is plain text; give the "
                "prompt as messages"
            )
        if continues_message(self._messages):
            raise EpisodeError(
                "the environment adds messages or tools to a prompt that ends with an assistant "
                "message; end the prompt with a user message"
            )
        try:
            ids = self._renderer.prompt(self._messages, self._tools)
        except DataError as error:
            raise EpisodeError(f"the prompt cannot be rendered: {error}") from error
        most = self._limits.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise EpisodeError(
                f"with the messages and tools of the environment the prompt has {len(ids)} tokens, "
                f"more than data.max_prompt_length {most}"
            )
        return ids

    async def _end_turn(self, sample: Sample, stop: anyio.Event | None = None) -> bool:
        """Give a turn to the environment and append the answer. Returns whether the episode is
        over, and sets the status then. If `stop` is set before the answer is there, the turn stays
        unanswered."""
        record, limits = _record(sample), self._limits
        if self._unanswered is None and self._take_turn(sample):
            return True
        turn = self._unanswered
        assert turn is not None
        try:
            answered = await self._answer(turn, stop)
        except _CrashError as error:
            # Otherwise a policy could avoid a bad reward by crashing its environment.
            log.warning("sample %s: %s", sample.uid, error)
            count_problem(record, CallProblem.RAISED)
            return truncate(sample, CRASH)
        if answered is None:
            sample.status = Status.PENDING
            return False
        self._unanswered = None
        answer, waited = answered
        record.tool_seconds += sum(c.seconds for c in answer.calls) if answer.calls else waited
        count_answer(record, answer, place=sample.num_tokens - 1, branch=len(sample.earlier))
        if answer.done:
            sample.status = Status.COMPLETED
            return True
        if (budget := used_up(record, limits)) is not None:
            return truncate(sample, budget)
        return self._append(sample, turn.message, answer.messages)

    def _take_turn(self, sample: Sample) -> bool:
        """Parse a complete turn, for the environment. Returns whether a budget ends the episode,
        and sets the status then."""
        record, limits = _record(sample), self._limits
        record.turns += 1
        turn = sample.segments[-1]
        if sample.status is Status.TRUNCATED:
            return truncate(sample, TOKENS)
        message = self._renderer.parse(turn.ids, self._tools)
        answers = record.turns - 1
        if message.tool_calls and _reached(record.turns, limits.max_assistant_turns):
            return truncate(sample, ASSISTANT_TURNS)
        if message.tool_calls and _reached(answers, limits.max_user_turns):
            return truncate(sample, USER_TURNS)
        self._messages.append(message.as_message())
        self._unanswered = Turn(
            message=message, number=record.turns, messages=tuple(self._messages)
        )
        return False

    async def _answer(self, turn: Turn, stop: anyio.Event | None) -> tuple[Answer, float] | None:
        """Return the answer of the environment and its seconds; None if `stop` is set before."""
        if stop is None and self._answering is None:
            return await self._timed_step(turn)
        # A call of another event loop, which has ended, is cancelled.
        if self._answering is None or self._answering.cancelled():
            self._answering = asyncio.create_task(self._timed_step(turn))
        async with anyio.create_task_group() as tasks:
            if stop is not None:
                tasks.start_soon(_cancel_when, stop, tasks.cancel_scope)
            # Does not cancel the call if it is cancelled itself.
            await asyncio.wait([self._answering])
            tasks.cancel_scope.cancel()
        if not self._answering.done():
            return None
        answered, self._answering = self._answering, None
        return answered.result()

    async def _timed_step(self, turn: Turn) -> tuple[Answer, float]:
        started = self._clock()
        answer = await self._call("step", lambda: self._environment.step(turn))
        return answer, self._clock() - started

    def _append(
        self, sample: Sample, message: AssistantMessage, messages: Sequence[Message]
    ) -> bool:
        """Append the messages after a turn, or begin a new branch. Returns True if they do not
        fit."""
        if self._renderer.surely_longer(messages, self._limits.max_tokens):
            return truncate(sample, TOKENS)
        try:
            ids, branches = self._continuation(sample, message, messages)
        except DataError as error:
            raise EpisodeError(f"the answer cannot be rendered: {error}") from error
        # At least one more token of the policy must fit.
        used = len(ids) - _first_prompt(sample) if branches else _used(sample) + len(ids)
        if used >= self._limits.max_tokens:
            return truncate(sample, TOKENS)
        if branches and not self._may_branch(sample):
            return truncate(sample, MICRO_BATCH)
        self._messages += messages
        if branches:
            begin_branch(sample, ids)
        else:
            role = str(messages[0].get("role")) if messages else "user"
            sample.append(Segment.given(role, ids))
        sample.status = Status.PENDING
        return False

    def _may_branch(self, sample: Sample) -> bool:
        """Whether another branch fits, whatever its length will be."""
        fits, most = self._limits.branches_fit, _first_prompt(sample) + self._limits.max_tokens
        return fits is None or fits([*(one.num_tokens for one in sample.branches), most])

    def _continuation(
        self, sample: Sample, message: AssistantMessage, messages: Sequence[Message]
    ) -> tuple[list[int], bool]:
        """Return the ids to append after a turn, and False; or the ids that a new branch begins
        with, and True."""
        rerender, renderer = self._limits.rerender, self._renderer
        ids: list[int] | None = None
        try:
            end, ids = renderer.extend(message, messages, self._tools)
            last = sample.segments[-1].ids
            if not last or last[-1] not in renderer.end_token_ids:
                ids = [end, *ids]
        except DataError:
            if not rerender:
                raise
        if ids is not None and not rerender:
            return ids, False
        whole = renderer.prompt([*self._messages, *messages], self._tools)
        if ids is not None and renderer.same_text([*sample.tokens, *ids], whole):
            return ids, False
        return whole, True

    async def _score(self, sample: Sample) -> None:
        record = _record(sample)
        started = self._clock()
        try:
            scores = await self._call("score", self._environment.score)
        except _CrashError as error:
            raise EpisodeError(str(error)) from error
        record.tool_seconds += self._clock() - started
        _reward(record, scores, place=sample.num_tokens - 1, branch=len(sample.earlier))
        if self._limits.scores_itself:
            record.score = 0.0

    async def _call(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Call the environment.

        A failure of the infrastructure is repeated, and at last raises EpisodeError. Another
        exception is repeated once, and then raises _CrashError.
        """
        limits, wait, crashed = self._limits, self._limits.backoff_s, False
        for attempt in range(limits.retries + 1):
            try:
                return await call()
            except InfrastructureError as error:
                text = f"environment {what}: {shortened(reason(error))}"
                if attempt == limits.retries:
                    raise EpisodeError(text) from error
            except SlipstreamError:
                raise
            except Exception as error:
                text = f"environment {what}: {shortened(reason(error))}"
                if crashed or limits.retries == 0:
                    raise _CrashError(text) from error
                crashed = True
            await anyio.sleep(wait)
            wait *= 2
        raise _CrashError(text)


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def extend_sample(sample: Sample, generation: Generation) -> bool:
    """Append generated tokens to a sample. Returns True if the turn is complete.

    An aborted sample keeps its partial tokens and stays PENDING; the next generation continues the
    same turn.
    """
    sample.stop_reason = generation.stop_reason
    turn = sample.segments[-1] if sample.segments else None
    if turn is None or turn.role != ASSISTANT:
        turn = Segment.given(ASSISTANT, [])
        sample.append(turn)
    start = len(turn.ids)
    turn.ids.extend(generation.token_ids)
    turn.loss_mask.extend([1.0] * len(generation.token_ids))
    turn.log_probs.extend(generation.log_probs)
    turn.sampling_log_probs.extend(generation.sampling_log_probs)
    for span in generation.spans:
        last = turn.spans[-1] if turn.spans else None
        if last is not None and last.version == span.version and last.end == start + span.start:
            turn.spans[-1] = VersionSpan(span.version, last.start, start + span.end)
        else:
            turn.spans.append(VersionSpan(span.version, start + span.start, start + span.end))
    turn.drafted.extend(start + place for place in generation.drafted)
    sample.response += generation.text
    status = STATUS[generation.stop_reason]
    sample.status = Status.PENDING if status is Status.ABORTED else status
    sample.failure = generation.error
    return status in (Status.COMPLETED, Status.TRUNCATED)


def episode_seed(key: NoiseKey) -> int:
    """Return the seed of the environment. All samples of a prompt have the same one."""
    text = repr((key.seed, key.namespace, key.epoch, key.uid))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def add_turn_rewards(sample: Sample) -> None:
    """Add the rewards of turns, tools and environment to a scored sample. `reward_parts` get their
    sums by name."""
    if sample.episode is None or sample.status is Status.FAILED:
        return
    for placed in sample.episode.rewards:
        part = TURN_PART + placed.name
        sample.reward_parts[part] = sample.reward_parts.get(part, 0.0) + placed.value
        sample.reward += placed.value


def _first_prompt(sample: Sample) -> int:
    """The number of tokens of the episode's prompt."""
    return (sample.earlier[0] if sample.earlier else sample).prompt_length


def _used(sample: Sample) -> int:
    """The number of tokens after the episode's prompt, in the context of the current branch."""
    return sample.num_tokens - _first_prompt(sample)


def begin_branch(sample: Sample, ids: Sequence[int]) -> None:
    """Continue a sample in a new branch, whose context is `ids`."""
    done = put_aside(sample)
    sample.earlier.append(done)
    sample.segments = [Segment.given("prompt", list(ids))]
    sample.branch, sample.parent = len(sample.earlier), done.branch


def put_aside(sample: Sample) -> Sample:
    """Return the current branch of a sample as a sample of its own."""
    return Sample(
        prompt=sample.prompt,
        segments=sample.segments,
        status=Status.COMPLETED,
        uid=sample.uid,
        epoch=sample.epoch,
        group_index=sample.group_index,
        index=sample.index,
        branch=sample.branch,
        parent=sample.parent,
        attempt=sample.attempt,
        data_source=sample.data_source,
    )


def _record(sample: Sample) -> EpisodeRecord:
    assert sample.episode is not None
    return sample.episode


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit


def used_up(record: EpisodeRecord, limits: EpisodeLimits) -> str | None:
    """Return the budget, apart from tokens, that is used up after a turn whose answer does not
    count yet; None if there is none."""
    if _reached(record.turns, limits.max_assistant_turns):
        return ASSISTANT_TURNS
    if _reached(record.turns - 1, limits.max_user_turns):
        return USER_TURNS
    if limits.max_tool_seconds is not None and record.tool_seconds > limits.max_tool_seconds:
        return TOOL_SECONDS
    return None


def truncate(sample: Sample, budget: str) -> bool:
    """End an episode because of a budget. Returns True."""
    sample.status = Status.TRUNCATED
    _record(sample).truncated_by = budget
    return True


def count_answer(record: EpisodeRecord, answer: Answer, *, place: int, branch: int = 0) -> None:
    """Record the answer to a turn: calls, problems, rewards and metrics. `place` and `branch` are
    those of the rewards. Raises EpisodeError for a reward that is not finite."""
    record.calls += len(answer.calls)
    for call in answer.calls:
        if call.problem is not None:
            count_problem(record, call.problem)
    _reward(record, answer.rewards, place=place, branch=branch)
    for name, value in answer.metrics.items():
        record.metrics[name] = record.metrics.get(name, 0.0) + value


def count_problem(record: EpisodeRecord, problem: CallProblem) -> None:
    """Record a problem of a call or an environment."""
    record.problems[problem] = record.problems.get(problem, 0) + 1


def _reward(
    record: EpisodeRecord, rewards: Mapping[str, float], *, place: int, branch: int
) -> None:
    """Record rewards. Raises EpisodeError for one that is not finite."""
    for name, value in rewards.items():
        if not math.isfinite(value):
            raise EpisodeError(
                f"the reward {name!r} of turn {record.turns} is {value}; tools and environments "
                "must return finite rewards"
            )
        record.rewards.append(PlacedReward(place, name, float(value), branch))
