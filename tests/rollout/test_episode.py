"""Episodes: segments, budgets, failures, and episodes that stop and continue."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from slipstream.data.lookup import build_tokenizer
from slipstream.data.lookup_tokenizer import CHAT_TEMPLATE
from slipstream.environment.protocol import (
    Answer,
    CallProblem,
    CallRecord,
    InfrastructureError,
    Start,
    Turn,
)
from slipstream.rollout.episode import (
    ASSISTANT_TURNS,
    CRASH,
    MICRO_BATCH,
    TOKENS,
    TOOL_SECONDS,
    USER_TURNS,
    EpisodeLimits,
    Episodes,
    add_turn_rewards,
    episode_seed,
)
from slipstream.rollout.formats.hermes import HermesFormat
from slipstream.rollout.render import Renderer
from slipstream.types import (
    Generation,
    NoiseKey,
    PlacedReward,
    Prompt,
    Sample,
    Status,
    StopReason,
    VersionSpan,
)

TOKENIZER = build_tokenizer()
RENDERER = Renderer(TOKENIZER, HermesFormat())
QUESTION = "who is ana 's boss ?"
CALL = """ana 's boss : <tool_call>{"name": "look_up", "arguments": {"name": "ana"}}</tool_call>"""
ANSWER = "answer ben"


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def prompt() -> Prompt:
    messages = [{"role": "user", "content": QUESTION}]
    return Prompt(uid="q", ids=RENDERER.prompt(messages), messages=messages)


def new_sample() -> Sample:
    return Sample.from_prompt(prompt(), group_index=0, index=0)


class Policy:
    """Writes given turns, one token per log-prob of -1. `stop_after` aborts the turn with this
    number after `stop_at` tokens, once."""

    def __init__(self, *turns: str, stop_after: int | None = None, stop_at: int = 2) -> None:
        self.turns = [ids(turn) for turn in turns]
        self.stop_after, self.stop_at = stop_after, stop_at
        self.calls = 0
        self.asked: list[int | None] = []

    async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
        self.calls += 1
        self.asked.append(max_tokens)
        segments = [segment for branch in sample.branches for segment in branch.segments]
        written = sum(segment.role == "assistant" for segment in segments)
        partial: Sequence[int] = []
        if sample.segments[-1].role == "assistant":
            partial, written = sample.segments[-1].ids, written - 1
        left, reason = self.turns[written][len(partial) :], StopReason.EOS
        if written == self.stop_after:
            self.stop_after, left, reason = None, left[: self.stop_at], StopReason.ABORT
        if left and reason is StopReason.EOS and left[-1] not in RENDERER.end_token_ids:
            reason = StopReason.LENGTH
        return Generation(
            request_id="r",
            token_ids=list(left),
            log_probs=[-1.0] * len(left),
            sampling_log_probs=[-1.0] * len(left),
            spans=[VersionSpan(0, 0, len(left))],
            stop_reason=reason,
        )


class Table:
    """An environment that answers every call with a text, and counts what happens to it."""

    def __init__(self, log: list[str], text: str = "boss ben", **options: Any) -> None:
        self.log, self.text = log, text
        self.failures: list[Exception] = options.get("failures", [])
        self.final: Mapping[str, float] = options.get("final", {})

    async def reset(self, row: Prompt, seed: int) -> Start:
        self.log.append(f"reset {seed}")
        return Start()

    async def step(self, turn: Turn) -> Answer:
        self.log.append(f"step {turn.number}")
        if self.failures:
            raise self.failures.pop(0)
        if not turn.message.tool_calls:
            return Answer(done=True, metrics={"ends": 1.0})
        message = {"role": "tool", "name": "look_up", "content": self.text}
        record = CallRecord(name="look_up", problem=CallProblem.RAISED if self.text == "" else None)
        return Answer(messages=[message], rewards={"look_up": -0.25}, calls=[record])

    async def score(self) -> Mapping[str, float]:
        return self.final

    async def close(self) -> None:
        self.log.append("close")


