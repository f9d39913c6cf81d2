"""verl's reward functions and managers, called with batches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from omegaconf import OmegaConf

from slipstream.compat import verl
from slipstream.compat.rewards import config_of, samples_of
from slipstream.compat.verl import DataProto
from slipstream.errors import ConfigError, DataError
from slipstream.rewards.data_proto import proto_of
from tests.data.helpers import char_tokenizer, ids
from tests.rewards.helpers import sample


def batch() -> DataProto:
    """Return two rows; the second one is shorter and correct."""
    rows = [
        sample(*ids("#### 41"), source="openai/gsm8k", truth="42"),
        sample(*ids("#### 7"), source="openai/gsm8k", truth="7"),
    ]
    rows[1].uid, rows[1].segments[0].ids[:] = "u2", [8, 8]
    return proto_of(rows, ["", ""])


def test_samples_of_restores_samples_from_a_batch() -> None:
    one, two = samples_of(batch())
    assert (one.prompt_ids, one.response_ids, one.uid) == ([9, 9], ids("#### 41"), "u1")
    assert (two.prompt_ids, two.response_ids, two.uid) == ([8, 8], ids("#### 7"), "u2")
    assert (two.data_source, two.ground_truth, two.extra_info) == (
        "openai/gsm8k",
        "7",
        {"index": 4},
    )
    (bare,) = samples_of(DataProto({"responses": torch.tensor([[5, 6]])}))
    assert (bare.prompt_ids, bare.response_ids, bare.uid) == ([], [5, 6], "0")


def test_managers_put_rewards_at_the_last_tokens() -> None:
    manager = verl.load_reward_manager({}, char_tokenizer(), num_examine=0)
    data = batch()
    rewards = manager(data)
    assert rewards.shape == data.batch["responses"].shape
    assert rewards.nonzero().tolist() == [[1, 5]]
    both = manager(data, return_dict=True)
    assert torch.equal(both["reward_tensor"], rewards)
    tensor, extra = verl.compute_reward(data, manager)
    assert torch.equal(tensor, rewards)
    assert extra == both["reward_extra_info"]
    assert torch.equal(anyio.run(verl.compute_reward_async, data, {}, char_tokenizer())[0], rewards)


def test_existing_rm_scores_are_returned() -> None:
    data = batch()
    given = torch.full(data.batch["responses"].shape, 3.0)
    data.union(DataProto({"rm_scores": given}))
    manager = verl.load_reward_manager({}, char_tokenizer())
    assert manager(data) is data.batch["rm_scores"]


def test_extra_info_has_parts_and_failures(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, scale):\n"
        "    if ground_truth == '7':\n"
        "        raise ValueError('seven')\n"
        "    return {'score': scale, 'acc': 1, 'pred': solution_str[-2:]}\n"
    )
    config = {
        "custom_reward_function": {"path": str(path), "reward_kwargs": {"scale": 2}},
    }
    _, extra = verl.compute_reward(batch(), verl.load_reward_manager(config, char_tokenizer()))
    assert extra["acc"] == [1.0, None]
    assert extra["pred"] == ["41", None]
    assert extra["failed"] == [None, "ValueError: seven"]
    function = verl.get_custom_reward_fn(OmegaConf.create(config))
    assert function is not None
    assert function("x", "ab", "c", {})["score"] == 2
    assert verl.get_custom_reward_fn({}) is None


def test_manager_options_are_passed_as_keywords() -> None:
    manager = verl.load_reward_manager(
        ["reward_model.reward_manager=dapo"],
        char_tokenizer(),
        max_resp_len=7,
        overlong_buffer_cfg={"enable": True, "len": 4, "penalty_factor": 1.0},
    )
    # Seven tokens use four tokens of the buffer, six tokens use three.
    assert manager(batch()).sum(1).tolist() == [-1.0, 0.25]
    with pytest.raises(ConfigError, match="do not fit the manager"):
        verl.load_reward_manager({}, char_tokenizer(), max_resp_len=7)


def test_compute_reward_calls_batch_functions() -> None:
    def both(data: DataProto) -> Any:
        return torch.ones(len(data)), {"note": data.responses}

    data = batch()
    assert verl.compute_reward(data, lambda data: torch.zeros(2))[1] == {}
    assert verl.compute_reward(data, both)[1] == {"note": ["", ""]}
    assert anyio.run(verl.compute_reward_async, data, None, None, both)[0].tolist() == [1.0, 1.0]
    assert data.ground_truth_answers == ["42", "7"]


def test_default_compute_score_accepts_verls_keywords() -> None:
    held = threading.Semaphore(1)
    assert verl.default_compute_score("gsm8k", "#### 7", "7", concurrent_semaphore=held) == 1.0
    assert held.acquire(blocking=False)
    with pytest.raises(ConfigError, match=r"reward_model\.sandbox_fusion\.url='nowhere'"):
        verl.default_compute_score("apps", "x", "{}", sandbox_fusion_url="nowhere")


def test_config_of_accepts_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("trainer:\n  seed: 5\n")
    forms: list[Any] = [
        ["trainer.seed=5"],
        {"trainer": {"seed": 5}},
        OmegaConf.create({"trainer": {"seed": 5}}),
        path,
        str(path),
        config_of({"trainer.seed": 5}),
    ]
    assert [config_of(form).trainer.seed for form in forms] == [5] * 6
    assert config_of(None) == config_of([])
    assert config_of(config_of(None), overrides=["trainer.seed=5"]).trainer.seed == 5
    interpolated = OmegaConf.create({"trainer": {"seed": 5}, "data": {"seed": "${trainer.seed}"}})
    assert config_of(interpolated).data.seed == 5
    with pytest.raises(ConfigError, match=r"did you mean trainer\.seed"):
        config_of({"trainer": {"sed": 5}})


def test_manager_classes_score_batches() -> None:
    tokenizer = char_tokenizer()
    assert verl.NaiveRewardManager(tokenizer, 1)(batch()).sum(1).tolist() == [0.0, 1.0]
    dapo = verl.DAPORewardManager(
        tokenizer,
        num_examine=0,
        max_resp_len=7,
        overlong_buffer_cfg={"enable": True, "len": 4, "penalty_factor": 1.0},
    )
    assert dapo(batch()).sum(1).tolist() == [-1.0, 0.25]

    def lengths(
        data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any
    ) -> list[int]:
        return [len(text) for text in solution_strs]

    together = verl.BatchRewardManager(tokenizer, 0, lengths)
    assert together(batch()).sum(1).tolist() == [7.0, 6.0]
    with pytest.raises(ConfigError, match=r"set data\.reward_fn_key=source"):
        verl.NaiveRewardManager(tokenizer, 0, reward_fn_key="source")


def test_compute_reward_requests_a_mapping_if_return_dict_is_a_parameter() -> None:
    class Mine:
        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            rewards = torch.ones(len(data))
            extra = {"acc": [0.5] * len(data)}
            return (
                {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
            )

    tensor, extra = verl.compute_reward(batch(), Mine())
    assert tensor.tolist() == [1.0, 1.0]
    assert extra == {"acc": [0.5, 0.5]}


def test_failures_of_a_direct_call_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def boom(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        raise ValueError("boom")

    rewards = verl.NaiveRewardManager(char_tokenizer(), 0, boom)(batch())
    assert rewards.abs().sum() == 0
    assert "2 of 2 responses failed: ValueError: boom" in caplog.text


def test_data_set_fields_reach_batch_functions() -> None:
    def of_state(data: DataProto) -> torch.Tensor:
        return torch.tensor([float(state) for state in data.batch["state"]])

    data = batch().union(DataProto(non_tensor_batch={"state": [3, 4]}))
    manager = verl.NaiveRewardManager(char_tokenizer(), 0, of_state)
    assert manager(data).sum(1).tolist() == [3.0, 4.0]


def test_a_row_with_a_wrong_type_raises_data_error() -> None:
    data = DataProto(
        {"responses": torch.tensor([[5], [6]])}, {"reward_model": [{"ground_truth": "1"}, "2"]}
    )
    with pytest.raises(DataError, match="row 1: reward_model must be a mapping, got str '2'"):
        samples_of(data)


def test_group_terms_apply_in_direct_calls(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def spread(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(len(solution_strs)) for _ in solution_strs]\n"
    )
    term = {"path": str(path), "name": "spread", "weight": 1, "group": True}
    config = {"reward_model": {"terms": {"spread": term}}}
    manager = verl.load_reward_manager(config, char_tokenizer())
    data = batch()
    assert manager(data).sum(1).tolist() == [1.0, 2.0]
    data.non_tensor_batch["uid"][:] = "u"
    tensor, extra = verl.compute_reward(data, manager)
    assert tensor.sum(1).tolist() == [2.0, 3.0]
    assert extra["spread"] == [2.0, 2.0]
