"""Names of VERL's and FastRL's configuration files, for files that start from one of them.

A program for VERL usually has its own file with `defaults: [ppo_trainer, _self_]`. Here these
names are empty files, so that such a file sets options of our tree. Called by `sources`. If Hydra's
search path has VERL's own files, they are used instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

BASES = (
    "ppo_trainer",
    "ppo_megatron_trainer",
    "ppo_veomni_trainer",
    "ppo_torchtitan_trainer",
    "dapo_trainer",
    "dapo_megatron_trainer",
    "fastrl_trainer",
    "sft_trainer",
    "sft_trainer_engine",
)
"""Whole configurations."""

_BACKENDS = ("dp", "megatron", "veomni", "torchtitan", "automodel")

GROUPS: dict[str, tuple[str, ...]] = {
    "actor": ("actor", *(f"{backend}_actor" for backend in _BACKENDS)),
    "ref": ("ref", *(f"{backend}_ref" for backend in _BACKENDS)),
    "critic": ("critic", *(f"{backend}_critic" for backend in _BACKENDS)),
    "reward_model": ("reward_model", *(f"{backend}_reward_model" for backend in _BACKENDS)),
    "model_engine": _BACKENDS,
    "engine": ("fsdp", *_BACKENDS[1:]),
    "optim": ("fsdp", *_BACKENDS[1:]),
    "rollout": ("rollout",),
    "model": ("hf_model",),
    "data": ("legacy_data",),
    "reward": ("reward",),
    "reward_manager": ("reward_manager",),
    "algorithm": ("rollout_correction", "filter_groups"),
    "profiler": ("profiler",),
    "distillation": ("distillation",),
    "npu_profile": ("npu_profile",),
    "transfer_queue": ("transfer_queue",),
}
"""Config groups, and the files in each."""


_CHOICES = (
    ("model_engine", "dp"),
    ("actor@actor_rollout_ref.actor", "dp_actor"),
    ("ref@actor_rollout_ref.ref", "dp_ref"),
    ("rollout@actor_rollout_ref.rollout", "rollout"),
    ("model@actor_rollout_ref.model", "hf_model"),
    ("data@data", "legacy_data"),
    ("critic@critic", "dp_critic"),
    ("reward_model@reward_model", "dp_reward_model"),
    ("algorithm@algorithm.rollout_correction", "rollout_correction"),
)
"""The files that a base selects, so that `override` can select others."""


@contextmanager
def bases_folder() -> Iterator[Path]:
    """Write the files to a temporary folder, for the end of Hydra's search path."""
    with TemporaryDirectory(prefix="slipstream-bases-") as name:
        folder = Path(name)
        chosen = "".join(f"- {group}: {file}\n" for group, file in _CHOICES)
        for base in BASES:
            (folder / f"{base}.yaml").write_text(f"defaults:\n{chosen}- _self_\n")
        for group, files in GROUPS.items():
            (folder / group).mkdir()
            for file in files:
                (folder / group / f"{file}.yaml").write_text("# @package _global_\n{}\n")
        yield folder
