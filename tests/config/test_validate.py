"""Tests of rules between options: the error names each broken rule, and its remedy works."""

from __future__ import annotations

import pytest

from slipstream.config import Config, Hardware, load_config, resolve_mode
from slipstream.errors import ConfigError

CPU = Hardware(gpus=0)
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


def load(overrides: str, hardware: Hardware = CPU, recipe: str | None = "tiny") -> Config:
    return load_config(overrides.split(), recipe=recipe, hardware=hardware, notify=lambda _: None)


@pytest.mark.parametrize(
    ("broken", "message", "remedy"),
    [
        ("data.train_files=a.parquet", "but data.train_files is set", "data.train_files=null"),
        ("data.val_files=a.parquet", "but data.val_files is set", "data.val_files=null"),
        ("data.train_max_samples=5", "data.train_max_samples=5", "data.train_max_samples=-1"),
        ("data.val_max_samples=5", "data.val_max_samples=5", "data.val_max_samples=-1"),
        (
            "data.task=null sft.total_training_steps=0 data.task_kwargs={a:1}",
            "data.task_kwargs={a:1} has no effect",
            "data.task=countdown",
        ),
        (
            "data.mixture_weights=[1,2]",
            "data.mixture_weights has 2 numbers",
            "data.mixture_weights=null",
        ),
        (
            "sft.mixture_weights=[1,2] sft.train_files=a.jsonl",
            "sft.mixture_weights has 2 numbers",
            "sft.mixture_weights=null",
        ),
        (
            "reward_model.sandbox.total_timeout_s=28",
            "reward_model.timeout_s=30",
            "reward_model.sandbox.total_timeout_s=null",
        ),
        (
            "reward_model.sandbox.total_timeout_s=28",
            "reward_model.sandbox.run_timeout_s=5",
            "reward_model.timeout_s=35",
        ),
        (
            "reward_model.sandbox_fusion.url=http://x reward_model.sandbox.python=/usr/bin/python3",
            "reward_model.sandbox_fusion.url=http://x",
            "reward_model.sandbox.python=null",
        ),
        (
            "data.task=null",
            "sft.total_training_steps=2 needs demonstrations",
            "sft.total_training_steps=0",
        ),
        ("sft.batch_tokens=100", "sft.max_length=256", "sft.batch_tokens=256"),
        (
            "sft.max_tokens_per_micro_batch=100",
            "sft.max_length=256",
            "sft.max_length=100",
        ),
        (
            f"{MODEL}.lora_alpha=32",
            f"has no effect with {MODEL}.lora_rank=0",
            f"{MODEL}.lora_rank=8",
        ),
        (
            f"{MODEL}.exclude_modules=[q_proj]",
            "has no effect",
            f"{MODEL}.exclude_modules=[]",
        ),
        (
            f"{MODEL}.lora_rank=4 {MODEL}.target_modules=[]",
            "target_modules is empty",
            f"{MODEL}.target_modules=all-linear",
        ),
        (
            f"{MODEL}.lora_rank=4 {MODEL}.target_modules=[q_proj] {MODEL}.lora_adapter_path=a",
            "the adapter has its own",
            f"{MODEL}.lora_adapter_path=null",
        ),
        (
            f"algorithm.filter_groups.enable=true {ROLLOUT}.n=1 algorithm.adv_estimator=remax",
            f"has no effect with {ROLLOUT}.n=1",
            f"{ROLLOUT}.n=8",
        ),
        (
            f"{ACTOR}.policy_loss.loss_mode=dro",
            f"{ACTOR}.policy_loss.dro_beta is not set",
            f"{ACTOR}.policy_loss.dro_beta=0.1",
        ),
        (f"{ACTOR}.optim.muon_lr=0.1", "has no effect", f"{ACTOR}.optim.optimizer=Muon"),
        ("sft.optim.betas=[0.9,1]", "must be below 1", "sft.optim.betas=[0.9,0.999]"),
        (
            f"{ACTOR}.optim.lr_warmup_steps=1 {ACTOR}.optim.lr_warmup_steps_ratio=0.1",
            "both set the length of the warm-up",
            f"{ACTOR}.optim.lr_warmup_steps=-1",
        ),
        (
            "sft.optim.lr_scheduler_type=linear sft.optim.lr_warmup_steps=2",
            "2 steps, 2 of them for warm-up",
            "sft.optim.lr_scheduler_type=constant",
        ),
        (
            f"{ACTOR}.optim.lr_scheduler_type=cosine {ACTOR}.optim.lr_warmup_steps=8 "
            f"{ACTOR}.ppo_mini_batch_size=1 {ACTOR}.ppo_epochs=2",
            "2 steps, 8 of them for warm-up",
            f"{ACTOR}.optim.lr_scheduler_type=constant",
        ),
        (
            f"{ACTOR}.optim.num_cycles=2 {ACTOR}.optim.lr_scheduler_type=linear",
            "num_cycles=2 has no effect",
            f"{ACTOR}.optim.lr_scheduler_type=cosine",
        ),
        (
            "sft.optim.lr_wsd_stable_steps_ratio=0.5 sft.optim.lr_scheduler_type=cosine",
            "lr_wsd_stable_steps_ratio=0.5 has no effect",
            "sft.optim.lr_scheduler_type=wsd",
        ),
        (
            f"{ACTOR}.optim.min_lr_ratio=0.1",
            f"has no effect with {ACTOR}.optim.lr_scheduler_type=constant",
            f"{ACTOR}.optim.lr_scheduler_type=cosine",
        ),
        (
            f"{ROLLOUT}.max_model_len=47",
            f"{ROLLOUT}.max_model_len=47 is below data.max_prompt_length + "
            "data.max_response_length = 48",
            f"{ROLLOUT}.max_model_len=48",
        ),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=20",
            "is below",
            f"{ACTOR}.ppo_max_token_len_per_gpu=48",
        ),
        (
            f"{MODEL}.init.max_position_embeddings=200",
            "is below sft.max_length=256",
            f"{MODEL}.init.max_position_embeddings=256",
        ),
        (
            "data.max_response_length=300",
            "is below data.max_prompt_length",
            f"{MODEL}.init.max_position_embeddings=316",
        ),
        (
            f"{ACTOR}.ppo_mini_batch_size=3",
            "is above data.train_batch_size=2",
            f"{ACTOR}.ppo_mini_batch_size=2",
        ),
        (
            f"data.train_batch_size=12 {ACTOR}.ppo_mini_batch_size=8",
            "data.train_batch_size=12 is not a multiple",
            f"{ACTOR}.ppo_mini_batch_size=6",
        ),
        (
            f"{ACTOR}.use_dynamic_bsz=false",
            "needs a micro-batch size",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        ),
        (f"{ACTOR}.clip_ratio_c=1", "must be above 1", f"{ACTOR}.clip_ratio_c=3"),
        (f"{ACTOR}.clip_ratio=1.5", "is above 1", f"{ACTOR}.clip_ratio_low=0.2"),
        (
            f"{ROLLOUT}.n=4 algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive "
            "algorithm.kl_ctrl.horizon=1",
            "horizon=1 must be above a fifth of the 8 samples",
            "algorithm.kl_ctrl.horizon=80",
        ),
        (
            f"{ACTOR}.loss_scale_factor=9",
            "has no effect",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        ),
        (f"{MODEL}.path=m", "both name a model", f"{MODEL}.init=null"),
        (
            f"{MODEL}.implementation=transformers",
            "needs a checkpoint",
            f"{MODEL}.implementation=auto",
        ),
        (f"{MODEL}.init=null", "no model is set", f"{MODEL}.init.num_layers=12"),
        (
            f"{MODEL}.init.hidden_size=33",
            "is not a multiple",
            f"{MODEL}.init.hidden_size=64",
        ),
        (
            f"{MODEL}.init.num_kv_heads=3",
            "is not a multiple",
            f"{MODEL}.init.num_kv_heads=2",
        ),
        (
            f"{MODEL}.init.head_dim=5",
            "not a multiple of 16, which the embedded engine needs",
            f"{MODEL}.init.head_dim=16",
        ),
        (
            f"{ACTOR}.log_prob_chunk_tokens=1023",
            "not a multiple of 4",
            f"{ACTOR}.log_prob_chunk_tokens=1024",
        ),
        (
            "actor_rollout_ref.ref.path=m",
            "has no effect without a KL term",
            f"{ACTOR}.use_kl_loss=true",
        ),
        (f"{ROLLOUT}.temperature=0", "temperature above 0", f"{ROLLOUT}.temperature=1"),
        (
            f"{ROLLOUT}.val_kwargs.do_sample=true",
            "temperature above 0",
            f"{ROLLOUT}.val_kwargs.temperature=1",
        ),
        (
            f"{ROLLOUT}.val_kwargs.temperature=0.6",
            "has no effect",
            f"{ROLLOUT}.val_kwargs.do_sample=true",
        ),
        (f"{ROLLOUT}.val_kwargs.n=4", "generates equal responses", f"{ROLLOUT}.val_kwargs.n=1"),
        (f"{ROLLOUT}.top_p=0", "excludes all tokens", f"{ROLLOUT}.top_p=1"),
        (f"{ROLLOUT}.val_kwargs.top_p=0", "excludes all tokens", f"{ROLLOUT}.val_kwargs.top_p=1"),
        (
            f"{ROLLOUT}.partial_rollout=true",
            f"has no effect with {ROLLOUT}.over_sample_rate=0",
            f"{ROLLOUT}.over_sample_rate=0.5",
        ),
        (
            "algorithm.adv_estimator=gae critic.enable=false",
            "but critic.enable=false",
            "critic.enable=null",
        ),
        (
            "algorithm.adv_estimator=gdpo",
            "algorithm.gdpo_reward_keys is not set",
            "algorithm.gdpo_reward_keys=[acc,format]",
        ),
        (
            "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[acc,format] "
            "algorithm.gdpo_reward_weights=[1]",
            "algorithm.gdpo_reward_weights has 1 numbers",
            "algorithm.gdpo_reward_weights=null",
        ),
        (
            "algorithm.gdpo_reward_keys=[acc]",
            "has no effect",
            "algorithm.gdpo_reward_keys=null",
        ),
        (
            f"algorithm.adv_estimator=grpo-passk {ROLLOUT}.n=1",
            f"but {ROLLOUT}.n=1 generates only one",
            f"{ROLLOUT}.n=8",
        ),
        (
            "algorithm.adv_estimator=rloo algorithm.norm_adv_by_std_in_grpo=false",
            "has no effect",
            "algorithm.norm_adv_by_std_in_grpo=true",
        ),
        (
            f"algorithm.rollout_correction.support_replay=true {ROLLOUT}.top_p=0.9 "
            "trainer.sync_every=2",
            "but trainer.sync_every=2",
            "trainer.sync_every=1",
        ),
        (
            "algorithm.rollout_correction.support_replay=true",
            "has no effect",
            f"{ROLLOUT}.top_p=0.95",
        ),
        (
            "algorithm.rollout_correction.support_replay=true "
            f"{ROLLOUT}.top_p=0.9 algorithm.adv_estimator=optimal_token_baseline",
            "over the whole vocabulary",
            "algorithm.adv_estimator=grpo",
        ),
        ("algorithm.lam=0.9", "has no effect", "algorithm.lam=1"),
        ("algorithm.pf_ppo.weight_pow=3", "has no effect", "algorithm.use_pf_ppo=true"),
        (
            "algorithm.filter_groups.max_num_gen_batches=3",
            "has no effect",
            "algorithm.filter_groups.enable=true",
        ),
        (f"{ACTOR}.tau_neg=2", "has no effect", f"{ACTOR}.policy_loss.loss_mode=sapo"),
        (
            f"{ACTOR}.policy_loss.clip_cov_lb=2",
            "has no effect",
            f"{ACTOR}.policy_loss.loss_mode=clip_cov",
        ),
        (
            "algorithm.rollout_correction.preset=decoupled_token_is "
            "algorithm.rollout_correction.rollout_is=token",
            "conflicts with algorithm.rollout_correction.preset=decoupled_token_is",
            "algorithm.rollout_correction.preset=null",
        ),
        (
            f"algorithm.rollout_correction.bypass_mode=true {ACTOR}.policy_loss.loss_mode=gspo",
            "uses its own loss",
            f"{ACTOR}.policy_loss.loss_mode=vanilla",
        ),
        (
            f"{ACTOR}.policy_loss.loss_mode=bypass_mode",
            "bypass_mode=true",
            f"{ACTOR}.policy_loss.loss_mode=vanilla",
        ),
        (
            "algorithm.adv_estimator=on_policy_distillation",
            "needs a teacher",
            "actor_rollout_ref.ref.path=FOLDER",
        ),
        (
            f"algorithm.adv_estimator=remax {ROLLOUT}.do_sample=false",
            f"{ROLLOUT}.do_sample=false makes all of them equal",
            f"{ROLLOUT}.do_sample=true",
        ),
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=64 data.train_batch_size=4 {ROLLOUT}.n=2",
            "is above the 8 sequences",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        ),
        (f"{ROLLOUT}.n=1", f"but {ROLLOUT}.n=1 generates only one", f"{ROLLOUT}.n=8"),
        (
            f"algorithm.adv_estimator=rloo {ROLLOUT}.n=1",
            f"but {ROLLOUT}.n=1 generates only one",
            f"{ROLLOUT}.n=8",
        ),
        (f"{ROLLOUT}.do_sample=false", "makes all of them equal", f"{ROLLOUT}.do_sample=true"),
        (
            "trainer.resume_mode=resume_path",
            "needs a checkpoint",
            "trainer.resume_mode=auto",
        ),
        (
            "trainer.resume_from_path=c",
            "has no effect",
            "trainer.resume_mode=resume_path",
        ),
        ("trainer.critic_warmup=1", "needs a critic", "trainer.critic_warmup=0"),
        (
            "speculative.enable=true",
            "spec_strategy=eagle needs a draft model",
            "speculative.spec_strategy=history",
        ),
        (
            "speculative.enable=true speculative.spec_strategy=history "
            "actor_rollout_ref.rollout.name=hf",
            "name=hf does not support drafts",
            "speculative.enable=false",
        ),
        (
            "speculative.enable=true speculative.eagle.spec_model_path=x "
            "speculative.eagle.spec_topk=9 speculative.eagle.spec_verify_tokens=16",
            "spec_topk=9 is above the maximum, 8",
            "speculative.eagle.spec_topk=8",
        ),
        (
            "speculative.enable=true speculative.spec_strategy=history "
            "speculative.eagle.spec_topk=2 speculative.eagle.spec_verify_tokens=8",
            "history drafts only chains",
            "speculative.eagle.spec_topk=1",
        ),
        (
            "speculative.enable=true speculative.spec_strategy=quantized "
            "speculative.eagle.spec_topk=2 speculative.eagle.spec_verify_tokens=8",
            "strategy=quantized drafts only chains",
            "speculative.eagle.spec_topk=1",
        ),
        (
            "speculative.enable=true speculative.spec_strategy=history "
            "speculative.quantized.bits=4",
            "quantized.bits=4 has no effect with speculative.spec_strategy=history",
            "speculative.spec_strategy=quantized",
        ),
        (
            "speculative.enable=true speculative.train.enable_drafter_training=true "
            "speculative.spec_strategy=quantized_union",
            "rollouts do not use it",
            "speculative.train.enable_drafter_training=false",
        ),
        (
            "speculative.enable=true speculative.eagle.spec_model_path=x "
            "speculative.eagle.spec_topk=4",
            "spec_verify_tokens is not set",
            "speculative.eagle.spec_verify_tokens=16",
        ),
        (
            "speculative.enable=true speculative.eagle.spec_model_path=x "
            "speculative.eagle.spec_steps=2 speculative.eagle.spec_topk=2 "
            "speculative.eagle.spec_verify_tokens=9",
            "must be at least 2, and at most 7",
            "speculative.eagle.spec_verify_tokens=7",
        ),
        (
            "speculative.enable=true speculative.eagle.spec_model_path=x "
            "speculative.eagle.spec_verify_tokens=4",
            "speculative.eagle.spec_steps=7 draft tokens needs 8 tokens",
            "speculative.eagle.spec_verify_tokens=null",
        ),
        (
            "speculative.enable=true speculative.eagle.spec_model_path=x "
            "speculative.eagle.tune_algorithm=UCB1 speculative.eagle.mab_epsilon=0.2",
            "mab_epsilon=0.2 has no effect with speculative.eagle.tune_algorithm=UCB1",
            "speculative.eagle.tune_algorithm=BEG",
        ),
        (
            "speculative.enable=true speculative.spec_strategy=history "
            "speculative.eagle.mab_configs=['4_1_5']",
            "mab_configs has no effect with speculative.eagle.tune_algorithm=COST",
            "speculative.eagle.tune_algorithm=BEG",
        ),
        (
            "speculative.train.enable_drafter_training=true",
            "speculative.enable=false",
            "speculative.train.enable_drafter_training=false",
        ),
        (
            "speculative.enable=true speculative.train.enable_drafter_training=true "
            "speculative.spec_strategy=history",
            "speculative.spec_strategy=history",
            "speculative.spec_strategy=eagle",
        ),
        (
            "speculative.enable=true speculative.train.enable_drafter_training=true "
            "speculative.train.min_workers_for_training=2",
            "min_workers_for_training=2 is not supported",
            "speculative.train.min_workers_for_training=1",
        ),
        (
            "speculative.train.collect_hidden_states_from_sgl=true "
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.name=hf returns no hidden states",
            "speculative.train.collect_hidden_states_from_engine=false",
        ),
        (
            "speculative.enable=true speculative.train.enable_drafter_training=true "
            "speculative.train.checkpoint_path=x",
            "checkpoint_path=x is not supported",
            "speculative.train.checkpoint_path=null",
        ),
        (
            "speculative.enable=true speculative.train.enable_drafter_training=true "
            "speculative.train.long_share=1.5",
            "is above 1",
            "speculative.train.long_share=0.25",
        ),
        (
            "speculative.enable=true speculative.train.enable_drafter_training=true "
            "speculative.train.held_out_every=1",
            "held_out_every=1",
            "speculative.train.held_out_every=8",
        ),
        (
            "speculative.enable=true speculative.train.enable_drafter_training=true "
            "speculative.train.max_seq_len=2",
            "max_seq_len=2 is too short",
            "speculative.train.max_seq_len=8192",
        ),
        (
            "speculative.draft.total_training_steps=20",
            "no steps for the decay",
            "speculative.draft.optim.lr_scheduler_type=constant",
        ),
        (
            "speculative.train.optim.min_lr_ratio=2",
            "min_lr_ratio=2 is above 1",
            "speculative.train.optim.min_lr_ratio=0",
        ),
        (
            "speculative.draft.optim.min_lr_ratio=3",
            "min_lr_ratio=3 is above 1",
            "speculative.draft.optim.min_lr_ratio=0",
        ),
        (
            "speculative.train.value_weight=0 speculative.train.soft_weight=0",
            "leave no loss to train a draft model with",
            "speculative.train.value_weight=1",
        ),
        (
            "speculative.train.value_weight=0 speculative.train.soft_weight=0",
            "leave no loss to train a draft model with",
            "speculative.train.acceptance_weight=1",
        ),
        (
            "custom_reward_function.reward_kwargs={a:1}",
            "reward_kwargs has no effect",
            "custom_reward_function.path=FILE",
        ),
        (
            "trainer.nnodes=2 algorithm.adv_estimator=gae",
            "algorithm.adv_estimator=gae trains a critic, which supports only one process",
            "algorithm.adv_estimator=grpo",
        ),
        (
            "trainer.nnodes=2 critic.enable=true",
            "critic.enable=true trains a critic",
            "critic.enable=false",
        ),
        (
            "trainer.nnodes=2 actor_rollout_ref.rollout.name=hf",
            "rollout.name=hf supports only one process",
            "actor_rollout_ref.rollout.name=embedded",
        ),
        (
            "trainer.n_gpus_per_node=8 trainer.device=auto",
            "this machine has 0 usable GPUs",
            "trainer.device=cpu",
        ),
        (
            "trainer.n_gpus_per_node=1 trainer.device=auto",
            "this machine has 0 usable GPUs",
            "trainer.n_gpus_per_node=0",
        ),
        ("trainer.device=cuda", "this machine has 0 usable GPUs", "trainer.device=cpu"),
    ],
)
def test_error_names_the_broken_rule_and_its_remedy_works(
    broken: str, message: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(broken)
    assert message in str(caught.value)
    assert remedy in str(caught.value)
    assert "settings cannot be used" not in str(caught.value)
    load(f"{broken} {remedy}")


def test_loss_scale_factor_is_valid_if_only_the_critic_uses_it() -> None:
    config = load(
        f"{ACTOR}.loss_scale_factor=9 critic.loss_agg_mode=seq-mean-token-sum-norm "
        "algorithm.adv_estimator=gae"
    )
    assert config.actor_rollout_ref.actor.loss_agg_mode == "token-mean"


@pytest.mark.parametrize("mode", ["cispo", "geo_mean", "dppo_kl"])
def test_losses_without_lower_bound_accept_clip_ratio_low_above_1(mode: str) -> None:
    config = load(f"{ACTOR}.policy_loss.loss_mode={mode} {ACTOR}.clip_ratio_low=10")
    assert config.actor_rollout_ref.actor.clip_ratio_low == 10


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("critic.ppo_mini_batch_size=3", "not a multiple of critic.ppo_mini_batch_size=3"),
        (
            "critic.ppo_micro_batch_size_per_gpu=99",
            "critic.ppo_micro_batch_size_per_gpu=99 is above",
        ),
        ("critic.ppo_max_token_len_per_gpu=9", "critic.ppo_max_token_len_per_gpu=9 is below"),
        (
            "critic.use_dynamic_bsz=true critic.ppo_micro_batch_size_per_gpu=2",
            "has no effect with critic.use_dynamic_bsz=true",
        ),
        ("critic.use_dynamic_bsz=false", "set critic.ppo_micro_batch_size_per_gpu=8"),
        ("critic.model.tokenizer_path=a", "has no effect without critic.model.path"),
        ("critic.optim.muon_lr=1", "set critic.optim.optimizer=Muon"),
    ],
)
def test_rules_of_the_critic_apply_only_if_it_is_trained(broken: str, message: str) -> None:
    load(broken)
    with pytest.raises(ConfigError) as caught:
        load(f"{broken} algorithm.adv_estimator=gae")
    assert message in str(caught.value)


