"""Keys of VERL and FastRL that Slipstream does not have, and values that only they support.

`WITHOUT_EFFECT` holds keys that cannot change a result here, such as those for memory, speed,
parallelism, profilers or workers. They are accepted with a notice. `ONLY_NEUTRAL` holds keys of
features that Slipstream does not have. The value that turns the feature off is accepted; any other
value is an error. `REFUSED_VALUES` holds values of our own keys that are an error. `TAKEN_VALUES`
holds those that the launchers of VERL and FastRL take with a warning. `aliases` reads the tables.

In a key, `*` stands for any text. A pattern does not apply to keys that the schema has.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from slipstream.config.engines import ENGINE_KEY, engines_with, generates_with
from slipstream.types import PolicyKind

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"

_RAY = (
    "Ray only starts the processes of trainer.nnodes and trainer.n_gpus_per_node, with its default "
    "settings"
)
_CRITIC = "the critic is trained in the process of the policy"
_LORA = "only the policy can have an adapter"
_OPTIM = f"{_ACTOR}.optim.optimizer selects the optimizer, which runs where the weights are"
_MULTI_TURN = "tokens of the policy are never decoded and tokenized again"

_BY_REASON: dict[str, tuple[str, ...]] = {
    "each process computes whole sequences with all layers; processes (trainer.nnodes, "
    "trainer.n_gpus_per_node) split the batch": (
        f"{_ROLLOUT}.data_parallel_size",
        f"{_ROLLOUT}.expert_parallel_size",
        f"{_ROLLOUT}.pipeline_model_parallel_size",
        f"{_ROLLOUT}.nnodes",
        f"{_ROLLOUT}.n_gpus_per_node",
        "*.ulysses_sequence_parallel_size",
        "*.context_parallel_size",
    ),
    "parameters, gradients and optimizer states stay on the device": (
        "*.fsdp_config.*offload*",
        "*.fsdp.*offload*",
        "*.megatron.*offload*",
        "*.param_offload",
        "*.grad_offload",
        "*.optimizer_offload",
        f"{_MODEL}.enable_activation_offload",
        "critic.model.enable_activation_offload",
    ),
    "actor_rollout_ref.actor.dtype and rollout.dtype set the compute dtype, and trained weights "
    "are float32": (
        "*.fsdp_config.*dtype",
        "*.fsdp_config.mixed_precision*",
        "*.fsdp.*dtype",
        "*.fsdp.mixed_precision*",
    ),
    "weights are always sharded over all processes, and gathered one layer at a time": (
        f"{_ACTOR}.fsdp_config.*",
        f"{_REF}.fsdp_config.*",
    ),
    "training runs in PyTorch (FSDP2 for several processes)": (
        "*.megatron.*",
        "*.veomni.*",
        "*.torchtitan.*",
        "*.automodel.*",
        "model_engine",
        "*@*",
    ),
    "runs do not pass it to a serving engine; rollout.engine_kwargs sets options of servers": (
        f"{_ROLLOUT}.disable_log_stats",
        f"{_ROLLOUT}.layered_summon",
        f"{_ROLLOUT}.layer_name_map.*",
        f"{_ROLLOUT}.multi_stage_wake_up",
        f"{_ROLLOUT}.use_preprocessed_multimodal_input",
        f"{_ROLLOUT}.update_weights_bucket_megabytes",
        f"{_ROLLOUT}.checkpoint_engine.*",
        f"{_ROLLOUT}.cudagraph_capture_sizes",
        f"{_ROLLOUT}.scheduling_policy",
        f"{_ROLLOUT}.skip_tokenizer_init",
        f"{_ROLLOUT}.router_config_path",
        f"{_ROLLOUT}.disaggregation.*",
        f"{_ROLLOUT}.moe_load_balance_metrics_interval",
        f"{_ROLLOUT}.micro_batch_size*",
        f"{_ROLLOUT}.agent.custom_async_server.*",
        f"{_ROLLOUT}.prometheus.*",
        f"{_ROLLOUT}.mtp*",
        f"{_ROLLOUT}.qat*",
        f"{_ROLLOUT}.quantization_config_file",
        f"{_ROLLOUT}.enable_sleep_mode",
        f"{_ROLLOUT}.limit_images",
        f"{_ROLLOUT}.attention_backend",
    ),
    "external profilers can be attached": (
        "*.profiler.*",
        "*.profile.*",
        "*.profile_*",
        "profile.*",
        "global_profiler.*",
        "trainer.npu_profile.*",
        "trainer.*_nsight_options.*",
    ),
    "metrics and recorded rollouts (trainer.logger, trainer.rollout_data_dir) replace traces": (
        f"{_ROLLOUT}.trace.*",
    ),
    "a checkpoint always has the model, the optimizer and all that a resume needs": (
        f"{_ACTOR}.checkpoint.*",
    ),
    "critic and policy share a checkpoint": (
        "critic.checkpoint.*",
        "trainer.max_critic_ckpt_to_keep",
    ),
    "log-probs are computed in chunks (actor.log_prob_chunk_tokens)": (
        f"{_ROLLOUT}.log_prob_*",
        f"{_REF}.log_prob_*",
        "*.entropy_from_logits_with_chunking",
        "*.entropy_from_logits_chunk_size",
        "*.entropy_checkpointing",
    ),
    "sequences are always packed without padding": (
        "*.use_remove_padding",
        "*.pad_to_length",
    ),
    "the built-in decoder has its own kernels": (
        f"{_MODEL}.use_liger",
        f"{_MODEL}.tiled_mlp.*",
        f"{_MODEL}.override_config.attn_implementation",
        f"{_MODEL}.override_config._attn_implementation",
        "*.use_fused_kernels",
        "*.fused_kernel_options.*",
        "*.use_torch_compile",
    ),
    _MULTI_TURN: (
        f"{_ROLLOUT}.multi_turn.use_inference_chat_template",
        f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
        f"{_ROLLOUT}.multi_turn.num_repeat_rollouts",
    ),
    "responses are always generated concurrently; training waits for the batch": (
        f"{_ROLLOUT}.mode",
    ),
    "rollouts always record log-probs": (f"{_ROLLOUT}.calculate_log_probs",),
    "the reference policy runs in the processes of the actor": (
        f"{_REF}.strategy",
        f"{_REF}.rollout_n",
        f"{_REF}.optim.*",
    ),
    f"{_ROLLOUT}.n sets the number of responses per prompt": (f"{_ACTOR}.rollout_n",),
    "training and rollout always share a process": ("actor_rollout_ref.hybrid_engine",),
    "processes have a deadline per stage instead (trainer.stage_timeout_s)": (
        "actor_rollout_ref.nccl_timeout",
        "reward_model.nccl_timeout",
    ),
    "trainer.seed seeds everything, and results are deterministic": (
        f"{_ROLLOUT}.seed",
        f"{_ROLLOUT}.full_determinism",
        f"{_ACTOR}.data_loader_seed",
        "critic.data_loader_seed",
    ),
    "the model reads text only": (
        f"{_ACTOR}.freeze_vision_tower",
        "data.return_multi_modal_inputs",
        "data.image_key",
        "data.video_key",
        "data.audio_key",
        "data.image_patch_size",
        "data.mm_processor_kwargs*",
    ),
    _OPTIM: (
        "*.optim.optimizer_impl",
        "*.optim.use_checkpoint_opt_param_scheduler",
        "*.optim.use_precision_aware_optimizer",
        "*.optim.main_*_dtype",
        "*.optim.exp_avg*_dtype",
        "*.optim.use_layer_wise_distributed_optimizer",
        "*.optim.override_optimizer_config.optimizer_offload_fraction",
        "*.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
        "*.optim.override_optimizer_config.use_precision_aware_optimizer",
        "*.optim.override_optimizer_config.optimizer_cpu_offload",
        "*.optim.override_optimizer_config.fused",
        "*.optim.override_optimizer_config.foreach",
        "*.optim.override_optimizer_config.main_*_dtype",
        "*.optim.override_optimizer_config.exp_avg*_dtype",
        "*.optim.muon_*",
    ),
    "wsd falls as a cosine after the share lr_wsd_stable_steps_ratio of the steps": (
        "*.optim.lr_wsd_*",
    ),
    "the training process reads the data itself": (
        f"{_MODEL}.use_shm",
        "data.dataloader_num_workers",
        "data.filter_overlong_prompts_workers",
        "data.use_shm",
    ),
    "samples always carry their messages, token ids and prompt": (
        "data.return_raw_chat",
        "data.return_raw_input_ids",
        "data.return_full_prompt",
    ),
    "the order of validation prompts does not change the result": ("data.validation_shuffle",),
    "the column data.reward_fn_key selects the reward function": ("reward_model.reward_format",),
    "rewards are always computed during the rollout": (
        "reward_model.launch_reward_fn_async",
        "reward_model.use_reward_loop",
    ),
    "reward managers are named": (
        "reward_manager.module.name",
        "reward.reward_manager.module.name",
        "reward_model.reward_loop_class_name",
    ),
    "the reward model runs in the process of the policy": (
        "reward_model.enable_resource_pool",
        "reward_model.n_gpus_per_node",
        "reward_model.nnodes",
        "reward_model.strategy",
        "reward_model.use_dynamic_bsz",
        "reward_model.forward_max_token_len_per_gpu",
        "reward_model.model.use_*",
        "reward_model.model.fsdp_config.*",
        "reward_model.model.override_config*",
        "reward_model.rollout.*",
        "reward_model.inference.*",
        "reward.reward_model.enable_resource_pool",
        "reward.reward_model.n_gpus_per_node",
        "reward.reward_model.nnodes",
        "reward.reward_model.rollout.*",
    ),
    "it is always the policy's tokenizer": ("reward_model.model.input_tokenizer",),
    f"only {_MODEL}.external_lib is imported": (
        "reward_model.model.external_lib",
        "critic.model.external_lib",
    ),
    "code from checkpoints is never run": (
        "reward_model.model.trust_remote_code",
        "critic.model.trust_remote_code",
    ),
    "it is always computed for the estimators that need it": (
        f"{_ACTOR}.calculate_sum_pi_squared",
    ),
    "the entropy is always computed": (f"{_ACTOR}.calculate_entropy",),
    f"the critic trains on the {_ROLLOUT}.n responses of the rollout": ("critic.rollout_n",),
    "the critic trains all of its weights": (
        "critic.model.target_modules",
        "critic.model.exclude_modules",
        "critic.model.lora_alpha",
        "critic.model.lora.*",
    ),
    _CRITIC: (
        "critic.strategy",
        "critic.nccl_timeout",
        "critic.forward_*",
        "critic.ppo_infer_*",
        "critic.engine.*",
        "critic.fsdp.*",
        "critic.model.fsdp_config.*",
        "critic.model.use_*",
        "critic.model.tiled_mlp.*",
        "critic.model.override_config*",
    ),
    f"{_MODEL}.custom_chat_template is used for all models": ("critic.model.custom_chat_template",),
    "adapters are saved on their own; `slipstream export` merges them": (
        f"{_MODEL}.lora.merge",
        f"{_MODEL}.lora.a2a_experimental",
    ),
    f"{_MODEL}.lora_rank, lora_alpha, target_modules and exclude_modules set the adapter": (
        f"{_MODEL}.lora.*",
    ),
    "there is no such layer or option in dense models of text": (
        "*.qat.*",
        "*.mtp.*",
        "*.router_replay.*",
        f"{_MODEL}.override_config.moe_config.freeze_moe_router",
    ),
    "micro-batches are always balanced by tokens": ("trainer.balance_batch",),
    _RAY: (
        f"{_ROLLOUT}.agent.num_workers",
        "trainer.ray_wait_register_center_timeout",
        "ray_kwargs.*",
        "ray_init.*",
    ),
    "there is one trainer, which waits for the rollouts of its step and keeps them in memory": (
        "trainer.use_legacy_worker_impl",
        "trainer.use_v1",
        "trainer.v1.*",
        "transfer_queue.*",
    ),
    "groups that the filter rejects are replaced one by one": (
        "algorithm.filter_groups.max_inflight_gen_batches",
    ),
    "it applies only if the feature is on": (
        "distillation.*",
        "skip.*",
        f"{_ROLLOUT}.skip_dump_dir",
        f"{_ROLLOUT}.skip.*",
    ),
    "Hydra only parses the settings; trainer.default_local_dir sets the run folder": ("hydra.*",),
}
"""Why keys have no effect -> the keys. The first pattern that matches a key gives the reason."""

WITHOUT_EFFECT: dict[str, str] = {key: why for why, keys in _BY_REASON.items() for key in keys}
"""Key or pattern -> why it has no effect."""

PARALLEL_SIZES = re.compile(r"(tensor|pipeline|expert|data|sequence|context)\w*_parallel_size$")
"""Pattern of keys without effect whose values must be counts."""


@dataclass(frozen=True, slots=True)
class Neutral:
    """A feature that Slipstream does not have: `values` that leave it off, and a remedy.

    If `same_as` names an option, the value of that option is accepted, too.
    """

    values: tuple[Any, ...]
    remedy: str
    same_as: str | None = None


def _off(remedy: str) -> Neutral:
    return Neutral((False, None), remedy)


def _tools_elsewhere(name: str) -> Neutral:
    """Another key of `multi_turn.NAME`."""
    key = f"{_ROLLOUT}.multi_turn.{name}"
    return Neutral((None,), f"set {key} instead, and this key to null", same_as=key)


_BYTES = Neutral(
    (None,),
    "the buffer of responses is limited by bytes and age instead; set it to null, and set "
    "speculative.train.buffer_bytes and speculative.train.lookback_steps",
)
_MANAGER = Neutral(
    ("register", None),
    "reward managers of your own are registered by name, in a module that "
    f"{_MODEL}.external_lib names; set it to register",
)
_MANAGER_FILE = _off(
    f"name the module with your reward manager in {_MODEL}.external_lib, register the manager "
    "there, and set reward_model.reward_manager to its name; set it to null"
)
_CONFIG_OF_CHECKPOINT = _off(
    "the configuration is always that of the checkpoint; set it to null, and edit its config.json"
)
_NO_DROPOUT = Neutral((0, None), "models are trained without dropout; set it to 0")
_REPLAY = Neutral(("disabled", None), "routing replay of MoE models is not supported; set disabled")
_SKIP = _off("replaying recorded rollouts is not supported; set it to false")

ONLY_NEUTRAL: dict[str, Neutral] = {
    f"{_REF}.model": Neutral(
        ({}, None), f"set {_REF}.path to the checkpoint of the reference policy instead"
    ),
    "critic.model.lora_rank": Neutral(
        (0, None), "LoRA is not supported for the critic, which trains all weights; set it to 0"
    ),
    "critic.model.lora.rank": Neutral(
        (0, None), "LoRA is not supported for the critic, which trains all weights; set it to 0"
    ),
    "critic.model.lora_adapter_path": _off(
        "LoRA is not supported for the critic, which trains all weights; set it to null"
    ),
    f"{_MODEL}.lora.type": Neutral(("lora", None), "only plain LoRA is supported; set lora"),
    f"{_MODEL}.lora.dropout": Neutral(
        (0, None), "adapters are trained without dropout; set it to 0"
    ),
    f"{_MODEL}.hf_config_path": _CONFIG_OF_CHECKPOINT,
    "critic.model.hf_config_path": _CONFIG_OF_CHECKPOINT,
    "critic.loss_scale_factor": Neutral(
        (None,),
        f"actor and critic share {_ACTOR}.loss_scale_factor; set it to null",
        same_as=f"{_ACTOR}.loss_scale_factor",
    ),
    f"{_MODEL}.override_config.*dropout*": _NO_DROPOUT,
    f"{_MODEL}.override_config.*_pdrop": _NO_DROPOUT,
    f"{_MODEL}.override_config.*": Neutral(
        ({}, None),
        "only max_position_embeddings can be overridden; edit the checkpoint's config.json",
    ),
    "*.qat.enable": _off("quantization-aware training is not supported; set it to false"),
    "*.mtp.enable*": _off("heads for multi-token prediction are not trained; set it to false"),
    "*.router_replay.mode": _REPLAY,
    "*.load_weight": Neutral((True, None), "weights are always loaded; set it to true"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": _off(
        "routing replay of MoE models is not supported; set it to false"
    ),
    f"{_ROLLOUT}.quantization": _off(
        f"rollouts compute in {_ROLLOUT}.dtype without quantization; set it to null"
    ),
    f"{_ROLLOUT}.logprobs_mode": Neutral(
        ("processed_logprobs", None),
        "rollouts record the log-probs of the distribution that they sample from; set "
        "processed_logprobs",
    ),
    f"{_ROLLOUT}.tools": _tools_elsewhere("tool_config_path"),
    f"{_ROLLOUT}.interactions": _tools_elsewhere("interaction_config_path"),
    "data.tool_config_path": _tools_elsewhere("tool_config_path"),
    "data.function_tool_path": _tools_elsewhere("function_tool_path"),
    "tools": _tools_elsewhere("tool_config_path"),
    f"{_ROLLOUT}.skip_rollout": _SKIP,
    f"{_ROLLOUT}.skip.enable": _SKIP,
    "skip.*.enable": _SKIP,
    "*.optim.override_optimizer_config": Neutral(
        ({}, None), "set options of the optimizer by their own keys (betas, eps, weight_decay)"
    ),
    "*.optim.lr_warmup_init": Neutral((0, None), "the warm-up starts at 0; set it to 0"),
    "*.optim.lr_min": Neutral(
        (0, None), "set it to 0, and set optim.min_lr_ratio, a share of the peak learning rate"
    ),
    "*.optim.lr_start": Neutral((0, None), "the warm-up starts at 0; set it to 0"),
    "*.optim.lr_decay_ratio": Neutral(
        (1, None), "the decay covers all steps after the warm-up; set it to 1"
    ),
    "*.optim.lr_decay_steps": Neutral(
        (None,), "set it to null, and set optim.total_training_steps instead"
    ),
    "*.optim.weight_decay_incr_style": Neutral(
        ("constant", None), "the weight decay is constant; set constant"
    ),
    "reward_manager.source": _MANAGER,
    "reward.reward_manager.source": _MANAGER,
    "reward_model.reward_loop_source": _MANAGER,
    "reward_manager.module.path": _MANAGER_FILE,
    "reward.reward_manager.module.path": _MANAGER_FILE,
    "reward_model.reward_loop_module_path": _MANAGER_FILE,
    "distillation.enabled": _off(
        "set it to false; for on-policy distillation, set "
        "algorithm.adv_estimator=on_policy_distillation and actor_rollout_ref.ref.path=TEACHER"
    ),
    "speculative.train.buffer_max_samples": _BYTES,
    "speculative.train.data_buffer_max_size": _BYTES,
    "speculative.train.data_augment_std": Neutral(
        (0, None),
        "noise of features is uniform, with one width for all positions; set it to 0, and set "
        "speculative.train.feature_noise instead",
    ),
    "speculative.train.enable_step_barrier": _off(
        "one process trains the draft model, so there is no barrier; set it to false"
    ),
    "speculative.train.optim.total_training_steps": Neutral(
        (0, -1, None),
        "the length of the schedule follows from trainer.total_training_steps, "
        "speculative.train.training_interval_steps and speculative.train.updates_per_training; "
        "set it to 0",
    ),
    "trainer.default_hdfs_dir": _off(
        "HDFS is not supported; checkpoints are written to trainer.default_local_dir; set it to "
        "null"
    ),
    "trainer.del_local_ckpt_after_load": _off("it is not supported; set it to false"),
    "trainer.esi_redundant_time": Neutral((0, None), "it is not supported; set it to 0"),
    "trainer.checkpoint_callback_class": _off(
        "there are no callbacks of checkpoints; set it to null"
    ),
    "trainer.v1.trainer_mode": Neutral(
        ("sync", None),
        "training waits for the rollouts of its step; set sync (for stale rollouts, set "
        f"trainer.sync_every or {_ROLLOUT}.partial_rollout)",
    ),
    "trainer.v1.sampler.custom_sampler.path": _off(
        "set it to null; data.sampler.class_path names your own sampler"
    ),
}
"""Key or pattern of a feature that Slipstream does not have -> the values that leave it off."""

REFUSED_VALUES: dict[str, dict[Any, str]] = {
    f"{_ACTOR}.strategy": dict.fromkeys(
        ("megatron", "veomni", "torchtitan", "automodel"),
        "only PyTorch is supported; several processes train with FSDP2; set "
        f"{_ACTOR}.strategy=fsdp2",
    ),
    ENGINE_KEY: dict.fromkeys(
        ("trtllm",),
        f"this engine is not supported; set {engines_with(generates_with(PolicyKind.DECODER))}",
    ),
    "trainer.device": dict.fromkeys(
        ("npu", "xpu"),
        "only CPUs and CUDA are supported; set trainer.device=auto",
    ),
    "trainer.logger": dict.fromkeys(
        ("swanlab", "vemlp_wandb", "clearml"),
        "this logger is not supported (supported: console, file, tensorboard, wandb, mlflow, "
        "trackio); set trainer.logger=[console,file,wandb]",
    ),
    f"{_MODEL}.trust_remote_code": {
        True: "code from checkpoints is never run; "
        f"set {_MODEL}.trust_remote_code=false and use a checkpoint of an "
        "architecture that transformers has"
    },
}
"""Our key -> values that VERL supports and Slipstream does not, each with a remedy."""

TAKEN_VALUES: dict[str, tuple[str, str]] = {
    ENGINE_KEY: (
        "embedded",
        f"is not used: the built-in engine generates the responses ({ENGINE_KEY}=embedded)",
    ),
    f"{_ACTOR}.strategy": (
        "fsdp2",
        f"is not used: PyTorch trains, with FSDP2 for several processes ({_ACTOR}.strategy=fsdp2)",
    ),
    "trainer.device": (
        "auto",
        "is not used: the run computes with CUDA, or on the CPU without it (trainer.device=auto)",
    ),
}
"""Our key -> the value that the launchers of VERL and FastRL set instead of one in
`REFUSED_VALUES`, and what they say about it."""


@functools.cache
def _compiled(tables: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    return [(key, re.compile(re.escape(key).replace(r"\*", ".*"))) for key in tables if "*" in key]


def find(key: str, table: dict[str, Any]) -> Any:
    """Return the entry of `key` or of the first pattern that matches it; None if there is none."""
    if key in table:
        return table[key]
    for pattern, compiled in _compiled(tuple(table)):
        if compiled.fullmatch(key):
            return table[pattern]
    return None
