"""Determines which training a configuration asks for: SFT, RL, or SFT and then RL.

Called by the command line and by programs before they start a run.
"""

from __future__ import annotations

from typing import Literal

from slipstream.config.schema import Config
from slipstream.errors import ConfigError

Mode = Literal["sft", "rl", "sft+rl"]

HEAD_ALONE = ("speculative.enable=false", "speculative.train.enable_drafter_training=false")
"""Overrides for training only a draft head (`slipstream draft`) with the settings of an RL run.

They turn off drafting and co-training, which affect only RL.
"""


def resolve_mode(config: Config, *, given_data: bool = False) -> Mode:
    """Return which training the configuration asks for.

    `given_data` is true if a program supplies the prompts. With `trainer.mode=auto`, SFT runs if
    sft.total_training_steps is above 0. RL runs if it has data and trainer.total_training_steps is
    not 0. If both apply, SFT runs before RL.

    Raises ConfigError if there is nothing to train, or if a requested phase has no steps or data.
    """
    mode = config.trainer.mode
    has_task = config.data.task is not None
    has_sft = config.sft.total_training_steps > 0
    has_class = config.data.custom_cls.path is not None
    has_rl_data = given_data or has_task or has_class or config.data.train_files is not None
    steps = config.trainer.total_training_steps
    wants_sft = mode in ("sft", "sft+rl") or (mode == "auto" and has_sft)
    wants_rl = mode in ("rl", "sft+rl") or (mode == "auto" and has_rl_data and steps != 0)
    if not wants_sft and not wants_rl:
        raise ConfigError(
            "there is nothing to train; for RL, set data.train_files=FILE or data.task=countdown, "
            "and trainer.total_training_steps=100; for SFT, set sft.total_training_steps=100"
        )
    if wants_sft and not has_sft:
        raise ConfigError(
            f"trainer.mode={mode} needs SFT steps, but sft.total_training_steps=0; set "
            "sft.total_training_steps=100"
        )
    if wants_rl:
        _check_rl(config, has_data=has_rl_data)
    if wants_sft and wants_rl:
        return "sft+rl"
    return "sft" if wants_sft else "rl"


def _check_rl(config: Config, *, has_data: bool) -> None:
    steps = config.trainer.total_training_steps
    if not has_data:
        raise ConfigError(
            f"trainer.mode={config.trainer.mode} needs prompts; "
            "set data.train_files=FILE or data.task=countdown"
        )
    if steps == 0:
        raise ConfigError(
            f"trainer.mode={config.trainer.mode} needs RL steps, but "
            "trainer.total_training_steps=0; set trainer.total_training_steps=100 or "
            "trainer.mode=sft"
        )
    if steps is None and config.data.task is not None:
        raise ConfigError(
            f"data.task={config.data.task} generates prompts without end, so the number of RL "
            "steps must be set; set trainer.total_training_steps=100, or "
            "trainer.total_training_steps=0 for no RL"
        )