def episodes_of(log: list[str], limits: dict[str, Any] | None = None, **options: Any) -> Episodes:
    merged = {"max_tokens": 200, "backoff_s": 0.0, **(limits or {})}
    return Episodes(lambda: Table(log, **options), RENDERER, EpisodeLimits(**merged))


def run(episodes: Episodes, sample: Sample, policy: Policy) -> bool:
    return anyio.run(lambda: episodes.run(sample, prompt(), policy, seed=7))


def test_segments_join_to_the_whole_conversation() -> None:
    sample, log = new_sample(), list[str]()
    assert run(episodes_of(log), sample, Policy(f"{CALL}<end>", f"{ANSWER}<end>"))
    assert [s.role for s in sample.segments] == ["prompt", "assistant", "tool", "assistant"]
    text = f"<user>{QUESTION}<end><assistant>{CALL}<end><tool>boss ben<end><assistant>{ANSWER}<end>"
    assert TOKENIZER.decode(sample.tokens) == text
    assert sample.tokens == ids(text)
    assert log == ["reset 7", "step 1", "step 2", "close"]
    assert sample.status is Status.COMPLETED


def test_only_sampled_tokens_have_loss_and_log_probs() -> None:
    sample = new_sample()
    run(episodes_of([]), sample, Policy(f"{CALL}<end>", f"{ANSWER}<end>"))
    for segment in sample.segments:
        sampled = segment.role == "assistant"
        assert set(segment.loss_mask) == {float(sampled)}
        assert set(segment.log_probs) == {-1.0 if sampled else 0.0}
        assert set(segment.versions) == {0 if sampled else -1}


def test_the_record_counts_turns_calls_and_rewards_at_the_end_of_their_turn() -> None:
    sample = new_sample()
    run(episodes_of([], final={"end": 2.0}), sample, Policy(f"{CALL}<end>", f"{ANSWER}<end>"))
    record = sample.episode
    assert record is not None
    first = len(prompt().ids) + len(ids(f"{CALL}<end>")) - 1
    last = sample.num_tokens - 1
    assert (record.turns, record.calls, record.problems) == (2, 1, {})
    assert record.rewards == [
        PlacedReward(first, "look_up", -0.25),
        PlacedReward(last, "end", 2.0),
    ]
    assert record.metrics == {"ends": 1.0}
    sample.reward = 1.0
    add_turn_rewards(sample)
    assert sample.reward == 2.75
    assert sample.reward_parts == {"turn/look_up": -0.25, "turn/end": 2.0}


def test_problems_are_counted_by_kind() -> None:
    sample = new_sample()
    run(episodes_of([], text=""), sample, Policy(f"{CALL}<end>", f"{ANSWER}<end>"))
    assert sample.episode is not None
    assert sample.episode.problems == {"raised": 1}


@pytest.mark.parametrize(
    ("limits", "budget", "turns"),
    [
        ({"max_assistant_turns": 2}, ASSISTANT_TURNS, 2),
        ({"max_user_turns": 1}, USER_TURNS, 2),
        ({"max_tool_seconds": 0.0}, TOOL_SECONDS, 1),
        ({"max_tokens": 14}, TOKENS, 1),
    ],
)
def test_a_budget_that_is_used_up_truncates_the_episode(
    limits: dict[str, Any], budget: str, turns: int
) -> None:
    sample, log = new_sample(), list[str]()
    assert run(episodes_of(log, limits), sample, Policy(*[f"{CALL}<end>"] * 5))
    assert sample.episode is not None
    assert (sample.status, sample.episode.truncated_by) == (Status.TRUNCATED, budget)
    assert sample.episode.turns == turns
    assert sample.segments[-1].role == "assistant"
    assert log[-1] == "close"


def test_a_turn_that_is_cut_off_is_not_executed() -> None:
    sample, log = new_sample(), list[str]()
    assert run(episodes_of(log), sample, Policy(CALL))
    assert sample.status is Status.TRUNCATED
    assert log == ["reset 7", "close"]


