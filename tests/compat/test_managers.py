"""Reward managers that user code registers, and verl's classes as base classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.compat import managers, verl
from slipstream.compat.managers import (
    AbstractRewardManager,
    NaiveRewardManager,
    RewardManagerBase,
    get_reward_manager_cls,
    register,
)
from slipstream.compat.trainer import _unwrapped
from slipstream.compat.verl import DataProto
from slipstream.errors import ConfigError
from slipstream.rewards import load
from slipstream.rewards.data_proto import proto_of
from slipstream.rewards.manager import NaiveRewardManager as PerResponseManager
from tests.data.helpers import char_tokenizer, ids
from tests.rewards.helpers import sample


@pytest.fixture(autouse=True)
def _restore_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "_CLASSES", dict(managers._CLASSES))
    monkeypatch.setattr(load, "_MANAGERS", dict(load._MANAGERS))


def batch() -> DataProto:
    """Return two rows with the truths 41 (a wrong response) and 7."""
    rows = [
        sample(*ids("#### 42"), source="openai/gsm8k", truth="41"),
        sample(*ids("#### 7"), source="openai/gsm8k", truth="7"),
    ]
    return proto_of(rows, ["", ""])


class Lengths(AbstractRewardManager):
    """Written like verl's managers: the score, plus a bonus for the length, at the last token."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        bonus: float = 0.0,
    ) -> None:
        self.tokenizer, self.num_examine, self.bonus = tokenizer, num_examine, bonus
        self.compute_score, self.reward_fn_key = compute_score, reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra: dict[str, list[Any]] = {"length": []}
        for i in range(len(data)):
            item = data[i]
            response, width = item.batch["responses"], item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][width:].sum())
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=self.tokenizer.decode(response[:length]),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            rewards[i, length - 1] = score + self.bonus * length
            extra["length"].append(length)
        if return_dict:
            return {"reward_tensor": rewards, "reward_extra_info": extra}
        return rewards


def test_a_registered_class_is_selected_by_its_name() -> None:
    register("lengths")(Lengths)
    config = {"reward_model": {"reward_manager": "lengths", "reward_kwargs": {"bonus": 0.5}}}
    manager = verl.load_reward_manager(config, char_tokenizer())
    both = manager(batch(), return_dict=True)
    assert both["reward_tensor"].sum(1).tolist() == [3.5, 4.0]
    assert both["reward_tensor"].nonzero().tolist() == [[0, 6], [1, 5]]
    assert both["reward_extra_info"]["length"] == [7.0, 6.0]
    assert isinstance(manager.manager, PerResponseManager)
    assert get_reward_manager_cls("lengths") is Lengths


def test_a_response_without_tokens_is_scored() -> None:
    register("lengths")(Lengths)
    config = {"reward_model": {"reward_manager": "lengths"}}
    manager = verl.load_reward_manager(config, char_tokenizer())
    empty = sample(source="openai/gsm8k", truth="7")
    score = anyio.run(manager.manager.score_sample, empty)
    assert (score.value, score.failure) == (0.0, None)


