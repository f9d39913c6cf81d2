"""Asynchronous rollouts: generate groups of samples, and score each sample when it ends.

    prompts --> group --+--> sample --> episode --> score --+--> filter --> batch
                        +--> sample --> episode --> score --+

An episode is one response, or several turns with an environment between them (`episode`).

Without over-sampling a batch depends only on prompts, seed and weights: the next prompt replaces a
group that the filter rejects, whatever group ended first. With over-sampling more groups start than
a batch needs. The first groups to finish are used, so the batch depends on timing, and the others
are stopped. With `partial_rollout` the next batch continues their responses; otherwise they are
dropped. This module knows engines by their protocol only, and nothing about training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn, Protocol

import anyio

from slipstream.checkpoint.saved import MOST_REPEATS, REMEDY, Saved
from slipstream.errors import (
    ConfigError,
    DataError,
    EngineError,
    StageTimeoutError,
    check_at_least_one,
)
from slipstream.inference.protocol import InferenceEngine
from slipstream.reading import shown
from slipstream.rewards.protocol import GroupRewardManager, RewardManager, Score, apply_score
from slipstream.rollout.episode import (
    EpisodeRunner,
    SingleTurn,
    add_turn_rewards,
    episode_seed,
)
from slipstream.rollout.filters import GroupFilter, run_filter
from slipstream.rollout.occupancy import Occupancy
from slipstream.types import (
    GenerateRequest,
    Generation,
    GenerationSink,
    Group,
    PolicyVersion,
    Prompt,
    Sample,
    SamplingParams,
    Segment,
    Status,
    StopReason,
)

_MOST_TOKENS = 1 << 31
"""No vocabulary is larger."""

_ROUNDING = 1e-3
"""No log-prob is above 0 by more than this."""

SURPLUS = "surplus"
"""Drop reason of groups that over-sampling started and the batch did not need."""


class PromptSupply(Protocol):
    """A source of prompts, for example `data.DataBuffer`."""

    def get_prompts(self, n: int) -> list[Prompt]:
        """The next `n` prompts; fewer if the prompts have ended."""
        ...


def with_over_sampling(groups: int, share: float) -> int:
    """The number of groups to start for a batch of `groups` groups."""
    # In floating point 100 * 1.1 is a little more than 110; it must count as 110.
    return math.ceil(groups * (1 + share) - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings of the rollout manager: a batch has `batch_size` groups of `n` samples.

    `over_sampling=0.25` starts 25 % more groups than needed. `timeout_s` is the time limit of one
    batch. An episode that takes longer than `episode_timeout_s` in one batch fails. `seed` and
    `namespace` are part of every sample's noise key. It is an error if the filter rejects more than
    `max_rejected` times the batch size in one batch. With `greedy_baseline` each group has one more
    response, decoded greedily.
    """

    batch_size: int
    n: int
    params: SamplingParams
    seed: int
    namespace: str = "train"
    over_sampling: float = 0.0
    partial_rollout: bool = False
    timeout_s: float = 3600.0
    episode_timeout_s: float | None = None
    max_rejected: float = 20.0
    greedy_baseline: bool = False

    def __post_init__(self) -> None:
        check_at_least_one(self, "batch_size", "n")
        if self.over_sampling < 0:
            raise ConfigError(f"over_sampling={self.over_sampling:g} must not be negative")


