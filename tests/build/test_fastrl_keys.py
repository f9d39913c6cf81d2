"""Every key of FastRL's `speculative.*` changes the parts of a run, or is refused with a reason.

The keys are those of mit-han-lab/fastrl at bce3df7. They include keys that its code reads without
listing them in its settings, and constants in its code that are settings here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from slipstream.build import speculation
from slipstream.build.cotraining import check_cotraining, make_cotraining
from slipstream.build.speculation import (
    Speculation,
    check_speculation,
    draft_plans,
    head_aux_layers,
    make_selector,
    make_speculation,
)
from slipstream.config import Config, Hardware, load_config
from slipstream.deadlines import Deadlines
from slipstream.drafter.cotraining import CoTrainSettings
from slipstream.drafter.interval import IntervalTraining
from slipstream.drafter.opportunistic import OpportunisticTraining
from slipstream.errors import ConfigError
from slipstream.inference.speculation.bandits import (
    BanditSelector,
    EpsilonGreedy,
    UpperConfidenceBound,
)
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.selector import (
    UNTIL_HEAD,
    CostModelSelector,
    PredefinedSelector,
    StrategySelector,
)
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models.draft.files import save_draft_head
from slipstream.training.compute_thread import ComputeThread
from tests.drafter.helpers import new_head
from tests.inference.helpers import shared_decoder

KEYS = """
enable spec_strategy bs_threshold
eagle.spec_model_path eagle.spec_steps eagle.spec_topk eagle.spec_verify_tokens
eagle.tune_algorithm eagle.mab_configs eagle.mab_bs_threshold
train.enable_drafter_training train.training_interval_steps train.batch_size_per_gpu
train.max_seq_len train.max_epochs train.checkpoint_path train.min_workers_for_training
train.collect_hidden_states_from_sgl
train.optim.lr train.optim.lr_warmup_steps train.optim.min_lr_ratio train.optim.warmup_style
"""
"""The keys that FastRL's settings list."""

UNLISTED = """
train.buffer_max_samples train.data_buffer_max_size train.enable_step_barrier
train.optim.weight_decay train.optim.total_training_steps
train.vloss_weight train.ploss_weight train.data_augment_std
"""
"""Keys that FastRL's code reads or passes on, but its settings do not list."""

OF_ITS_CODE = {
    "a window of 512 tokens": "train.max_seq_len",
    "4 sequences a step": "train.batch_size_per_gpu",
    "200 steps a training": "train.updates_per_training",
    "rows of the last 2 RL steps": "train.lookback_steps",
    "betas of AdamW": "train.optim.betas",
    "gradients clipped at 1": "train.grad_clip",
    "an epsilon of 0.1": "eagle.mab_epsilon",
    "a window of 300 steps": "eagle.mab_window_size",
    "10 checks before a switch": "eagle.hysteresis",
}
"""Constants in FastRL's code, and the setting of each here."""

OURS = {"eagle.exploration"}
"""The setting of `COST` that takes the place of an epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run that the settings give."""

    speculation: Speculation | None
    selector: StrategySelector
    training: IntervalTraining | OpportunisticTraining | None

    @property
    def interval(self) -> IntervalTraining:
        assert isinstance(self.training, IntervalTraining)
        return self.training

    @property
    def learns(self) -> CoTrainSettings:
        return self.interval.training.settings


def load(overrides: str) -> Config:
    given = ["speculative.enable=true", "speculative.train.enable_drafter_training=true"]
    return load_config(
        [*given, *(f"speculative.{one}" for one in overrides.split())],
        recipe="tiny",
        hardware=Hardware(gpus=0),
        notify=lambda _: None,
    )


def parts(overrides: str) -> Parts:
    config, decoder = load(overrides), shared_decoder()
    return Parts(
        speculation=make_speculation(
            config,
            decoder,
            dtype=torch.float32,
            device=torch.device("cpu"),
            kv_budget_bytes=1 << 20,
            free_cache=False,
            notify=lambda _: None,
        ),
        selector=make_selector(config),
        training=make_cotraining(
            config,
            decoder,
            [],
            ComputeThread(),
            total_steps=40,
            notify=lambda _: None,
            deadlines=Deadlines(),
        ),
    )


