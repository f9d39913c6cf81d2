"""Launch lines in the manner of VERL's and FastRL's users, and a table of what becomes of them.

Run `python -m tests.config.launch_lines` to print the table. The lines cover the keys that real
lines set. `{data}` and `{model}` are folders; sizes are those that people use, since only the
settings are checked.
"""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.config import Config, Hardware, load_config
from slipstream.config.mode import resolve_mode
from slipstream.errors import ConfigError

A, R, F, M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))

DATA = """
data.train_files={data}/train.parquet data.val_files={data}/test.parquet
data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error'
"""
MODEL = f"""
{M}.path={{model}} {M}.use_remove_padding=True {M}.enable_gradient_checkpointing=True
"""
MICRO = f"""
{A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=64 {A}.ppo_micro_batch_size_per_gpu=8
{R}.log_prob_micro_batch_size_per_gpu=16 {F}.log_prob_micro_batch_size_per_gpu=16
"""
DYNAMIC = f"""
{A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=64 {A}.use_dynamic_bsz=True
{A}.ppo_max_token_len_per_gpu=24576 {R}.log_prob_use_dynamic_bsz=True
{R}.log_prob_max_token_len_per_gpu=24576 {F}.log_prob_use_dynamic_bsz=True
{F}.log_prob_max_token_len_per_gpu=24576
"""
KL_LOSS = f"""
{A}.use_kl_loss=True {A}.kl_loss_coef=0.001 {A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0
algorithm.use_kl_in_reward=False
"""
KEPT = f"""
{A}.fsdp_config.param_offload=False {A}.fsdp_config.optimizer_offload=False
{F}.fsdp_config.param_offload=True
"""
OFFLOAD = KEPT.replace("False", "True")
VLLM = f"""
{R}.name=vllm {R}.tensor_model_parallel_size=2 {R}.gpu_memory_utilization=0.6 {R}.n=5
"""
SGLANG = VLLM.replace("vllm", "sglang")
TRAINER = """
trainer.critic_warmup=0 'trainer.logger=["console","wandb"]' trainer.project_name=math
trainer.experiment_name=line trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=20
trainer.test_freq=5 trainer.total_epochs=15
"""
GRPO = "algorithm.adv_estimator=grpo" + DATA + MODEL + MICRO + KL_LOSS + KEPT + VLLM + TRAINER
NEWER = "algorithm.adv_estimator=grpo" + DATA + MODEL + DYNAMIC + KL_LOSS + KEPT + VLLM + TRAINER
CRITIC = """
critic.optim.lr=1e-5 critic.model.path={model} critic.model.use_remove_padding=True
critic.model.enable_gradient_checkpointing=True
"""
OLD_CRITIC = """
critic.ppo_micro_batch_size_per_gpu=8 critic.model.fsdp_config.param_offload=False
critic.model.fsdp_config.optimizer_offload=True
"""
NEW_CRITIC = """
critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=32768 critic.fsdp.param_offload=True
critic.fsdp.optimizer_offload=True
"""
PPO = "algorithm.adv_estimator=gae" + DATA + MODEL + CRITIC + KEPT + VLLM.replace("n=5", "n=1")
SAMPLED = f"""
{R}.temperature=1.0 {R}.top_p=1.0 {R}.top_k=-1 {R}.val_kwargs.temperature=1.0
{R}.val_kwargs.top_p=0.7 {R}.val_kwargs.top_k=-1 {R}.val_kwargs.do_sample=True {R}.val_kwargs.n=1
"""
CLIP_HIGHER = f"{A}.clip_ratio_low=0.2 {A}.clip_ratio_high=0.28 {A}.clip_ratio_c=10.0 "
SEQUENCE_PARALLEL = f"""
{A}.ulysses_sequence_parallel_size=4 {F}.ulysses_sequence_parallel_size=4
{A}.fsdp_config.fsdp_size=-1
"""
LONG = f"""
algorithm.adv_estimator=grpo data.train_files={{data}}/train.parquet
data.val_files={{data}}/test.parquet data.prompt_key=prompt data.truncation='left'
data.max_prompt_length=2048 data.max_response_length=20480 data.train_batch_size=512
{R}.n=16 algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 {A}.use_kl_loss=False
{A}.kl_loss_coef=0.0 {A}.loss_agg_mode=token-mean {A}.grad_clip=1.0 {A}.entropy_coeff=0
{A}.optim.lr=1e-6 {A}.optim.lr_warmup_steps=10 {A}.optim.weight_decay=0.1
{A}.ppo_mini_batch_size=32 {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=22528
{R}.name=vllm {R}.tensor_model_parallel_size=4 {R}.gpu_memory_utilization=0.80
{R}.enable_chunked_prefill=True {R}.max_num_batched_tokens=22528 trainer.val_before_train=True
trainer.resume_mode=auto trainer.default_local_dir={{data}}/ckpts
"""
DAPO = LONG + MODEL + OFFLOAD + SAMPLED + CLIP_HIGHER + SEQUENCE_PARALLEL + TRAINER
OLD_BUFFER = """
reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True
reward_model.overlong_buffer.len=4096 reward_model.overlong_buffer.penalty_factor=1.0
reward_model.overlong_buffer.log=False
"""
BUFFER = """
reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
+reward_model.reward_kwargs.overlong_buffer_cfg.log=False
+reward_model.reward_kwargs.max_resp_len=20480
"""
NEW_BUFFER = BUFFER.replace("reward_model.reward_kwargs", "reward.reward_kwargs").replace(
    "reward_model.reward_manager", "reward.reward_manager.name"
)
FILTER = """
data.gen_batch_size=1536 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
algorithm.filter_groups.max_num_gen_batches=10
"""
NO_FILTER = """
algorithm.filter_groups.enable=False algorithm.filter_groups.metric=acc
algorithm.filter_groups.max_num_gen_batches=10
"""
MEGATRON = f"""
{A}.megatron.tensor_model_parallel_size=2 {A}.megatron.pipeline_model_parallel_size=2
{A}.megatron.virtual_pipeline_model_parallel_size=2 {A}.megatron.context_parallel_size=2
{F}.megatron.tensor_model_parallel_size=2 {F}.megatron.pipeline_model_parallel_size=2
{A}.megatron.param_offload=True {A}.megatron.grad_offload=True {A}.megatron.use_mbridge=True
"""
FASTRL = f"""
algorithm.adv_estimator=grpo data.train_files={{data}}/train.parquet
data.val_files={{data}}/test.parquet data.train_batch_size=64 data.max_prompt_length=1024
data.max_response_length=32768 data.filter_overlong_prompts=True data.truncation='error'
data.return_raw_chat=True {M}.path={{model}} {M}.use_remove_padding=True
{M}.enable_gradient_checkpointing=True {A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=4
{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=33792 {A}.use_kl_loss=True
{A}.kl_loss_coef=0.001 {A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0 {A}.strategy=fsdp2
{A}.fsdp_config.param_offload=True {A}.fsdp_config.optimizer_offload=True
{F}.fsdp_config.param_offload=True {A}.ulysses_sequence_parallel_size=4 {R}.name=sglang
speculative.eagle.spec_model_path={{data}}/eagle
{R}.tensor_model_parallel_size=4 {R}.multi_turn.format=hermes {R}.gpu_memory_utilization=0.4
{R}.n=8 {R}.temperature=0.9 {R}.mode=sync {R}.free_cache_engine=True
algorithm.use_kl_in_reward=False speculative.enable=True speculative.bs_threshold=32
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=1
"""

