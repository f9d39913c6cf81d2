"""What warm-up and learning rate schedules count, and notices about it.

Called by `load` and `validate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slipstream.config.schema import Config
from slipstream.config.schema_actor import RLOptimSection


def schedule_notices(config: Config, assigned: Collection[str]) -> Iterator[str]:
    """Yield notices about RL schedules that a user of other systems may read differently.

    `assigned` are the keys that a user or a recipe set; a setting made on purpose gets no notice.
    """
    if config.trainer.mode == "sft":
        return
    actor, critic = config.actor_rollout_ref.actor, config.critic
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    updates = updates_per_step(batch, mini, actor.ppo_epochs)
    yield from _section("actor_rollout_ref.actor.optim", actor.optim, updates, assigned)
    if critic.enable:
        epochs = actor.ppo_epochs if critic.ppo_epochs is None else critic.ppo_epochs
        updates = updates_per_step(batch, critic.ppo_mini_batch_size or mini, epochs)
        yield from _section("critic.optim", critic.optim, updates, assigned)


def updates_per_step(batch: int, mini: int | None, epochs: int) -> int:
    """Return the optimizer steps of one RL step of `batch` prompts.

    `mini` is the number of prompts per optimizer step, None for all.
    """
    return -(-batch // (mini or batch)) * epochs


def _section(
    key: str, optim: RLOptimSection, updates: int, assigned: Collection[str]
) -> Iterator[str]:
    warms_up = optim.lr_warmup_steps > 0 or optim.lr_warmup_steps_ratio > 0
    unit, first = f"{key}.lr_schedule_unit", f"{key}.zero_indexed_step"
    if (
        updates > 1
        and (warms_up or optim.lr_scheduler_type != "constant")
        and optim.lr_schedule_unit == "rl_step"
        and unit not in assigned
    ):
        yield (
            f"warm-up and schedule of {key} count RL steps, as in VERL, and one RL step has "
            f"{updates} optimizer steps; {unit}=optimizer_step counts optimizer steps"
        )
    if warms_up and optim.zero_indexed_step and first not in assigned:
        yield (
            f"warm-up of {key} starts at learning rate 0, as in VERL, so the first step does not "
            f"change the weights; {first}=false starts at the first positive rate"
        )
