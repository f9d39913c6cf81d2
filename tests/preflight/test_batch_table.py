"""Tests of the predicted sizes of batches and micro-batches, and of the table that shows them."""

from __future__ import annotations

from slipstream.config.load import load_config
from slipstream.preflight.batch_table import Batches, RlBatches, SftBatches, batches_of, table_rows

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def table(*overrides: str, held_out: int = 0) -> Batches:
    config = load_config(
        [
            "data.task=countdown",
            "data.max_prompt_length=20",
            "data.max_response_length=80",
            "data.train_batch_size=6",
            f"{ROLLOUT}.n=4",
            *overrides,
        ],
        recipe="tiny",
        notify=lambda _: None,
    )
    return batches_of(config, "sft+rl", rl_steps=7, held_out=held_out)


def rl(*overrides: str) -> RlBatches:
    found = table(*overrides).rl
    assert found is not None
    return found


def test_sizes_of_an_rl_step_with_one_update() -> None:
    assert rl(f"{ACTOR}.ppo_max_token_len_per_gpu=1000") == RlBatches(
        steps=7,
        prompts=6,
        started=6,
        per_prompt=4,
        samples=24,
        tokens=2400,
        updates=1,
        mini_prompts=6,
        mini_samples=24,
        micro_batch_tokens=1000,
        micro_batches=3,
        critic_micro_batch_tokens=1000,
        critic_accumulates=True,
        in_flight=24,
        processes=1,
    )


def test_processes_divide_samples_and_requests() -> None:
    found = rl(f"{ACTOR}.ppo_max_token_len_per_gpu=1000", "trainer.nnodes=3")
    assert (found.samples, found.mini_samples, found.processes) == (24, 24, 3)
    assert (found.micro_batches, found.micro_batch_tokens, found.in_flight) == (1, 800, 8)
    lines = dict(table_rows(table(f"{ACTOR}.ppo_max_token_len_per_gpu=1000", "trainer.nnodes=3")))
    assert lines["processes"] == "3; they share samples and weights"
    assert lines["concurrent responses"] == "at most 8 per process"


def test_updates_with_mini_batches_epochs_and_fixed_micro_batches() -> None:
    found = rl(
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
    )
    assert (found.updates, found.mini_prompts, found.mini_samples) == (6, 2, 8)
    assert (found.micro_batches, found.micro_batch_tokens) == (3, 300)


def test_micro_batch_tokens_are_the_budget_unless_the_mini_batch_is_smaller() -> None:
    # Long sequences do not fill 1,050 tokens exactly, but shorter ones can.
    found = rl(f"{ACTOR}.ppo_max_token_len_per_gpu=1050")
    assert (found.micro_batch_tokens, found.micro_batches) == (1050, 3)
    assert rl(f"{ACTOR}.ppo_max_token_len_per_gpu=5000").micro_batch_tokens == 2400


def test_critic_micro_batches_follow_the_settings_of_the_critic() -> None:
    gae = "algorithm.adv_estimator=gae"
    assert rl(gae, "critic.ppo_max_token_len_per_gpu=700").critic_micro_batch_tokens == 700
    fixed = ("critic.use_dynamic_bsz=false", "critic.ppo_micro_batch_size_per_gpu=5")
    assert rl(gae, *fixed).critic_micro_batch_tokens == 500


def test_requests_in_flight_with_over_sampling_greedy_baselines_and_max_num_seqs() -> None:
    assert rl(f"{ROLLOUT}.over_sample_rate=0.5").in_flight == 36
    assert rl("data.train_batch_size=100", f"{ROLLOUT}.over_sample_rate=0.1").started == 110
    assert rl("algorithm.adv_estimator=remax").in_flight == 30
    assert rl(f"{ROLLOUT}.max_num_seqs=10").in_flight == 10


def test_an_sft_step_can_exceed_batch_tokens_by_one_text() -> None:
    budget = "sft.max_tokens_per_micro_batch=4096"
    found = table(budget, "sft.batch_tokens=512", "sft.max_length=64").sft
    assert found == SftBatches(
        steps=2,
        step_samples=None,
        step_tokens=512,
        micro_batch_tokens=512 + 63,
        accumulates=False,
    )
    found = table(budget, "sft.train_batch_size=3", "sft.max_length=64").sft
    assert found is not None
    assert (found.step_samples, found.micro_batch_tokens) == (3, 3 * 64)
    found = table("sft.max_tokens_per_micro_batch=256", "sft.max_length=64").sft
    assert found is not None
    assert found.micro_batch_tokens == 256
    assert found.accumulates


def test_concurrent_validation_requests() -> None:
    assert table(f"{ROLLOUT}.max_num_seqs=8", held_out=5).validation == 5
    assert table(f"{ROLLOUT}.max_num_seqs=8", held_out=50).validation == 8
    several = [
        f"{ROLLOUT}.val_kwargs.{text}" for text in ("n=2", "do_sample=true", "temperature=1")
    ]
    assert table("data.val_batch_size=3", *several, held_out=50).validation == 6
    # The source with the most responses per prompt counts.
    one = f"{ROLLOUT}.val_kwargs.by_source={{countdown: {{n: 8}}}}"
    found = table("data.val_batch_size=3", *several, one, held_out=50)
    assert (found.validation, found.val_per_prompt) == (24, 8)


def test_rows_of_the_printed_table() -> None:
    rows = dict(table_rows(table("data.train_batch_size=1000", f"{ROLLOUT}.over_sample_rate=0.1")))
    assert rows["RL step"] == "1,000 prompts (1,100 started) x 4 responses = 4,000 samples"
    assert rows["tokens per step"] == "at most 400,000"
    assert rows["validation"] == "none: there are no validation prompts"
