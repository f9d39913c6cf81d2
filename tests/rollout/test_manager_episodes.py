"""The manager with episodes of several turns: batches, and groups that are carried over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import anyio
import pytest

from slipstream.data.data_buffer import DataBuffer
from slipstream.data.lookup import build_tokenizer
from slipstream.environment.protocol import Answer, Start, Turn
from slipstream.errors import DataError, StageTimeoutError
from slipstream.inference.fake import FakeEngine, ScriptedCore
from slipstream.rewards.protocol import Score
from slipstream.rollout.episode import EpisodeLimits, Episodes, extend_sample
from slipstream.rollout.formats.hermes import HermesFormat
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.rollout.render import Renderer
from slipstream.types import (
    GenerateRequest,
    Group,
    PlacedReward,
    Prompt,
    Sample,
    SamplingParams,
    Status,
    StopReason,
)

TOKENIZER = build_tokenizer()
RENDERER = Renderer(TOKENIZER, HermesFormat())
CALL = """ana 's boss : <tool_call>{"name": "look_up", "arguments": {"name": "ana"}}</tool_call>"""
REPLY = "<tool>boss ben<end><assistant>"
SCORE = 1.0


def response(uid: str) -> list[int]:
    """All tokens of an episode."""
    calls = {"short": 1, "long": 5, "longest": 9}[uid]
    return list(TOKENIZER.encode(f"{CALL}<end>{REPLY}" * calls + "answer ben<end>"))


class Table:
    """Answers each call, at a cost."""

    opened = closed = 0

    async def reset(self, row: Prompt, seed: int) -> Start:
        Table.opened += 1
        return Start()

    async def step(self, turn: Turn) -> Answer:
        if not turn.message.tool_calls:
            return Answer(done=True)
        reply = {"role": "tool", "name": "look_up", "content": "boss ben"}
        return Answer(messages=[reply], rewards={"look_up": -0.25})

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        Table.closed += 1


class Scorer:
    """Gives every sample the same score."""

    async def score_sample(self, sample: Sample) -> Score:
        return Score(SCORE)

    async def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(SCORE) for _ in samples]


def manager(*uids: str, **settings: object) -> AsyncRolloutManager:
    messages = [{"role": "user", "content": "who is ana 's boss ?"}]
    ids = RENDERER.prompt(messages)
    prompts = [Prompt(uid=uid, ids=ids, messages=messages) for uid in uids]
    core = ScriptedCore(
        lambda request: response(request.key.uid),
        vocab_size=len(TOKENIZER),
        max_model_len=512,
        eos_token_ids=[TOKENIZER.eos_token_id],
    )
    values = {"batch_size": 1, "n": 2, "seed": 7, "timeout_s": 20.0, **settings}
    return AsyncRolloutManager(
        [FakeEngine(core)],
        DataBuffer(prompts, shuffle=False),
        Scorer(),
        RolloutSettings(params=SamplingParams(max_tokens=400), **values),  # type: ignore[arg-type]
        episodes=Episodes(Table, RENDERER, EpisodeLimits(max_tokens=400)),
    )


def batch(rollouts: AsyncRolloutManager) -> list[Group]:
    return anyio.run(rollouts.generate_batch)


@pytest.fixture(autouse=True)
def _counts() -> None:
    Table.opened = Table.closed = 0


def test_a_batch_of_episodes() -> None:
    (group,) = batch(manager("short"))
    for sample in group.samples:
        assert sample.response_ids == response("short")
        assert sample.status is Status.COMPLETED
        assert sample.reward == SCORE - 0.25
        assert sample.reward_parts == {"score": SCORE, "turn/look_up": -0.25}
    assert (Table.opened, Table.closed) == (2, 2)


def test_a_stopped_group_continues_in_the_next_batch() -> None:
    rollouts = manager("short", "long", "longest", over_sampling=1.0, partial_rollout=True)
    (first,) = batch(rollouts)
    assert first.prompt.uid == "short"
    assert rollouts.counts.carried_over == 2
    (second,) = batch(rollouts)
    assert second.prompt.uid == "long"
    for sample in second.samples:
        assert sample.response_ids == response("long")
        assert sample.episode is not None
        assert (sample.episode.turns, len(sample.episode.rewards)) == (6, 5)
    assert (Table.opened, Table.closed) == (6, 4)


