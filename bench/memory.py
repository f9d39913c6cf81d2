"""What `--dry-run` says of memory, against what runs then take.

    python -m bench.memory [NAME ...]

Each case is estimated in one process, and run in another, whose peak of resident memory the system
tells when it ends to a small one that began it: a peak counts what the one before took. Responses
are made as long as they may be. Prints both and their ratio, and fails where one is further than a
quarter from the other.
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

WITHIN = 0.25

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
# What is measured is this machine's memory, not a GPU's.
_HERE = ("trainer.device=cpu",)

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
    return [*CASES[name], *_SHORT, *_FULL, *_HERE]


def estimate(name: str) -> None:
    """In a process of its own: print the bytes that are estimated."""
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
    """In a process of its own: print the peak of resident bytes of the run."""
    with TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "slipstream.cli", "train", *_settings(name)]
        with subprocess.Popen(
            [*line, f"trainer.default_local_dir={folder}/run"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{name}: the run ended with status {process.returncode}: {said}")
        print(usage.ru_maxrss * 1024)


def _apart(what: str, name: str) -> str:
    """The last line of what a process of its own prints."""
    line = [sys.executable, "-m", "bench.memory", what, name]
    try:
        said = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None
    return said.splitlines()[-1]


def main(names: Sequence[str]) -> None:
    worst = 0.0
    for name in names or CASES:
        found = json.loads(_apart(_ESTIMATE, name))
        peak = int(_apart(_USED, name))
        ratio = found["total"] / peak
        worst = max(worst, abs(ratio - 1))
        print(
            f"{name:<20} estimated {found['total'] / 1e9:6.2f} GB (process "
            f"{found['base'] / 1e9:.2f}), used {peak / 1e9:6.2f} GB: {ratio:.2f}x",
            flush=True,
        )
        for phase, parts in found["parts"].items():
            listed = ", ".join(f"{what} {size / 1e6:.0f}" for what, size in parts.items())
            print(f"    {phase}, MB: {listed}", flush=True)
    if worst > WITHIN:
        raise SystemExit(f"{worst:.0%} apart, where {WITHIN:.0%} is promised")


if __name__ == "__main__":
    if sys.argv[1:2] == [_ESTIMATE]:
        estimate(sys.argv[2])
    elif sys.argv[1:2] == [_USED]:
        used(sys.argv[2])
    else:
        main(sys.argv[1:])
