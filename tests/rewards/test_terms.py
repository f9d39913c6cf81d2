"""Reward terms of samples and groups are added to the score."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.load import load_reward_manager
from slipstream.rewards.protocol import GroupRewardManager, Score, apply_score
from slipstream.rewards.results import NOT_APPLICABLE
from slipstream.rewards.terms import read_terms
from slipstream.types import Sample, Segment, Status
from tests.rewards.helpers import decode

MINE = """
import time

def brevity(data_source, solution_str, ground_truth, extra_info, per_word=1.0):
    if solution_str == "4":
        raise ValueError("four")
    return -per_word * len(solution_str.split())

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str.split()[0]), "length": len(solution_str)}

def rank(completions, prompts, **columns):
    order = sorted(completions, key=len)
    return [float(order.index(c)) for c in completions]

async def later(completions, **columns):
    return [0.25 for _ in completions]

def few(completions, **columns):
    return [1.0]

def slow(completions, **columns):
    time.sleep(30)

def whole(data):
    return data.batch["response_mask"].sum(1).float()
"""


def sample(*ids: int) -> Sample:
    return Sample(
        uid="u",
        segments=[Segment.given("prompt", [1]), Segment.given("assistant", list(ids))],
        response=decode(list(ids)),
        status=Status.COMPLETED,
    )


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def scored(terms: Mapping[str, Any], path: str, samples: list[Sample], **options: Any) -> None:
    """Score samples as rollouts do."""
    manager = load_reward_manager(
        decode=decode, custom_path=path, terms=terms, **{"timeout_s": 5.0, **options}
    )
    assert isinstance(manager, GroupRewardManager)

    async def run() -> None:
        for one in samples:
            apply_score(one, await manager.score_sample(one))
        await manager.finish_group(samples)

    anyio.run(run)


def test_the_score_is_a_weighted_sum_with_named_parts(mine: str) -> None:
    terms = {
        "answer": 2.0,
        "repetition": {"weight": 0.5, "ngram": 1},
        "mine": {
            "weight": 0.25,
            "path": mine,
            "name": "brevity",
            "reward_kwargs": {"per_word": 2.0},
        },
    }
    one = sample(7, 7, 8)
    scored(terms, mine, [one])
    # 2 * 7 + 0.5 * (2 / 3 - 1) + 0.25 * -2 * 3
    assert one.reward == pytest.approx(14 - 0.5 / 3 - 1.5)
    assert one.reward_parts == pytest.approx(
        {
            "acc": 7.0,
            "answer": 7.0,
            "length": 5.0,
            "repetition": -1 / 3,
            "mine": -6.0,
            "score": one.reward,
        }
    )


def test_the_answer_has_weight_1_by_default(mine: str) -> None:
    one = sample(7)
    scored({"think_format": 1.0}, mine, [one])
    assert (one.reward, one.reward_parts["think_format"]) == (7.0, 0.0)


def test_group_terms_get_all_responses_of_a_group(mine: str) -> None:
    terms = {
        "rank": {"weight": 10.0, "path": mine, "name": "rank", "group": True},
        "later": {"weight": 2.0, "path": mine, "name": "later", "group": True},
        "whole": {"weight": 0.1, "path": mine, "name": "whole", "group": True},
        "relative_length": 1.0,
    }
    group = [sample(1, 2, 3), sample(5), sample(6, 1)]
    scored(terms, mine, group)
    assert [s.reward_parts["rank"] for s in group] == [2.0, 0.0, 1.0]
    assert [s.reward_parts["relative_length"] for s in group] == [-0.5, 0.5, 0.0]
    # The term `whole` is 0, because given segments have an empty response mask.
    assert [s.reward for s in group] == pytest.approx([1 + 20 + 0.5 - 0.5, 5 + 0.5 + 0.5, 16.5])
    assert all(s.reward_parts["score"] == s.reward for s in group)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("few", "few: returned 1 rewards for 2 responses"),
        ("slow", "slow: no answer within 0.2 s"),
    ],
)
def test_a_failing_group_term_fails_the_whole_group(mine: str, name: str, reason: str) -> None:
    terms = {name: {"weight": 1.0, "path": mine, "name": name, "group": True}}
    zero, dropped = [sample(1), sample(2)], [sample(1), sample(2)]
    scored(terms, mine, zero, timeout_s=0.2)
    assert [(s.reward, s.status, s.metadata["reward_failure"]) for s in zero] == [
        (0.0, Status.COMPLETED, reason)
    ] * 2
    scored(terms, mine, dropped, timeout_s=0.2, on_failure="drop")
    assert [(s.status, s.failure) for s in dropped] == [(Status.FAILED, reason)] * 2
    with pytest.raises(RewardError, match=r"failed on the 2 responses to 'u'.*set reward_model"):
        scored(terms, mine, [sample(1), sample(2)], timeout_s=0.2, on_failure="stop")


def test_a_failing_sample_term_fails_the_sample(mine: str) -> None:
    terms = {
        "mine": {"weight": 1.0, "path": mine, "name": "brevity"},
        "rank": {"weight": 1.0, "path": mine, "name": "rank", "group": True},
    }
    group = [sample(3, 1), sample(4), sample(5)]
    scored(terms, mine, group)
    assert [s.reward for s in group] == [3 - 2 + 1, 0.0, 5 - 1]
    assert group[1].metadata["reward_failure"] == "mine: ValueError: four"
    assert "rank" not in group[1].reward_parts


TASKS = """
def math(completion_ids, **columns):
    return [float(len(ids)) if ids[0] == 1 else None for ids in completion_ids]

def code(completions, log_extra, log_metric, **columns):
    log_metric("calls", 1)
    log_extra("begin", [text[0] for text in completions])
    return [10.0 if text.startswith("2") else None for text in completions]

