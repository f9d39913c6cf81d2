"""Which training a configuration asks for.

Knows the schema and the rule of `trainer.mode`. Called by the command line and by `loops` before a
run is built.
"""

from __future__ import annotations

from typing import Literal

from slipstream.config.schema import Config
from slipstream.errors import ConfigError

Mode = Literal["sft", "rl", "sft+rl"]

HEAD_ALONE = ("speculative.enable=false", "speculative.train.enable_drafter_training=false")
"""What makes a run's settings those of training a draft head for its policy: whether RL drafts, and
whether a head learns beside it, is nothing to that."""


def resolve_mode(config: Config, *, given_data: bool = False) -> Mode:
    """Which training the configuration asks for; `given_data`: a program gives the prompts.

    `trainer.mode=auto` means SFT where it has steps, RL where it has data and is not switched off,
    and SFT before RL where both hold.

    Raises:
        ConfigError: there is nothing to do, or the mode that is asked for lacks steps or data.
    """
    mode = config.trainer.mode
    endless = config.data.task is not None
    has_sft = config.sft.total_training_steps > 0
    own = config.data.custom_cls.path is not None
    has_rl_data = given_data or endless or own or config.data.train_files is not None
    steps = config.trainer.total_training_steps
    wants_sft = mode in ("sft", "sft+rl") or (mode == "auto" and has_sft)
    wants_rl = mode in ("rl", "sft+rl") or (mode == "auto" and has_rl_data and steps != 0)
    if not wants_sft and not wants_rl:
        raise ConfigError(
            "there is nothing to train: set data.train_files=FILE or data.task=countdown with "
            "trainer.total_training_steps=100 for RL, or sft.total_training_steps=100 for SFT"
        )
    if wants_sft and not has_sft:
        raise ConfigError(f"trainer.mode={mode} has no SFT steps; set sft.total_training_steps=100")
    if wants_rl:
        _check_rl(config, has_data=has_rl_data)
    if wants_sft and wants_rl:
        return "sft+rl"
    return "sft" if wants_sft else "rl"


def _check_rl(config: Config, *, has_data: bool) -> None:
    steps = config.trainer.total_training_steps
    if not has_data:
        raise ConfigError(
            f"trainer.mode={config.trainer.mode} has no prompts; "
            "set data.train_files=FILE or data.task=countdown"
        )
    if steps == 0:
        raise ConfigError(
            f"trainer.mode={config.trainer.mode} with trainer.total_training_steps=0 has no RL "
            "steps; set trainer.total_training_steps=100 or trainer.mode=sft"
        )
    if steps is None and config.data.task is not None:
        raise ConfigError(
            f"data.task={config.data.task} never ends, so the number of RL steps must be given; "
            "set trainer.total_training_steps=100, or 0 for no RL"
        )
