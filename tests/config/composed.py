"""A composed configuration in the manner of VERL, with the keys that `verl_defaults` lists."""

from __future__ import annotations

from typing import Any

from slipstream.config.verl_defaults import DEFAULTS

MODEL = "~/models/deepseek-llm-7b-chat"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

OURS: dict[str, Any] = {
    "data.tokenizer": None,
    "data.train_files": "train.parquet",
    "data.val_files": "test.parquet",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.custom_cls.path": None,
    "data.apply_chat_template_kwargs": {},
    "actor_rollout_ref.model.path": MODEL,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.lora_adapter_path": None,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_scale_factor": None,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ROLLOUT}.name": "???",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    "critic.optim.lr": 1e-5,
    "reward_model.reward_manager": "naive",
    "reward_model.enable": False,
    "custom_reward_function.path": None,
    "algorithm.adv_estimator": "gae",
    "algorithm.filter_groups.enable": False,
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
    "trainer.max_actor_ckpt_to_keep": None,
    # Interpolations, as VERL's files have them.
    f"{ROLLOUT}.prompt_length": "${oc.select:data.max_prompt_length,512}",
    f"{ROLLOUT}.response_length": "${oc.select:data.max_response_length,512}",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": f"${{oc.select:{ACTOR}.use_dynamic_bsz,false}}",
    f"{ACTOR}.checkpoint.load_contents": "${.save_contents}",
    f"{ACTOR}.profiler.save_path": "${oc.select:global_profiler.save_path,null}",
    "actor_rollout_ref.ref.strategy": f"${{{ACTOR}.strategy}}",
    "critic.ppo_mini_batch_size": f"${{oc.select:{ACTOR}.ppo_mini_batch_size,256}}",
    "critic.ppo_micro_batch_size_per_gpu": "${oc.select:.ppo_micro_batch_size,null}",
    "critic.forward_max_token_len_per_gpu": "${.ppo_max_token_len_per_gpu}",
    "critic.model.tokenizer_path": f'${{oc.select:actor_rollout_ref.model.path,"{MODEL}"}}',
    "reward_model.model.input_tokenizer": "${actor_rollout_ref.model.path}",
    "reward_manager.name": "${oc.select:reward_model.reward_manager,naive}",
    "data.tool_config_path": f"${{oc.select:{ROLLOUT}.multi_turn.tool_config_path, null}}",
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    # Classes that Hydra would create.
    f"{ACTOR}._target_": "verl.workers.config.FSDPActorConfig",
    "algorithm.kl_ctrl._target_": "verl.trainer.config.KLControlConfig",
    "reward.sandbox_fusion._target_": "verl.workers.config.SandboxFusionConfig",
    "actor_rollout_ref.model.override_config": {},
}


def composed(**changed: Any) -> dict[str, Any]:
    """Return the nested configuration. `changed` are keys with `__` in place of dots."""
    flat = {key: values[0] for key, values in DEFAULTS.items()} | OURS
    flat |= {key.replace("__", "."): value for key, value in changed.items()}
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if any(other.startswith(f"{key}.") for other in flat):
            continue  # a section
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return tree