def test_a_turn_without_its_end_token_gets_one_without_loss() -> None:
    """A stop string ends a turn without an end token."""

    class Stops(Policy):
        async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
            generation = await super().__call__(sample, max_tokens)
            if generation.stop_reason is StopReason.LENGTH:
                generation.stop_reason = StopReason.STOP_STRING
            return generation

    sample, log = new_sample(), list[str]()
    assert run(episodes_of(log), sample, Stops(CALL, f"{ANSWER}<end>"))
    assert sample.tokens == run_tokens()
    answer = sample.segments[2]
    assert answer.ids[0] == TOKENIZER.eos_token_id
    assert not any(answer.loss_mask)


def run_tokens() -> list[int]:
    sample = new_sample()
    run(episodes_of([]), sample, Policy(f"{CALL}<end>", f"{ANSWER}<end>"))
    return sample.tokens


def test_a_failure_of_the_infrastructure_is_repeated() -> None:
    sample, log = new_sample(), list[str]()
    failures = [InfrastructureError("gone"), InfrastructureError("gone")]
    policy = Policy(f"{CALL}<end>", f"{ANSWER}<end>")
    assert run(episodes_of(log, failures=failures), sample, policy)
    assert sample.status is Status.COMPLETED
    assert log == ["reset 7", "step 1", "step 1", "step 1", "step 2", "close"]


def test_a_failure_that_lasts_fails_the_sample_with_its_cause() -> None:
    sample, log = new_sample(), list[str]()
    failures: list[Exception] = [InfrastructureError("server gone")] * 9
    assert not run(episodes_of(log, failures=failures), sample, Policy(f"{CALL}<end>"))
    assert sample.status is Status.FAILED
    assert "server gone" in (sample.failure or "")
    assert log[-1] == "close"
    sample.reward = 0.0
    add_turn_rewards(sample)
    assert sample.reward == 0.0


def test_a_crash_that_does_not_recur_changes_nothing() -> None:
    sample, log = new_sample(), list[str]()
    policy = Policy(f"{CALL}<end>", f"{ANSWER}<end>")
    assert run(episodes_of(log, failures=[ValueError("odd")]), sample, policy)
    assert sample.status is Status.COMPLETED


def test_a_crash_that_recurs_ends_the_episode_and_is_scored() -> None:
    """Otherwise a policy could avoid a bad reward by crashing its environment."""
    sample, log = new_sample(), list[str]()
    failures: list[Exception] = [ValueError("odd")] * 9
    assert run(episodes_of(log, failures=failures), sample, Policy(f"{CALL}<end>"))
    assert sample.status is Status.TRUNCATED
    assert sample.episode is not None
    assert (sample.episode.truncated_by, sample.episode.problems) == (CRASH, {"raised": 1})
    assert log == ["reset 7", "step 1", "step 1", "close"]