@dataclass(slots=True)
class RolloutCounts:
    """Counters of one batch.

    `dropped` counts groups by reason: a filter's reason, or `surplus`. `carried_over` counts
    unfinished samples that the next batch continues. `tail_seconds` is the wall time with fewer
    than half of the batch's maximum of running responses. `tool_seconds` is the wall time without
    running responses while episodes wait for tools, and `scoring_seconds` the wall time waiting for
    rewards. `generated` is the number of needed groups, accepted and rejected, divided by the batch
    size; None without a filter.
    """

    dropped: dict[str, int] = field(default_factory=dict)
    generated: float | None = None
    carried_over: int = 0
    tail_seconds: float = 0.0
    tool_seconds: float = 0.0
    scoring_seconds: float = 0.0

    def drop(self, reason: str) -> None:
        """Count a dropped group."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


class AsyncRolloutManager:
    """Makes batches of scored groups, one batch at a time."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        data_buffer: PromptSupply,
        reward_manager: RewardManager,
        settings: RolloutSettings,
        *,
        group_filter: GroupFilter | None = None,
        sink: GenerationSink | None = None,
        episodes: EpisodeRunner | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`episodes` runs the episodes of samples; None: every response is a single turn. `sink`
        receives the hidden states of the responses that it wants, if the engine returns
        hidden states. `clock` returns seconds, for `counts`."""
        if not engines:
            raise EngineError("a rollout manager needs at least one engine, got none")
        self.settings = settings
        self.counts = RolloutCounts()
        self._engines = engines
        self._data = data_buffer
        self._reward = reward_manager
        self._filter = group_filter
        self._sink = sink
        self._episodes = episodes or SingleTurn()
        self._clock = clock
        self._next_group = 0
        self._carried: list[Group] = []
        self.rejected: list[Group] = []
        """Scored groups of the last batch that the filter rejected."""

    @property
    def timeout_s(self) -> float:
        """Time limit of one batch, in seconds."""
        return self.settings.timeout_s

    async def generate_batch(self) -> list[Group]:
        """Generate the next `batch_size` groups, sorted by group index; fewer if the prompts end.

        Raises StageTimeoutError, which names the missing samples; DataError if there is no prompt
        left or the filter rejects too many groups; RewardError if a failed reward must end the run;
        and the engine's error for a request that it can never serve. After an error the manager
        cannot be used any more, because running groups are lost.
        """
        self.counts = RolloutCounts()
        batch = _Batch(
            want=self.settings.batch_size,
            occupancy=Occupancy(self._clock),
            stop=anyio.Event() if self.settings.partial_rollout else None,
        )
        start = with_over_sampling(batch.want, self.settings.over_sampling)
        groups, self._carried = self._carried[:start], self._carried[start:]
        groups += self._new_groups(start - len(groups))
        if not groups:
            raise DataError(
                "no prompt is left for another batch; add data, or lower "
                "trainer.total_training_steps"
            )
        with anyio.move_on_after(self.settings.timeout_s) as scope:
            await self._run_batch(groups, batch)
        if scope.cancelled_caught:
            raise StageTimeoutError(self._late(batch))
        self.rejected = batch.rejected
        batch.occupancy.finish()
        self.counts.tail_seconds = batch.occupancy.tail_seconds
        self.counts.tool_seconds = batch.occupancy.tool_seconds
        self.counts.scoring_seconds = batch.occupancy.empty_seconds
        if self._filter is not None:
            self.counts.generated = 1 + len(batch.rejected) / batch.want
        await self._keep_unfinished(batch)
        return sorted(batch.done, key=lambda group: group.index)

    async def close(self) -> None:
        """Release what unfinished episodes hold."""
        await self._episodes.close()

    def state_dict(self) -> dict[str, Any]:
        """The group counter and the unfinished groups, as JSON values."""
        carried = [asdict(group) for group in self._carried]
        for group in carried:
            samples = [one for one in (*group["samples"], group["greedy"]) if one is not None]
            for branch in [one for sample in samples for one in (*sample["earlier"], sample)]:
                for segment in branch["segments"]:
                    # Which tokens were drafted depends on timing, but equal runs must have equal
                    # checkpoints.
                    del segment["drafted"]
        return {"next_group": self._next_group, "carried": carried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`. Raises DataError if `state` is not one."""
        saved = Saved(state, error=DataError).fields("next_group", "carried")
        next_group = saved["next_group"].count()
        carried = [_group_from(group, next_group) for group in saved["carried"].elements()]
        if self.settings.greedy_baseline and any(group.greedy is None for group in carried):
            raise DataError(
                "carried has a group whose greedy is null, but algorithm.adv_estimator needs a "
                f"greedy response; {REMEDY}, or set the algorithm.adv_estimator of the earlier run"
            )
        indices = [group.index for group in carried]
        if len(set(indices)) != len(indices):
            raise DataError(f"carried has a group twice, of the indices {indices[:20]}; {REMEDY}")
        self._next_group, self._carried = next_group, carried

    @property
    def started(self) -> int:
        """The number of groups started since the start of the run, one for each prompt."""
        return self._next_group

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest policy version that wrote a part of an unfinished response; 0 for none."""
        samples = (sample for group in self._carried for sample in group.members)
        return max((version for sample in samples for version in sample.versions), default=0)

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
                tasks.start_soon(self._run_sample, sample, group.prompt, engine, batch)
        if any(sample.status is Status.PENDING for sample in group.members):
            return  # stopped; `_keep_unfinished` handles it as one of the running groups
        # Without pending samples it is a surplus group of the batch before, already finished.
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
        """Count a rejected group, and start another one if the batch still needs it."""
        self.counts.drop(reason)
        if len(batch.rejected) > self.settings.max_rejected * batch.want:
            raise DataError(
                f"the group filter rejected {len(batch.rejected)} groups for a batch of "
                f"{batch.want} ({len(batch.done)} accepted; reasons: {self.counts.dropped}); relax "
                "the filter, try more batches of prompts "
                "(algorithm.filter_groups.max_num_gen_batches), or use prompts of another "
                "difficulty"
            )
        if not batch.stopping and len(batch.done) + len(batch.running) < batch.want:
            for fresh in self._new_groups(1):
                batch.launch(fresh)

    async def _run_sample(
        self, sample: Sample, prompt: Prompt, engine: InferenceEngine, batch: _Batch
    ) -> None:
        if batch.stopping:
            return

        async def generate(sample: Sample, max_tokens: int | None = None) -> Generation:
            return await self._generate(sample, max_tokens, engine, batch)

        seed = episode_seed(sample.noise_key(self.settings.seed, self.settings.namespace))
        ended, limit = False, self.settings.episode_timeout_s
        with anyio.move_on_after(limit) as scope:
            batch.episodes[id(sample)] = sample, scope
            single = isinstance(self._episodes, SingleTurn)
            with nullcontext() if single else batch.occupancy.episode():
                ended = await self._episodes.run(
                    sample, prompt, generate, seed=seed, stop=batch.stop
                )
        del batch.episodes[id(sample)]
        if scope.cancelled_caught and limit is not None and anyio.current_time() >= scope.deadline:
            sample.status = Status.FAILED
            sample.failure = (
                f"episode: not complete after {limit:g} s; raise "
                "actor_rollout_ref.rollout.episode_timeout_s"
            )
        if ended:
            # Pending until it is scored, so that no other task takes it for finished.
            status, sample.status = sample.status, Status.PENDING
            score = await self._score(sample)
            sample.status = status
            apply_score(sample, score)
            add_turn_rewards(sample)

    async def _score(self, sample: Sample) -> Score:
        """The score of the episode itself, or of the reward function."""
        if sample.episode is not None and sample.episode.score is not None:
            return Score(sample.episode.score)
        return await self._reward.score_sample(sample)

    async def _generate(
        self, sample: Sample, max_tokens: int | None, engine: InferenceEngine, batch: _Batch
    ) -> Generation:
        """Generate the next turn of a sample, of at most `max_tokens` (None: what the response may
        still have). Stopped without tokens if the batch is complete."""
        request = self._request(sample, max_tokens)
        if batch.stopping:
            return Generation(
                request_id=request.request_id,
                token_ids=[],
                log_probs=[],
                sampling_log_probs=[],
                spans=[],
                stop_reason=StopReason.ABORT,
            )
        with batch.occupancy.one():
            generation = await engine.generate(request)
        wanted = self._sink is not None and request.return_hidden_states
        if wanted and generation.stop_reason not in (StopReason.ABORT, StopReason.ERROR):
            assert self._sink is not None
            self._sink.receive(request, generation)
        # Free the hidden states, because tools and scoring may take long.
        generation.hidden_states = generation.context_hidden_states = None
        return generation

    def _request(self, sample: Sample, max_tokens: int | None) -> GenerateRequest:
        prior = sample.response_ids
        params = self.settings.params
        left = params.max_tokens - len(prior)
        if max_tokens is not None:
            left = min(left, max_tokens)
        if self.settings.greedy_baseline and sample.index == self.settings.n:
            params = replace(params, temperature=0.0)
        request = GenerateRequest(
            request_id=_request_id(self.settings.namespace, sample),
            prompt_ids=tuple(sample.prompt_ids),
            prior_ids=tuple(prior),
            params=replace(params, max_tokens=left),
            key=sample.noise_key(self.settings.seed, self.settings.namespace),
            group=f"{self.settings.namespace}/{sample.group_index}",
        )
        wanted = self._sink is not None and self._sink.wants(request)
        return replace(request, return_hidden_states=True) if wanted else request

    async def _stop(self, batch: _Batch) -> None:
        """Stop the samples of all unfinished groups, because enough groups are done."""
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
        if batch.stop is not None:
            batch.stop.set()
        else:
            # Episodes that will be dropped must not wait for their tools.
            for sample, scope in batch.episodes.values():
                if sample.episode is not None:
                    scope.cancel()

    async def _keep_unfinished(self, batch: _Batch) -> None:
        """Carry unfinished and surplus groups over to the next batch, or drop them."""
        left = [*batch.running.values(), *batch.surplus]
        if not self.settings.partial_rollout:
            async with anyio.create_task_group() as tasks:
                for group in left:
                    self.counts.drop(SURPLUS)
                    for sample in group.members:
                        tasks.start_soon(self._episodes.discard, sample)
            return
        self._carried = sorted([*self._carried, *left], key=lambda group: group.index)
        self.counts.carried_over = sum(
            sample.status is Status.PENDING for group in left for sample in group.members
        )

    def _late(self, batch: _Batch) -> str:
        """The message of a timeout."""
        pending = [
            f"{group.index}.{sample.index} ({sample.uid})"
            for _, group in sorted(batch.running.items())
            for sample in group.members
            # A sample that waits for its environment has a complete turn.
            if sample.status is Status.PENDING or id(sample) in batch.episodes
        ]
        more = f" and {len(pending) - 4} more" if len(pending) > 4 else ""
        hung = ""
        if not isinstance(self._episodes, SingleTurn) and self.settings.episode_timeout_s is None:
            hung = (
                ". If an environment or a tool hangs, set "
                "actor_rollout_ref.rollout.episode_timeout_s: then only its samples fail"
            )
        return (
            f"rollout: {len(batch.done)} of {batch.want} groups were done after "
            f"{self.settings.timeout_s:g} s; these samples are missing: {', '.join(pending[:4])}"
            f"{more}. Raise actor_rollout_ref.rollout.timeout_s (or trainer.stage_timeout_s), or "
            f"lower data.max_response_length{hung}"
        )


@dataclass(slots=True)
class _Batch:
    """The groups of one call of `generate_batch`."""

    want: int
    occupancy: Occupancy
    running: dict[int, Group] = field(default_factory=dict)
    done: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    episodes: dict[int, tuple[Sample, anyio.CancelScope]] = field(default_factory=dict)
    """The running episodes, by `id` of their sample."""
    rejected: list[Group] = field(default_factory=list)
    launch: Callable[[Group], None] = field(default=lambda group: None)
    stopping: bool = False
    stop: anyio.Event | None = None
    """Set when episodes that a later batch continues need not wait for their environments; None if
    none continues."""


def _request_id(namespace: str, sample: Sample) -> str:
    return f"{namespace}/{sample.group_index}/{sample.index}"


def _raise_one(errors: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the first error of a task group instead of the group, so that callers can catch it by
    its type.

    A group with KeyboardInterrupt is raised as a group: the event loop has already raised the
    interrupt. Raised again from a task, it would end the loop before its worker threads, and these
    would never end.
    """
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error if isinstance(error, Exception) else errors