def test_a_stopped_group_survives_a_restart() -> None:
    options = {"over_sampling": 1.0, "partial_rollout": True}
    rollouts = manager("short", "long", "longest", **options)
    batch(rollouts)
    state = json.loads(json.dumps(rollouts.state_dict()))
    anyio.run(rollouts.close)
    assert Table.opened == Table.closed == 4
    again = manager("short", "long", "longest", **options)
    again._data.get_prompts(2)
    again.load_state_dict(state)
    (group,) = batch(again)
    (whole,) = batch(manager("long"))
    for sample, other in zip(group.samples, whole.samples, strict=True):
        assert sample.segments == other.segments
        assert sample.episode == other.episode
        assert sample.reward == other.reward
    anyio.run(again.close)
    assert Table.opened == Table.closed


def test_a_dropped_group_closes_its_environments() -> None:
    rollouts = manager("short", "long", "longest", over_sampling=1.0)
    batch(rollouts)
    assert rollouts.counts.dropped == {"surplus": 1}
    assert Table.opened == Table.closed == 4


@pytest.mark.parametrize("place", [-1, 10_000])
def test_a_saved_reward_must_belong_to_a_token(place: int) -> None:
    rollouts = manager("short", "long", "longest", over_sampling=1.0, partial_rollout=True)
    batch(rollouts)
    sample = rollouts._carried[0].samples[0]
    assert sample.episode is not None
    sample.episode.rewards.append(PlacedReward(place, "x", 1.0))
    state = json.loads(json.dumps(rollouts.state_dict()))
    with pytest.raises(DataError, match="place of a reward"):
        manager("short", "long", "longest").load_state_dict(state)


def test_a_score_of_the_episode_replaces_the_reward_function() -> None:
    rollouts = manager("short")

    class Scored(Episodes):
        async def run(self, sample, row, generate, **more):  # type: ignore[no-untyped-def]
            ended = await super().run(sample, row, generate, **more)
            sample.episode.score = 5.0
            return ended

    rollouts._episodes = Scored(Table, RENDERER, EpisodeLimits(max_tokens=400))
    (group,) = batch(rollouts)
    assert [sample.reward for sample in group.samples] == [4.75, 4.75]
    assert isinstance(group.samples[0], Sample)


def test_a_request_continues_at_the_position_in_the_response() -> None:
    """Noise depends on the position, so answers of tools count."""
    asked: list[GenerateRequest] = []
    rollouts = manager("short")
    inner = rollouts._engines[0].generate

    async def generate(request: GenerateRequest):  # type: ignore[no-untyped-def]
        asked.append(request)
        return await inner(request)

    rollouts._engines[0].generate = generate  # type: ignore[method-assign]
    batch(rollouts)
    call = list(TOKENIZER.encode(f"{CALL}<end>{REPLY}"))
    assert [r.prior_ids for r in asked if r.key.index == 0] == [(), tuple(call)]
    assert [r.params.max_tokens for r in asked if r.key.index == 0] == [400, 400 - len(call)]
    assert len({r.key for r in asked if r.key.index == 0}) == 1


def test_an_episode_may_ask_for_fewer_tokens_than_are_left() -> None:
    class Short(Episodes):
        async def run(self, sample, row, generate, **more):  # type: ignore[no-untyped-def]
            generation = await generate(sample, 3)
            assert generation.stop_reason is StopReason.LENGTH
            return extend_sample(sample, generation)

    rollouts = manager("short")
    rollouts._episodes = Short(Table, RENDERER, EpisodeLimits(max_tokens=400))
    (group,) = batch(rollouts)
    assert [sample.response_length for sample in group.samples] == [3, 3]


def test_a_dropped_episode_does_not_wait_for_its_tool() -> None:
    class Slow(Table):
        async def step(self, turn: Turn) -> Answer:
            if turn.number > 1:
                await anyio.sleep(60)
            return await super().step(turn)

    rollouts = manager("short", "long", over_sampling=1.0, timeout_s=5.0)

    class Quick(Table):
        async def step(self, turn: Turn) -> Answer:
            return await super().step(turn)

    made = iter([Quick, Quick, Slow, Slow])
    limits = EpisodeLimits(max_tokens=400)
    rollouts._episodes = Episodes(lambda: next(made)(), RENDERER, limits)
    (group,) = batch(rollouts)
    assert group.prompt.uid == "short"
    assert Table.opened == Table.closed == 4


class Hangs(Table):
    """Never answers."""

    async def step(self, turn: Turn) -> Answer:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("partial", [False, True])
def test_a_late_episode_fails_and_the_batch_goes_on(partial: bool) -> None:
    rollouts = manager("short", episode_timeout_s=0.3, partial_rollout=partial)
    made = iter([Table, Hangs])
    rollouts._episodes = Episodes(lambda: next(made)(), RENDERER, EpisodeLimits(max_tokens=400))
    (group,) = batch(rollouts)
    assert sorted(sample.status for sample in group.samples) == [Status.COMPLETED, Status.FAILED]
    (late,) = [sample for sample in group.samples if sample.status is Status.FAILED]
    assert late.failure is not None
    assert "rollout.episode_timeout_s" in late.failure
    assert Table.opened == Table.closed == 2


