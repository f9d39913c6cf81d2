"""The reasoning_gym task, with the real library."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.data.gym import ReasoningGymTask
from slipstream.data.registry import get_task
from slipstream.errors import ConfigError, DataError, RewardError
from slipstream.rewards.functions import default_compute_score
from slipstream.types import Prompt
from tests.data.helpers import char_tokenizer, ids
from tests.run.helpers import records_of, rl_only

gym = pytest.importorskip("reasoning_gym")


class Bytes:
    """A tokenizer with one token per byte, for any text."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return list("".join(message["content"] for message in messages).encode())


def task(datasets: Any, **options: Any) -> ReasoningGymTask:
    result = get_task(
        "reasoning_gym",
        options.pop("seed", 1),
        tokenizer=options.pop("tokenizer", char_tokenizer()),
        **{"datasets": datasets, "max_prompt_length": 9999, **options},
    )
    assert isinstance(result, ReasoningGymTask)
    return result


def graded(prompt: Prompt, response: str) -> Any:
    return default_compute_score(
        prompt.data_source, response, prompt.ground_truth, prompt.extra_info
    )


def test_problems_depend_on_seed_split_and_index_only() -> None:
    one, two = task("chain_sum"), task("chain_sum")
    for split, index in (("train", 0), ("train", 1234), ("held_out", 0)):
        left = one.prompt(split, index)  # type: ignore[arg-type]
        assert left == two.prompt(split, index)  # type: ignore[arg-type]
        assert left.uid == f"reasoning_gym/{split}/{index}"
        question = left.extra_info["reasoning_gym"]["question"]
        system = gym.utils.SYSTEM_PROMPTS["default"]
        assert left.messages == [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
        assert left.ids == ids(f"<s>system:{system}<e>\n<s>user:{question}<e>\n<s>assistant:")
    questions = {one.prompt("train", i).extra_info["reasoning_gym"]["question"] for i in range(40)}
    assert len(questions) == 40
    assert task("chain_sum", seed=2).prompt("train", 0) != one.prompt("train", 0)
    assert one.prompt("held_out", 5).ids != one.prompt("train", 5).ids


def test_answers_are_graded_by_the_library() -> None:
    prompt = task("chain_sum", system_prompt=None).prompt("train", 3)
    right = f"I think <answer>0</answer>, no: <answer> {prompt.ground_truth} </answer>"
    assert graded(prompt, right) == {"score": 1.0, "acc": 1.0, "pred": prompt.ground_truth}
    assert graded(prompt, prompt.ground_truth)["acc"] == 0.0
    assert graded(prompt, "<answer>x</answer>")["acc"] == 0.0
    with pytest.raises(ValueError, match="extra_info has no 'reasoning_gym'"):
        default_compute_score("reasoning_gym/chain_sum", "x", "1", {})
    with pytest.raises(RewardError, match="has no generator 'chain'"):
        default_compute_score("reasoning_gym/chain", "x", "1", {"reasoning_gym": {}})


def test_grading_works_after_a_json_round_trip() -> None:
    prompt = task({"spell_backward": {}, "number_sorting": {}}).prompt("train", 1)
    prompt.extra_info = json.loads(json.dumps(prompt.extra_info, default=str))
    assert graded(prompt, f"<answer>{prompt.ground_truth}</answer>")["score"] == 1.0


def test_mixtures_are_weighted_and_configured() -> None:
    mixed = task({"chain_sum": {"weight": 3, "config": {"min_terms": 2, "max_terms": 2}}, "gcd": 1})
    prompts = [mixed.prompt("train", i) for i in range(200)]
    counts = Counter(p.data_source for p in prompts)
    assert 130 <= counts["reasoning_gym/chain_sum"] <= 170
    assert counts["reasoning_gym/gcd"] == 200 - counts["reasoning_gym/chain_sum"]
    sums = [p for p in prompts if p.data_source.endswith("chain_sum")]
    assert {p.extra_info["reasoning_gym"]["metadata"]["num_terms"] for p in sums} == {2}


def test_overlong_problems_are_replaced() -> None:
    long = task("chain_sum", system_prompt=None)
    lengths = [len(long.prompt("train", i).ids) for i in range(30)]
    limit = sorted(lengths)[10]
    short = task("chain_sum", system_prompt=None, max_prompt_length=limit)
    kept = [len(short.prompt("train", i).ids) for i in range(30)]
    assert max(kept) <= limit
    assert [b for a, b in zip(lengths, kept, strict=True) if a <= limit] == [
        a for a in lengths if a <= limit
    ]
    with pytest.raises(DataError, match=r"in a row are longer than data.max_prompt_length=20"):
        task("chain_sum", max_prompt_length=20).prompt("train", 0)


WITHOUT_ANSWERS = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Generators whose problems have many solutions and no given answer."""


# Some libraries used by the generators leave files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_generator_has_problems_and_grades_answers() -> None:
    names = sorted(set(gym.factory.DATASETS) - {"composite"})
    assert len(names) > 100
    for name in names:
        one = task(name, tokenizer=Bytes(), max_prompt_length=10**7)
        prompt = one.prompt("train", 7)
        assert graded(prompt, "no")["score"] < 0.1, name
        if name in WITHOUT_ANSWERS:
            with pytest.raises(DataError, match="provides none, so there is nothing to imitate"):
                one.demonstration("train", 7)
        else:
            assert graded(prompt, one.demonstration("train", 7)[-1]["content"])["acc"] == 1.0, name


def test_a_demonstration_is_graded_as_correct() -> None:
    one = task("gcd")
    talk = one.demonstration("train", 2)
    assert [m["role"] for m in talk] == ["system", "user", "assistant"]
    assert graded(one.prompt("train", 2), talk[-1]["content"])["acc"] == 1.0


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ("chain_sums", r"datasets\.chain_sums: .* did you mean chain_sum"),
        ("composite", "no generator with that name"),
        ({}, "names no generator"),
        ({"gcd": 0}, r"gcd\.weight=0 must be a number above 0"),
        ({"gcd": {"weights": 1}}, "has no option weights"),
        ({"gcd": {"config": {"seed": 3}}}, r"config\.seed is set by the run"),
        ({"gcd": {"config": {"min_numbers": -3}}}, "is refused by reasoning-gym"),
        ({"gcd": {"config": {"min_number": 3}}}, "is refused by reasoning-gym: .*min_number"),
    ],
)
def test_invalid_settings_are_refused(datasets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(datasets)


def test_the_option_datasets_is_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = rl_only(tmp_path / "run", "data.task=reasoning_gym")
    assert main(line) == 2
    assert "needs the option 'datasets'; set data.task_kwargs.datasets" in capsys.readouterr().err


def test_a_run_trains_on_generated_problems(tmp_path: Path) -> None:
    line = rl_only(
        tmp_path / "run",
        "data.task=reasoning_gym",
        "data.task_kwargs={datasets: {chain_sum: 2, gcd: 1}, system_prompt: null}",
        "data.max_prompt_length=64",
        "data.val_size=3",
        "trainer.val_before_train=true",
    )
    assert main(line) == 0
    rows = [row for rows in records_of(tmp_path / "run" / "rollouts").values() for row in rows]
    assert len(rows) == 8
    assert {row["data_source"].split("/")[0] for row in rows} == {"reasoning_gym"}
    assert all(row["failure"] is None for row in rows)
    assert "answer" in rows[0]["extra_info"]["reasoning_gym"]