def _proposer(made: Parts) -> type:
    assert made.speculation is not None
    return type(made.speculation.proposer)


def _first_weight(made: Parts) -> float:
    return float(made.interval.training.used.fc.weight.detach()[0, 0])


def _cost_model(made: Parts) -> CostModelSelector:
    assert isinstance(made.selector, CostModelSelector)
    return made.selector


PREDEFINED = "eagle.tune_algorithm=PREDEFINED"
CHAINS = "eagle.mab_configs=['3_1_4','1_1_2']"
LINEAR = "train.optim.lr_scheduler_type=linear"

Seen = Callable[[Parts], object]
EFFECTS: dict[str, tuple[str, Seen, object, object]] = {
    # Key: the override, the observed value, and its results without and with the override.
    "enable": (
        "enable=false train.enable_drafter_training=false",
        lambda m: m.speculation is None,
        False,
        True,
    ),
    "spec_strategy": ("spec_strategy=union", _proposer, EagleProposer, UnionProposer),
    "bs_threshold": (
        "bs_threshold=4",
        lambda m: _cost_model(m)._threshold,
        None,
        4,
    ),
    "eagle.spec_model_path": ("eagle.spec_model_path={head}", _first_weight, None, 0.5),
    "eagle.spec_steps": (
        "eagle.spec_steps=4",
        lambda m: [plan.steps for plan in _cost_model(m).plans],
        [0, 1, 2, 3, 4, 5, 7],
        [0, 1, 2, 3, 4],
    ),
    "eagle.tune_algorithm": (
        PREDEFINED,
        lambda m: type(m.selector),
        CostModelSelector,
        PredefinedSelector,
    ),
    "eagle.mab_epsilon": (
        f"eagle.tune_algorithm=EG {CHAINS} eagle.mab_epsilon=0.3",
        lambda m: getattr(m.selector, "_rule", None),
        None,
        EpsilonGreedy(0.3),
    ),
    "eagle.mab_window_size": (
        f"eagle.tune_algorithm=UCB1 {CHAINS} eagle.mab_window_size=7",
        lambda m: getattr(m.selector, "_window", None),
        None,
        7,
    ),
    "eagle.exploration": (
        "eagle.exploration=0.1",
        lambda m: _cost_model(m)._exploration,
        0.005,
        0.1,
    ),
    "eagle.hysteresis": ("eagle.hysteresis=0.1", lambda m: _cost_model(m)._hysteresis, 0.02, 0.1),
    "train.enable_drafter_training": (
        "train.enable_drafter_training=false spec_strategy=history",
        lambda m: m.training is None,
        False,
        True,
    ),
    "train.training_interval_steps": (
        "train.training_interval_steps=3",
        lambda m: m.interval._interval,
        10,
        3,
    ),
    "train.batch_size_per_gpu": (
        "train.batch_size_per_gpu=5",
        lambda m: m.learns.batch_size,
        32,
        5,
    ),
    "train.max_seq_len": (
        "train.max_seq_len=512",
        lambda m: m.interval.training.collector.settings.max_length,
        8192,
        512,
    ),
    "train.max_epochs": (
        "train.max_epochs=3",
        lambda m: m.interval.training.collector.buffer.settings.max_uses,
        10,
        3,
    ),
    "train.updates_per_training": (
        "train.updates_per_training=200",
        lambda m: m.learns.updates,
        8,
        200,
    ),
    "train.lookback_steps": (
        "train.lookback_steps=5",
        lambda m: m.interval.training.collector.buffer.settings.lookback_steps,
        2,
        5,
    ),
    "train.grad_clip": ("train.grad_clip=0.5", lambda m: m.learns.train.grad_clip, 1.0, 0.5),
    "train.vloss_weight": (
        "train.vloss_weight=0.5",
        lambda m: m.learns.train.value_weight,
        1.0,
        0.5,
    ),
    "train.ploss_weight": (
        "train.ploss_weight=0.1",
        lambda m: m.learns.train.soft_weight,
        0.5,
        0.1,
    ),
    "train.collect_hidden_states_from_sgl": (
        "train.collect_hidden_states_from_sgl=true",
        lambda m: m.interval.decoded is not None,
        False,
        True,
    ),
    "train.optim.lr": ("train.optim.lr=1e-6", lambda m: m.learns.train.optim.lr, 1e-4, 1e-6),
    "train.optim.lr_warmup_steps": (
        "train.optim.lr_warmup_steps=1000",
        lambda m: m.learns.train.optim.warmup_steps,
        20,
        1000,
    ),
    "train.optim.min_lr_ratio": (
        f"train.optim.min_lr_ratio=0.1 {LINEAR}",
        lambda m: m.learns.train.optim.min_lr_ratio,
        0.0,
        0.1,
    ),
    "train.optim.warmup_style": (
        "train.optim.warmup_style=cosine",
        lambda m: m.learns.train.optim.schedule,
        "constant",
        "cosine",
    ),
    "train.optim.weight_decay": (
        "train.optim.weight_decay=0.01",
        lambda m: m.learns.train.optim.weight_decay,
        0.0,
        0.01,
    ),
    "train.optim.betas": (
        "train.optim.betas=[0.8,0.9]",
        lambda m: m.learns.train.optim.betas,
        (0.9, 0.95),
        (0.8, 0.9),
    ),
}