def _group_from(saved: Saved, groups: int) -> Group:
    """Return an unfinished group; `groups` have been started."""
    group: Group = saved.of(Group)
    if not 0 <= group.index < groups:
        saved.field("index").refuse(f"the number of one of {groups} groups")
    if not group.samples:
        saved.field("samples").refuse("a list with a sample")
    for place, sample in enumerate(group.members):
        problem = _problem(sample, place, group)
        if problem is not None:
            raise DataError(f"{saved.place}, sample {place}: {problem}; {REMEDY}")
    return group


def _problem(sample: Sample, place: int, group: Group) -> str | None:
    """Return why an unfinished sample cannot be continued; None if it can."""
    if sample.group_index != group.index:
        return f"group_index={sample.group_index} is not the index of its group, {group.index}"
    if sample.index != place:
        return f"index={sample.index} is not its place in the group"
    for name in ("epoch", "branch", "attempt"):
        if not 0 <= getattr(sample, name) < MOST_REPEATS:
            return f"{name}={getattr(sample, name)} is negative or too large"
    if (sample.uid, sample.epoch) != (group.prompt.uid, group.prompt.epoch):
        return f"uid={shown(sample.uid)} or epoch={sample.epoch} is not that of its prompt"
    # An environment can change the prompt, and begin another branch with another one.
    given = sample.segments[0].ids if sample.segments else []
    if not given or (sample.episode is None and given != group.prompt.ids):
        return "ids of its first segment are not those of its prompt"
    rewards = [] if sample.episode is None else sample.episode.rewards
    branches = sample.branches
    if not all(
        0 <= reward.branch < len(branches)
        and 0 <= reward.place < branches[reward.branch].num_tokens
        for reward in rewards
    ):
        return "the place of a reward is not one of its tokens"
    if not all(branch.segments for branch in branches):
        return "a branch has no tokens"
    for segment in [segment for branch in branches for segment in branch.segments]:
        problem = _segment_problem(segment)
        if problem is not None:
            return problem
    return None


def _segment_problem(segment: Segment) -> str | None:
    """Return why a saved segment cannot be used; None if it can."""
    if not all(0 <= token < _MOST_TOKENS for token in segment.ids):
        return "a token of ids is negative or too large"
    if not all(0.0 <= weight <= 1.0 for weight in segment.loss_mask):
        return "an entry of loss_mask is not from 0 to 1"
    if max([*segment.log_probs, *segment.sampling_log_probs], default=0.0) > _ROUNDING:
        return "an entry of log_probs or sampling_log_probs is above 0"
    for span in segment.spans:
        if not (0 <= span.start <= span.end <= len(segment.ids) and span.version >= 0):
            return (
                f"version={span.version}, start={span.start}, end={span.end} in spans is not a "
                f"part of {len(segment.ids)} tokens"
            )
    return None
