"""`--dry-run`: what a run would do, without doing it.

Prints the settings, what they come to in prompts, samples, tokens and micro-batches, and how much
memory that takes; refuses what the run itself would refuse; and takes one tiny step of everything
that the run has: its model, data, reward, engine, trainer and checkpoint. Leaves nothing behind.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.checkpoint.interrupt import GracefulInterrupt
from slipstream.config.load import CONFIG_FILE, load_config, to_yaml
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.inference.engine.memory import free_bytes
from slipstream.loops import build
from slipstream.loops.batch_table import Batches, batches_of, rows_of
from slipstream.loops.context import initial_policy, open_run
from slipstream.loops.memory_estimate import MemoryEstimate, estimate_memory
from slipstream.loops.phases import check_rl
from slipstream.loops.run import trial
from slipstream.metrics.loggers import check_loggers
from slipstream.metrics.progress import Progress, SteadyConsole
from slipstream.metrics.tables import Page
from slipstream.models.config import ModelConfig
from slipstream.models.policy import PolicyConfig
from slipstream.training.compute_thread import ComputeThread

TINY_PROMPTS = 2
TINY_TOKENS = 16
"""Of the one step: prompts, and tokens of a response."""


def dry_run(config: Config, mode: Mode) -> int:
    """Returns the exit status: 0, or it raises what the run would."""
    page = Page()
    print(to_yaml(config), end="")
    policy, batches = looked_at(config, mode)
    page.title("batches")
    page.table(list(rows_of(batches)))
    page.title("memory")
    if isinstance(policy, ModelConfig):
        _print_memory(page, estimate_memory(config, mode, policy, batches), config)
    else:
        page.line(
            f"what a {policy.family} takes in transformers is not estimated: only the run shows it"
        )
    page.title("one tiny step")
    start = time.perf_counter()
    _tiny_step(config, mode)
    page.line(f"done in {time.perf_counter() - start:.1f} s; nothing is left of it")
    return 0


def looked_at(config: Config, mode: Mode) -> tuple[PolicyConfig, Batches]:
    """Its policy's sizes and its batches, all checked as a run's are. Raises what a run would."""
    build.set_threads(config)
    build.import_external(config)
    folder = Path(config.trainer.default_local_dir)
    check_loggers(config.trainer.logger, folder)
    compute = ComputeThread()
    try:
        progress = Progress(console=SteadyConsole(file=sys.stdout))
        run = open_run(config, folder, progress, GracefulInterrupt(), compute)
        start = initial_policy(config)
        policy = build.model_config(config, run.tokenizer, start)
        build.check_budgets(config, policy, mode)
        if "sft" in mode:
            build.check_demonstrations(config, policy)
        steps = 0
        if "rl" in mode:
            compute.run(lambda: check_rl(run, start))
            steps = build.rl_steps(config, run.data)
        return policy, batches_of(config, mode, rl_steps=steps, held_out=len(run.held_out))
    finally:
        compute.close()


def _print_memory(page: Page, estimate: MemoryEstimate, config: Config) -> None:
    device = build.device_of(config)
    rows = [("the process itself", _size(estimate.base))]
    for name, phase in estimate.phases.items():
        several = len(estimate.phases) > 1
        prefix = f"{name}: " if several else ""
        rows += [(prefix + what, _size(size)) for what, size in phase.held.items()]
        largest = max(phase.one_at_a_time, key=lambda what: phase.one_at_a_time[what])
        rows.append((f"{prefix}{largest}, at its peak", _size(phase.one_at_a_time[largest])))
    free = free_bytes(device)
    rows.append(("at most, all responses at full length", _size(estimate.total)))
    rows.append((f"free on {device.type} now", _size(free)))
    page.table(rows)
    if estimate.total - estimate.base > free:
        page.line(
            "that is more than is free: lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
            "(an optimizer step), actor_rollout_ref.rollout.max_num_seqs (keys and values), or "
            "set actor_rollout_ref.model.enable_gradient_checkpointing=true",
            style="bold red",
        )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _tiny_step(config: Config, mode: Mode) -> None:
    """A step of each phase in a folder beside the run's, on its disk."""
    home = Path(config.trainer.default_local_dir).absolute().parent
    while not home.is_dir():
        home = home.parent
    with TemporaryDirectory(prefix=".dry-run-", dir=home) as folder:
        file = Path(folder) / CONFIG_FILE
        file.write_text(to_yaml(config))
        tiny = load_config(
            tiny_overrides(config, Path(folder) / "run"), file=file, notify=lambda _: None
        )
        trial(tiny, mode)


def tiny_overrides(config: Config, folder: Path) -> list[str]:
    """What makes one small step of `config` in `folder`, whatever the responses are worth. It has
    no schedule."""
    built_in = config.data.task is not None and config.data.val_files is None
    response = min(TINY_TOKENS, config.data.max_response_length)
    return [
        f"trainer.default_local_dir={folder}",
        "trainer.rollout_data_dir=null",
        "trainer.validation_data_dir=null",
        "trainer.resume_mode=disable",
        "trainer.resume_from_path=null",
        "trainer.logger=[file]",
        "trainer.total_training_steps=1",
        "trainer.critic_warmup=0",
        "trainer.sync_every=1",
        "trainer.val_before_train=false",
        "trainer.val_only=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"data.train_batch_size={min(TINY_PROMPTS, config.data.train_batch_size)}",
        f"data.max_response_length={response}",
        f"data.{'val_size' if built_in else 'val_max_samples'}={TINY_PROMPTS}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=null",
        "actor_rollout_ref.rollout.max_model_len=null",
        "critic.ppo_mini_batch_size=null",
        "algorithm.filter_groups.enable=false",
        *(
            f"{key}.optim.{setting}"
            for key in ("actor_rollout_ref.actor", "critic", "sft", "speculative.train")
            for setting in ("lr_scheduler_type=constant", "min_lr_ratio=0")
        ),
        f"sft.total_training_steps={min(1, config.sft.total_training_steps)}",
        f"sft.batch_tokens={min(config.sft.batch_tokens, config.sft.max_length)}",
        "sft.test_freq=-1",
        "sft.save_freq=-1",
    ]