def test_train_max_samples_of_0_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data.train_max_samples=0 leaves no data"):
        load(f"data.train_files=a data.train_max_samples=0 {MODEL}.path=m", recipe=None)


@pytest.mark.parametrize("day", ["2026-02-30", "20260131", "today"])
def test_a_date_of_chat_templates_is_a_date(day: str) -> None:
    key = "data.chat_template_date"
    assert load(f"{key}=2026-01-31").data.chat_template_date == "2026-01-31"
    with pytest.raises(ConfigError, match=rf"{key}=.*{day}.*set {key}=2026-01-31, or null"):
        load(f"{key}='{day}'")


def test_one_mixture_weight_per_file_is_valid() -> None:
    config = load(f"data.train_files=[a,b] data.mixture_weights=[1,3] {MODEL}.path=m", recipe=None)
    assert config.data.mixture_weights == (1.0, 3.0)


def test_rl_alone_needs_no_demonstrations() -> None:
    own_data = "data.task=null data.train_files=mine.jsonl"
    with pytest.raises(ConfigError, match=r"sft\.total_training_steps=2 needs demonstrations"):
        load(own_data)
    config = load(f"{own_data} trainer.mode=rl sft.max_length=100000 sft.optim.lr_warmup_steps=99")
    assert (config.trainer.mode, config.sft.total_training_steps) == ("rl", 2)


