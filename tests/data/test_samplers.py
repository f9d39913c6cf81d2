"""The pass rate curriculum, and samplers selected by name."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.data.samplers import PassRateSampler, load_sampler
from slipstream.errors import ConfigError, DataError
from slipstream.rewards.data_proto import DataProto


def batch(places: list[int], rewards: list[float], acc: list[Any] | None = None) -> DataProto:
    scores = torch.zeros((len(places), 2))
    scores[:, 1] = torch.tensor(rewards)
    fields: dict[str, Any] = {"dataset_index": places}
    return DataProto({"token_level_scores": scores}, fields | ({} if acc is None else {"acc": acc}))


def sampler(size: int = 10, **kwargs: Any) -> PassRateSampler:
    return PassRateSampler(list(range(size)), {"seed": 1, "sampler": {"kwargs": kwargs}})


def test_every_prompt_is_drawn_once_before_any_is_repeated() -> None:
    order = list(sampler())
    assert sorted(order) == list(range(10))
    assert order != sorted(order)


def test_pass_rates_are_exponential_means_of_groups() -> None:
    curriculum = sampler(3, momentum=0.5)
    curriculum.update(batch([0, 0, 1, 1], [1.0, 1.0, 0.0, 0.5]))
    assert curriculum.pass_rates.tolist() == [1.0, 0.5, 0.5]
    curriculum.update(batch([0, 0], [0.0, -1.0]))
    assert curriculum.pass_rates.tolist() == [0.5, 0.5, 0.5]
    curriculum.update(batch([0, 1], [0.0, 0.0]))
    assert curriculum.pass_rates.tolist() == [0.25, 0.25, 0.5]
    # `acc` takes precedence over rewards, which may contain penalties.
    curriculum.update(batch([2, 2], [-1.0, -1.0], acc=[1.0, 1.0]))
    assert curriculum.pass_rates[2] == 1.0


def test_threshold_defines_solved_responses() -> None:
    curriculum = sampler(2, momentum=1.0, threshold=0.1)
    curriculum.update(batch([0, 0, 1, 1], [0.1, 0.1, 0.1, 1.1]))
    assert curriculum.pass_rates.tolist() == [0.0, 0.5]


def test_prompts_solved_sometimes_are_drawn_more_often() -> None:
    curriculum = sampler(30, floor=0.02, momentum=1.0)
    solved = [1.0] * 10 + [0.0] * 10
    for place, right in enumerate(solved):
        curriculum.update(batch([place, place], [right, right]))
    drawn: Counter[int] = Counter()
    for _ in range(2000):
        (place,) = islice(curriculum, 1)
        drawn[place // 10] += 1
        curriculum._recent.clear()
    # Weights are 0.02 for p = 0 and p = 1, and 0.27 for p = 1/2. With ten prompts of each, the
    # shares are 6.5 %, 6.5 % and 87 %.
    assert drawn[2] / 2000 == pytest.approx(0.87, abs=0.03)
    assert drawn[0] / 2000 == pytest.approx(0.065, abs=0.02)


def test_a_prompt_is_not_drawn_twice_between_updates() -> None:
    curriculum = sampler(6, momentum=1.0, floor=0.001)
    curriculum.update(batch([0, 1, 2, 3, 4], [1.0] * 5))
    first = list(islice(curriculum, 4))
    assert len(set(first)) == 4
    assert 5 in first


def test_state_is_json_and_restores_the_draws() -> None:
    one = sampler()
    list(islice(one, 3))
    one.update(batch([0, 1], [1.0, 0.0]))
    list(islice(one, 2))
    state = json.loads(json.dumps(one.state_dict()))
    other = sampler()
    other.load_state_dict(state)
    assert list(islice(other, 5)) == list(islice(one, 5))
    with pytest.raises(DataError, match="has 10 prompts, but the data set has 4"):
        sampler(4).load_state_dict(state)


def test_rows_added_later_are_included() -> None:
    rows = [0, 1]
    curriculum = PassRateSampler(rows, {})
    assert len(list(curriculum)) == 2
    rows.append(2)
    curriculum.update(batch([0], [1.0]))
    assert len(curriculum) == 3
    assert curriculum.pass_rates.tolist() == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"flor": 0.1},
            "data.sampler.kwargs.flor is not an option of PassRateSampler; did you mean",
        ),
        ({"floor": 0}, "data.sampler.kwargs.floor=0 must be above 0"),
        ({"momentum": 2}, "momentum=2 must be above 0 and at most 1"),
        ({"momentum": True}, "momentum=True must be"),
        ({"threshold": "x"}, "threshold=x must be a number"),
    ],
)
def test_invalid_options_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampler(**kwargs)


def test_samplers_are_built_in_or_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "order.py"
    path.write_text(
        "from slipstream.data.samplers import AbstractSampler\n"
        "class Backwards(AbstractSampler):\n"
        "    def __init__(self, data_source, data_config): self.size = len(data_source)\n"
        "    def __len__(self): return self.size\n"
        "    def __iter__(self): return iter(range(self.size - 1, -1, -1))\n"
        "class Other: pass\n",
        encoding="utf-8",
    )
    assert isinstance(load_sampler([1], {}, path=None, name="PassRateSampler"), PassRateSampler)
    assert list(load_sampler("abc", {}, path=str(path), name="Backwards")) == [2, 1, 0]
    with pytest.raises(ConfigError, match="PassRate is not built in; did you mean"):
        load_sampler([1], {}, path=None, name="PassRate")
    with pytest.raises(ConfigError, match=r"Other must be a torch.utils.data.Sampler"):
        load_sampler([1], {}, path=str(path), name="Other")