REFUSED: dict[str, tuple[str, str, str]] = {
    # Key: the override, the reason for the refusal, and a remedy that works.
    "eagle.spec_topk": (
        "eagle.spec_topk=4",
        "speculative.eagle.spec_verify_tokens is not set",
        "eagle.spec_verify_tokens=16",
    ),
    "eagle.spec_verify_tokens": (
        "eagle.spec_verify_tokens=48",
        "spec_verify_tokens=48",
        "eagle.spec_verify_tokens=null",
    ),
    "eagle.mab_configs": (
        "eagle.mab_configs=['8_4_32']",
        "has no effect",
        "eagle.tune_algorithm=BEG",
    ),
    "eagle.mab_bs_threshold": (
        "eagle.mab_bs_threshold=[1,8]",
        "has no effect",
        "eagle.tune_algorithm=BEG",
    ),
    "train.checkpoint_path": (
        "train.checkpoint_path=drafts",
        "checkpoint_path=drafts is not supported",
        "train.checkpoint_path=null",
    ),
    "train.min_workers_for_training": (
        "train.min_workers_for_training=2",
        "one worker",
        "train.min_workers_for_training=1",
    ),
    "train.buffer_max_samples": (
        "train.buffer_max_samples=2000",
        "limited by bytes and age",
        "train.buffer_bytes",
    ),
    "train.data_buffer_max_size": (
        "train.data_buffer_max_size=10000",
        "limited by bytes and age",
        "train.buffer_bytes",
    ),
    "train.enable_step_barrier": (
        "train.enable_step_barrier=true",
        "enable_step_barrier=true",
        "set it to false",
    ),
    "train.optim.total_training_steps": (
        "train.optim.total_training_steps=800000",
        "trainer.total_training_steps",
        "set it to 0",
    ),
    "train.data_augment_std": (
        "train.data_augment_std=0.2",
        "data_augment_std=0.2",
        "train.feature_noise",
    ),
}


def test_every_key_is_either_effective_or_refused() -> None:
    asked = {*KEYS.split(), *UNLISTED.split(), *OF_ITS_CODE.values(), *OURS}
    assert asked == EFFECTS.keys() | REFUSED.keys()
    assert not EFFECTS.keys() & REFUSED.keys()


@pytest.mark.parametrize("key", EFFECTS)
def test_key_changes_the_parts_of_a_run(key: str, tmp_path: Path) -> None:
    overrides, seen, before, after = EFFECTS[key]
    assert any(one.startswith(f"{key}=") for one in overrides.split())
    if "{head}" in overrides:
        head = new_head(shared_decoder())
        torch.nn.init.constant_(head.fc.weight, 0.5)
        save_draft_head(head, tmp_path)
        overrides = overrides.format(head=tmp_path)
        before = seen(parts(""))
    assert seen(parts("")) == before != after
    assert seen(parts(overrides)) == after


def test_batches_above_bs_threshold_are_decoded_without_drafts() -> None:
    free, bounded = (parts(f"{PREDEFINED} {more}") for more in ("", "bs_threshold=4"))
    assert [bounded.selector.select(n) == OFF for n in (4, 5)] == [False, True]
    assert [free.selector.select(n) == OFF for n in (4, 5)] == [False, False]


