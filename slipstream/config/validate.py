"""Rules between options: combinations of values that have the right types but cannot work.

Each rule is a generator of error messages, and each message ends with a remedy. Rules read the
configuration and the `Hardware` argument, and do not import torch. Called by `load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import date

from slipstream.config.engines import (
    ENGINE_KEY,
    engine_lacks,
    engines_with,
    selected_engine,
    unknown_engine,
)
from slipstream.config.hardware import Hardware
from slipstream.config.inert import options_without_effect
from slipstream.config.rules import WithoutEffect
from slipstream.config.schedules import updates_per_step
from slipstream.config.schema import Config, DataSection
from slipstream.config.schema_actor import (
    ModelSection,
    MultiTurnSection,
    OptimSection,
    ServerSection,
)
from slipstream.config.schema_speculative import MOST_BRANCHES, EagleSection
from slipstream.config.servers import server_rules
from slipstream.config.tree import show
from slipstream.config.val_settings import check_val_settings
from slipstream.config.validate_algorithm import NEEDS_CRITIC, algorithm_rules
from slipstream.config.verl_keys import REFUSED_VALUES
from slipstream.errors import did_you_mean
from slipstream.tree_size import candidate_count

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_UNBOUNDED_BELOW = frozenset({"cispo", "geo_mean", "dppo_tv", "dppo_kl"})
"""Policy losses with which clip_ratio_low may be above 1.