def test_a_late_generation_is_aborted() -> None:
    """The engine must not go on with a response that nobody waits for."""
    rollouts = manager("short", n=1, episode_timeout_s=0.2)
    engine = rollouts._engines[0]

    async def generate() -> list[Group]:
        await engine.pause()
        return await rollouts.generate_batch()

    (group,) = anyio.run(generate)
    assert group.samples[0].status is Status.FAILED
    assert engine.stats().running == 0
    assert Table.opened == Table.closed == 1


class Gate(Table):
    """Answers the second call of an episode only when the gate is open."""

    opens: anyio.Event
    waiting = answered = 0

    async def step(self, turn: Turn) -> Answer:
        if turn.number == 2:
            Gate.waiting += 1
            await Gate.opens.wait()
            Gate.answered += 1
        return await super().step(turn)


def with_gate(*uids: str) -> AsyncRolloutManager:
    rollouts = manager(*uids, over_sampling=1.0, partial_rollout=True)
    made = iter([Table, Table, Gate, Gate])
    limits = EpisodeLimits(max_tokens=400)
    rollouts._episodes = Episodes(lambda: next(made, Table)(), RENDERER, limits)
    Gate.waiting = Gate.answered = 0
    return rollouts


def test_a_stopped_episode_does_not_wait_for_its_tool() -> None:
    """The tool goes on meanwhile, and is not called again."""
    rollouts = with_gate("short", "long", "longest")

    async def two_batches() -> list[Group]:
        Gate.opens = anyio.Event()
        (first,) = await rollouts.generate_batch()
        assert first.prompt.uid == "short"
        assert (rollouts.counts.carried_over, Gate.waiting, Gate.answered) == (2, 2, 0)
        Gate.opens.set()
        return [*await rollouts.generate_batch()]

    (second,) = anyio.run(two_batches)
    (whole,) = batch(manager("long"))
    assert (Gate.waiting, Gate.answered) == (2, 2)
    for sample, other in zip(second.samples, whole.samples, strict=True):
        assert sample.segments == other.segments
        assert sample.episode == other.episode
        assert sample.reward == other.reward


@pytest.mark.parametrize("restarts", [False, True])
def test_a_call_that_ended_with_the_process_is_made_again(restarts: bool) -> None:
    """Without a restart, only the event loop is another one."""
    rollouts = with_gate("short", "long", "longest")

    async def first() -> None:
        Gate.opens = anyio.Event()
        await rollouts.generate_batch()

    async def second() -> list[Group]:
        Gate.opens = anyio.Event()
        Gate.opens.set()
        return await rollouts.generate_batch()

    anyio.run(first)
    if restarts:
        state = json.loads(json.dumps(rollouts.state_dict()))
        rollouts = with_gate("longest")
        rollouts.load_state_dict(state)
    (group,) = anyio.run(second)
    (whole,) = batch(manager("long"))
    assert group.prompt.uid == "long"
    for sample, other in zip(group.samples, whole.samples, strict=True):
        assert sample.segments == other.segments
        assert sample.episode == other.episode
        assert sample.reward == other.reward


@pytest.mark.parametrize("same_loop", [True, False])
def test_a_stopped_episode_that_is_dropped_ends_its_call(same_loop: bool) -> None:
    rollouts = with_gate("short", "long", "longest")

    async def stop() -> None:
        Gate.opens = anyio.Event()
        await rollouts.generate_batch()
        if same_loop:
            await rollouts.close()
            Gate.opens.set()
            await anyio.sleep(0.01)

    anyio.run(stop)
    anyio.run(rollouts.close)
    assert (Gate.waiting, Gate.answered) == (2, 0)
    assert Table.opened == Table.closed == 4


def test_a_timeout_names_samples_that_wait_for_their_environment() -> None:
    class Hangs(Table):
        async def step(self, turn: Turn) -> Answer:
            await anyio.sleep_forever()
            raise AssertionError

    rollouts = manager("short", timeout_s=0.1)
    rollouts._episodes = Episodes(Hangs, RENDERER, EpisodeLimits(max_tokens=400))
    with pytest.raises(StageTimeoutError, match=r"0\.0 \(short\), 0\.1 \(short\)") as caught:
        batch(rollouts)
    assert "set actor_rollout_ref.rollout.episode_timeout_s" in str(caught.value)
