"""Translates the settings of VERL's SFT trainers, whose keys differ from those of its RL trainers.

`data`, `optim` and `trainer` are sections of SFT there, so the tables of `aliases` do not apply
before this translation. `launchers.sft` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.config.notices import Notices
from slipstream.config.schema import SftSection
from slipstream.config.sources import Assignment
from slipstream.config.suggest import unknown_key
from slipstream.config.tree import options, show
from slipstream.config.verl_defaults import is_default
from slipstream.config.verl_keys import find

_MODEL = "actor_rollout_ref.model"

EPOCHS = "trainer.total_epochs"
SAVE_FREQ = "trainer.save_freq"

RENAMED_SFT: dict[str, str] = {
    "data.train_files": "sft.train_files",
    "data.train_max_samples": "sft.train_max_samples",
    "data.train_batch_size": "sft.train_batch_size",
    "data.max_length": "sft.max_length",
    "data.max_token_len_per_gpu": "sft.max_tokens_per_micro_batch",
    "data.truncation": "sft.truncation",
    "data.messages_key": "sft.messages_key",
    "data.multiturn.messages_key": "sft.messages_key",
    "data.prompt_key": "sft.prompt_key",
    "data.response_key": "sft.response_key",
    "data.ignore_input_ids_mismatch": "sft.ignore_input_ids_mismatch",
    "data.chat_template": f"{_MODEL}.custom_chat_template",
    "model.partial_pretrain": f"{_MODEL}.path",
    "optim.lr_scheduler": "sft.optim.lr_scheduler_type",
    "optim.warmup_style": "sft.optim.lr_scheduler_type",
    "optim.lr_decay_style": "sft.optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "sft.optim.lr_warmup_steps_ratio",
    "optim.beta1": "sft.optim.betas.0",
    "optim.beta2": "sft.optim.betas.1",
    "optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "trainer.total_training_steps": "sft.total_training_steps",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    SAVE_FREQ: "sft.save_freq",
}
"""VERL's key -> ours."""

KEPT_SFT = (
    "data.tokenizer",
    "data.apply_chat_template_kwargs",
    "trainer.default_local_dir",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.seed",
    "trainer.device",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.num_threads",
    "trainer.stage_timeout_s",
    "trainer.default_hdfs_dir",
)
"""Keys that mean the same in VERL's SFT, its RL and here."""

_BY_REASON: dict[str, tuple[str, ...]] = {
    "SFT has no validation loss; `slipstream eval` scores checkpoints": (
        "data.val_files",
        "data.val_max_samples",
        "trainer.test_freq",
    ),
    "micro-batches are filled up to sft.max_tokens_per_micro_batch tokens": (
        "data.micro_batch_size",
        "data.micro_batch_size_per_gpu",
        "data.use_dynamic_bsz",
        "data.balance_dp_token",
        "trainer.balance_batch",
    ),
    "sequences are always packed without padding": ("data.pad_mode", "use_remove_padding"),
    "conversations are read from the column sft.messages_key, if a row has it": (
        "data.multiturn.enable",
    ),
    "the columns tools and enable_thinking are read if a row has them": (
        "data.multiturn.tools_key",
        "data.multiturn.enable_thinking_key",
        "data.tools_key",
        "data.enable_thinking_key",
        "data.enable_thinking_default",
    ),
    "the training process reads the data itself": ("data.use_shm", "data.num_workers"),
    "each process computes whole sequences with all layers": ("ulysses_sequence_parallel_size",),
    "training runs in PyTorch (FSDP2 for several processes)": (
        "engine",
        "engine.*",
        "optim",
        "model",
        "profiler",
        "model.strategy",
        "model.fsdp_config.*",
    ),
    "a checkpoint always has the model, the optimizer and all that a resume needs": (
        "checkpoint.*",
        "trainer.checkpoint.*",
    ),
    "external profilers can be attached": ("profiler.*", "trainer.profile_interval"),
    "Hydra only parses the settings; trainer.default_local_dir sets the run folder": ("hydra.*",),
}

WITHOUT_EFFECT_SFT = {key: why for why, keys in _BY_REASON.items() for key in keys}
"""Key or pattern of VERL's SFT -> why it has no effect."""

DICT_KEYS = {
    "data.prompt_dict_keys": "sft.prompt_key",
    "data.response_dict_keys": "sft.response_key",
}
"""Keys that name an entry of a column -> our key of the column."""

DEFAULTS_SFT: dict[str, Any] = {
    "sft.prompt_key": "question",
    "sft.response_key": "answer",
    # VERL renders text prompts with the chat template.
    "sft.wrap_prompts": True,
    "sft.train_batch_size": 256,
    "sft.max_length": 1024,
}
"""Defaults of VERL's SFT that apply to its launch lines, since they say how rows are read."""