def test_a_reset_that_fails_fails_the_sample() -> None:
    class Broken(Table):
        async def reset(self, row: Prompt, seed: int) -> Start:
            raise ValueError("no table")

    sample, log = new_sample(), list[str]()
    limits = EpisodeLimits(max_tokens=200, backoff_s=0.0)
    assert not run(Episodes(lambda: Broken(log), RENDERER, limits), sample, Policy(CALL))
    assert "no table" in (sample.failure or "")
    assert log == ["close"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_fails_the_sample(value: float) -> None:
    sample = new_sample()
    policy = Policy(f"{CALL}<end>", f"{ANSWER}<end>")
    assert not run(episodes_of([], final={"end": value}), sample, policy)
    assert sample.status is Status.FAILED
    assert "end" in (sample.failure or "")


def test_an_environment_that_cannot_be_closed_changes_nothing() -> None:
    class Stuck(Table):
        async def close(self) -> None:
            await anyio.sleep(60)

    sample = new_sample()
    limits = EpisodeLimits(max_tokens=200, close_s=0.05)
    policy = Policy(f"{ANSWER}<end>")
    assert run(Episodes(lambda: Stuck([]), RENDERER, limits), sample, policy)
    assert sample.status is Status.COMPLETED


def test_a_cancelled_episode_closes_its_environment() -> None:
    class Slow(Table):
        async def step(self, turn: Turn) -> Answer:
            await anyio.sleep(60)
            raise AssertionError

    sample, log = new_sample(), list[str]()
    episodes = Episodes(lambda: Slow(log), RENDERER, EpisodeLimits(max_tokens=200))

    async def work() -> None:
        with anyio.move_on_after(0.05):
            await episodes.run(sample, prompt(), Policy(f"{CALL}<end>"), seed=7)

    anyio.run(work)
    assert log == ["reset 7", "close"]


@pytest.mark.parametrize("text", ["boss <end> ben", "<assistant>", "\ud800 ben"])
def test_answers_with_any_text_are_appended(text: str) -> None:
    sample = new_sample()
    policy = Policy(f"{CALL}<end>", f"{ANSWER}<end>")
    assert run(episodes_of([], text=text), sample, policy)
    assert sample.status is Status.COMPLETED
    control = {TOKENIZER.eos_token_id, *TOKENIZER.all_special_ids}
    answer = [i for i in sample.segments[2].ids if i in control]
    assert answer == ids("<tool><end><assistant>")


class Adds(Table):
    """An environment that adds a message to the prompt."""

    async def reset(self, row: Prompt, seed: int) -> Start:
        return Start(messages=[{"role": "user", "content": "be brief"}])


def added(row: Prompt, **limits: Any) -> Sample:
    sample = Sample.from_prompt(row, group_index=0, index=0)
    episodes = Episodes(lambda: Adds([]), RENDERER, EpisodeLimits(max_tokens=200, **limits))
    anyio.run(lambda: episodes.run(sample, row, Policy(f"{ANSWER}<end>"), seed=7))
    return sample


def test_an_environment_may_add_messages_to_the_prompt() -> None:
    sample = added(prompt())
    text = f"<user>{QUESTION}<end><user>be brief<end><assistant>"
    assert TOKENIZER.decode(sample.prompt_ids) == text


@pytest.mark.parametrize(
    ("messages", "limits", "words"),
    [
        ("plain text", {}, "plain text"),
        (None, {"max_prompt_tokens": 3}, "data.max_prompt_length 3"),
    ],
)
def test_a_prompt_that_cannot_be_changed_fails_the_sample(
    messages: Any, limits: dict[str, int], words: str
) -> None:
    row = prompt()
    if messages is not None:
        row.messages = messages
    sample = added(row, **limits)
    assert sample.status is Status.FAILED
    assert words in (sample.failure or "")


def whole() -> Sample:
    sample = new_sample()
    run(episodes_of([]), sample, Policy(f"{CALL}<end>", f"{CALL}<end>", f"{ANSWER}<end>"))
    return sample


@pytest.mark.parametrize("stop_at", [0, 2])
@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_stopped_episode_continues_with_its_environment(stop_after: int, stop_at: int) -> None:
    sample, log = new_sample(), list[str]()
    episodes = episodes_of(log)
    turns = (f"{CALL}<end>", f"{CALL}<end>", f"{ANSWER}<end>")
    policy = Policy(*turns, stop_after=stop_after, stop_at=stop_at)
    assert not run(episodes, sample, policy)
    assert sample.status is Status.PENDING
    assert "close" not in log
    assert run(episodes, sample, policy)
    assert sample == whole()
    assert log == ["reset 7", "step 1", "step 2", "step 3", "close"]


@pytest.mark.parametrize("stop_at", [0, 2])
@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_after_a_restart_the_turns_are_replayed_to_a_new_environment(
    stop_after: int, stop_at: int
) -> None:
    sample, log = new_sample(), list[str]()
    turns = (f"{CALL}<end>", f"{CALL}<end>", f"{ANSWER}<end>")
    policy = Policy(*turns, stop_after=stop_after, stop_at=stop_at)
    assert not run(episodes_of(log), sample, policy)
    policy.calls = 0
    saved = copy.deepcopy(sample)
    assert run(episodes_of(log), saved, policy)
    assert saved == whole()
    assert policy.calls == 3 - stop_after  # replayed turns are not sampled again


def test_a_replay_keeps_the_seconds_that_were_used() -> None:
    sample = new_sample()
    policy = Policy(f"{CALL}<end>", f"{ANSWER}<end>", stop_after=1)
    run(episodes_of([]), sample, policy)
    assert sample.episode is not None
    sample.episode.tool_seconds = 50.0
    assert run(episodes_of([], {"max_tool_seconds": 100.0}), sample, policy)
    assert sample.status is Status.COMPLETED
    assert sample.episode.tool_seconds >= 50.0


def test_an_environment_that_answers_otherwise_in_the_replay_fails_the_sample() -> None:
    sample = new_sample()
    policy = Policy(f"{CALL}<end>", f"{ANSWER}<end>", stop_after=1)
    run(episodes_of([]), sample, policy)
    log = list[str]()
    assert not run(episodes_of(log, text="boss eva"), sample, policy)
    assert sample.status is Status.FAILED
    assert "replay" in (sample.failure or "")
    assert log[-1] == "close"


def test_a_discarded_episode_closes_its_environment() -> None:
    sample, log = new_sample(), list[str]()
    episodes = episodes_of(log)
    run(episodes, sample, Policy(f"{CALL}<end>", stop_after=0))
    anyio.run(episodes.discard, sample)
    assert log[-1] == "close"
    anyio.run(episodes.discard, sample)
    assert log.count("close") == 1


def test_samples_of_a_prompt_have_the_same_seed() -> None:
    key = NoiseKey(seed=1, epoch=2, uid="q", index=0)
    assert episode_seed(key) == episode_seed(NoiseKey(seed=1, epoch=2, uid="q", index=3))
    assert episode_seed(key) != episode_seed(NoiseKey(seed=1, epoch=3, uid="q"))


DROPS = CHAT_TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{% if message.role != 'assistant' or loop.last %}{{ message.content or '' }}{% endif %}",
)
"""Drops the text of earlier assistant turns, but not their calls."""

