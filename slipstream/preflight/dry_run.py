"""`--dry-run` checks the settings of a run and runs one tiny step.

It prints the settings, the sizes of batches and micro-batches, and a memory estimate. It raises the
same errors for invalid settings as the run itself. Then it runs one tiny step with the run's
model, data, rewards, engine, trainer and checkpoints. It deletes all files that it wrote.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from slipstream.build.data import rl_steps
from slipstream.build.policy import (
    device_of,
    initial_policy,
    max_model_len,
    memory_sharers,
    model_config,
    process_count,
)
from slipstream.build.process import import_external, set_threads
from slipstream.checkpoint.interrupt import GracefulInterrupt
from slipstream.config.launch import INTERRUPTED
from slipstream.config.load import CONFIG_FILE, load_config, to_yaml
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.errors import CheckpointError, ConfigError, reason_of
from slipstream.inference.engine.memory import free_bytes
from slipstream.metrics.loggers import check_loggers
from slipstream.metrics.progress import Progress, SteadyConsole
from slipstream.metrics.tables import Page
from slipstream.models.config import ModelConfig
from slipstream.models.policy import PolicyConfig
from slipstream.preflight.batch_table import Batches, batches_of, table_rows
from slipstream.preflight.memory_estimate import COPY, POLICY, MemoryEstimate, estimate_memory
from slipstream.run.context import check_resumable, open_run
from slipstream.run.folder import check_same_run
from slipstream.run.train import check_phases, check_validation, trial
from slipstream.training.compute_thread import ComputeThread

DRAWN_PROMPTS = 4_096
"""Maximum number of generated validation prompts that are drawn to check the settings."""

TINY_PROMPTS = 2
"""Maximum number of prompts in the tiny step."""

TINY_TOKENS = 16
"""Maximum number of tokens per response in the tiny step."""

TINY_RESPONSES = 16
"""Maximum number of responses per prompt in the tiny step."""

TINY_LAYERS, TINY_WIDTH, TINY_POSITIONS = 64, 4096, 131_072
"""Layers, width of the MLP, and positions of a model with random weights in the tiny step."""

TINY_EPOCHS = 2
"""Maximum number of passes over the samples in the tiny step."""


def dry_run(config: Config, mode: Mode) -> int:
    """Print settings, batches and memory, run one tiny step, and return the exit status.

    Raises the errors that the run would raise, and ConfigError if trainer.val_only=true.
    """
    if config.trainer.val_only:
        raise ConfigError(
            "--dry-run runs a training step, but trainer.val_only=true does not train; set "
            "trainer.val_only=false, or omit --dry-run"
        )
    page = Page()
    print(to_yaml(config), end="")
    try:
        return _checked(page, config, mode)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the dry run needs more memory than is free ({reason_of(error)}); choose a smaller "
            "model (actor_rollout_ref.model.path or .init)"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    # On a CPU, PyTorch raises a plain RuntimeError.
    texts = ("can't allocate memory", "Storage size calculation overflowed")
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(text in str(error) for text in texts)


def _checked(page: Page, config: Config, mode: Mode) -> int:
    policy, batches = looked_at(config, mode)
    page.title("batches")
    page.table(list(table_rows(batches)))
    page.title("memory")
    if isinstance(policy, ModelConfig):
        estimate = estimate_memory(config, mode, policy, batches)
        _print_memory(page, estimate, config)
        _check_weights_fit(estimate, config)
    else:
        page.line(
            f"no estimate: the model family {policy.family} runs through transformers, whose "
            "memory is only known from the run"
        )
    page.title("one tiny step")
    start = time.perf_counter()
    finished = _tiny_step(config, mode)
    seconds = time.perf_counter() - start
    page.line(
        f"{'done in' if finished else 'interrupted after'} {seconds:.1f} s; its files are deleted"
    )
    return 0 if finished else INTERRUPTED


def looked_at(config: Config, mode: Mode) -> tuple[PolicyConfig, Batches]:
    """Check the settings like a run does, and return the policy's config and the batch sizes.

    Raises the errors that the run would raise.
    """
    set_threads(config)
    import_external(config)
    folder = Path(config.trainer.default_local_dir)
    check_loggers(config.trainer.logger, folder, config.trainer.project_name)
    check_same_run(folder, config)
    compute = ComputeThread()
    try:
        progress = Progress(console=SteadyConsole(file=sys.stdout))
        # A built-in task may generate validation prompts without end.
        drawn = min(config.data.val_size, DRAWN_PROMPTS)
        shorter = replace(config, data=replace(config.data, val_size=drawn))
        run = open_run(shorter, folder, progress, GracefulInterrupt(), compute)
        check_resumable(run, mode.split("+"))
        check_validation(run)
        policy = model_config(config, run.tokenizer, initial_policy(config))
        check_phases(run, mode, policy)
        steps = rl_steps(config, run.data) if "rl" in mode else 0
        held_out = len(run.held_out)
        if config.data.task is not None and config.data.val_files is None:
            held_out += config.data.val_size - drawn
        return policy, batches_of(config, mode, rl_steps=steps, held_out=held_out)
    finally:
        compute.close()


def _print_memory(page: Page, estimate: MemoryEstimate, config: Config) -> None:
    device = device_of(config)
    rows = [("process without a run", _size(estimate.base))]
    for name, phase in estimate.phases.items():
        several = len(estimate.phases) > 1
        prefix = f"{name}: " if several else ""
        rows += [(prefix + part, _size(size)) for part, size in phase.held.items()]
        largest = max(phase.one_at_a_time, key=lambda part: phase.one_at_a_time[part])
        rows.append((f"{prefix}{largest} (peak)", _size(phase.one_at_a_time[largest])))
    free = free_bytes(device)
    count = process_count(config)
    each = f" (each of {count} processes)" if count > 1 else ""
    rows.append((f"total if all responses have full length{each}", _size(estimate.total)))
    rows.append((f"free on {device.type} now", _size(free)))
    page.table(rows)
    if estimate.uncounted:
        page.line(f"not counted: {', '.join(estimate.uncounted)}")
    if (estimate.total - estimate.base) * memory_sharers(config) > free:
        page.line(
            "the run may need more memory than is free. To reduce the memory of an optimizer step, "
            "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or set "
            "actor_rollout_ref.model.enable_gradient_checkpointing=true. To reduce the KV cache, "
            "lower actor_rollout_ref.rollout.max_num_seqs.",
            style="bold red",
        )


def _check_weights_fit(estimate: MemoryEstimate, config: Config) -> None:
    """Raise ConfigError if the policy and its optimizer do not fit, as in the tiny step too, or if
    a quantized copy of the policy does not fit beside them."""
    need = max(phase.held[POLICY] for phase in estimate.phases.values())
    free = free_bytes(device_of(config))
    copies = [phase.held.get(COPY, 0) for phase in estimate.phases.values()]
    if need * memory_sharers(config) > free:
        raise ConfigError(
            f"the policy and its optimizer need {_size(need)}, but {_size(free)} are free; choose "
            "a smaller model (actor_rollout_ref.model.path or .init), or trainer.nnodes or "
            "trainer.n_gpus_per_node with more memory"
        )
    if max(copies) and (need + max(copies)) * memory_sharers(config) > free:
        raise ConfigError(
            f"speculative.spec_strategy={config.speculative.spec_strategy}: the quantized copy of "
            f"the policy needs {_size(max(copies))} beside {_size(need)} for the policy and its "
            f"optimizer, but {_size(free)} are free; set speculative.spec_strategy=history"
        )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _tiny_step(config: Config, mode: Mode) -> bool:
    """Run one step of each phase in a temporary folder on the run's disk.

    Returns false if the user interrupted it. Raises CheckpointError if the run's folder, or its
    nearest existing parent, is not writable.
    """
    parent = Path(config.trainer.default_local_dir).absolute()
    while not parent.is_dir():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise CheckpointError(
            f"the folder {parent} is not writable, so the run cannot store checkpoints and logs; "
            "set trainer.default_local_dir to a writable folder"
        )
    with TemporaryDirectory(prefix=".dry-run-", dir=parent) as folder:
        file = Path(folder) / CONFIG_FILE
        file.write_text(to_yaml(config))
        values = tiny_values(config, Path(folder) / "run")
        return trial(load_config(file=file, values=values, notify=lambda _: None), mode)


def _tiny_model(config: Config) -> dict[str, Any]:
    """Return settings that shrink a very deep, wide or long model with random weights.

    All its layers are alike, so a few of them take the same step. A draft head fits one model only.
    """
    init, eagle = config.actor_rollout_ref.model.init, config.speculative.eagle
    if init is None or eagle.spec_model_path is not None:
        return {}
    layers = max(TINY_LAYERS, 1 + max(eagle.aux_hidden_state_layer_ids or (0,)))
    width = max(TINY_WIDTH, 4 * init.hidden_size)
    longest = max(TINY_POSITIONS, max_model_len(config), config.sft.max_length)
    key = "actor_rollout_ref.model.init"
    return {
        f"{key}.max_position_embeddings": min(init.max_position_embeddings, longest),
        f"{key}.num_layers": min(init.num_layers, layers),
        # Widths are multiples of 16 in exact mode.
        f"{key}.intermediate_size": init.intermediate_size
        if init.intermediate_size <= 2 * width
        else width,
    }


def tiny_values(config: Config, folder: Path) -> dict[str, Any]:
    """Return settings by dotted key that reduce the run of `config` to one tiny step in `folder`.

    The step trains on any responses, whatever their rewards: groups are not filtered. Learning
    rates are constant. Only a built-in task has validation prompts; `looked_at` has checked the
    validation settings already.
    """
    actor_ref, critic = config.actor_rollout_ref, config.critic
    sft_samples = config.sft.train_batch_size
    prompts = min(TINY_PROMPTS, config.data.train_batch_size)
    responses = min(TINY_RESPONSES, actor_ref.rollout.n)
    sequences = prompts * responses
    built_in = config.data.task is not None and config.data.val_files is None
    values: dict[str, Any] = {
        "trainer.default_local_dir": str(folder),
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "trainer.logger": ["file"],
        "trainer.total_training_steps": 1,
        "trainer.critic_warmup": 0,
        "trainer.sync_every": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "data.train_batch_size": prompts,
        "data.max_response_length": min(TINY_TOKENS, config.data.max_response_length),
        "data.val_files": None,
        "data.val_max_samples": -1,
        "data.val_batch_size": None,
        "actor_rollout_ref.rollout.val_kwargs.by_source": {},
        "actor_rollout_ref.rollout.max_model_len": None,
        "actor_rollout_ref.rollout.n": responses,
        "actor_rollout_ref.rollout.val_kwargs.n": min(
            TINY_RESPONSES, actor_ref.rollout.val_kwargs.n
        ),
        "actor_rollout_ref.actor.ppo_epochs": min(TINY_EPOCHS, actor_ref.actor.ppo_epochs),
        "actor_rollout_ref.actor.ppo_mini_batch_size": None,
        "critic.ppo_mini_batch_size": None,
        "algorithm.filter_groups.enable": False,
        "algorithm.filter_groups.metric": None,
        "algorithm.filter_groups.max_num_gen_batches": 0,
        "sft.total_training_steps": min(1, config.sft.total_training_steps),
        "sft.train_batch_size": sft_samples and min(TINY_PROMPTS, sft_samples),
        "sft.batch_tokens": min(config.sft.batch_tokens, config.sft.max_length),
        "sft.test_freq": -1,
        "sft.save_freq": -1,
        "speculative.train.training_interval_steps": 1,
    }
    if built_in:
        values["data.val_size"] = TINY_PROMPTS
    values |= _tiny_model(config)
    if critic.ppo_epochs is not None:
        values["critic.ppo_epochs"] = min(TINY_EPOCHS, critic.ppo_epochs)
    for key, rows in (
        ("actor_rollout_ref.actor", actor_ref.actor.ppo_micro_batch_size_per_gpu),
        ("critic", critic.ppo_micro_batch_size_per_gpu),
    ):
        if rows is not None:
            values[f"{key}.ppo_micro_batch_size_per_gpu"] = min(rows, sequences)
    for key in ("actor_rollout_ref.actor", "critic", "sft", "speculative.train"):
        values |= {f"{key}.optim.lr_scheduler_type": "constant", f"{key}.optim.min_lr_ratio": 0.0}
    return values
