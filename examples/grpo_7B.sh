#!/usr/bin/env bash
# Trains a 7B model with GRPO on one large GPU, like FastRL's script of this name. It trains a LoRA
# adapter with a higher learning rate, because the optimizer state of all weights would not fit, and
# responses are shorter. This script has not been run at this size yet, so start with --dry-run.
#
#   MODEL=models/Qwen2.5-7B TRAIN=train.parquet VAL=test.parquet HEAD=runs/eagle examples/grpo_7B.sh
#   MODEL=... examples/grpo_7B.sh --dry-run              # shows the plan and its memory
#
# HEAD is a draft head that examples/eagle_train.sh trains. You can append settings (key=value).
set -euo pipefail

python -m slipstream.main_fastrl \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:-train.parquet}" \
    data.val_files="${VAL:-test.parquet}" \
    data.train_batch_size=64 \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="${MODEL:-models/Qwen2.5-7B}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.actor.dtype=bfloat16 \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.9 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    speculative.enable=True \
    speculative.bs_threshold=32 \
    speculative.eagle.spec_model_path="${HEAD:-runs/eagle}" \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=1 \
    trainer.test_freq=10 \
    trainer.save_freq=10 \
    trainer.default_local_dir="${OUT:-runs/grpo_7B}" "$@"
