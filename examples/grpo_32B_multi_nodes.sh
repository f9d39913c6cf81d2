#!/usr/bin/env bash
#SBATCH --job-name=grpo_32B
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#
# Trains a 32B model with GRPO on several machines under Slurm. It uses the settings of FastRL's
# script of this name as far as Slipstream has them: 32 prompts per machine, 8 responses per prompt,
# 8 prompts per optimizer step. This script has not been run at this size yet, so start with
# --dry-run. It starts Ray on all machines, reports the memory that the run needs there, and takes one
# tiny step on all of them.
#
#   MODEL=/shared/Qwen2.5-32B TRAIN=... VAL=... HEAD=... OUT=... sbatch examples/grpo_32B_multi_nodes.sh
#   MODEL=... sbatch examples/grpo_32B_multi_nodes.sh --dry-run
#
# Every GPU holds all weights in bf16 for generation (66 GB for a 32B model) and its shard of the
# training state (16 bytes per weight, divided by the number of GPUs). It therefore needs GPUs with at
# least 141 GB. Responses are half as long as FastRL's, because a sequence is not split among GPUs.
# All machines must see all paths. Ray's output is in ray-head.log and ray-others.log. Without Slurm
# the script runs on this machine only. You can append settings (key=value).
set -euo pipefail

NODES=${SLURM_JOB_NUM_NODES:-1}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}

if [ -n "${SLURM_JOB_ID:-}" ]; then
    # Start Ray on every machine of the job: first on the machine that runs this script, then on the
    # others.
    host=${HEAD_ADDRESS:-$(hostname --ip-address | cut -d " " -f 1)}
    port=${RAY_PORT:-6379}
    if [ "$NODES" -gt 1 ] && [[ $host == 127.* ]] && [ -z "${HEAD_ADDRESS:-}" ]; then
        echo "this machine resolves its own name to $host, which other machines cannot reach; set HEAD_ADDRESS to an address that they can reach" >&2
        exit 2
    fi
    resources=(--num-gpus="$GPUS" --num-cpus="${SLURM_CPUS_PER_TASK:-64}" --disable-usage-stats)
    # Ray keeps a token in the home directory, which all machines share. Older versions of Ray have
    # no token.
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
    ray get-auth-token --generate > /dev/null 2>&1 || true
    trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
    ray start --block --head --node-ip-address="$host" --port="$port" "${resources[@]}" > ray-head.log &
    until (exec 3<> "/dev/tcp/$host/$port") 2> /dev/null; do
        kill -0 $! || { cat ray-head.log; exit 1; }
        sleep 1
    done
    export RAY_ADDRESS=$host:$port
    if [ "$NODES" -gt 1 ]; then
        srun --nodes=$((NODES - 1)) --ntasks=$((NODES - 1)) --relative=1 \
            --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}" ray start --block --address="$RAY_ADDRESS" "${resources[@]}" > ray-others.log &
    fi
fi

python -m slipstream.main_fastrl \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:-train.parquet}" \
    data.val_files="${VAL:-test.parquet}" \
    data.train_batch_size=$((32 * NODES)) \
    data.max_prompt_length=2048 \
    data.max_response_length=16384 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="${MODEL:-models/Qwen2.5-32B}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.dtype=bfloat16 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.9 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.55 \
    speculative.enable=True \
    speculative.bs_threshold=32 \
    speculative.eagle.spec_model_path="${HEAD:-runs/eagle}" \
    trainer.nnodes="$NODES" \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.total_epochs=1 \
    trainer.test_freq=10 \
    trainer.save_freq=10 \
    trainer.default_local_dir="${OUT:-runs/grpo_32B}" "$@"