class Halves(RewardManagerBase):
    """Written like the managers of verl's reward loop."""

    def __init__(
        self, config: Any, tokenizer: Any, compute_score: Any, reward_router_address: Any = None
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.loop = None
        self.scale = config.reward_model.reward_kwargs.get("scale", 0.5)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        item = data[0]
        text = self.tokenizer.decode(item.batch["responses"])
        score = await self.loop.run_in_executor(
            None,
            lambda: self.compute_score(  # type: ignore[misc]
                data_source=item.non_tensor_batch["data_source"],
                solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info={},
            ),
        )
        extra = {"acc": score, "score": score}
        return {"reward_score": self.scale * score, "reward_extra_info": extra}


def test_a_class_of_verls_reward_loop_is_selected_by_its_name() -> None:
    register("halves")(Halves)
    manager = verl.load_reward_manager(
        {"reward_model": {"reward_manager": "halves"}}, char_tokenizer()
    )
    both = manager(batch(), return_dict=True)
    assert both["reward_tensor"].sum(1).tolist() == [0.0, 0.5]
    assert both["reward_extra_info"]["acc"] == [0.0, 1.0]


REWARD_FILE = """
from slipstream.compat.verl import DataProto
from slipstream.compat.verl.utils.reward_score import default_compute_score, gsm8k
from slipstream.compat.verl.workers.reward_manager import register
from slipstream.compat.verl.workers.reward_manager.abstract import AbstractRewardManager
import torch

@register("from_file")
class Mine(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source"):
        self.tokenizer, self.compute_score = tokenizer, compute_score

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            text = self.tokenizer.decode(data[i].batch["responses"])
            truth = data[i].non_tensor_batch["reward_model"]["ground_truth"]
            rewards[i, 0] = self.compute_score("x", text, truth, {})
        return rewards

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 3 * gsm8k.compute_score(solution_str, ground_truth)
"""


def test_the_file_of_the_reward_function_may_register_a_manager(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(REWARD_FILE)
    config = {
        "reward_model": {"reward_manager": "from_file"},
        "custom_reward_function": {"path": str(path)},
    }
    for _ in range(2):  # each load imports the file again
        manager = verl.load_reward_manager(config, char_tokenizer())
        assert manager(batch()).sum(1).tolist() == [0.0, 3.0]


def test_names_are_unique_but_a_class_may_be_registered_again() -> None:
    register("lengths")(Lengths)
    assert register("lengths")(Lengths) is Lengths
    with pytest.raises(ConfigError, match=r"'lengths' is already registered by .*Lengths"):
        register("lengths")(Halves)
    for name in ("naive", "limited"):
        with pytest.raises(ConfigError, match=f"'{name}' (is already registered|already exists)"):
            register(name)(Lengths)
    with pytest.raises(ConfigError, match="no class of reward managers is registered as 'other'"):
        get_reward_manager_cls("other")
    assert get_reward_manager_cls("naive") is NaiveRewardManager is verl.NaiveRewardManager


def test_a_class_whose_constructor_does_not_fit_is_refused() -> None:
    register("lengths")(Lengths)
    config = {"reward_model": {"reward_manager": "lengths", "reward_kwargs": {"size": 1}}}
    with pytest.raises(ConfigError, match=r"reward_manager=lengths.*set reward_model\.reward_kw"):
        verl.load_reward_manager(config, char_tokenizer())


@pytest.mark.parametrize("name", ["num_examine", "reward_fn_key", "tokenizer"])
def test_options_of_a_class_do_not_replace_the_arguments_of_every_class(name: str) -> None:
    register("lengths")(Lengths)
    config = {"reward_model": {"reward_manager": "lengths", "reward_kwargs": {name: "x"}}}
    message = rf"reward_model\.reward_kwargs must not contain {name}"
    with pytest.raises(ConfigError, match=message):
        verl.load_reward_manager(config, char_tokenizer())


def test_verls_classes_can_be_base_classes() -> None:
    class Doubled(verl.NaiveRewardManager):
        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            return 2 * super().__call__(data)

    own = Doubled(char_tokenizer(), num_examine=1)
    assert (own.num_examine, own.reward_fn_key) == (1, "data_source")
    assert own(batch()).sum(1).tolist() == [0.0, 2.0]
    assert isinstance(own, AbstractRewardManager)
    # A trainer calls the subclass, and scores with the manager inside of other objects.
    assert _unwrapped(own) is own
    plain = verl.NaiveRewardManager(char_tokenizer(), 0)
    assert _unwrapped(plain) is plain.manager


@pytest.mark.parametrize("kind", [Lengths, NaiveRewardManager])
def test_rewards_of_the_batch_are_returned(kind: Any) -> None:
    data = batch()
    own = kind(char_tokenizer(), 0)
    assert own._extract_reward_from_rm_scores(data) is None
    scores = torch.ones(data.batch["responses"].shape)
    data.union(DataProto({"rm_scores": scores}, {"acc": [1, 0]}, {"reward_extra_keys": ["acc"]}))
    assert own._extract_reward_from_rm_scores(data) is data.batch["rm_scores"]
    both = own._extract_reward_from_rm_scores(data, return_dict=True)
    assert both["reward_extra_info"]["acc"].tolist() == [1, 0]
    if kind is NaiveRewardManager:
        called = own(data, return_dict=True)
        assert called["reward_tensor"] is data.batch["rm_scores"]
        assert called["reward_extra_info"]["acc"].tolist() == [1, 0]


def test_gdpo_is_the_manager_that_scores_each_response() -> None:
    manager = verl.load_reward_manager(
        {"reward_model": {"reward_manager": "gdpo"}}, char_tokenizer()
    )
    assert manager(batch()).sum(1).tolist() == [0.0, 1.0]