SHORT_CALL = CALL[CALL.index("<tool_call>") :]


def rerendering(limits: dict[str, Any] | None = None, template: str = DROPS) -> Episodes:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer, HermesFormat())
    merged = EpisodeLimits(**{"max_tokens": 200, "rerender": True, **(limits or {})})
    return Episodes(lambda: Table([]), renderer, merged)


def test_a_template_that_changes_earlier_turns_begins_a_branch() -> None:
    sample = new_sample()
    turns = (f"{CALL}<end>", f"{SHORT_CALL}<end>", f"{ANSWER}<end>")
    assert run(rerendering(), sample, Policy(*turns))
    first, last = sample.branches
    assert (first.branch, first.parent, last.branch, last.parent) == (0, None, 1, 0)
    assert [s.role for s in first.segments] == ["prompt", "assistant"]
    # The second turn has no text that the template could drop, so the branch goes on.
    assert [s.role for s in last.segments] == ["prompt", "assistant", "tool", "assistant"]
    result = "<end><tool>boss ben<end><assistant>"
    start = f"<user>{QUESTION}<end><assistant>"
    assert TOKENIZER.decode(first.tokens) == f"{start}{CALL}<end>"
    short = f"{SHORT_CALL}{result}"
    assert TOKENIZER.decode(last.tokens) == f"{start}{short}{short}{ANSWER}<end>"
    assert sum(first.loss_mask) + sum(last.loss_mask) == sum(len(ids(turn)) for turn in turns)
    assert set(last.segments[0].loss_mask) == {0.0}
    assert first.noise_key(1) != last.noise_key(1)


def test_rewards_stay_in_the_branch_of_their_turn() -> None:
    sample = new_sample()
    run(rerendering(), sample, Policy(f"{CALL}<end>", f"{CALL}<end>", f"{ANSWER}<end>"))
    assert sample.episode is not None
    first, second, _ = sample.branches
    assert sample.episode.rewards == [
        PlacedReward(first.num_tokens - 1, "look_up", -0.25, 0),
        PlacedReward(second.num_tokens - 1, "look_up", -0.25, 1),
    ]


def test_a_template_that_only_appends_makes_no_branch() -> None:
    sample = new_sample()
    # Without the space before the call, which parsing removes.
    turns = (f"{CALL.replace(' <tool', '<tool')}<end>", f"{ANSWER}<end>")
    run(rerendering(template=CHAT_TEMPLATE), sample, Policy(*turns))
    appended = new_sample()
    run(episodes_of([]), appended, Policy(*turns))
    assert sample == appended
    assert sample.earlier == []


