"""Our loss, gradients and optimizer steps against recorded answers of TRL (`trl_record`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import trl_parity
from bench.trl_parity import (
    CASES,
    TOLERANCE,
    Case,
    ParityOutcome,
    differences,
    make_batch,
    old_log_probs,
    our_updates,
    ours,
    update_differences,
)
from slipstream.data.countdown import CountdownTask
from tests.bench.trl_record import (
    FOLDER,
    TOOL_CASES,
    UPDATE_SETTINGS,
    answered,
    recorded,
    recorded_tools,
    updated,
)


def outcome(case: Case, *, told: Case | None = None) -> ParityOutcome:
    """Our outcome of `case`, computed with the settings of `told` if given."""
    batch, old, _ = recorded()
    return ours(FOLDER, batch, told or case, old if case.off_policy else None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_equal_trls(case: Case) -> None:
    trl = answered(case)
    assert len(trl.gradients) == 13
    assert max(float(gradient.abs().max()) for gradient in trl.gradients.values()) > 1e-2
    assert differences(outcome(case), trl).largest < TOLERANCE


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (CASES[0], replace(CASES[0], loss_type="grpo")),
        (CASES[1], replace(CASES[1], loss_type="dapo")),
        (CASES[2], replace(CASES[2], scale_rewards="group")),
        (CASES[3], replace(CASES[3], epsilon_high=None)),
        (CASES[3], replace(CASES[3], epsilon=0.19)),
        (CASES[3], replace(CASES[3], delta=1.5)),
    ],
    ids=lambda case: case.loss_type,
)
def test_a_different_setting_is_detected(case: Case, told: Case) -> None:
    assert differences(outcome(case, told=told), answered(case)).gradient > 100 * TOLERANCE


def test_a_different_epsilon_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_parity, "TRL_EPS", 1e-6)
    apart = differences(outcome(CASES[0]), answered(CASES[0]))
    assert apart.advantages == pytest.approx(1e-4 / 0.5774, rel=0.02)


@pytest.mark.parametrize("case", TOOL_CASES, ids=lambda case: case.name)
def test_loss_and_gradients_with_a_tool_equal_trls(case: Case) -> None:
    batch, answers = recorded_tools()
    assert batch.masks is not None
    assert all(0 in mask for mask in batch.masks)
    assert differences(ours(FOLDER, batch, case, None), answers[case.name]).largest < TOLERANCE
    # The loss of the tool's tokens is detected.
    unmasked = ours(FOLDER, replace(batch, masks=None), case, None)
    assert differences(unmasked, answers[case.name]).gradient > 100 * TOLERANCE


def test_optimizer_steps_equal_trls() -> None:
    batches, trl = updated()
    # Some of the gradients are clipped, and some are not.
    assert min(trl.grad_norms) < UPDATE_SETTINGS["grad_clip"] < max(trl.grad_norms)
    apart = update_differences(FOLDER, our_updates(FOLDER, batches, UPDATE_SETTINGS), trl)
    assert apart.grad_norm < 1e-4
    assert apart.update < 1e-4


@pytest.mark.parametrize(
    "other",
    [
        {"grad_clip": 6.0},
        {"warmup_steps": 0},
        {"betas": [0.9, 0.999]},
        {"weight_decay": 0.0},
        {"lr": 0.0101},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_different_setting_of_the_optimizer_is_detected(other: dict[str, Any]) -> None:
    batches, trl = updated()
    mine = our_updates(FOLDER, batches, {**UPDATE_SETTINGS, **other})
    assert update_differences(FOLDER, mine, trl).update > 1e-3


def test_off_policy_log_probs_are_the_models_plus_the_shifts() -> None:
    batch, old, _ = recorded()
    shifted = replace(batch, shifts=[[0.0] * len(row) for row in batch.shifts])
    own = old_log_probs(FOLDER, shifted)
    for one, other, shifts in zip(old, own, batch.shifts, strict=True):
        apart = [a - b for a, b in zip(one, other, strict=True)]
        assert apart == pytest.approx(shifts, abs=1e-5)


def test_every_group_of_a_batch_has_correct_and_incorrect_answers() -> None:
    task = CountdownTask(3)
    batch = make_batch(task, task.tokenizer, groups=3, group_size=4)
    groups = [batch.rewards[i : i + 4] for i in range(0, 12, 4)]
    assert all(set(rewards) == {0.0, 1.0} for rewards in groups)
    assert len({tuple(ids) for ids in batch.prompt_ids}) == 3
    prompts = {tuple(task.prompt("train", index).ids) for index in range(100)}
    assert {tuple(ids) for ids in batch.prompt_ids} <= prompts
    assert all(ids[-1] == task.tokenizer.eos_token_id for ids in batch.completion_ids)
    for prompt, ids, reward in zip(
        batch.prompt_ids, batch.completion_ids, batch.rewards, strict=True
    ):
        text = task.tokenizer.decode(ids, skip_special_tokens=True)
        index = next(i for i in range(100) if task.prompt("train", i).ids == prompt)
        assert task.verify(task.problem("train", index), text).correct == (reward == 1.0)


def test_outcomes_with_other_weight_names_are_refused() -> None:
    one = ParityOutcome(loss=0.0, advantages=[1.0], gradients={"a": torch.ones(1)})
    other = replace(one, gradients={"b": torch.ones(1)})
    with pytest.raises(ValueError, match="only one side has a, b"):
        differences(one, other)