LINES: dict[str, str] = {
    # Group-relative estimators, with micro-batches of a fixed size.
    "grpo": GRPO,
    "grpo_sglang": GRPO.replace("vllm", "sglang"),
    "grpo_hf": GRPO.replace("vllm", "hf").replace("parallel_size=2", "parallel_size=1"),
    "grpo_trtllm": NEWER.replace("vllm", "trtllm"),
    "grpo_tp8": GRPO.replace("parallel_size=2", "parallel_size=8") + OFFLOAD,
    "grpo_balance": GRPO
    + f"trainer.balance_batch=True {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=16000",
    "grpo_config_flags": GRPO + "hydra.run.dir=outputs/run hydra.output_subdir=null "
    "hydra/job_logging=disabled hydra/hydra_logging=disabled ++trainer.val_before_train=False",
    "grpo_custom_reward": GRPO
    + "custom_reward_function.path={data}/reward.py custom_reward_function.name=compute_score "
    "+custom_reward_function.reward_kwargs.scale=2",
    "grpo_no_custom_reward": GRPO
    + "custom_reward_function.path=null custom_reward_function.name=null",
    "grpo_reward_kwargs_alone": GRPO + "+custom_reward_function.reward_kwargs.scale=2",
    "grpo_lora": GRPO + f"{M}.lora_rank=64 {M}.lora_alpha=32 {M}.target_modules=all-linear "
    f"{M}.use_shm=True {R}.load_format=safetensors {R}.layered_summon=True {A}.optim.lr=3e-6",
    "grpo_lora_off": GRPO + f"{M}.lora_rank=0 {M}.lora_alpha=0 {M}.target_modules=all-linear "
    f"{M}.exclude_modules=DONT_EXCLUDE {R}.load_format=dummy",
    "grpo_lora_adapter": NEWER + f"{M}.lora_adapter_path={{data}}/adapter {R}.load_format=auto",
    "grpo_lora_new_names": NEWER + f"{M}.lora.rank=64 {M}.lora.alpha=128 {M}.lora.merge=True",
    "grpo_hsdp": GRPO + f"{A}.strategy=fsdp2 {F}.strategy=fsdp2 {A}.fsdp_config.fsdp_size=8 "
    f"{A}.fsdp_config.reshard_after_forward=True {A}.fsdp_config.forward_prefetch=True "
    f"{F}.fsdp_config.forward_prefetch=True {A}.fsdp_config.offload_policy=True",
    "grpo_precision": GRPO + f"{A}.fsdp_config.model_dtype=bfloat16 {F}.fsdp_config.dtype=float16 "
    f"+{A}.fsdp_config.mixed_precision.param_dtype=bf16 {R}.dtype=bfloat16 "
    f"+{A}.fsdp_config.mixed_precision.reduce_dtype=fp32 {A}.fsdp_config.dtype=bfloat16 "
    f"+{A}.fsdp_config.mixed_precision.buffer_dtype=fp32",
    "grpo_fused": GRPO + f"{M}.use_fused_kernels=True {M}.fused_kernel_options.impl_backend=triton "
    f"{M}.use_liger=True {A}.entropy_checkpointing=True {F}.entropy_checkpointing=True "
    f"{A}.entropy_from_logits_with_chunking=True {F}.entropy_from_logits_with_chunking=True "
    f"{A}.use_torch_compile=False {F}.use_torch_compile=False {M}.enable_activation_offload=True",
    "grpo_saves": GRPO + f"{A}.checkpoint.save_contents=['model','hf_model','optimizer','extra'] "
    f"{A}.checkpoint.load_contents=['model'] {A}.checkpoint.async_save=True "
    "trainer.max_actor_ckpt_to_keep=2 trainer.max_critic_ckpt_to_keep=2 "
    "trainer.default_hdfs_dir=null trainer.del_local_ckpt_after_load=False",
    "grpo_profiled": GRPO + f"{A}.profiler.enable=True {A}.profiler.ranks=[0] {R}.mode=sync "
    f"{A}.profiler.all_ranks=True {R}.profiler.enable=True global_profiler.tool=nsys "
    "global_profiler.steps=[1,2,5] global_profiler.profile_continuous_steps=False "
    "global_profiler.global_tool_config.nsys.discrete=True "
    "global_profiler.global_tool_config.nsys.worker_nsight_options.capture-range-end=null",
    "grpo_profiled_old": GRPO + f"{A}.profile_ranks=[0,1] {R}.profile_ranks_all=False "
    f"{F}.profile_discrete=True trainer.profile_steps=[1,2,5] profile.options.level=level1",
    "grpo_resumes": GRPO + "trainer.resume_mode=auto trainer.resume_from_path={data}/old",
    "grpo_does_not_resume": GRPO + "trainer.resume_mode=disable trainer.resume_from_path=null",
    "grpo_greedy_validation": GRPO + f"{R}.val_kwargs.temperature=0.6 {R}.val_kwargs.n=4",
    "grpo_sampled_validation": GRPO + SAMPLED + "trainer.log_val_generations=10 "
    "trainer.validation_data_dir={data}/val trainer.rollout_data_dir={data}/rollouts",
    "grpo_lam": GRPO + "algorithm.lam=0.95 algorithm.gamma=1.0",
    "grpo_async": GRPO + f"{R}.mode=async {R}.multi_turn.format=hermes "
    f"{R}.multi_turn.max_parallel_calls=2 {R}.agent.num_workers=4 data.return_raw_chat=True "
    f"{R}.agent.default_agent_loop=single_turn_agent {R}.skip_tokenizer_init=False "
    f"{R}.multi_turn.max_assistant_turns=5",
    "grpo_engine_kwargs": GRPO + f"+{R}.engine_kwargs.vllm.swap_space=4 {R}.enforce_eager=True "
    f"+{R}.engine_kwargs.sglang.attention_backend=fa3 {R}.free_cache_engine=False "
    f"{R}.multi_stage_wake_up=True {R}.update_weights_bucket_megabytes=1024 "
    f"{R}.disable_log_stats=False {R}.max_num_seqs=512 {R}.max_model_len=2048",
    "grpo_parallel_rollouts": GRPO + f"{R}.data_parallel_size=2 {R}.expert_parallel_size=1 "
    f"{R}.pipeline_model_parallel_size=2 actor_rollout_ref.nccl_timeout=1800",
    "grpo_attention": GRPO + f"+{M}.override_config.attn_implementation=eager "
    f"+{M}.override_config.attention_dropout=0. +{M}.override_config.embd_pdrop=0. "
    f"+{M}.override_config.resid_pdrop=0.",
    "grpo_chat_template": GRPO + "+data.apply_chat_template_kwargs.enable_thinking=False "
    "data.shuffle=False data.seed=42 data.validation_shuffle=True data.dataloader_num_workers=0",
    "grpo_data_class": GRPO + "data.custom_cls.path={data}/mine.py data.custom_cls.name=MyDataset",
    "grpo_curriculum": GRPO + "data.sampler.class_path={data}/sampler.py "
    "data.sampler.class_name=Mine data.dataloader_num_workers=0",
    "grpo_sandbox": GRPO + "reward_model.reward_manager=prime "
    "reward_model.sandbox_fusion.url=http://localhost:8080/run_code "
    "reward_model.sandbox_fusion.max_concurrent=256",
    "grpo_dynamic_kl": GRPO + "algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl "
    "algorithm.kl_ctrl.type=fixed algorithm.kl_ctrl.kl_coef=0.001",
    "grpo_dr": GRPO + f"algorithm.norm_adv_by_std_in_grpo=False {A}.use_kl_loss=False "
    f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=1024",
    "grpo_schedule": GRPO + f"{A}.optim.lr_warmup_steps_ratio=0.1 {A}.optim.warmup_style=cosine "
    f"{A}.optim.min_lr_ratio=0.1 {A}.optim.num_cycles=0.5 {A}.optim.betas=[0.9,0.95]",
    "grpo_min_lr_without_schedule": GRPO + f"{A}.optim.min_lr_ratio=0.1",
    "grpo_ray": GRPO + "+ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.timeline_json_file=t.json",
    "grpo_tis_of_0_6": GRPO + f"+{A}.tis_imp_ratio_cap=2.0 {R}.calculate_log_probs=True",
    # Keys of VERL 0.7 and later.
    "newer": NEWER,
    "newer_offload": NEWER + OFFLOAD + f"{M}.use_shm=True",
    "newer_reward_loop": NEWER + "reward_model.use_reward_loop=True reward_model.num_workers=8 "
    "reward_model.rollout.name=vllm reward_model.rollout.tensor_model_parallel_size=4 "
    "reward_model.rollout.gpu_memory_utilization=0.8 reward_model.rollout.prompt_length=4096",
    "newer_reward_section": NEWER + "reward.num_workers=8 reward.reward_manager.name=naive "
    "reward.reward_model.enable=False reward.reward_model.rollout.name=vllm "
    "reward.reward_model.rollout.tensor_model_parallel_size=1 reward.reward_model.nnodes=0 "
    "reward.custom_reward_function.path={data}/reward.py "
    "reward.custom_reward_function.name=compute_score",
    "newer_learned_reward": "algorithm.adv_estimator=grpo"
    + DATA
    + MODEL
    + MICRO
    + VLLM
    + TRAINER
    + "reward.num_workers=8 reward.reward_model.enable=True "
    "reward.reward_model.model_path={data}/judge "
    "reward.reward_model.rollout.name=vllm reward.reward_model.rollout.prompt_length=8192",
    "newer_trainer": NEWER + "trainer.use_v1=True trainer.v1.trainer_mode=sync "
    "trainer.use_legacy_worker_impl=disable transfer_queue.enable=True model_engine=dp "
    f"{R}.checkpoint_engine.update_weights_bucket_megabytes=4096",
    "newer_prefix_grouper": NEWER + f"{A}.use_prefix_grouper=True {M}.tiled_mlp.enabled=True "
    f"{A}.fsdp_config.ulysses_sequence_parallel_size=2 {A}.entropy_from_logits_chunk_size=1024",
    "newer_deterministic": NEWER + f"{A}.fsdp_config.full_determinism=True {R}.seed=1 "
    f"{R}.full_determinism=True {A}.data_loader_seed=1 {A}.fsdp_config.seed=1",
    "newer_gspo": NEWER + f"{A}.policy_loss.loss_mode=gspo {A}.clip_ratio_low=0.0003 "
    f"{A}.clip_ratio_high=0.0004 {A}.loss_agg_mode=seq-mean-token-mean",
    "newer_sapo": NEWER + f"{A}.policy_loss.loss_mode=sapo {A}.tau_pos=1.0 {A}.tau_neg=1.05 "
    f"{A}.loss_agg_mode=token-mean",
    "newer_tau_without_sapo": NEWER + f"{A}.tau_pos=1.0 {A}.tau_neg=1.1",
    "newer_cispo": NEWER + f"{A}.policy_loss.loss_mode=cispo {A}.clip_ratio_low=10 "
    f"{A}.clip_ratio_high=0.2",
    "newer_geo_mean": NEWER + f"{A}.policy_loss.loss_mode=geo_mean {A}.clip_ratio_low=0.4 "
    f"{A}.clip_ratio_high=0.4",
    "newer_clip_cov": NEWER + f"{A}.policy_loss.loss_mode=clip_cov "
    f"{A}.policy_loss.clip_cov_ratio=0.0002 {A}.policy_loss.clip_cov_lb=1.0 "
    f"{A}.policy_loss.clip_cov_ub=40.0 {A}.policy_loss.ppo_kl_coef=1",
    "newer_kl_cov": NEWER + f"{A}.policy_loss.loss_mode=kl_cov "
    f"{A}.policy_loss.kl_cov_ratio=0.002 {A}.policy_loss.ppo_kl_coef=1",
    "newer_gdpo": NEWER.replace("grpo", "gdpo") + "reward.reward_manager.name=gdpo "
    "reward.custom_reward_function.path={data}/reward.py "
    """'+algorithm.gdpo_reward_keys=["accuracy","format"]'""",
    "newer_rollout_correction": NEWER + "algorithm.rollout_correction.rollout_is=sequence "
    "algorithm.rollout_correction.rollout_is_threshold=2.0 "
    "algorithm.rollout_correction.rollout_is_batch_normalize=true "
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
    f"algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01 {R}.calculate_log_probs=True",
    "newer_two_rules": NEWER + "algorithm.rollout_correction.bypass_mode=true "
    "algorithm.rollout_correction.loss_type=ppo_clip "
    """"algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'" """
    """"algorithm.rollout_correction.rollout_rs_threshold='0.6_1.6,2.5'" """,
    "newer_rloo": NEWER.replace("=grpo", "=rloo"),
    "newer_remax": NEWER.replace("=grpo", "=remax"),
    "newer_opo": NEWER.replace("=grpo", "=opo"),
    "newer_gpg": NEWER.replace("=grpo", "=gpg") + f"{A}.policy_loss.loss_mode=gpg",
    "newer_reinforce": NEWER.replace("=grpo", "=reinforce_plus_plus"),
    # DAPO.
    "dapo_recipe": DAPO + OLD_BUFFER + FILTER,
    "dapo_recipe_without_filter": DAPO + OLD_BUFFER + NO_FILTER,
    "dapo_main": DAPO + BUFFER,
    "dapo_longer_context": DAPO
    + NEW_BUFFER
    + f"+{M}.override_config.max_position_embeddings=32768",
    "dapo_rollout_correction": DAPO
    + OLD_BUFFER
    + FILTER
    + "algorithm.rollout_correction.rollout_is=token "
    f"algorithm.rollout_correction.rollout_is_threshold=2.0 {R}.calculate_log_probs=True",
    "dapo_gspo": DAPO + OLD_BUFFER + NO_FILTER + f"{A}.policy_loss.loss_mode=gspo "
    f"{A}.loss_agg_mode=seq-mean-token-mean",
    "dapo_inflight": DAPO
    + NEW_BUFFER
    + FILTER
    + "algorithm.filter_groups.max_inflight_gen_batches=2",
    "dapo_buffer_off": DAPO.replace("dapo", "naive") + "reward_model.overlong_buffer.enable=False "
    "reward_model.overlong_buffer.len=0",
    # PPO with a critic, and learned reward models.
    "ppo": PPO + MICRO + OLD_CRITIC + TRAINER + f"{A}.use_kl_loss=False",
    "ppo_newer": PPO + DYNAMIC + NEW_CRITIC + TRAINER,
    "ppo_both_batch_settings": PPO
    + DYNAMIC
    + NEW_CRITIC
    + TRAINER
    + f"critic.ppo_micro_batch_size_per_gpu=2 {A}.ppo_micro_batch_size_per_gpu=2",
    "ppo_sequence_parallel": PPO
    + MICRO
    + OLD_CRITIC
    + SEQUENCE_PARALLEL
    + TRAINER
    + "critic.ulysses_sequence_parallel_size=2 critic.forward_micro_batch_size_per_gpu=32",
    "ppo_learned_reward": PPO + MICRO + OLD_CRITIC + TRAINER + "reward_model.enable=True "
    "reward_model.model.path={data}/judge reward_model.model.use_remove_padding=True "
    "reward_model.model.fsdp_config.param_offload=True reward_model.micro_batch_size_per_gpu=32 "
    "reward_model.use_dynamic_bsz=True reward_model.forward_max_token_len_per_gpu=98304",
    "ppo_pf": PPO + MICRO + OLD_CRITIC + TRAINER + "algorithm.use_pf_ppo=True "
    "algorithm.pf_ppo.reweight_method=pow algorithm.pf_ppo.weight_pow=2.0",
    "grpo_with_critic_settings": GRPO + CRITIC + OLD_CRITIC,
    # Megatron's settings.
    "megatron": "--config-path=config --config-name='ppo_megatron_trainer.yaml' "
    + GRPO.replace(KEPT, "")
    + MEGATRON,
    "megatron_optimizer": "--config-name=ppo_megatron_trainer "
    + GRPO.replace(KEPT, "")
    + MEGATRON
    + f"{A}.strategy=megatron {A}.optim.lr_decay_style=constant {A}.optim.weight_decay=0.1 "
    f"+{A}.optim.override_optimizer_config.optimizer_offload_fraction=1 "
    f"+{A}.optim.override_optimizer_config.optimizer_cpu_offload=True "
    f"+{A}.megatron.override_transformer_config.recompute_granularity=full",
    # FastRL.
    "fastrl": FASTRL,
    "fastrl_drafter": FASTRL + "speculative.eagle.spec_steps=8 speculative.eagle.spec_topk=4 "
    "speculative.eagle.spec_verify_tokens=48 speculative.eagle.tune_algorithm=BEG "
    "speculative.eagle.mab_configs=[8_4_32,8_4_16,8_4_8] "
    "speculative.eagle.mab_bs_threshold=[1,2,5,21]",
    "fastrl_trains_drafter": FASTRL + "speculative.train.enable_drafter_training=True "
    "speculative.train.training_interval_steps=5 speculative.train.batch_size_per_gpu=2 "
    "speculative.train.max_seq_len=8192 speculative.train.optim.lr=1e-6 "
    "speculative.train.optim.lr_warmup_steps=100 "
    "+speculative.train.ulysses_sequence_parallel_size=4",
    "fastrl_off": FASTRL.replace("enable=True", "enable=False")
    + "speculative.eagle.mab_configs=[8_4_32,8_4_16]",
    # What VERL's users cannot have here.
    "fp8_rollouts": NEWER + f"{R}.quantization=fp8",
    "stale_rollouts": NEWER + "trainer.v1.trainer_mode=separate_async",
    "other_tracker": GRPO.replace('"wandb"', '"swanlab"'),
}
"""Name -> launch line. `fastrl` lines are for `main_fastrl`, all others for `main_ppo`."""

