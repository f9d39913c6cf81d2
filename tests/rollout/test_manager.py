"""The rollout manager: batches, filters, over-sampling, carry-over, timeouts and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from slipstream.data.data_buffer import DataBuffer
from slipstream.errors import (
    ConfigError,
    DataError,
    EngineError,
    RequestError,
    RewardError,
    SlipstreamError,
    StageTimeoutError,
)
from slipstream.inference.fake import FakeEngine, Script, ScriptedCore
from slipstream.rewards.protocol import Score
from slipstream.rollout.episode import extend_sample
from slipstream.rollout.filters import check_reward_nonzero_std
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.types import (
    GenerateRequest,
    Generation,
    Group,
    Prompt,
    Sample,
    SamplingParams,
    Status,
    StopReason,
    VersionSpan,
    WeightUpdate,
)

EOS = 9


class Scorer:
    """A reward manager that calls `value`, after `wait` if it is given."""

    def __init__(
        self,
        value: Callable[[Sample], float] = lambda sample: 1.0,
        wait: Callable[[Sample], Awaitable[None]] | None = None,
    ) -> None:
        self._value = value
        self._wait = wait

    async def score_sample(self, sample: Sample) -> Score:
        if self._wait is not None:
            await self._wait(sample)
        return Score(self._value(sample))

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        return [await self.score_sample(sample) for sample in samples]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(uid=f"p{i}", ids=[1, 2, 3]) for i in range(count)]


def buffer(count: int = 100) -> DataBuffer:
    return DataBuffer(prompts(count), shuffle=False)


def number(request: GenerateRequest) -> int:
    return int(request.key.uid[1:])


def engine(script: Script, *, max_model_len: int = 64) -> FakeEngine:
    core = ScriptedCore(script, vocab_size=16, max_model_len=max_model_len, eos_token_ids=[EOS])
    return FakeEngine(core)


def short(request: GenerateRequest) -> list[int]:
    """One to five tokens, depending on prompt and index."""
    return [4] * ((number(request) * 3 + request.key.index * 2) % 5) + [EOS]


def manager(
    script: Script = short,
    *,
    scorer: Scorer | None = None,
    supply: Any = None,
    group_filter: Any = None,
    **settings: Any,
) -> AsyncRolloutManager:
    settings.setdefault("params", SamplingParams(max_tokens=20))
    values = {"batch_size": 3, "n": 2, "seed": 7, "timeout_s": 20.0, **settings}
    return AsyncRolloutManager(
        [engine(script)],
        supply if supply is not None else buffer(),
        scorer or Scorer(),
        RolloutSettings(**values),
        group_filter=group_filter,
    )


def batch(rollouts: AsyncRolloutManager) -> list[Group]:
    return anyio.run(rollouts.generate_batch)


def test_counts_the_seconds_of_waiting_for_rewards() -> None:
    now = 0.0

    async def wait(sample: Sample) -> None:
        nonlocal now
        now += 5.0

    rollouts = manager(scorer=Scorer(wait=wait), batch_size=1, n=1)
    rollouts._clock = lambda: now
    batch(rollouts)
    assert (rollouts.counts.scoring_seconds, rollouts.counts.tail_seconds) == (5.0, 0.0)


def test_groups_are_in_order_complete_and_scored() -> None:
    rollouts = manager(scorer=Scorer(lambda sample: float(sample.response_length)))
    first, second = batch(rollouts), batch(rollouts)
    assert [g.index for g in first + second] == [0, 1, 2, 3, 4, 5]
    assert rollouts.counts.generated is None
    assert [g.prompt.uid for g in first] == ["p0", "p1", "p2"]
    for group in first + second:
        assert [s.index for s in group.samples] == [0, 1]
        for sample in group.samples:
            expected = [4] * ((int(sample.uid[1:]) * 3 + sample.index * 2) % 5) + [EOS]
            assert sample.response_ids == expected
            assert sample.reward == len(expected)
            assert sample.status is Status.COMPLETED
            assert sample.stop_reason is StopReason.EOS
    assert rollouts.counts.dropped == {}


def test_requests_have_the_full_noise_key() -> None:
    seen: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> list[int]:
        seen.append(request)
        return [EOS]

    supply = DataBuffer(prompts(2), shuffle=False)
    rollouts = manager(script, supply=supply, batch_size=2, namespace="ns")
    batch(rollouts)
    batch(rollouts)  # the next epoch
    keys = {
        (r.key.seed, r.key.namespace, r.key.epoch, r.key.uid, r.key.index, r.key.attempt)
        for r in seen
    }
    assert keys == {
        (7, "ns", epoch, uid, index, 0)
        for epoch in (0, 1)
        for uid in ("p0", "p1")
        for index in (0, 1)
    }
    assert len({r.request_id for r in seen}) == 8
    assert {r.group for r in seen} == {"ns/0", "ns/1", "ns/2", "ns/3"}


@pytest.mark.parametrize("order", [1, -1])
def test_next_prompt_replaces_a_rejected_group_in_any_finishing_order(order: int) -> None:
    def script(request: GenerateRequest) -> list[int]:
        length = number(request) if order == 1 else 12 - number(request)
        return [4] * length + [EOS]

    def odd(sample: Sample) -> float:
        """Different rewards for odd prompts; equal rewards, which the filter rejects, for even."""
        return float(int(sample.uid[1:]) % 2 and sample.index)

    rollouts = manager(script, scorer=Scorer(odd), group_filter=check_reward_nonzero_std)
    assert [g.prompt.uid for g in batch(rollouts)] == ["p1", "p3", "p5"]
    assert rollouts.counts.dropped == {"zero_reward_std": 3}
    assert rollouts.counts.generated == 2.0
    assert [g.prompt.uid for g in batch(rollouts)] == ["p7", "p9", "p11"]


def test_filter_may_return_a_bool() -> None:
    def no_first(samples: Sequence[Sample]) -> bool:
        return samples[0].uid != "p0"

    rollouts = manager(group_filter=no_first)
    assert [g.prompt.uid for g in batch(rollouts)] == ["p1", "p2", "p3"]
    assert rollouts.counts.dropped == {"no_first": 1}


def test_error_if_the_filter_rejects_too_many_groups() -> None:
    rollouts = manager(group_filter=check_reward_nonzero_std, max_rejected=2)
    with pytest.raises(DataError, match=r"rejected 7 groups .* batch of 3 .*zero_reward_std"):
        batch(rollouts)


def late(request: GenerateRequest) -> list[int]:
    """A long response for prompt 0, and one token for all others."""
    return [4] * 15 + [EOS] if number(request) == 0 else [EOS]


def test_over_sampling_keeps_the_first_groups_and_drops_the_rest() -> None:
    rollouts = manager(late, over_sampling=1 / 3)
    assert [g.prompt.uid for g in batch(rollouts)] == ["p1", "p2", "p3"]
    assert rollouts.counts.dropped == {"surplus": 1}
    assert rollouts.counts.carried_over == 0
    assert [g.index for g in batch(rollouts)] == [4, 5, 6]


@pytest.mark.parametrize(("share", "groups"), [(0.0, 10), (0.1, 11), (0.25, 13), (1.0, 20)])
def test_over_sampling_starts_more_groups_by_its_share(share: float, groups: int) -> None:
    started: set[int] = set()

    def script(request: GenerateRequest) -> list[int]:
        started.add(number(request))
        return [4] * 12 + [EOS]

    # All responses have the same length, so none ends before all have started.
    rollouts = manager(script, batch_size=10, n=1, over_sampling=share)
    assert len(batch(rollouts)) == 10
    assert len(started) == groups


class Gated(ScriptedCore):
    """An engine core that stops responses to prompt 0 at three tokens until `gate_open`."""

    gate_open = False

    def step(self) -> list[Generation]:
        held = {
            name: state
            for name, state in self._running.items()
            if number(state[0].request) == 0 and len(state[0].token_ids) >= 3 and not self.gate_open
        }
        for name in held:
            del self._running[name]
        ended = super().step()
        self._running.update(held)
        return ended


LONG = [*range(4, 9)] * 3 + [EOS]


def gated(supply: DataBuffer) -> tuple[AsyncRolloutManager, Gated]:
    core = Gated(
        lambda request: LONG if number(request) == 0 else [EOS],
        vocab_size=16,
        max_model_len=64,
        eos_token_ids=[EOS],
    )
    settings = RolloutSettings(
        batch_size=3,
        n=2,
        params=SamplingParams(max_tokens=20),
        seed=7,
        over_sampling=1 / 3,
        partial_rollout=True,
        timeout_s=20.0,
    )
    return AsyncRolloutManager([FakeEngine(core)], supply, Scorer(), settings), core


def test_carried_over_samples_continue_also_after_a_resume() -> None:
    supply = buffer()
    rollouts, core = gated(supply)
    assert [g.index for g in batch(rollouts)] == [1, 2, 3]
    assert rollouts.counts.carried_over == 2
    assert rollouts.counts.dropped == {}
    state = json.loads(json.dumps([rollouts.state_dict(), supply.state_dict()]))
    (carried,) = state[0]["carried"]
    assert [s["segments"][1]["ids"] for s in carried["samples"]] == [LONG[:3]] * 2
    # Which tokens were drafted depends on timing, so it is not saved.
    assert all("drafted" not in s["segments"][1] for s in carried["samples"])

    again_supply = buffer()
    again, again_core = gated(again_supply)
    again.load_state_dict(state[0])
    again_supply.load_state_dict(state[1])

    async def next_batch(of: AsyncRolloutManager) -> list[Group]:
        await of._engines[0].update_weights(WeightUpdate(version=5, buckets=[]))
        return await of.generate_batch()

    for one, its_core in ((rollouts, core), (again, again_core)):
        its_core.gate_open = True
        # Without over-sampling no group is stopped, so the carried one is in this batch.
        one.settings = replace(one.settings, over_sampling=0.0)
        groups = anyio.run(next_batch, one)
        assert [g.index for g in groups] == [0, 4, 5]
        assert [g.prompt.uid for g in groups] == ["p0", "p4", "p5"]
        for sample in groups[0].samples:
            assert sample.response_ids == LONG
            assert sample.reward == 1.0
            assert sample.status is Status.COMPLETED
            assert [segment.role for segment in sample.segments] == ["prompt", "assistant"]
            assert sample.versions == [-1] * 3 + [0] * 3 + [5] * 13
            assert sample.rollout_log_probs == [0.0] * 3 + [-1.0] * 16


def test_surplus_finished_group_is_in_the_next_batch() -> None:
    scored: list[str] = []

    async def slowly(sample: Sample) -> None:
        # Scoring of p0 ends after the other groups have filled the batch.
        if sample.uid == "p0":
            while len(scored) < 6:
                await anyio.lowlevel.checkpoint()
        scored.append(sample.uid)

    async def two(rollouts: AsyncRolloutManager) -> tuple[list[Group], list[Group]]:
        return await rollouts.generate_batch(), await rollouts.generate_batch()

    rollouts = manager(
        lambda request: [EOS],
        scorer=Scorer(wait=slowly),
        over_sampling=1 / 3,
        partial_rollout=True,
    )
    first, second = anyio.run(two, rollouts)
    assert [g.index for g in first] == [1, 2, 3]
    assert second[0].index == 0
    assert [s.reward for s in second[0].samples] == [1.0, 1.0]


def test_timeout_names_the_missing_samples() -> None:
    async def never(sample: Sample) -> None:
        if sample.uid == "p1":
            await anyio.sleep_forever()

    rollouts = manager(scorer=Scorer(wait=never), timeout_s=0.2)
    with pytest.raises(StageTimeoutError) as caught:
        batch(rollouts)
    message = str(caught.value)
    assert message.startswith("rollout: 2 of 3 groups were done after 0.2 s")
    assert "1.0 (p1), 1.1 (p1)" in message
    assert "rollout.timeout_s" in message


def test_hanging_engine_raises_a_timeout() -> None:
    rollouts = manager(timeout_s=0.1)

    async def paused() -> None:
        await rollouts._engines[0].pause()
        await rollouts.generate_batch()

    with pytest.raises(StageTimeoutError, match="0 of 3 groups"):
        anyio.run(paused)
    assert rollouts._engines[0].stats().running == 0


def test_reward_error_is_raised_and_stops_the_engine() -> None:
    def broken(sample: Sample) -> float:
        raise RewardError(f"no reward for {sample.uid}")

    rollouts = manager(
        lambda request: [EOS] if number(request) == 1 else [4], scorer=Scorer(broken)
    )
    with pytest.raises(RewardError, match="no reward for p1"):
        batch(rollouts)
    assert rollouts._engines[0].stats().running == 0


def test_keyboard_interrupt_in_a_task_leaves_no_thread_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pressed(sample: Sample) -> float:
        raise KeyboardInterrupt

    async def beside_a_worker(sample: Sample) -> None:
        await anyio.to_thread.run_sync(int)

    started: list[threading.Thread] = []
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with pytest.raises(KeyboardInterrupt):
        batch(manager(scorer=Scorer(pressed, wait=beside_a_worker)))
    workers = [thread for thread in started if "AnyIO" in thread.name]
    assert workers
    for thread in workers:
        thread.join(5.0)
    assert [thread for thread in workers if thread.is_alive()] == []


def test_impossible_request_raises_the_engines_error() -> None:
    with pytest.raises(RequestError, match="max_model_len=64"):
        batch(manager(params=SamplingParams(max_tokens=63)))


class Failing:
    """An engine whose requests all fail after one token."""

    async def generate(self, request: GenerateRequest) -> Generation:
        return Generation(
            request_id=request.request_id,
            token_ids=[4],
            log_probs=[-1.0],
            sampling_log_probs=[-1.0],
            spans=[VersionSpan(0, 0, 1)],
            stop_reason=StopReason.ERROR,
            error="out of memory",
        )

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not expected")


def test_engine_failure_gives_a_failed_sample_without_score() -> None:
    def unasked(sample: Sample) -> float:
        raise AssertionError("a failed sample has no score")

    engines: Any = [Failing()]
    settings = RolloutSettings(batch_size=1, n=2, params=SamplingParams(max_tokens=4), seed=1)
    rollouts = AsyncRolloutManager(engines, buffer(), Scorer(unasked), settings)
    (group,) = batch(rollouts)
    assert [(s.status, s.failure) for s in group.samples] == [(Status.FAILED, "out of memory")] * 2


def test_groups_are_distributed_over_engines() -> None:
    seen: list[list[int]] = [[], []]

    def script(place: int) -> Script:
        def run(request: GenerateRequest) -> list[int]:
            seen[place].append(number(request))
            return [EOS]

        return run

    settings = RolloutSettings(batch_size=4, n=1, params=SamplingParams(max_tokens=4), seed=1)
    batch(AsyncRolloutManager([engine(script(0)), engine(script(1))], buffer(), Scorer(), settings))
    assert [sorted(s) for s in seen] == [[0, 2], [1, 3]]


class Ending:
    """A source of prompts that ends."""

    def __init__(self, count: int) -> None:
        self._left = prompts(count)

    def get_prompts(self, n: int) -> list[Prompt]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken


def test_last_batch_is_smaller_if_prompts_end() -> None:
    rollouts = manager(supply=Ending(5))
    assert [len(batch(rollouts)), len(batch(rollouts))] == [3, 2]
    with pytest.raises(DataError, match="no prompt is left"):
        batch(rollouts)


def test_rejected_group_is_not_replaced_if_prompts_end() -> None:
    rollouts = manager(supply=Ending(3), group_filter=lambda samples: samples[0].uid != "p0")
    assert [g.prompt.uid for g in batch(rollouts)] == ["p1", "p2"]


def test_rejects_no_engine_and_impossible_settings() -> None:
    params = SamplingParams(max_tokens=1)
    with pytest.raises(EngineError, match="at least one engine"):
        AsyncRolloutManager(
            [], buffer(), Scorer(), RolloutSettings(batch_size=1, n=1, params=params, seed=0)
        )
    for wrong in ({"batch_size": 0}, {"n": 0}, {"over_sampling": -0.5}):
        values: dict[str, Any] = {"batch_size": 1, "n": 1, **wrong}
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RolloutSettings(params=params, seed=0, **values)


def test_greedy_baseline_adds_one_greedy_response() -> None:
    seen: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> list[int]:
        seen.append(request)
        return [4] * request.key.index + [EOS]

    rollouts = manager(script, greedy_baseline=True)
    groups = batch(rollouts)
    for group in groups:
        assert len(group.samples) == 2
        assert group.greedy is not None
        assert group.greedy.response_ids == [4, 4, EOS]
        assert group.members == [*group.samples, group.greedy]
    temperatures = sorted((r.key.index, r.params.temperature) for r in seen)
    assert temperatures == [(0, 1.0)] * 3 + [(1, 1.0)] * 3 + [(2, 0.0)] * 3
    # The state of carried-over groups includes it.
    rollouts._carried = groups[:1]
    state = json.loads(json.dumps(rollouts.state_dict()))
    again = manager(script, greedy_baseline=True)
    again.load_state_dict(state)
    assert again._carried == groups[:1]


@pytest.mark.parametrize("state", [{}, {"next_group": 1, "carried": [{"index": 0}]}])
def test_rejects_an_unreadable_state(state: dict[str, Any]) -> None:
    with pytest.raises(SlipstreamError, match="resume from another checkpoint"):
        manager().load_state_dict(state)


def test_continued_turn_stays_one_segment_with_its_versions() -> None:
    sample = Sample.from_prompt(prompts(1)[0], group_index=0, index=0)

    def part(tokens: list[int], spans: list[VersionSpan], reason: StopReason) -> Generation:
        return Generation(
            request_id="r",
            token_ids=tokens,
            log_probs=[-float(t) for t in tokens],
            sampling_log_probs=[0.0] * len(tokens),
            spans=spans,
            stop_reason=reason,
            text="x" * len(tokens),
        )

    assert not extend_sample(sample, part([4, 5], [VersionSpan(3, 0, 2)], StopReason.ABORT))
    statuses = [sample.status]
    assert not extend_sample(sample, part([], [], StopReason.ABORT))
    assert extend_sample(
        sample, part([6, 7, 8], [VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)], StopReason.LENGTH)
    )
    assert [*statuses, sample.status] == [Status.PENDING, Status.TRUNCATED]
    assert sample.response_ids == [4, 5, 6, 7, 8]
    assert sample.response == "xxxxx"
    assert sample.rollout_log_probs == [0.0] * 3 + [-4.0, -5.0, -6.0, -7.0, -8.0]
    assert sample.loss_mask == [0.0] * 3 + [1.0] * 5
    assert sample.segments[1].spans == [VersionSpan(3, 0, 3), VersionSpan(4, 3, 5)]


class GroupScorer(Scorer):
    """Adds the group's size to each reward in `finish_group`."""

    async def finish_group(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            assert sample.status is not Status.PENDING
            sample.reward += len(samples)


def test_finish_group_is_called_once_also_for_carried_over_groups() -> None:
    rollouts = manager(
        scorer=GroupScorer(), batch_size=2, over_sampling=1.0, partial_rollout=True, n=3
    )
    for _ in range(4):
        for group in batch(rollouts):
            assert [sample.reward for sample in group.samples] == [4.0] * 3