def test_the_context_of_a_branch_counts_for_the_limit_of_tokens() -> None:
    turns = [f"{CALL}<end>"] * 3
    used = len(ids(f"{SHORT_CALL}<end><tool>boss ben<end><assistant>"))
    sample = new_sample()
    run(rerendering({"max_tokens": used}), sample, Policy(*turns))
    assert sample.episode is not None
    assert (sample.episode.truncated_by, len(sample.branches)) == (TOKENS, 1)
    sample = new_sample()
    policy = Policy(*turns)
    run(rerendering({"max_tokens": used + 1}), sample, policy)
    assert (len(sample.branches), policy.asked[-1]) == (2, 1)


def test_an_episode_ends_before_a_branch_that_may_not_fit() -> None:
    asked: list[list[int]] = []

    def fit(lengths: Sequence[int]) -> bool:
        asked.append(list(lengths))
        return len(lengths) < 3

    sample = new_sample()
    ended = run(rerendering({"branches_fit": fit}), sample, Policy(*[f"{CALL}<end>"] * 4))
    assert ended
    assert sample.episode is not None
    assert (sample.status, sample.episode.truncated_by) == (Status.TRUNCATED, MICRO_BATCH)
    first, second = sample.branches
    most = len(first.prompt_ids) + 200
    assert asked == [[first.num_tokens, most], [first.num_tokens, second.num_tokens, most]]


@pytest.mark.parametrize("stop_at", [0, 2])
@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_branches_are_replayed_after_a_restart(stop_after: int, stop_at: int) -> None:
    turns = (f"{CALL}<end>", f"{CALL}<end>", f"{ANSWER}<end>")
    expected = new_sample()
    assert run(rerendering(), expected, Policy(*turns))
    sample = new_sample()
    policy = Policy(*turns, stop_after=stop_after, stop_at=stop_at)
    assert not run(rerendering(), sample, policy)
    saved, policy.calls = copy.deepcopy(sample), 0
    assert run(rerendering(), saved, policy)
    assert saved == expected
    assert policy.calls == 3 - stop_after


def test_a_template_that_cannot_append_is_rendered_whole() -> None:
    # Writes no end token after a turn with a call that a result follows.
    template = CHAT_TEMPLATE.replace(
        "<end>{% endfor %}", "{% if not message.tool_calls %}<end>{% endif %}{% endfor %}"
    )
    turns = (f"{CALL}<end>", f"{ANSWER}<end>")
    sample = new_sample()
    assert run(rerendering(template=template), sample, Policy(*turns))
    assert len(sample.branches) == 2
    assert TOKENIZER.decode(sample.tokens) == (
        f"<user>{QUESTION}<end><assistant>{CALL.replace(' <tool', '<tool')}<tool>boss ben<end>"
        f"<assistant>{ANSWER}<end>"
    )
    appended = new_sample()
    run(rerendering({"rerender": False}, template), appended, Policy(*turns))
    assert appended.status is Status.FAILED


def test_an_engine_that_fails_before_the_first_token_fails_the_sample() -> None:
    async def down(sample: Sample, max_tokens: int | None = None, /) -> Generation:
        return Generation(
            request_id="r",
            token_ids=[],
            log_probs=[],
            sampling_log_probs=[],
            spans=[],
            stop_reason=StopReason.ERROR,
            error="the engine is down",
        )

    sample, log = new_sample(), list[str]()
    assert not anyio.run(lambda: episodes_of(log).run(sample, prompt(), down, seed=7))
    assert (sample.status, sample.failure) == (Status.FAILED, "the engine is down")
    assert log == ["reset 7", "close"]


def test_an_answer_that_cannot_fit_is_not_tokenized() -> None:
    sample = new_sample()
    assert run(episodes_of([], text="boss " * 1_000_000), sample, Policy(f"{CALL}<end>"))
    assert sample.episode is not None
    assert (sample.status, sample.episode.truncated_by) == (Status.TRUNCATED, TOKENS)
    assert RENDERER._longest_token is not None