def group(completions, trainer_state, **columns):
    return [trainer_state.max_steps if text.startswith("2") else None for text in completions]
"""


@pytest.mark.parametrize("on_failure", ["zero", "drop", "stop"])
def test_functions_that_do_not_apply_to_a_response_are_left_out_of_its_sum(
    tmp_path: Path, on_failure: str
) -> None:
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    of_math, of_code, both = sample(1, 5), sample(2, 5), sample(1)
    terms = {
        "answer": 3.0,
        "code": {"weight": 0.5, "path": path, "name": "code"},
        "group": {"weight": 0.1, "path": path, "name": "group", "group": True},
    }
    scored(
        terms,
        str(path),
        [of_math, of_code, both],
        custom_name="math",
        on_failure=on_failure,
        total_steps=40,
    )
    assert [s.reward for s in (of_math, of_code, both)] == [6.0, 5.0 + 4.0, 3.0]
    assert of_math.reward_parts == {"acc": 2.0, "answer": 2.0, "score": 6.0}
    assert of_code.reward_parts == {"calls": 1.0, "code": 10.0, "group": 40.0, "score": 9.0}
    assert of_code.metadata["reward_extras"] == {"begin": "2"}
    assert all("reward_failure" not in s.metadata for s in (of_math, of_code, both))


def test_a_response_without_any_function_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    terms = {"code": {"weight": 1.0, "path": path, "name": "code"}}
    none, other = sample(3), sample(2)
    scored(terms, str(path), [none, other], custom_name="math")
    assert (none.reward, none.metadata["reward_failure"]) == (0.0, NOT_APPLICABLE)
    assert other.reward == 10.0
    with pytest.raises(RewardError, match=r"terms failed on sample 'u': returned None"):
        scored(terms, str(path), [sample(3)], custom_name="math", on_failure="stop")


def test_a_response_without_any_function_is_a_failure_with_group_terms_too(tmp_path: Path) -> None:
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    terms = {"group": {"weight": 1.0, "path": path, "name": "group", "group": True}}
    none, other = sample(3), sample(2)
    options: dict[str, Any] = {"custom_name": "math", "total_steps": 40}
    scored(terms, str(path), [none, other], **options)
    assert (none.reward, none.metadata["reward_failure"]) == (0.0, NOT_APPLICABLE)
    assert (other.reward, "reward_failure" in other.metadata) == (40.0, False)
    with pytest.raises(RewardError, match=r"terms failed on sample 'u': returned None"):
        scored(terms, str(path), [sample(3), sample(2)], on_failure="stop", **options)


def test_a_failed_answer_remains_a_failure(mine: str) -> None:
    manager = load_reward_manager(decode=lambda ids: "x", custom_path=mine, terms={"answer": 2})
    score = anyio.run(manager.score_sample, sample(1))
    assert score == Score(0.0, failure="ValueError: could not convert string to float: 'x'")


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"think_fromat": 1.0}, "think_fromat is not known.*did you mean think_format"),
        ({"think_format": "1"}, "has the weight '1'; give a number"),
        ({"think_format": float("nan")}, "has the weight nan"),
        ({"think_format": {}}, "has the weight None"),
        ({"think_format": True}, "has the weight True"),
        ({"think_format": {"weight": 1, "promted": True}}, "unexpected.*promted"),
        ({"overlong": 1.0}, "overlong: missing a required argument: 'max_resp_len'"),
        ({"answer": {"weight": 1, "ngram": 2}}, "answer has ngram; .*custom_reward_function"),
        ({"mine": {"weight": 1, "path": "MINE", "grup": True}}, "grup.*did you mean group"),
        ({"mine": {"weight": 1, "path": "MINE", "name": "brevty"}}, "did you mean brevity"),
        ({"repetition": {"weight": 1, "path": "MINE"}}, "choose another name"),
        (
            {"mine": {"weight": 1, "path": "MINE", "name": "brevity", "group": True}},
            "mine has group: true.*solution_str",
        ),
    ],
)  # fmt: skip
def test_invalid_terms_are_refused(mine: str, terms: dict[str, Any], message: str) -> None:
    for entry in terms.values():
        if isinstance(entry, dict) and entry.get("path") == "MINE":
            entry["path"] = mine
    with pytest.raises(ConfigError, match=message):
        read_terms(terms)


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"think_format": 10**400}, "reward_model.terms.think_format"),
        ({"think_format": 1e300}, "reward_model.terms.think_format"),
        ({"repetition": {"weight": 1, "ngram": "3"}}, "reward_model.terms.repetition.ngram='3'"),
        ({"repetition": {"weight": 1, "ngram": 10**5_000}}, "reward_model.terms.repetition.ngram"),
        ({"repetition": {"weight": 1, "ngram": 0}}, "ngram=0"),
        ({"cosine_length": {"weight": 1, "max_resp_len": 0}}, "max_resp_len=0"),
        ({"overlong": {"weight": 1, "max_resp_len": 4, "buffer": 9}}, "buffer=9"),
        (
            {"cosine_length": {"weight": 1, "max_resp_len": 9, "short_right": "x"}},
            "reward_model.terms.cosine_length.short_right='x'",
        ),
    ],
)
def test_values_that_would_end_the_run_at_the_first_response_are_refused(
    entry: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_terms(entry)
    assert key in str(error.value)


def test_a_weighted_sum_that_is_too_large_is_a_failure() -> None:
    manager = load_reward_manager(
        decode=decode, function=lambda **_: 1e10, terms={"answer": 1e10, "think_format": 1.0}
    )
    score = anyio.run(manager.score_sample, sample(1))
    assert (score.value, score.ok) == (0.0, True)
    assert "1e+20" in str(score.failure)
