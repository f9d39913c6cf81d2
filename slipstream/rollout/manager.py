"""Asynchronous rollouts: groups of samples, each scored as soon as it ends.

    prompts --> group --+--> sample --> engine.generate --> score --+--> filter --> batch
                        +--> sample --> engine.generate --> score --+

Without over-sampling the batch is a function of prompts, seed and weights alone: a group that the
filter rejects is replaced by the next prompt, whatever ended first. With over-sampling more groups
start than a batch needs; the first ones to finish win, so the clock has a say, and the others are
stopped. Their tokens are kept and go on in the next batch (`partial_rollout`), or the prompts are
given up. Knows engines by protocol only, and nothing about training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn, Protocol

import anyio

from slipstream.errors import (
    ConfigError,
    DataError,
    EngineError,
    StageTimeoutError,
    check_at_least_one,
)
from slipstream.inference.protocol import InferenceEngine
from slipstream.rewards.protocol import GroupRewardManager, RewardManager, apply_score
from slipstream.rollout.filters import GroupFilter, run_filter
from slipstream.rollout.occupancy import Occupancy
from slipstream.types import (
    GenerateRequest,
    Generation,
    GenerationSink,
    Group,
    Prompt,
    Sample,
    SamplingParams,
    Segment,
    Status,
    StopReason,
    VersionSpan,
)

_STATUS = {
    StopReason.EOS: Status.COMPLETED,
    StopReason.STOP_TOKEN: Status.COMPLETED,
    StopReason.STOP_STRING: Status.COMPLETED,
    StopReason.LENGTH: Status.TRUNCATED,
    StopReason.ABORT: Status.ABORTED,
    StopReason.ERROR: Status.FAILED,
}

SURPLUS = "surplus"
"""Why a group was left out that over-sampling started and the batch did not need."""


class PromptSupply(Protocol):
    """Where prompts come from (`environment.DataBuffer`). Fewer than asked for: it has ended."""

    def get_prompts(self, n: int) -> list[Prompt]: ...


def with_over_sampling(groups: int, share: float) -> int:
    """How many groups are started where `groups` are wanted."""
    # 100 * 1.1 is a little more than 110 in binary, and means 110.
    return math.ceil(groups * (1 + share) - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """`batch_size` groups of `n` samples a batch.

    `over_sampling` 0.25 starts a quarter more groups than needed. `timeout_s` bounds one batch.
    `seed` and `namespace` enter every sample's noise key. A filter that rejects more than
    `max_rejected` times the batch size in one batch ends the run. With `greedy_baseline` each
    group has one more response, greedily decoded.
    """

    batch_size: int
    n: int
    params: SamplingParams
    seed: int
    namespace: str = "train"
    over_sampling: float = 0.0
    partial_rollout: bool = False
    timeout_s: float = 3600.0
    max_rejected: float = 20.0
    greedy_baseline: bool = False

    def __post_init__(self) -> None:
        check_at_least_one(self, "batch_size", "n")
        if self.over_sampling < 0:
            raise ConfigError(f"over_sampling={self.over_sampling:g} must not be negative")


@dataclass(slots=True)
class RolloutCounts:
    """What happened while one batch was made.

    `dropped` counts groups by reason: a filter's word, or `surplus`. `carried_over` counts
    unfinished samples that the next batch goes on with. `tail_seconds`, in which fewer than half as
    many responses were under way as there had been, and `scoring_seconds`, in which none was and
    rewards were waited for, are wall time. `generated` is what a filter had to be given to fill the
    batch, in batches; None without a filter.
    """

    dropped: dict[str, int] = field(default_factory=dict)
    generated: float | None = None
    carried_over: int = 0
    tail_seconds: float = 0.0
    scoring_seconds: float = 0.0

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


class AsyncRolloutManager:
    """Makes batches of scored groups from prompts and engines. One batch at a time."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        data_buffer: PromptSupply,
        reward_manager: RewardManager,
        settings: RolloutSettings,
        *,
        group_filter: GroupFilter | None = None,
        sink: GenerationSink | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`sink` is given the hidden states of the responses that it wants, from an engine that
        hands them over; `clock` gives the seconds of `counts`."""
        if not engines:
            raise EngineError("a rollout manager needs at least one engine, got none")
        self.settings = settings
        self.counts = RolloutCounts()
        self._engines = engines
        self._data = data_buffer
        self._reward = reward_manager
        self._filter = group_filter
        self._sink = sink
        self._clock = clock
        self._next_group = 0
        self._carried: list[Group] = []
        self.rejected: list[Group] = []
        """Scored groups of the last batch that the filter did not accept."""

    @property
    def timeout_s(self) -> float:
        """Deadline of one batch."""
        return self.settings.timeout_s

    async def generate_batch(self) -> list[Group]:
        """The next `batch_size` groups, by group index; fewer where the prompts have ended.

        Raises StageTimeoutError naming what was waited for; DataError where no prompt is left or
        the filter rejects everything; RewardError when a failed reward must end the run; and what
        an engine raises for a request that it can never serve. After an error the manager is not
        usable, since groups under way are lost.
        """
        self.counts = RolloutCounts()
        batch = _Batch(want=self.settings.batch_size, occupancy=Occupancy(self._clock))
        start = with_over_sampling(batch.want, self.settings.over_sampling)
        groups, self._carried = self._carried[:start], self._carried[start:]
        groups += self._new_groups(start - len(groups))
        if not groups:
            raise DataError("no prompt is left for another batch; add data or lower the steps")
        with anyio.move_on_after(self.settings.timeout_s) as scope:
            await self._run_batch(groups, batch)
        if scope.cancelled_caught:
            raise StageTimeoutError(self._late(batch))
        self.rejected = batch.rejected
        batch.occupancy.finish()
        self.counts.tail_seconds = batch.occupancy.tail_seconds
        self.counts.scoring_seconds = batch.occupancy.empty_seconds
        if self._filter is not None:
            self.counts.generated = 1 + len(batch.rejected) / batch.want
        self._keep_unfinished(batch)
        return sorted(batch.done, key=lambda group: group.index)

    def state_dict(self) -> dict[str, Any]:
        """Group counter and unfinished groups, as JSON values."""
        carried = [asdict(group) for group in self._carried]
        for group in carried:
            for sample in (*group["samples"], group["greedy"]):
                for segment in [] if sample is None else sample["segments"]:
                    # It depends on the clock, and checkpoints of equal runs are equal.
                    del segment["drafted"]
        return {"next_group": self._next_group, "carried": carried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Raises DataError where it is none."""
        try:
            self._next_group = int(state["next_group"])
            self._carried = [_group_from(raw) for raw in state["carried"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the state of the rollouts cannot be read ({error!r}); resume from another "
                "checkpoint"
            ) from error

    def _new_groups(self, count: int) -> list[Group]:
        groups = []
        for prompt in self._data.get_prompts(count):
            index, self._next_group = self._next_group, self._next_group + 1
            samples = [
                Sample.from_prompt(prompt, group_index=index, index=i)
                for i in range(self.settings.n)
            ]
            greedy = None
            if self.settings.greedy_baseline:
                greedy = Sample.from_prompt(prompt, group_index=index, index=self.settings.n)
            groups.append(Group(index=index, prompt=prompt, samples=samples, greedy=greedy))
        return groups

    async def _run_batch(self, groups: Sequence[Group], batch: _Batch) -> None:
        try:
            async with anyio.create_task_group() as tasks:

                def launch(group: Group) -> None:
                    batch.running[group.index] = group
                    tasks.start_soon(self._run_group, group, batch)

                batch.launch = launch
                for group in groups:
                    launch(group)
        except BaseExceptionGroup as errors:
            _raise_one(errors)

    async def _run_group(self, group: Group, batch: _Batch) -> None:
        engine = self._engines[group.index % len(self._engines)]
        pending = [sample for sample in group.members if sample.status is Status.PENDING]
        async with anyio.create_task_group() as tasks:
            for sample in pending:
                tasks.start_soon(self._run_sample, sample, engine, batch)
        if any(sample.status is Status.PENDING for sample in group.members):
            return  # stopped: `_keep_unfinished` finds it among the running ones
        # A surplus group of the batch before is finished already.
        if pending and isinstance(self._reward, GroupRewardManager):
            await self._reward.finish_group(group.members)
        del batch.running[group.index]
        verdict = run_filter(self._filter, group.samples)
        if not verdict:
            batch.rejected.append(group)
            self._replace(verdict.reason, batch)
        elif len(batch.done) == batch.want:
            batch.surplus.append(group)
        else:
            batch.done.append(group)
            if len(batch.done) == batch.want:
                await self._stop(batch)

    def _replace(self, reason: str, batch: _Batch) -> None:
        """Count a rejected group, and start another one where the batch still needs it."""
        self.counts.drop(reason)
        if len(batch.rejected) > self.settings.max_rejected * batch.want:
            raise DataError(
                f"the group filter rejected {len(batch.rejected)} groups while a batch of "
                f"{batch.want} "
                f"was made ({len(batch.done)} accepted; reasons: {self.counts.dropped}); relax "
                "the filter (algorithm.filter_groups.max_num_gen_batches counts the batches of "
                "prompts to try) or use prompts of another difficulty"
            )
        if not batch.stopping and len(batch.done) + len(batch.running) < batch.want:
            for fresh in self._new_groups(1):
                batch.launch(fresh)

    async def _run_sample(self, sample: Sample, engine: InferenceEngine, batch: _Batch) -> None:
        if batch.stopping:
            return
        request = self._request(sample)
        with batch.occupancy.one():
            generation = await engine.generate(request)
        if extend_sample(sample, generation):
            if self._sink is not None and request.return_hidden_states:
                self._sink.receive(request, generation)
            # Scoring may take long, and hidden states much memory.
            del generation
            # Stays pending until it is scored, so that nobody takes it for finished.
            status, sample.status = sample.status, Status.PENDING
            score = await self._reward.score_sample(sample)
            sample.status = status
            apply_score(sample, score)

    def _request(self, sample: Sample) -> GenerateRequest:
        prior = sample.response_ids
        params = self.settings.params
        if self.settings.greedy_baseline and sample.index == self.settings.n:
            params = replace(params, temperature=0.0)
        request = GenerateRequest(
            request_id=_request_id(self.settings.namespace, sample),
            prompt_ids=tuple(sample.prompt_ids),
            prior_ids=tuple(prior),
            params=replace(params, max_tokens=params.max_tokens - len(prior)),
            key=sample.noise_key(self.settings.seed, self.settings.namespace),
            group=f"{self.settings.namespace}/{sample.group_index}",
        )
        wanted = self._sink is not None and self._sink.wants(request)
        return replace(request, return_hidden_states=True) if wanted else request

    async def _stop(self, batch: _Batch) -> None:
        """Enough groups are done: stop the samples of all others."""
        batch.stopping = True
        ids = [
            _request_id(self.settings.namespace, sample)
            for group in batch.running.values()
            for sample in group.members
            if sample.status is Status.PENDING
        ]
        if ids:
            for engine in self._engines:
                await engine.abort(ids)

    def _keep_unfinished(self, batch: _Batch) -> None:
        """Unfinished and surplus groups go on in the next batch, or are given up."""
        left = [*batch.running.values(), *batch.surplus]
        if not self.settings.partial_rollout:
            for _ in left:
                self.counts.drop(SURPLUS)
            return
        self._carried = sorted([*self._carried, *left], key=lambda group: group.index)
        self.counts.carried_over = sum(
            sample.status is Status.PENDING for group in left for sample in group.members
        )

    def _late(self, batch: _Batch) -> str:
        pending = [
            f"{group.index}.{sample.index} ({sample.uid})"
            for _, group in sorted(batch.running.items())
            for sample in group.members
            if sample.status is Status.PENDING
        ]
        more = f" and {len(pending) - 4} more" if len(pending) > 4 else ""
        return (
            f"rollout: {len(batch.done)} of {batch.want} groups were done after "
            f"{self.settings.timeout_s:g} s; it waited for the samples {', '.join(pending[:4])}"
            f"{more}. Raise actor_rollout_ref.rollout.timeout_s (or trainer.stage_timeout_s), or "
            "lower data.max_response_length"
        )


@dataclass(slots=True)
class _Batch:
    """The groups of one call of `generate_batch`."""

    want: int
    occupancy: Occupancy
    running: dict[int, Group] = field(default_factory=dict)
    done: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    rejected: list[Group] = field(default_factory=list)
    launch: Callable[[Group], None] = field(default=lambda group: None)
    stopping: bool = False


def extend_sample(sample: Sample, generation: Generation) -> bool:
    """Append what an engine generated. True when the sample is complete and can be scored.

    An aborted sample stays PENDING, with its partial tokens: it can be gone on with, and goes on in
    the same turn.
    """
    sample.stop_reason = generation.stop_reason
    turn = sample.segments[-1] if sample.segments else None
    if turn is None or turn.role != "assistant":
        turn = Segment.given("assistant", [])
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
    status = _STATUS[generation.stop_reason]
    sample.status = Status.PENDING if status is Status.ABORTED else status
    sample.failure = generation.error
    return status in (Status.COMPLETED, Status.TRUNCATED)


def _request_id(namespace: str, sample: Sample) -> str:
    return f"{namespace}/{sample.group_index}/{sample.index}"


def _raise_one(errors: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise one error of a task group as itself: callers know errors by type.

    A group with KeyboardInterrupt stays one: the event loop has raised that itself, and raised once
    more from a task it would end the loop before its worker threads, which nothing ends then.
    """
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error if isinstance(error, Exception) else errors


def _group_from(raw: Mapping[str, Any]) -> Group:
    return Group(
        index=int(raw["index"]),
        prompt=Prompt(**raw["prompt"]),
        samples=[_sample_from(sample) for sample in raw["samples"]],
        greedy=None if raw.get("greedy") is None else _sample_from(raw["greedy"]),
    )


def _sample_from(raw: Mapping[str, Any]) -> Sample:
    segments = [
        Segment(**{**segment, "spans": [VersionSpan(**span) for span in segment["spans"]]})
        for segment in raw["segments"]
    ]
    reason = raw["stop_reason"]
    return Sample(
        **{
            **raw,
            "segments": segments,
            "status": Status(raw["status"]),
            "stop_reason": None if reason is None else StopReason(reason),
        }
    )