REFUSED: dict[str, tuple[str, ...]] = {
    "fp8_rollouts": ("rollout.quantization=fp8: ",),
    "stale_rollouts": ("trainer.v1.trainer_mode=separate_async: ",),
    "other_tracker": ("trainer.logger=swanlab: ",),
}
"""Lines that ask for what Slipstream does not have -> parts of the error."""


@dataclass(frozen=True)
class Outcome:
    """What became of a line: its configuration, or the error."""

    name: str
    config: Config | None
    error: str
    notices: tuple[str, ...]


def arguments(name: str, data: str = "data", model: str = "models/policy") -> list[str]:
    """Return the line's arguments as a shell would pass them."""
    return shlex.split(LINES[name].replace("{data}", data).replace("{model}", model))


@functools.cache
def outcome(name: str) -> Outcome:
    """Check the settings of one line as its launcher does, on a machine with a GPU."""
    notices: list[str] = []

    def rules(config: Config) -> Iterator[str]:
        try:
            resolve_mode(config)
        except ConfigError as error:
            yield str(error)

    try:
        config = load_config(
            [text for text in arguments(name) if not text.startswith("--")],
            hardware=Hardware(gpus=1),
            notify=notices.append,
            verl=True,
            rules=rules,
        )
    except ConfigError as error:
        return Outcome(name, None, str(error), tuple(notices))
    return Outcome(name, config, "", tuple(notices))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what becomes of each launch line.")
    parser.add_argument("--notices", action="store_true", help="print the notices, too")
    args = parser.parse_args()
    outcomes = [outcome(name) for name in LINES]
    for one in outcomes:
        print(f"{one.name:32} {'accepted' if one.config else 'refused '} {len(one.notices):3}")
        for text in (*(one.notices if args.notices else ()), *one.error.splitlines()):
            print(f"    {text}")
    accepted = sum(one.config is not None for one in outcomes)
    print(f"{len(outcomes)} lines, {accepted} accepted, {len(outcomes) - accepted} refused")


if __name__ == "__main__":
    main()
