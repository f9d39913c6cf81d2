"""Reward functions written for verl and for TRL are recognized and called correctly."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.rewards.custom import get_custom_reward_fn
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.protocol import REWARD_EXTRAS, Score, apply_score
from slipstream.rewards.signatures import (
    COMPLETIONS,
    DataProtoSignature,
    TRLSignature,
    VerlBatchSignature,
    VerlSignature,
    signature_of,
    takes,
)
from slipstream.rewards.trl import TRAINER_ARGUMENTS
from slipstream.types import Message, Sample, Segment, Status, VersionSpan


def sample(prompt: str | list[Message] = "2 + 3?") -> Sample:
    return Sample(
        prompt=prompt,
        segments=[Segment.given("prompt", [9]), Segment.given("assistant", [5, 6])],
        data_source="sums",
        ground_truth="5",
        extra_info={"answer": "five"},
        status=Status.COMPLETED,
    )


def scored(function: Any, one: Sample | None = None) -> Score:
    manager = NaiveRewardManager(function, decode=lambda ids: f"text of {ids}", timeout_s=5.0)
    return anyio.run(manager.score_sample, one or sample())


def test_signature_is_recognized_by_parameter_names() -> None:
    def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        return 0.0

    def trl(completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0]

    def batch(data_sources: Any, solution_strs: Any, **kwargs: Any) -> list[float]:
        return [0.0]

    def loose(**kwargs: Any) -> float:
        return 0.0

    bound = partial(trl, scale=1)
    assert [takes(f, COMPLETIONS) for f in (verl, trl, batch, loose, bound, max)] == [
        *(False, True, False, False, True, False)
    ]
    assert isinstance(signature_of(trl), TRLSignature)
    assert isinstance(signature_of(batch), VerlBatchSignature)
    assert isinstance(signature_of(loose), VerlSignature)


def test_verl_signature_arguments() -> None:
    assert VerlSignature().arguments([sample()], ["5"]) == {
        "data_source": "sums",
        "solution_str": "5",
        "ground_truth": "5",
        "extra_info": {"answer": "five", "num_turns": 1},
    }


def test_verl_batch_arguments_are_lists() -> None:
    assert VerlBatchSignature().arguments([sample()], ["5"]) == {
        "data_sources": ["sums"],
        "solution_strs": ["5"],
        "ground_truths": ["5"],
        "extra_infos": [{"answer": "five", "num_turns": 1}],
    }


def test_trl_arguments_are_lists() -> None:
    def takes_all(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        return [0.0]

    def few(completions: Any, answer: Any) -> list[float]:
        return [0.0]

    row = {"answer": ["five"], "ground_truth": ["5"], "data_source": ["sums"]}
    arguments = TRLSignature(takes_all).arguments([sample()], ["5"])
    assert [arguments.pop(name) is not None for name in TRAINER_ARGUMENTS] == [True] * 3
    assert arguments == {
        "prompts": ["2 + 3?"],
        "completions": ["5"],
        "completion_ids": [[5, 6]],
        **row,
    }
    assert TRLSignature(few).arguments([sample()], ["5"]) == {
        "completions": ["5"],
        "answer": ["five"],
    }
    bound = TRLSignature(partial(few, answer=["six"]))
    assert bound.arguments([sample()], ["5"]) == {"completions": ["5"]}
    messages: list[Message] = [{"role": "user", "content": "2 + 3?"}]
    chat = TRLSignature(takes_all).arguments([sample(messages)], ["5"])
    assert chat["prompts"] == [messages]
    assert chat["completions"] == [[{"role": "assistant", "content": "5"}]]


# Functions of TRL's guide and of `trl.rewards`, by their parameters, and verl's.
@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ("completions", TRLSignature),
        ("completions, **kwargs", TRLSignature),
        ("prompts, completions, **kwargs", TRLSignature),
        ("completion_ids, **kwargs", TRLSignature),
        ("completion_ids", TRLSignature),
        ("prompts, **kwargs", TRLSignature),
        ("prompts, completions, completion_ids, answer, trainer_state", TRLSignature),
        ("completions, solution, log_extra=None, **kwargs", TRLSignature),
        ("trainer_state, **kwargs", TRLSignature),
        ("log_metric, **kwargs", TRLSignature),
        ("ground_truth, completion_ids, **kwargs", TRLSignature),
        ("completion_ids, data_source, data", TRLSignature),
        ("*, completion_ids, **kwargs", TRLSignature),
        ("data_source, solution_str, ground_truth, extra_info", VerlSignature),
        ("solution_str, ground_truth, prompts=None, **kwargs", VerlSignature),
        ("**kwargs", VerlSignature),
        ("data_sources, solution_strs, ground_truths, extra_infos, prompts=0", VerlBatchSignature),
        ("data, **kwargs", DataProtoSignature),
        ("data, prompts=None", DataProtoSignature),
    ],
)
@pytest.mark.parametrize("form", ["def", "async def", "object", "partial"])
def test_signature_of_parameters(parameters: str, kind: type, form: str) -> None:
    space: dict[str, Any] = {}
    if form == "object":
        own = f"self, {parameters}"
        exec(f"class R:\n def __call__({own}): return [1.0]\nreward = R()", space)
    else:
        exec(f"{'def' if form == 'partial' else form} reward({parameters}): return [1.0]", space)
    function = partial(space["reward"]) if form == "partial" else space["reward"]
    assert type(signature_of(function)) is kind
    if kind is TRLSignature and "answer" not in parameters:
        assert scored(function, with_column("solution", "data")) == Score(1.0)


def with_column(*names: str) -> Sample:
    return replace(sample(), extra_info={name: "x" for name in names})


def test_only_token_ids_are_needed() -> None:
    def longer(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    assert scored(longer) == Score(2.0)


def test_the_trainers_state_is_that_of_the_sample() -> None:
    seen: list[Any] = []

    def reward(completion_ids: Any, trainer_state: Any) -> list[float]:
        seen.append(trainer_state)
        return [1.0]

    one = replace(sample(), epoch=2)
    one.segments[1].spans.append(VersionSpan(version=7, start=0, end=2))
    assert scored(reward, one) == Score(1.0)
    assert (seen[0].global_step, seen[0].epoch) == (7, 2.0)
    with pytest.raises(AttributeError, match=r"max_steps .*set trainer\.total_training_steps"):
        _ = seen[0].max_steps
    with pytest.raises(AttributeError, match=r"trainer_state\.log_history is not available"):
        _ = seen[0].log_history
    manager = NaiveRewardManager(reward, decode=str, timeout_s=5.0)
    manager.expect_steps(50)
    anyio.run(manager.score_sample, one)
    assert seen[1].max_steps == 50
    assert pickle.loads(pickle.dumps(seen[1])).max_steps == 50


def test_logged_metrics_are_parts_and_logged_columns_are_extras() -> None:
    def reward(completions: Any, log_extra: Any, log_metric: Any, **kwargs: Any) -> list[Any]:
        log_metric("length", 2)
        log_metric("length", torch.tensor(4.0))
        log_metric("own", 1)
        log_extra("parsed", [str(len(text)) for text in completions])
        return [{"score": 0.5, "own": 9.0}]

    assert scored(reward) == Score(0.5, {"length": 3.0, "own": 9.0}, extras={"parsed": "14"})
    one = sample()
    apply_score(one, scored(reward))
    assert one.metadata[REWARD_EXTRAS] == {"parsed": "14"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("log_metric('x', 'high')", "log_metric('x') got str, not a number"),
        ("log_extra('x', ['a', 'b'])", "log_extra('x') got 2 values for 1 responses"),
        ("log_extra('x', [])", "log_extra('x') got 0 values for 1 responses"),
        ("log_extra('x', 5)", "TypeError"),
    ],
)
def test_wrong_logs_are_failures(body: str, reason: str) -> None:
    space: dict[str, Any] = {}
    code = f"def reward(completions, log_metric, log_extra):\n    {body}\n    return [1.0]"
    exec(code, space)
    assert reason in (scored(space["reward"]).failure or "")


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        ([0.5], Score(0.5)),
        ((1,), Score(1.0)),
        (np.array([0.5]), Score(0.5)),
        (torch.tensor([0.5]), Score(0.5)),
        ([{"score": 0.5, "format": 1.0}], Score(0.5, {"format": 1.0})),
        ([None], Score(0.0, failure="returned None: no reward for this response")),
        ([], Score(0.0, failure="returned 0 rewards for 1 response")),
        ([1.0, 2.0], Score(0.0, failure="returned 2 rewards for 1 response")),
        (1.0, Score(0.0, failure="returned float, not a list of rewards")),
        (torch.tensor(1.0), Score(0.0, failure="returned Tensor, not a list of rewards")),
        ("1", Score(0.0, failure="returned str, not a list of rewards")),
        ({"a": 1}, Score(0.0, failure="returned dict, not a list of rewards")),
        (["1"], Score(0.0, failure="returned str, not a number")),
        ([float("nan")], Score(0.0, failure="returned nan, not a finite number")),
    ],
)
def test_results_of_trl_functions(returned: Any, score: Score) -> None:
    assert scored(lambda completions: returned) == score


def test_functions_from_files_are_called_with_their_signature(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def length(completions, scale=1.0, **kwargs):\n"
        "    return [scale * len(text) for text in completions]\n"
        "async def right(completions, ground_truth):\n"
        "    return [float(truth in text) for text, truth in zip(completions, ground_truth)]\n"
        "def verls(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):\n"
        "    return [{'score': scale * len(text)} for text in solution_strs]\n"
        "def needs(completions, solution):\n"
        "    return [1.0]\n"
    )
    text = "text of [5, 6]"
    assert scored(get_custom_reward_fn(file, "length")) == Score(float(len(text)))
    assert scored(get_custom_reward_fn(file, "length", {"scale": 0.5})) == Score(len(text) / 2)
    assert scored(get_custom_reward_fn(file, "right")) == Score(1.0)
    assert scored(get_custom_reward_fn(file, "verls", {"scale": 2})) == Score(2.0 * len(text))
    missing = scored(get_custom_reward_fn(file, "needs")).failure
    assert missing is not None
    assert "missing 1 required positional argument: 'solution'" in missing
    with pytest.raises(ConfigError, match=r"right\(completions, ground_truth\) .* scal"):
        get_custom_reward_fn(file, "right", {"scal": 1})
    with pytest.raises(ConfigError, match=r"verls\(.* cannot be called with data_sources, .* scal"):
        get_custom_reward_fn(file, "verls", {"scal": 1})
    with pytest.raises(ConfigError, match="must not contain extra_infos"):
        get_custom_reward_fn(file, "verls", {"extra_infos": []})
    with pytest.raises(ConfigError, match="must not contain completions"):
        get_custom_reward_fn(file, "length", {"completions": []})


def test_a_data_proto_function_gets_a_batch_of_one_row() -> None:
    seen: list[Any] = []

    def compute_reward(data: Any, scale: float = 1.0) -> torch.Tensor:
        seen.append(data)
        return torch.full((len(data.batch),), 0.5 * scale)

    assert isinstance(signature_of(compute_reward), DataProtoSignature)
    assert scored(partial(compute_reward, scale=3.0)) == Score(1.5)
    (data,) = seen
    assert data.batch["responses"].tolist() == [[5, 6]]
    assert data[0].non_tensor_batch["reward_model"]["ground_truth"] == "5"
    assert data.batch["answer"][0] == "five"
    assert data.batch["response_text"][0] == "text of [5, 6]"


class Manager:
    """A reward manager with verl's interface."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (torch.tensor([0.25]), Score(0.25)),
        (torch.tensor([[0.0, 0.5, 1.0]]), Score(1.5)),
        ([2], Score(2.0)),
        (np.array([[0.5, 0.0]]), Score(0.5)),
        (
            {"reward_tensor": torch.tensor([[0.0, 1.0]]), "reward_extra_info": {"acc": [True]}},
            Score(1.0, {"acc": 1.0}),
        ),
        ((torch.tensor([1.0]), {"acc": [0]}), Score(1.0, {"acc": 0.0})),
        # verl's managers also report a score before penalties, and answers that may be None.
        ((torch.tensor([[0.5]]), {"score": [1.0], "pred": [None]}), Score(0.5)),
    ],
)
def test_results_of_managers(returned: Any, score: Score) -> None:
    assert scored(Manager(returned)) == score


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (torch.tensor(0.5), "returned Tensor, not a list of rewards"),
        (torch.tensor([0.5, 0.5]), "returned 2 rewards for 1 response"),
        (torch.tensor([[float("nan")]]), "returned nan, not a finite number"),
        ({"score": [1.0]}, "returned a mapping without 'reward_tensor' (keys: score)"),
        (
            (torch.tensor([1.0]), 3),
            "returned a tuple that is not of rewards and what goes with them",
        ),
        (None, "returned NoneType, not a list of rewards"),
        ([["a"]], "rewards of tokens that are no numbers"),
    ],
)
def test_invalid_results_of_managers_are_failures(returned: Any, reason: str) -> None:
    assert reason in (scored(Manager(returned)).failure or "")