def test_history_drafts_need_no_head() -> None:
    made = parts("spec_strategy=history train.enable_drafter_training=false")
    assert _proposer(made) is HistoryProposer


@pytest.mark.parametrize(
    ("overrides", "waits"),
    [
        ("", True),
        ("spec_strategy=union", False),
        ("eagle.tune_algorithm=PREDEFINED", False),
        ("eagle.spec_model_path={head}", False),
    ],
)
def test_only_a_new_head_alone_waits_for_its_first_training(
    overrides: str, waits: bool, tmp_path: Path
) -> None:
    save_draft_head(new_head(shared_decoder()), tmp_path / "head")
    made = parts(overrides.format(head=tmp_path / "head"))
    assert made.speculation is not None
    assert (made.speculation.selector.begin_rollout(8) == UNTIL_HEAD) == waits


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_key_is_refused_with_reason_and_remedy(key: str) -> None:
    override, reason, remedy = REFUSED[key]
    assert override.startswith(f"{key}=")
    with pytest.raises(ConfigError) as caught:
        load(override)
    message = str(caught.value)
    assert f"speculative.{key}" in message
    assert reason in message
    assert remedy in message
    assert "settings cannot be used" not in message
    if "=" in remedy:
        switched = " train.enable_drafter_training=false" if remedy == "enable=false" else ""
        load(f"{override} {remedy}{switched}")
    else:
        # The neutral value of the key is accepted.
        load(f"{key}={remedy.removeprefix('set it to ') if 'set it' in remedy else 'null'}")


@pytest.mark.parametrize(
    ("name", "rule"),
    [("EG", EpsilonGreedy), ("UCB1", UpperConfidenceBound), ("BEG", EpsilonGreedy)],
)
def test_bandit_chooses_from_the_configured_plans(name: str, rule: type) -> None:
    more = " eagle.mab_bs_threshold=[1,4,16]" if name == "BEG" else ""
    algorithm = f"eagle.tune_algorithm={name}"
    made = make_selector(load(f"{algorithm} {CHAINS}{more}"))
    assert isinstance(made, BanditSelector)
    three, one, seven = (DraftPlan.chain(drafts) for drafts in (3, 1, 7))
    grouped = {1: (seven,), 4: (three,), 16: (one,)}
    assert made.buckets == (grouped if name == "BEG" else {1: (three, one, seven)})
    assert type(made._rule) is rule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "eagle.tune_algorithm=EG eagle.mab_configs=['3_9_16']",
            "mab_configs: 3_9_16: a tree follows at most 8 tokens of a level",
        ),
        (
            "spec_strategy=history train.enable_drafter_training=false eagle.tune_algorithm=EG",
            "mab_configs: 8_4_32, 8_4_16, 8_4_8: .* speculative.spec_strategy=union",
        ),
        (
            "eagle.tune_algorithm=EG eagle.mab_configs=['3-1-4']",
            "mab_configs: draft plan '3-1-4': expected steps_topk_verify, for example 3_1_4",
        ),
        (
            "eagle.tune_algorithm=EG eagle.mab_configs=['3_1_9']",
            "mab_configs: draft plan 3_1_9: a chain of 3 drafts needs verify_tokens=4",
        ),
        (
            f"eagle.tune_algorithm=BEG {CHAINS}",
            "mab_bs_threshold: 4 thresholds .1, 2, 5, 21. do not match",
        ),
    ],
)
def test_plans_that_a_bandit_cannot_use_are_refused(given: str, message: str) -> None:
    config = load(given)
    for use in (draft_plans, make_selector):
        with pytest.raises(ConfigError, match=f"speculative.eagle.{message}"):
            use(config)