CISPO's paper sets no lower bound. The others do not clip the ratio itself.
"""

_CHUNK_MULTIPLE = 4
"""Copy of `models.numerics.ROW_MULTIPLE`, which cannot be imported here without torch."""


def validate(config: Config, hardware: Hardware, *, complete: bool = True) -> list[str]:
    """Return a message `what is wrong; remedy` for each broken rule.

    With `complete`, a configuration without a model breaks a rule, too.
    """
    problems: list[str] = []
    for rule in (
        _registered,
        _reward_model,
        _sandbox,
        _data,
        _sft_data,
        _lengths,
        _actor,
        _critic,
        _rollout,
        algorithm_rules,
        _run,
    ):
        problems.extend(rule(config))
    problems.extend(_model(config, complete))
    problems.extend(_place(config, hardware))
    problems.extend(server_rules(config, hardware))
    return problems


BUILT_IN_TASKS = ("countdown", "lookup", "reasoning_gym")
"""Built-in tasks of `data.registry`, which is not imported here."""

BUILT_IN_LOGGERS = ("console", "file", "tensorboard", "wandb", "mlflow", "trackio")
"""Built-in loggers of `metrics.loggers`, which is not imported here."""


def _registered(config: Config) -> Iterator[str]:
    """Check the names of tasks, loggers and engines if no user module can register others."""
    if config.actor_rollout_ref.model.external_lib is not None:
        return
    names: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("data.task", config.data.task, BUILT_IN_TASKS),
        *(("trainer.logger", name, BUILT_IN_LOGGERS) for name in config.trainer.logger),
    ]
    for key, name, known in names:
        if name is not None and name not in known and name not in REFUSED_VALUES.get(key, {}):
            yield (
                f"{key}={name} is not known{did_you_mean(name, known)} "
                f"(known: {', '.join(known)}); to use one of your own, set "
                "actor_rollout_ref.model.external_lib=MODULE to a module that registers it"
            )
    name = config.actor_rollout_ref.rollout.name
    if selected_engine(config) is None and name not in REFUSED_VALUES.get(ENGINE_KEY, {}):
        yield unknown_engine(name)


def _reward_model(config: Config) -> Iterator[str]:
    rewards = config.reward_model
    if not rewards.enable:
        if rewards.reward_manager == "model":
            yield (
                "reward_model.reward_manager=model needs a learned reward model; set "
                "reward_model.enable=true and reward_model.model.path=FOLDER"
            )
        return
    if rewards.model.path is None:
        yield (
            "reward_model.enable=true needs a model; set reward_model.model.path=FOLDER, or "
            "reward_model.enable=false"
        )
    if rewards.reward_manager not in ("naive", "model"):
        yield (
            f"reward_model.reward_manager={rewards.reward_manager} calls a reward function, but "
            "reward_model.enable=true scores with a model; set reward_model.reward_manager=naive"
        )
    if config.custom_reward_function.path is not None:
        yield (
            f"custom_reward_function.path={config.custom_reward_function.path} and "
            "reward_model.enable=true both score responses; to add both scores, set "
            "reward_model.terms={NAME: {path: FILE, weight: 1}} and "
            "custom_reward_function.path=null"
        )


def _sandbox(config: Config) -> Iterator[str]:
    rewards, local = config.reward_model, config.reward_model.sandbox
    total = local.total_timeout_s
    if total is not None and total + local.run_timeout_s > rewards.timeout_s:
        yield (
            f"reward_model.sandbox.total_timeout_s={total:g} plus "
            f"reward_model.sandbox.run_timeout_s={local.run_timeout_s:g} for the last program may "
            f"exceed reward_model.timeout_s={rewards.timeout_s:g}, so that the reward fails; set "
            "reward_model.sandbox.total_timeout_s=null, or "
            f"reward_model.timeout_s={total + local.run_timeout_s + 2:g}"
        )
    if rewards.sandbox_fusion.url is None:
        return
    unused = {"python": (local.python is not None, "null")}
    unused["run_untrusted_code_without_isolation"] = (
        local.run_untrusted_code_without_isolation,
        "false",
    )
    for name, (is_set, default) in unused.items():
        if is_set:
            yield (
                f"reward_model.sandbox.{name} applies to programs that run on this machine, but "
                f"reward_model.sandbox_fusion.url={rewards.sandbox_fusion.url} sends them to a "
                f"service; set reward_model.sandbox.{name}={default}, or "
                "reward_model.sandbox_fusion.url=null"
            )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.task is not None:
        for name in ("train_files", "val_files"):
            if getattr(data, name) is not None:
                yield (
                    f"data.task={data.task} generates its prompts, but data.{name} is set, too; "
                    f"set data.task=null or data.{name}=null"
                )
        for name in ("train_max_samples", "val_max_samples"):
            if getattr(data, name) != -1:
                remedy = (
                    "data.val_size=N" if name.startswith("val") else "trainer.total_training_steps"
                )
                yield (
                    f"data.{name}={getattr(data, name)} limits rows of data files, but data.task="
                    f"{data.task} has no files; set data.{name}=-1 and use {remedy}"
                )
    elif data.task_kwargs:
        yield WithoutEffect(
            f"data.task_kwargs={show(data.task_kwargs)} has no effect without a task; set "
            "data.task=countdown, or remove data.task_kwargs"
        )
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(data, name) == 0:
            yield (
                f"data.{name}=0 leaves no data; set data.{name} to a positive number, or to -1 for "
                "all data"
            )
    if data.chat_template_date is not None and not _is_date(data.chat_template_date):
        yield (
            f"data.chat_template_date={show(data.chat_template_date)} is not a date; set "
            "data.chat_template_date=2026-01-31, or null for the day on which the run starts"
        )
    yield from _weights("data", data.mixture_weights, data.train_files)
    yield from _data_classes(data)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _data_classes(data: DataSection) -> Iterator[str]:
    classes = {
        "custom_cls": (data.custom_cls.path, data.custom_cls.name, "path", "name"),
        "datagen": (data.datagen.path, data.datagen.name, "path", "name"),
        "sampler": (
            data.sampler.class_path or data.sampler.class_name,
            data.sampler.class_name,
            "class_path",
            "class_name",
        ),
    }
    for section, (path, name, path_key, name_key) in classes.items():
        if (path is None) != (name is None):
            missing, present = (name_key, path_key) if name is None else (path_key, name_key)
            yield (
                f"data.{section}.{present} is set, but data.{section}.{missing} is not; set both, "
                "or neither"
            )
    for section in ("custom_cls", "sampler"):
        if getattr(data, section).kwargs and classes[section][1] is None:
            yield WithoutEffect(
                f"data.{section}.kwargs has no effect without a class; set "
                f"data.{section}.{classes[section][3]}"
            )
    in_use = [f"data.{section}" for section, (_, name, _, _) in classes.items() if name is not None]
    if in_use and data.task is not None:
        yield (
            f"{in_use[0]} needs a data set, but data.task={data.task} generates its prompts; set "
            "data.task=null"
        )
    if in_use and data.mixture_weights is not None:
        yield (
            f"data.mixture_weights and {in_use[0]} both determine which samples are drawn; set "
            "data.mixture_weights=null"
        )
    if "data.custom_cls" in in_use and "data.datagen" in in_use:
        yield (
            "data.datagen adds rows to the built-in data set, but data.custom_cls replaces it; set "
            "data.custom_cls.path=null, or set data.datagen.path=null and add rows in the method "
            "on_batch_end of the class"
        )
    if "data.datagen" in in_use and data.train_files is None:
        yield (
            "data.datagen adds rows to data.train_files, which is not set; set "
            "data.train_files=FILE"
        )


def _weights(
    section: str, weights: tuple[float, ...] | None, files: tuple[str, ...] | None
) -> Iterator[str]:
    if weights is None:
        return
    count = len(files or ())
    if count != len(weights):
        yield (
            f"{section}.mixture_weights has {len(weights)} numbers, but {section}.train_files has "
            f"{count} files; give one number per file, or set {section}.mixture_weights=null"
        )


def _sft_data(config: Config) -> Iterator[str]:
    sft = config.sft
    if config.trainer.mode == "rl":
        return  # the run has no SFT, whatever a recipe says about it
    yield from _weights("sft", sft.mixture_weights, sft.train_files)
    yield from _optim("sft.optim", sft.optim, sft.total_training_steps or None)
    if sft.total_training_steps == 0:
        return
    if sft.train_files is None and config.data.task is None:
        yield (
            f"sft.total_training_steps={sft.total_training_steps} needs demonstrations; "
            "set sft.train_files=FILE, or data.task=countdown, or sft.total_training_steps=0"
        )
    if sft.train_max_samples == 0:
        yield "sft.train_max_samples=0 leaves no data; set sft.train_max_samples=-1 for all data"
    names = ("max_tokens_per_micro_batch",)
    for name in names if sft.train_batch_size is not None else ("batch_tokens", *names):
        if getattr(sft, name) < sft.max_length:
            yield (
                f"sft.{name}={getattr(sft, name)} is below the maximum length of one "
                f"demonstration, sft.max_length={sft.max_length}; set sft.{name}={sft.max_length} "
                f"or sft.max_length={getattr(sft, name)}"
            )


def _optim(section: str, optim: OptimSection, run_steps: int | None) -> Iterator[str]:
    """Check one optimizer; `run_steps` is the number of steps of its schedule in the run, None if
    unknown."""
    steps = run_steps if optim.total_training_steps == -1 else optim.total_training_steps
    if steps is not None:
        yield from no_decay(section, optim, steps, max(optim.lr_warmup_steps, 0))
    if optim.muon_lr is not None and optim.optimizer != "Muon":
        yield WithoutEffect(
            f"{section}.muon_lr={optim.muon_lr:g} has no effect with {section}.optimizer="
            f"{optim.optimizer}; set {section}.optimizer=Muon or {section}.muon_lr=null"
        )
    if max(optim.betas) >= 1:
        yield (
            f"{section}.betas={list(optim.betas)}: both must be below 1; set "
            f"{section}.betas=[0.9,0.999]"
        )
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        yield (
            f"{section}.lr_warmup_steps={optim.lr_warmup_steps} and "
            f"{section}.lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio:g} both set the length "
            "of the warm-up; "
            f"set {section}.lr_warmup_steps=-1 or {section}.lr_warmup_steps_ratio=0"
        )
    if optim.min_lr_ratio > 0 and optim.lr_scheduler_type == "constant":
        yield WithoutEffect(
            f"{section}.min_lr_ratio={optim.min_lr_ratio:g} has no effect with "
            f"{section}.lr_scheduler_type=constant; "
            f"set {section}.lr_scheduler_type=cosine or {section}.min_lr_ratio=0"
        )
    for name, users in (("num_cycles", ("cosine", "wsd")), ("lr_wsd_stable_steps_ratio", ("wsd",))):
        value, default = getattr(optim, name), getattr(OptimSection(), name)
        if value != default and optim.lr_scheduler_type not in users:
            yield WithoutEffect(
                f"{section}.{name}={value:g} has no effect with {section}.lr_scheduler_type="
                f"{optim.lr_scheduler_type}; set {section}.lr_scheduler_type={users[0]} or "
                f"{section}.{name}={default:g}"
            )


def no_decay(section: str, optim: OptimSection, steps: int, warmup: int) -> Iterator[str]:
    """Yield a message if `steps` steps end before the decay of the learning rate starts.

    `warmup` is the number of warm-up steps.
    """
    if optim.lr_scheduler_type != "constant" and steps <= warmup:
        yield (
            f"{section}.lr_scheduler_type={optim.lr_scheduler_type} has no steps for the decay: "
            f"{steps} steps, {warmup} of them for warm-up; "
            f"set {section}.lr_scheduler_type=constant or more steps"
        )


def _critic(config: Config) -> Iterator[str]:
    critic, batch = config.critic, config.data.train_batch_size
    if config.algorithm.adv_estimator not in NEEDS_CRITIC and not critic.enable:
        return
    yield from _optim("critic.optim", critic.optim, None)
    mini = critic.ppo_mini_batch_size
    if mini is not None and batch % mini:
        fitting = next(size for size in range(min(mini, batch), 0, -1) if batch % size == 0)
        yield (
            f"data.train_batch_size={batch} is not a multiple of critic.ppo_mini_batch_size={mini};"
            f" set critic.ppo_mini_batch_size={fitting}"
        )
    if critic.use_dynamic_bsz and critic.ppo_micro_batch_size_per_gpu is not None:
        yield WithoutEffect(
            f"critic.ppo_micro_batch_size_per_gpu={critic.ppo_micro_batch_size_per_gpu} has no "
            "effect with critic.use_dynamic_bsz=true; set critic.use_dynamic_bsz=false or "
            "critic.ppo_micro_batch_size_per_gpu=null"
        )
    rows = critic.ppo_micro_batch_size_per_gpu
    mini = mini or config.actor_rollout_ref.actor.ppo_mini_batch_size
    yield from _micro_batch(config, "critic", rows, mini)
    if critic.use_dynamic_bsz is False and not (
        rows or config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    ):
        yield (
            "critic.use_dynamic_bsz=false needs a micro-batch size; set "
            "critic.ppo_micro_batch_size_per_gpu=8 or critic.use_dynamic_bsz=null"
        )
    if critic.model.tokenizer_path is not None and critic.model.path is None:
        yield WithoutEffect(
            f"critic.model.tokenizer_path={critic.model.tokenizer_path} has no effect without "
            "critic.model.path, because the critic then starts from the policy; set "
            "critic.model.tokenizer_path=null or critic.model.path=FOLDER"
        )


def _lengths(config: Config) -> Iterator[str]:
    needed = config.data.max_prompt_length + config.data.max_response_length
    total = f"data.max_prompt_length + data.max_response_length = {needed}"
    limits: dict[str, int | None] = {
        f"{_ROLLOUT}.max_model_len": config.actor_rollout_ref.rollout.max_model_len,
    }
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        limits[f"{_ACTOR}.ppo_max_token_len_per_gpu"] = (
            config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        )
    if config.algorithm.adv_estimator in NEEDS_CRITIC or config.critic.enable:
        limits["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
    init = config.actor_rollout_ref.model.init
    if init is not None:
        limits[f"{_MODEL}.init.max_position_embeddings"] = init.max_position_embeddings
        has_sft = config.sft.total_training_steps and config.trainer.mode != "rl"
        if has_sft and init.max_position_embeddings < config.sft.max_length:
            yield (
                f"{_MODEL}.init.max_position_embeddings={init.max_position_embeddings} is below "
                f"sft.max_length={config.sft.max_length}; "
                f"set {_MODEL}.init.max_position_embeddings={config.sft.max_length}"
            )
    for key, limit in limits.items():
        if limit is not None and limit < needed:
            yield (
                f"{key}={limit} is below {total}; set {key}={needed}, or lower "
                "data.max_prompt_length or data.max_response_length"
            )


def _micro_batch(config: Config, section: str, rows: int | None, mini: int | None) -> Iterator[str]:
    """Check that a micro-batch of `rows` sequences is not larger than an optimizer step.

    An optimizer step trains on `mini` prompts; None means on the whole batch.
    """
    sequences = _sequences(config, mini)
    if rows is not None and rows > sequences:
        yield (
            f"{section}.ppo_micro_batch_size_per_gpu={rows} is above the {sequences} sequences of "
            f"an optimizer step (ppo_mini_batch_size or data.train_batch_size, times {_ROLLOUT}.n);"
            f" set {section}.ppo_micro_batch_size_per_gpu={sequences}"
        )


def _sequences(config: Config, mini: int | None) -> int:
    """Return the sequences of an optimizer step on `mini` prompts; None means the whole batch."""
    return (mini or config.data.train_batch_size) * config.actor_rollout_ref.rollout.n


def _actor(config: Config) -> Iterator[str]:
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    if mini is not None and mini > batch:
        yield (
            f"{_ACTOR}.ppo_mini_batch_size={mini} is above data.train_batch_size={batch}; "
            f"set {_ACTOR}.ppo_mini_batch_size={batch} or data.train_batch_size={mini}"
        )
    elif mini is not None and batch % mini:
        fitting = max(size for size in range(1, mini + 1) if batch % size == 0)
        yield (
            f"data.train_batch_size={batch} is not a multiple of {_ACTOR}.ppo_mini_batch_size="
            f"{mini}; set {_ACTOR}.ppo_mini_batch_size={fitting}"
        )
    if actor.log_prob_chunk_tokens % _CHUNK_MULTIPLE:
        fitting = -(-actor.log_prob_chunk_tokens // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
        yield (
            f"{_ACTOR}.log_prob_chunk_tokens={actor.log_prob_chunk_tokens} is not a multiple of "
            f"{_CHUNK_MULTIPLE}; set {_ACTOR}.log_prob_chunk_tokens={fitting}"
        )
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        yield (
            f"{_ACTOR}.use_dynamic_bsz=false needs a micro-batch size; set "
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu={min(8, _sequences(config, mini))} or "
            f"{_ACTOR}.use_dynamic_bsz=true"
        )
    yield from _micro_batch(config, _ACTOR, actor.ppo_micro_batch_size_per_gpu, mini)
    if actor.clip_ratio_c <= 1:
        yield (
            f"{_ACTOR}.clip_ratio_c={actor.clip_ratio_c:g}: the bound of dual-clip PPO must be "
            f"above 1; set {_ACTOR}.clip_ratio_c=3"
        )
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    if low > 1 and actor.policy_loss.loss_mode not in _UNBOUNDED_BELOW:
        yield (
            f"{_ACTOR}.clip_ratio_low (or clip_ratio) = {low:g} is above 1, so the lower clipping "
            f"bound 1 - {low:g} of the ratio is negative; set {_ACTOR}.clip_ratio_low=0.2"
        )
    modes = (actor.loss_agg_mode, config.critic.loss_agg_mode)
    if actor.loss_scale_factor is not None and "seq-mean-token-sum-norm" not in modes:
        yield WithoutEffect(
            f"{_ACTOR}.loss_scale_factor={actor.loss_scale_factor:g} has no effect with "
            f"{_ACTOR}.loss_agg_mode={actor.loss_agg_mode}; set {_ACTOR}.loss_scale_factor=null or "
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
        )
    rounds = config.trainer.total_training_steps or None
    if actor.optim.lr_schedule_unit == "optimizer_step":
        rounds = rounds and rounds * updates_per_step(batch, mini, actor.ppo_epochs)
    yield from _optim(f"{_ACTOR}.optim", actor.optim, rounds)


def _model(config: Config, complete: bool) -> Iterator[str]:
    model = config.actor_rollout_ref.model
    init = model.init
    if model.path is not None and init is not None:
        yield (
            f"{_MODEL}.path={model.path} and {_MODEL}.init both name a model; "
            f"set {_MODEL}.init=null or {_MODEL}.path=null"
        )
    if model.implementation == "transformers" and init is not None:
        yield (
            f"{_MODEL}.implementation=transformers needs a checkpoint, but {_MODEL}.init "
            "initializes the built-in decoder with random weights; set "
            f"{_MODEL}.implementation=auto"
        )
    if complete and model.path is None and init is None:
        yield (
            f"no model is set; set {_MODEL}.path=FOLDER to a Hugging Face checkpoint, or "
            f"{_MODEL}.init.num_layers=12 for a model with random weights"
        )
    yield from _lora(model)
    if init is None:
        return
    key = f"{_MODEL}.init"
    engine = selected_engine(config)
    multiple = 1 if engine is None else engine.capabilities.width_multiple
    if init.head_dim is None and init.hidden_size % init.num_heads:
        unit = init.num_heads * max(multiple, 2)
        fitting = -(-init.hidden_size // unit) * unit
        yield (
            f"{key}.hidden_size={init.hidden_size} is not a multiple of {key}.num_heads="
            f"{init.num_heads}; set {key}.hidden_size={fitting} or {key}.head_dim=64"
        )
        return
    if init.num_heads % init.num_kv_heads:
        yield (
            f"{key}.num_heads={init.num_heads} is not a multiple of {key}.num_kv_heads="
            f"{init.num_kv_heads}; set {key}.num_kv_heads={init.num_heads}"
        )
    width = init.head_dim or init.hidden_size // init.num_heads
    sizes = {"hidden_size": init.hidden_size, "intermediate_size": init.intermediate_size}
    for name, size in {**sizes, "head_dim": width}.items():
        if size % multiple:
            yield (
                f"{key}.{name}={size} is not a multiple of {multiple}, which the "
                f"{config.actor_rollout_ref.rollout.name} engine needs; set {key}.{name}="
                f"{-(-size // multiple) * multiple}"
            )
    if multiple % 2 and width % 2:
        yield (
            f"{key}: the head width is odd ({width}), but rotary embeddings need an even width; "
            f"set {key}.head_dim={width + 1}"
        )


def _lora(model: ModelSection) -> Iterator[str]:
    defaults = ModelSection()
    if model.lora_rank and not model.target_modules:
        yield (
            f"{_MODEL}.target_modules is empty with {_MODEL}.lora_rank={model.lora_rank}; set "
            f"{_MODEL}.target_modules=all-linear"
        )
    if model.lora_rank and model.lora_alpha == 0:
        yield (
            f"{_MODEL}.lora_alpha=0 multiplies the adapter's output by 0; set "
            f"{_MODEL}.lora_alpha={model.lora_rank}"
        )
    names: tuple[str, ...] = ("target_modules", "exclude_modules")
    if model.lora_adapter_path is not None:
        # Rank and alpha are compared with the adapter's when it is read (`add_adapter`).
        reason = f"{_MODEL}.lora_adapter_path, because the adapter has its own"
        remedy = f"{_MODEL}.lora_adapter_path=null"
    elif model.lora_rank == 0:
        reason, remedy = f"{_MODEL}.lora_rank=0", f"{_MODEL}.lora_rank=8"
        names = ("lora_alpha", *names)
    else:
        return
    for name in names:
        value, default = getattr(model, name), getattr(defaults, name)
        # Scripts for VERL switch LoRA off with lora_rank=0 lora_alpha=0.
        if value not in (default, 0):
            yield WithoutEffect(
                f"{_MODEL}.{name}={show(value)} has no effect with {reason}; set {remedy} or "
                f"{_MODEL}.{name}={show(default)}"
            )


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.do_sample and rollout.temperature == 0:
        yield (
            f"{_ROLLOUT}.do_sample=true needs a temperature above 0; set {_ROLLOUT}.temperature=1 "
            f"or {_ROLLOUT}.do_sample=false"
        )
    yield from check_val_settings(config)
    if rollout.top_p == 0:
        yield f"{_ROLLOUT}.top_p=0 excludes all tokens; set {_ROLLOUT}.top_p=1"
    yield from _multi_turn(config)
    if rollout.partial_rollout and rollout.over_sample_rate == 0:
        yield WithoutEffect(
            f"{_ROLLOUT}.partial_rollout=true has no effect with {_ROLLOUT}.over_sample_rate=0, "
            "because no response is stopped early; "
            f"set {_ROLLOUT}.over_sample_rate=0.5 or {_ROLLOUT}.partial_rollout=false"
        )


TASKS_WITH_TOOLS = ("lookup",)
"""Tasks of `environment.tasks.registry`, which is not imported here."""

_TOOL_KEYS = (
    "function_tool_path",
    "tool_config_path",
    "mcp_config_path",
    "interaction_config_path",
)


_EPISODE_OPTIONS = ("history", "max_tool_response_tokens")
_LIMITS = (
    "max_assistant_turns",
    "max_user_turns",
    "max_tool_seconds",
    "max_parallel_calls",
    "max_tool_response_length",
    "tool_response_truncate_side",
)


def _multi_turn(config: Config) -> Iterator[str]:
    settings, key = config.actor_rollout_ref.rollout.multi_turn, f"{_ROLLOUT}.multi_turn"
    given = [name for name in _TOOL_KEYS if getattr(settings, name) is not None]
    if settings.environment.path is not None:
        for name in given:
            yield f"{key}.environment.path replaces {key}.{name}; set one of them to null"
        if settings.python_tool:
            yield f"{key}.environment.path replaces {key}.python_tool; set it to false"
    # A user's module can register tools.
    known = config.actor_rollout_ref.model.external_lib is None
    without = not given and not settings.python_tool and settings.environment.path is None
    none = known and without and config.data.task not in TASKS_WITH_TOOLS
    if settings.enable and none:
        yield (
            f"{key}.enable=true: there are no tools and no interactions; set one of "
            f"{', '.join(f'{key}.{name}' for name in _TOOL_KEYS)}, {key}.environment.path, or "
            f"{key}.enable=false"
        )
    if settings.enable is False or none:
        agent = config.actor_rollout_ref.rollout.agent
        loops = (agent.agent_loop_config_path, agent.custom_generate_function_path)
        # Agent loops read the limits of turns and answers.
        own = any(path is not None for path in loops) or not known
        for name in (*_EPISODE_OPTIONS, *(() if own else _LIMITS)):
            value, off = getattr(settings, name), getattr(MultiTurnSection(), name)
            if value != off:
                yield WithoutEffect(
                    f"{key}.{name}={value} has no effect without tools, interactions and an "
                    f"environment; set one of them, or {key}.{name}="
                    f"{'null' if off is None else off}"
                )
    if settings.enable is False:
        if settings.python_tool:
            yield WithoutEffect(
                f"{key}.python_tool=true has no effect with {key}.enable=false; set "
                f"{key}.enable=true or {key}.python_tool=false"
            )
        for name in given:
            yield WithoutEffect(
                f"{key}.{name}={getattr(settings, name)} has no effect with {key}.enable=false; "
                f"set {key}.enable=true or {key}.{name}=null"
            )


def _servers(config: Config) -> Iterator[str]:
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    server, defaults = rollout.server, ServerSection()
    names = [field.name for field in fields(defaults)]
    changed = [name for name in names if getattr(server, name) != getattr(defaults, name)]
    if engine_lacks(config, lambda engine: engine.servers):
        remedy = engines_with(lambda engine: engine.servers)
        for name in changed:
            yield WithoutEffect(
                f"{key}.server.{name}={show(getattr(server, name))} has no effect with "
                f"{ENGINE_KEY}={rollout.name}; set {remedy}, or remove {key}.server.{name}"
            )
        if any(rollout.engine_kwargs.values()):
            yield WithoutEffect(
                f"{key}.engine_kwargs={show(rollout.engine_kwargs)} has no effect with "
                f"{ENGINE_KEY}={rollout.name}; set {remedy}, or remove {key}.engine_kwargs"
            )
    elif server.urls:
        for name in changed:
            if name in ("replicas", "python", "startup_timeout_s"):
                yield WithoutEffect(
                    f"{key}.server.{name}={show(getattr(server, name))} has no effect with "
                    f"{key}.server.urls, because the run starts no server; remove one of them"
                )


def _run(config: Config) -> Iterator[str]:
    trainer = config.trainer
    yield from _servers(config)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield (
            "trainer.resume_mode=resume_path needs a checkpoint, but trainer.resume_from_path is "
            "not set; set trainer.resume_from_path=FOLDER or trainer.resume_mode=auto"
        )
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        yield WithoutEffect(
            f"trainer.resume_from_path={trainer.resume_from_path} has no effect with "
            f"trainer.resume_mode={trainer.resume_mode}; set trainer.resume_mode=resume_path or "
            "trainer.resume_from_path=null"
        )
    if config.speculative.enable:
        yield from _speculation(config)
    yield from _drafter(config)
    yield from options_without_effect(config.speculative)
    if config.speculative.train.enable_drafter_training:
        yield from _cotraining(config)
    if config.custom_reward_function.path is None and config.custom_reward_function.reward_kwargs:
        yield WithoutEffect(
            "custom_reward_function.reward_kwargs has no effect without a reward function; "
            "set custom_reward_function.path=FILE, or remove custom_reward_function.reward_kwargs"
        )


def _speculation(config: Config) -> Iterator[str]:
    speculative, eagle = config.speculative, config.speculative.eagle
    key = "speculative.eagle"
    if engine_lacks(config, lambda engine: engine.drafts):
        yield (
            f"speculative.enable=true: {ENGINE_KEY}={config.actor_rollout_ref.rollout.name} does "
            f"not support drafts; set {engines_with(lambda engine: engine.drafts)} or "
            "speculative.enable=false"
        )
    trains_head = speculative.train.enable_drafter_training
    if speculative.drafts_with_head and eagle.spec_model_path is None and not trains_head:
        yield (
            f"speculative.spec_strategy={speculative.spec_strategy} needs a draft model; train one "
            f"with `slipstream draft` and set {key}.spec_model_path=FOLDER, or set "
            "speculative.train.enable_drafter_training=true to train one during RL, or set "
            "speculative.spec_strategy=history or quantized"
        )
    if eagle.spec_topk > MOST_BRANCHES:
        yield (
            f"{key}.spec_topk={eagle.spec_topk} is above the maximum, {MOST_BRANCHES} tokens per "
            f"level of a tree; set {key}.spec_topk={MOST_BRANCHES} or less"
        )
    if eagle.spec_topk == 1 and eagle.spec_verify_tokens not in (None, eagle.spec_steps + 1):
        yield (
            f"{key}.spec_verify_tokens={eagle.spec_verify_tokens}: verifying a chain of "
            f"{key}.spec_steps={eagle.spec_steps} draft tokens needs {eagle.spec_steps + 1} "
            f"tokens; set {key}.spec_verify_tokens=null"
        )
    if eagle.spec_topk > 1 and not speculative.drafts_with_head:
        yield (
            f"{key}.spec_topk={eagle.spec_topk} drafts trees, but speculative.spec_strategy="
            f"{speculative.spec_strategy} drafts only chains; set {key}.spec_topk=1, or "
            "speculative.spec_strategy=union to merge history drafts into trees"
        )
    elif eagle.spec_topk > 1:
        yield from _tree(eagle)


def _tree(eagle: EagleSection) -> Iterator[str]:
    key, topk = "speculative.eagle", eagle.spec_topk
    candidates = candidate_count(eagle.spec_steps, topk)
    rows = eagle.spec_verify_tokens
    if rows is None:
        yield (
            f"{key}.spec_topk={topk} drafts trees, but {key}.spec_verify_tokens is not set; set it "
            "to the number of tokens to verify per request, including the last known token, for "
            f"example {key}.spec_verify_tokens=16"
        )
    elif not 2 <= rows <= candidates + 1:
        yield (
            f"{key}.spec_verify_tokens={rows} must be at least 2, and at most {candidates + 1}: "
            f"{key}.spec_steps={eagle.spec_steps} with {key}.spec_topk={topk} give at most "
            f"{candidates} draft tokens; set {key}.spec_verify_tokens={candidates + 1} or less"
        )


def _drafter(config: Config) -> Iterator[str]:
    train, draft = config.speculative.train, config.speculative.draft
    optim, key = draft.optim, "speculative.draft.optim"
    steps = draft.total_training_steps
    if optim.lr_scheduler_type != "constant" and steps <= optim.lr_warmup_steps:
        yield (
            f"{key}.lr_scheduler_type={optim.lr_scheduler_type} has no steps for the decay: "
            f"speculative.draft.total_training_steps={steps}, {key}.lr_warmup_steps="
            f"{optim.lr_warmup_steps}; set {key}.lr_scheduler_type=constant or more steps"
        )
    if train.checkpoint_path is not None:
        yield (
            f"speculative.train.checkpoint_path={train.checkpoint_path} is not supported, because "
            "the run's checkpoints contain the draft model; set "
            "speculative.train.checkpoint_path=null"
        )
    for name, settings in (("draft", draft.optim), ("train", train.optim)):
        key = f"speculative.{name}.optim"
        if max(settings.betas) >= 1:
            yield (
                f"{key}.betas={list(settings.betas)}: both must be below 1; set "
                f"{key}.betas=[0.9,0.95]"
            )
        if (settings.min_lr_ratio or 0) > 1:
            yield (
                f"{key}.min_lr_ratio={settings.min_lr_ratio:g} is above 1; set {key}.min_lr_ratio=0"
            )
    value_weight = 1 if train.value_weight is None else train.value_weight
    others = train.soft_weight, train.acceptance_weight, train.topk_mass_weight
    if not (value_weight or any(others)):
        yield (
            "speculative.train.value_weight=0, soft_weight=0, acceptance_weight=0 and "
            "topk_mass_weight=0 leave no loss to train a draft model with; set "
            "speculative.train.value_weight=1, or speculative.train.acceptance_weight=1"
        )
    states = "speculative.train.collect_hidden_states_from_engine"
    # With speculative.enable=true, `_speculation` already reports an engine without drafts.
    if (
        train.collect_hidden_states_from_engine
        and not (config.speculative.enable and engine_lacks(config, lambda engine: engine.drafts))
        and engine_lacks(config, lambda engine: engine.hidden_states)
    ):
        yield (
            f"{states}=true: {ENGINE_KEY}={config.actor_rollout_ref.rollout.name} returns no "
            f"hidden states; set {engines_with(lambda engine: engine.hidden_states)}, or "
            f"{states}=false to use those of the trainer's forward pass"
        )


def _cotraining(config: Config) -> Iterator[str]:
    speculative, train = config.speculative, config.speculative.train
    key = "speculative.train"
    off = f"{key}.enable_drafter_training=false"
    if not speculative.drafts_with_head:
        yield (
            f"{key}.enable_drafter_training=true trains a draft model, but rollouts do not use it "
            f"with speculative.enable={show(speculative.enable)} "
            f"speculative.spec_strategy={speculative.spec_strategy}; "
            f"set speculative.enable=true speculative.spec_strategy=eagle, or {off}"
        )
    eagle = speculative.eagle
    if (
        isinstance(eagle.draft_vocab_size, int)
        and eagle.spec_model_path is None
        and eagle.spec_algorithm == "EAGLE3"
    ):
        yield (
            f"speculative.eagle.draft_vocab_size={eagle.draft_vocab_size}: the draft vocabulary is "
            "chosen by token counts of responses, and a draft model created by RL has none yet; "
            "train one with `slipstream draft` first and set speculative.eagle.spec_model_path="
            "FOLDER, or set speculative.eagle.draft_vocab_size=null, or "
            "speculative.eagle.spec_algorithm=EAGLE"
        )
    if train.min_workers_for_training != 1:
        yield (
            f"{key}.min_workers_for_training={train.min_workers_for_training} is not supported: "
            f"draft training has one worker; set {key}.min_workers_for_training=1"
        )
    if train.long_share > 1:
        yield f"{key}.long_share={train.long_share:g} is above 1; set {key}.long_share=0.25"
    if train.held_out_every < 2:
        yield (
            f"{key}.held_out_every={train.held_out_every} holds out all responses and leaves no "
            f"training data; set {key}.held_out_every=8"
        )
    if train.max_seq_len < 3:
        yield (
            f"{key}.max_seq_len={train.max_seq_len} is too short to train a draft model; set "
            f"{key}.max_seq_len=8192"
        )


def _place(config: Config, hardware: Hardware) -> Iterator[str]:
    trainer = config.trainer
    has = f"this machine has {hardware.gpus} usable GPU{'' if hardware.gpus == 1 else 's'}"
    if trainer.n_gpus_per_node > hardware.gpus and trainer.device != "cpu":
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: {has}; set "
            f"trainer.n_gpus_per_node={hardware.gpus}, or trainer.device=cpu to start "
            f"{trainer.n_gpus_per_node} CPU process{'' if trainer.n_gpus_per_node == 1 else 'es'}"
        )
    if trainer.nnodes * max(1, trainer.n_gpus_per_node) > 1:
        for problem, remedy in _single_process_only(config):
            yield (
                f"trainer.nnodes={trainer.nnodes} trainer.n_gpus_per_node="
                f"{trainer.n_gpus_per_node} use several processes: {problem}; set {remedy}, or "
                f"trainer.nnodes=1 trainer.n_gpus_per_node={min(1, trainer.n_gpus_per_node)}"
            )
    if trainer.device == "cuda" and hardware.gpus == 0:
        yield f"trainer.device=cuda: {has}; set trainer.device=cpu"


def _single_process_only(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a problem and a remedy for each setting that works only in a single process."""
    if config.algorithm.adv_estimator == "gae":
        yield (
            "algorithm.adv_estimator=gae trains a critic, which supports only one process",
            "algorithm.adv_estimator=grpo",
        )
    if config.critic.enable:
        yield (
            "critic.enable=true trains a critic, which supports only one process",
            "critic.enable=false",
        )
    if config.speculative.train.collect_hidden_states_from_engine:
        yield (
            "speculative.train.collect_hidden_states_from_engine=true supports only one process",
            "speculative.train.collect_hidden_states_from_engine=false",
        )
    if engine_lacks(config, lambda engine: engine.several_processes):
        yield (
            f"{ENGINE_KEY}={config.actor_rollout_ref.rollout.name} supports only one process",
            engines_with(lambda engine: engine.several_processes),
        )
