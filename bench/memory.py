"""The memory that `--dry-run` estimates, against the peak memory of real runs.

    python -m bench.memory [NAME ...]

Each case is estimated in one process and run in another. A small third process starts the run and
gets its peak resident memory from the system, because the peak of a child includes that of the
process that started it. All responses have the maximum length. Prints both values and their ratio.
Fails if an estimate is below the peak, or more than a quarter above it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from slipstream.config.load import load_config
from slipstream.config.mode import resolve_mode

MOST = 1.25
"""Maximum ratio of estimate and peak. The minimum is 1."""

_ESTIMATE, _USED = "--estimate", "--used"

_WIDE = (
    "actor_rollout_ref.model.init.hidden_size=512",
    "actor_rollout_ref.model.init.intermediate_size=1408",
    "actor_rollout_ref.model.init.num_heads=8",
    "actor_rollout_ref.model.init.num_kv_heads=4",
)
_SHORT = (
    *("sft.total_training_steps=2", "sft.test_freq=1"),
    *("sft.optim.lr_scheduler_type=constant", "sft.optim.min_lr_ratio=0"),
    *("trainer.total_training_steps=2", "trainer.test_freq=1", "data.val_size=64"),
)
_FULL = ("actor_rollout_ref.rollout.ignore_eos=true",)
# The benchmark measures main memory, not a GPU's.
_ON_CPU = ("trainer.device=cpu",)

CASES: dict[str, tuple[str, ...]] = {
    "quickstart": ("--recipe", "quickstart"),
    "quickstart, wide": ("--recipe", "quickstart", *_WIDE),
    "32,000 words": (
        *("--recipe", "quickstart", *_WIDE),
        "actor_rollout_ref.model.init.vocab_size=32000",
        "actor_rollout_ref.model.init.num_layers=4",
    ),
    "Qwen2.5's words": (
        *("--recipe", "quickstart", "trainer.mode=rl", *_WIDE),
        "actor_rollout_ref.model.init.vocab_size=151936",
        "actor_rollout_ref.model.init.num_layers=4",
    ),
    "LoRA": (
        *("--recipe", "quickstart", "trainer.mode=rl", *_WIDE),
        *("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=32"),
    ),
    "many samples": (
        *("--recipe", "quickstart", "trainer.mode=rl", "data.train_batch_size=32"),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
    ),
    "critic, AdamW": (
        *("--recipe", "quickstart", "trainer.mode=rl", *_WIDE),
        "algorithm.adv_estimator=gae",
    ),
    "SFT, checkpointing": (
        *("--recipe", "quickstart", "trainer.mode=sft", *_WIDE),
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        *("sft.batch_tokens=16384", "sft.max_tokens_per_micro_batch=16384"),
    ),
    "two processes": (
        *("--recipe", "quickstart", "trainer.mode=rl", *_WIDE),
        *("trainer.nnodes=2", "actor_rollout_ref.actor.use_kl_loss=true"),
    ),
    "two processes, checkpointing": (
        *("--recipe", "quickstart", "trainer.mode=rl", *_WIDE),
        *("trainer.nnodes=2", "actor_rollout_ref.model.enable_gradient_checkpointing=true"),
    ),
    "reference, fp32": (
        *("--recipe", "quickstart", "trainer.mode=rl", *_WIDE),
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.dtype=float32",
    ),
}


def _settings(name: str) -> list[str]:
    return [*CASES[name], *_SHORT, *_FULL, *_ON_CPU]


def estimate(name: str) -> None:
    """In a separate process: print the estimated bytes as JSON."""
    from slipstream.models.config import ModelConfig
    from slipstream.preflight.dry_run import looked_at
    from slipstream.preflight.memory_estimate import estimate_memory

    _, recipe, *overrides = _settings(name)
    config = load_config(overrides, recipe=recipe, notify=lambda _: None)
    mode = resolve_mode(config)
    policy, batches = looked_at(config, mode)
    assert isinstance(policy, ModelConfig)
    found = estimate_memory(config, mode, policy, batches)
    parts = {
        phase: {**bytes_of.held, **bytes_of.one_at_a_time}
        for phase, bytes_of in found.phases.items()
    }
    print(json.dumps({"total": found.total, "base": found.base, "parts": parts}))


def used(name: str) -> None:
    """In a separate process: print the peak resident bytes of the run."""
    with TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "slipstream.cli", "train", *_settings(name)]
        with subprocess.Popen(
            [*line, f"trainer.default_local_dir={folder}/run"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            output = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{name}: the run ended with status {process.returncode}: {output}")
        print(usage.ru_maxrss * 1024)


def _in_process(what: str, name: str) -> str:
    """The last line that a separate process prints."""
    line = [sys.executable, "-m", "bench.memory", what, name]
    try:
        output = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None
    return output.splitlines()[-1]


def main(names: Sequence[str]) -> None:
    wrong: list[str] = []
    for name in names or CASES:
        found = json.loads(_in_process(_ESTIMATE, name))
        peak = int(_in_process(_USED, name))
        ratio = found["total"] / peak
        if not 1 <= ratio <= MOST:
            wrong.append(name)
        print(
            f"{name:<20} estimated {found['total'] / 1e9:6.2f} GB (process "
            f"{found['base'] / 1e9:.2f}), used {peak / 1e9:6.2f} GB: {ratio:.2f}x",
            flush=True,
        )
        for phase, parts in found["parts"].items():
            listed = ", ".join(f"{what} {size / 1e6:.0f}" for what, size in parts.items())
            print(f"    {phase}, MB: {listed}", flush=True)
    if wrong:
        raise SystemExit(f"the ratio of estimate and peak is not within 1 to {MOST}: {wrong}")


if __name__ == "__main__":
    if sys.argv[1:2] == [_ESTIMATE]:
        estimate(sys.argv[2])
    elif sys.argv[1:2] == [_USED]:
        used(sys.argv[2])
    else:
        main(sys.argv[1:])
