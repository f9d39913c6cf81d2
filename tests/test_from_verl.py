"""A launch line with every override of VERL's usual configuration block, for a tiny model."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from slipstream import main_ppo
from slipstream.compat import verl
from slipstream.config.aliases import RENAMED
from slipstream.config.tree import options
from slipstream.config.verl_sft import RENAMED_SFT
from slipstream.data.tokenizer import build_tokenizer, save_tokenizer
from tests.run.helpers import metrics_of, records_of

ROOT = Path(__file__).parent.parent

# Every key is in VERL's block; sizes are those of a tiny model.
INFERENCE = (
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.rollout.temperature=1.0",
    "actor_rollout_ref.rollout.top_p=0.9",
    "actor_rollout_ref.rollout.max_response_length=12",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.interactions=null",
    "actor_rollout_ref.rollout.tools=null",
)
TRAINING = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.optim.beta1=0.9",
    "actor_rollout_ref.actor.optim.beta2=0.999",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
)
DATA = (
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=12",
    "data.truncation=error",
    "data.shuffle=true",
    "data.seed=42",
    "data.reward_fn_key=reward",
    "data.chat_template=null",
    "data.custom_cls.path=null",
    "data.custom_cls.name=null",
    "data.datagen.path=null",
    "data.datagen.name=null",
    "data.sampler.class_path=null",
    "data.sampler.class_name=null",
)
ALGORITHM = (
    "algorithm.adv_estimator=grpo",
    "algorithm.policy_loss_fn=ppo",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_ctl.type=fixed",
    "algorithm.kl_ctl.init_kl_coef=0.001",
    "reward_model.enable=False",
    "reward_model.reward_manager=naive",
    "reward_model.reward_format=null",
    "reward_model.sandbox_fusion.url=null",
    "reward_model.sandbox_fusion.max_concurrent=64",
)
REFUSED = {
    "actor_rollout_ref.rollout.tools=[search]": "multi_turn.tool_config_path instead",
    "actor_rollout_ref.rollout.interactions=[chat]": "multi_turn.interaction_config_path instead",
}
"""Overrides that this version does not support, and the remedy in the message."""

REWARD = """
import torch
from slipstream.compat.verl import DataProto

def compute_reward(data: DataProto, **kwargs) -> torch.Tensor:
    batch_size = len(data.batch)
    rewards = torch.zeros(batch_size)
    for i in range(batch_size):
        response = data.responses[i]
        ground_truth = data.ground_truth_answers[i]
        if is_correct(response, ground_truth):
            rewards[i] = 1.0
        else:
            rewards[i] = 0.0
    return rewards

def is_correct(response, ground_truth):
    return len(response.split()) % 2 == int(ground_truth) % 2
"""


def line(folder: Path) -> list[str]:
    """Write files and a reward function to `folder`, and return the launch line with them."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} + 1 ="}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        }
        for i in range(8)
    ]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_reward.py").write_text(REWARD)
    save_tokenizer(build_tokenizer(), folder / "tokenizer")
    return [
        *INFERENCE,
        *TRAINING,
        *DATA,
        *ALGORITHM,
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'test.jsonl'}",
        f"reward_model.custom_reward_function.path={folder / 'my_reward.py'}",
        "reward_model.custom_reward_function.name=compute_reward",
        "reward_model.custom_reward_function.reward_kwargs={}",
        f"data.tokenizer={folder / 'tokenizer'}",
        "actor_rollout_ref.model.init.hidden_size=32",
        "actor_rollout_ref.model.init.num_layers=2",
        "actor_rollout_ref.model.init.num_heads=2",
        "actor_rollout_ref.model.init.num_kv_heads=1",
        "actor_rollout_ref.model.init.intermediate_size=64",
        "actor_rollout_ref.model.init.max_position_embeddings=64",
        "trainer.device=cpu",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def test_launch_line_with_the_whole_verl_block_trains(tmp_path: Path) -> None:
    assert main_ppo.main(line(tmp_path)) == 0
    assert sorted(metrics_of(tmp_path / "run")) == [0, 1, 2]
    rows = [row for rows in records_of(tmp_path / "run" / "rollouts").values() for row in rows]
    assert len(rows) == 2 * 4 * 5
    for row in rows:
        right = len(row["text"].split()) % 2 == int(row["gts"]) % 2
        assert row["score"] == float(right)
    assert {row["score"] for row in rows} == {0.0, 1.0}


@pytest.mark.parametrize("asked", REFUSED)
def test_unsupported_verl_settings_are_refused_with_a_remedy(
    tmp_path: Path, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo.main([*line(tmp_path), asked]) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if "error: " in text]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {asked}: ")
    assert REFUSED[asked] in errors[0]
    assert not (tmp_path / "run").exists()


def test_guide_lists_every_key_of_the_block() -> None:
    guide = (ROOT / "docs" / "from_verl.md").read_text(encoding="utf-8")
    keys = [text.partition("=")[0] for text in (*INFERENCE, *TRAINING, *DATA, *ALGORITHM, *REFUSED)]
    assert [key for key in keys if f"`{key}`" not in guide] == []


def test_names_and_keys_in_the_guide_exist() -> None:
    guide = (ROOT / "docs" / "from_verl.md").read_text(encoding="utf-8")
    keys, names = guide.split("## Names")
    named = re.findall(r"`slipstream\.([\w.]+)`", names)
    assert len(named) > 35
    for name in named:
        module, _, attribute = f"slipstream.{name}".rpartition(".")
        if not hasattr(importlib.import_module(module), attribute):
            importlib.import_module(f"slipstream.{name}")
    assert {name.rpartition(".")[2] for name in named} >= set(verl.__all__) - {
        "DataProtoItem",
        "advantage_estimation",
        "compute_advantages",
        "kl_penalty",
    }
    pairs = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|", keys, re.MULTILINE)
    assert len(pairs) > 30
    for old, new in pairs:
        assert new in options(), new
        if old in RENAMED_SFT and new.startswith("sft."):
            assert RENAMED_SFT[old] == new
        else:
            renamed = RENAMED.get(old, old).removesuffix(".0").removesuffix(".1")
            assert renamed == new or old in options() or old == "trainer.total_epochs", old