@dataclass(slots=True)
class SftLine:
    """A translated line: our settings, notices and problems. `epochs` sets the number of steps.

    `save_each_epoch` is true if VERL's line saves a checkpoint after each epoch.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notices: Notices = field(default_factory=Notices)
    problems: list[str] = field(default_factory=list)
    epochs: Any = 4
    save_each_epoch: bool = False


def translate(assignments: Iterable[Assignment]) -> SftLine:
    """Translate the assignments of a line for VERL's SFT trainers.

    A key without effect that has VERL's default gives no notice.
    """
    line = SftLine(values=dict(DEFAULTS_SFT))
    entries: dict[str, Any] = {}
    for one in _without_deleted(line, assignments):
        key, value = one.key, one.value
        if value == "???" or key.rpartition(".")[2] == "_target_":
            continue
        if key == EPOCHS:
            line.epochs = value
        elif key in DICT_KEYS:
            entries[DICT_KEYS[key]] = value
        elif key == "data.custom_cls.path" and value is not None:
            line.problems.append(
                f"{key}={show(value)}: SFT reads rows itself, from columns sft.messages_key, or "
                "sft.prompt_key and sft.response_key; set it to null"
            )
        elif key.startswith("data.custom_cls.") or _is_unset(key, value):
            continue
        elif (reason := find(key, WITHOUT_EFFECT_SFT)) is not None:
            if not (one.interpolated or is_default(key, value, SFT_DEFAULTS)):
                line.notices.inert(key, reason, in_file=one.in_file)
        else:
            _rename(line, key, value)
    if "sft.max_tokens_per_micro_batch" not in line.values:
        longest, default = line.values["sft.max_length"], SftSection().max_tokens_per_micro_batch
        if isinstance(longest, int):
            line.values["sft.max_tokens_per_micro_batch"] = max(default, longest)
    for key, names in entries.items():
        column = line.values[key]
        if names and isinstance(column, str):  # `load_config` reports a column of another type
            parts = names if isinstance(names, list) else [names]
            line.values[key] = ".".join([column, *map(str, parts)])
    return line


def _is_unset(key: str, value: Any) -> bool:
    """Return whether null leaves a setting to its default."""
    option = options().get(RENAMED_SFT.get(key, key))
    return value is None and option is not None and not option.nullable


def _rename(line: SftLine, key: str, value: Any) -> None:
    if key == SAVE_FREQ:
        line.save_each_epoch = value == "after_each_epoch"
        if line.save_each_epoch:
            return
    ours = _our_key(key)
    if ours is None:
        line.problems.append(_unknown(key))
    else:
        line.values[ours] = value


def _unknown(key: str) -> str:
    """Return the problem of a key that VERL's SFT does not have."""
    if key in options():
        return f"{key}: VERL's SFT has no such option; remove it"
    return unknown_key(key)


def _our_key(key: str) -> str | None:
    """Return our spelling of a key of VERL's SFT that has an effect; None if it is unknown."""
    if key in RENAMED_SFT:
        return RENAMED_SFT[key]
    if key.startswith("optim."):
        return f"sft.{key}"
    if key.startswith("model."):
        return f"{_MODEL}.{key.removeprefix('model.')}"
    if key.startswith(KEPT_SFT) or key.partition(".")[0] in ("sft", "actor_rollout_ref"):
        return key
    return None


def _without_deleted(line: SftLine, assignments: Iterable[Assignment]) -> list[Assignment]:
    """Return the assignments that no later `~key` deletes, so that defaults apply instead.

    Deleting a key that is neither set nor known is a problem of `line`.
    """
    kept: list[Assignment] = []
    for one in assignments:
        if not one.delete:
            kept.append(one)
            continue
        left = [other for other in kept if not _is_within(other.key, one.key)]
        if len(left) == len(kept) and not _can_be_deleted(one.key):
            line.problems.append(_unknown(one.key))
        kept = left
    return kept


def _can_be_deleted(key: str) -> bool:
    """Return whether VERL's SFT has `key`, or a section of this name."""
    names = (*RENAMED_SFT, *KEPT_SFT, *WITHOUT_EFFECT_SFT, *DICT_KEYS, EPOCHS, "data.custom_cls")
    return (
        any(_is_within(name, key) for name in names)
        or key.startswith("data.custom_cls.")
        or find(key, WITHOUT_EFFECT_SFT) is not None
        or _our_key(key) in options()
    )


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


SFT_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "data.val_files": (None, "~/data/gsm8k/test.parquet"),
    "data.val_max_samples": (-1,),
    "data.micro_batch_size": (None,),
    "data.micro_batch_size_per_gpu": (4,),
    "data.use_dynamic_bsz": (True,),
    "data.balance_dp_token": (False,),
    "data.pad_mode": ("no_padding",),
    "data.multiturn.enable": (False,),
    "data.multiturn.tools_key": ("tools",),
    "data.multiturn.enable_thinking_key": ("enable_thinking",),
    "data.tools_key": ("tools",),
    "data.enable_thinking_key": ("enable_thinking",),
    "data.enable_thinking_default": (None, "none"),
    "data.use_shm": (False,),
    "data.num_workers": (8,),
    "trainer.test_freq": (-1,),
    "trainer.balance_batch": (True,),
    "trainer.profile_interval": ([-1, -1],),
    "trainer.checkpoint.save_contents": (["model", "optimizer", "extra"],),
    "checkpoint.save_contents": (["model", "optimizer", "extra"],),
    "ulysses_sequence_parallel_size": (1,),
    "use_remove_padding": (False, True),
    "model.strategy": ("fsdp", "fsdp2"),
    "model.fsdp_config.model_dtype": ("fp32",),
    "model.fsdp_config.wrap_policy.min_num_params": (0,),
    "model.fsdp_config.cpu_offload": (False,),
    "model.fsdp_config.offload_params": (False,),
    "engine": ("fsdp",),
    "optim": ("fsdp",),
}
"""VERL's defaults of keys without effect."""