def test_a_model_is_required_only_with_complete() -> None:
    with pytest.raises(ConfigError, match="no model is set"):
        load_config(hardware=CPU)
    assert load_config(hardware=CPU, complete=False).actor_rollout_ref.model.path is None


def test_n_gpus_per_node_is_limited_by_the_usable_gpus() -> None:
    two = Hardware(gpus=2)
    assert load("trainer.device=cuda", two).trainer.device == "cuda"
    assert load("trainer.n_gpus_per_node=1", two).trainer.n_gpus_per_node == 1
    assert load("trainer.n_gpus_per_node=2", two).trainer.n_gpus_per_node == 2
    with pytest.raises(ConfigError) as caught:
        load("trainer.n_gpus_per_node=3 trainer.device=auto", two)
    message = str(caught.value)
    assert message.startswith("trainer.n_gpus_per_node=3: this machine has 2 usable GPUs; ")
    assert "set trainer.n_gpus_per_node=2, or trainer.device=cpu" in message


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ("", "sft+rl"),
        ("trainer.total_training_steps=0", "sft"),
        ("sft.total_training_steps=0", "rl"),
        ("trainer.mode=sft", "sft"),
        ("trainer.mode=sft trainer.total_training_steps=null", "sft"),
        ("trainer.mode=rl", "rl"),
        ("trainer.mode=sft+rl", "sft+rl"),
        ("data.task=null data.train_files=a sft.total_training_steps=0", "rl"),
        (
            "data.task=null data.train_files=a sft.train_files=b trainer.total_training_steps=null",
            "sft+rl",
        ),
        ("data.task=null sft.train_files=b", "sft"),
    ],
)
def test_auto_mode_depends_on_steps_and_data(overrides: str, mode: str) -> None:
    assert resolve_mode(load(overrides)) == mode


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (
            "sft.total_training_steps=0 trainer.total_training_steps=0",
            "there is nothing to train",
            "trainer.total_training_steps=100",
        ),
        (
            "sft.total_training_steps=0 trainer.mode=sft",
            "but sft.total_training_steps=0",
            "sft.total_training_steps=100",
        ),
        (
            "trainer.mode=rl data.task=null sft.total_training_steps=0",
            "trainer.mode=rl needs prompts",
            "data.task=countdown",
        ),
        (
            "trainer.mode=rl trainer.total_training_steps=0",
            "but trainer.total_training_steps=0",
            "trainer.total_training_steps=100",
        ),
        (
            "trainer.total_training_steps=null",
            "data.task=countdown generates prompts without end",
            "trainer.total_training_steps=100",
        ),
    ],
)
def test_a_run_without_steps_or_data_is_an_error(overrides: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_mode(load(overrides))
    assert message in str(caught.value)
    assert remedy in str(caught.value)
    resolve_mode(load(f"{overrides} {remedy}"))


def test_an_odd_head_width_is_an_error_for_every_engine() -> None:
    with pytest.raises(ConfigError, match=r"odd \(5\).*init.head_dim=6"):
        load(f"{ROLLOUT}.name=hf {MODEL}.init.head_dim=5")


def test_copied_multiples_equal_those_of_exact_mode() -> None:
    # `config` may not import torch, so it has copies of two constants.
    from slipstream.config.engines import EMBEDDED
    from slipstream.config.validate import _CHUNK_MULTIPLE
    from slipstream.models.numerics import ROW_MULTIPLE, WIDTH_MULTIPLE

    assert (EMBEDDED.width_multiple, _CHUNK_MULTIPLE) == (WIDTH_MULTIPLE, ROW_MULTIPLE)
