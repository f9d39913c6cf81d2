#!/usr/bin/env bash
# Trains an EAGLE-3 draft head for a fixed model, before RL, as FastRL's eagle-train does. The head
# learns in rounds from the model's own responses to your prompts. The responses are not stored on
# disk.
#
#   MODEL=models/Qwen2.5-7B-Instruct TRAIN=train.parquet VAL=test.parquet examples/eagle_train.sh
#
# You can append settings (key=value). To use the head in RL, set
# speculative.eagle.spec_model_path to the output folder.
set -euo pipefail

slipstream draft \
    actor_rollout_ref.model.path="${MODEL:-models/Qwen2.5-0.5B-Instruct}" \
    data.train_files="${TRAIN:-train.parquet}" \
    data.val_files="${VAL:-test.parquet}" \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    speculative.eagle.spec_algorithm=EAGLE3 \
    speculative.eagle.draft_vocab_size=32768 \
    speculative.draft.total_training_steps=2400 \
    speculative.draft.optim.lr=1e-4 \
    trainer.default_local_dir="${OUT:-runs/eagle}" "$@"