@pytest.mark.parametrize(
    ("given", "refused", "allowed"),
    [
        ("eagle.spec_steps=15", 16, 17),
        ("eagle.spec_steps=8 eagle.spec_topk=2 eagle.spec_verify_tokens=12", 9, 10),
        ("eagle.tune_algorithm=UCB1 eagle.mab_configs=['12_2_8'] eagle.spec_steps=2", 13, 14),
    ],
)
def test_plans_deeper_than_the_context_are_refused(given: str, refused: int, allowed: int) -> None:
    """At least one prompt token and one sampled token come before the first draft."""
    config, policy = load(f"{given} eagle.spec_model_path=null"), shared_decoder().config
    key = "mab_configs: 12_2_8" if "mab" in given else f"{given.split()[0].split('.')[1]}"
    with pytest.raises(ConfigError, match=f"{key}: a context of {refused} tokens .*never has room"):
        check_speculation(config, policy, refused)
    check_speculation(config, policy, allowed)


@pytest.mark.parametrize(
    ("broken", "reason", "remedies"),
    [
        (
            "train.optim.min_lr_ratio=0.1",
            "min_lr_ratio=0.1 has no effect",
            ["train.optim.lr_scheduler_type=cosine", "train.optim.min_lr_ratio=null"],
        ),
        (
            "train.optim.optimizer=AdamW train.optim.muon_lr=0.1",
            "muon_lr=0.1 has no effect with speculative.train.optim.optimizer=AdamW",
            ["train.optim.optimizer=Muon", "train.optim.muon_lr=null"],
        ),
        (
            "train.depth_decay=0.8",
            "depth_decay=0.8 has no effect with speculative.train.depth=1",
            ["train.depth=2", "train.depth_decay=null"],
        ),
        (
            f"{PREDEFINED} eagle.exploration=0.1",
            "exploration=0.1 has no effect with speculative.eagle.tune_algorithm=PREDEFINED",
            ["eagle.tune_algorithm=COST", "eagle.exploration=0.005"],
        ),
        (
            "draft.optim.betas=[0.9,1]",
            "must be below 1",
            ["draft.optim.betas=[0.9,0.95]"],
        ),
    ],
)
def test_setting_made_ineffective_by_another_is_refused(
    broken: str, reason: str, remedies: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(broken)
    assert reason in str(caught.value)
    assert "settings cannot be used" not in str(caught.value)
    for remedy in remedies:
        assert f"speculative.{remedy}" in str(caught.value)
        load(f"{broken} {remedy}")


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_checks_create_neither_selectors_nor_heads(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks depend only on the settings."""

    def made(*_: object, **__: object) -> None:
        raise AssertionError("a check has made something")

    for name in ("make_selector", "CostModelSelector", "DraftHead", "Eagle3Head"):
        monkeypatch.setattr(speculation, name, made)
    policy = replace(shared_decoder().config, num_layers=8)
    config = load(f"eagle.spec_model_path=null eagle.spec_algorithm={algorithm}")
    check_speculation(config, policy, 64)
    check_cotraining(config, policy, 4)
    assert head_aux_layers(config, policy) == ((2, 4, 5) if algorithm == "EAGLE3" else ())
    wrong = load(
        "eagle.spec_model_path=null eagle.spec_algorithm=EAGLE3 "
        "eagle.aux_hidden_state_layer_ids=[1,2,8]"
    )
    with pytest.raises(ConfigError, match="aux_hidden_state_layer_ids"):
        check_speculation(wrong, policy, 64)


def test_selectors_choose_from_trees_and_chains() -> None:
    tree = "eagle.spec_steps=6 eagle.spec_topk=3 eagle.spec_verify_tokens=16"
    fixed = make_selector(load(f"eagle.tune_algorithm=PREDEFINED {tree}"))
    assert fixed.select(4) == DraftPlan(6, 3, 16)
    by_cost = make_selector(load(tree))
    assert isinstance(by_cost, CostModelSelector)
    assert {str(plan) for plan in by_cost.plans} == {
        *("0_0_1", "1_1_2", "2_1_3", "3_1_4", "4_1_5", "5_1_6", "6_1_7"),
        *("3_2_8", "3_3_8", "3_3_12", "6_2_8", "6_2_12", "6_3_8", "6_3_12", "6_3_16"),
    }
    bandit = make_selector(load("eagle.tune_algorithm=EG"))
    assert isinstance(bandit, BanditSelector)
    assert [str(plan) for plan in bandit.buckets[1]] == ["8_4_32", "8_4_16", "8_4_8", "7_1_8"]
