"""Flags that several benchmarks share, and what they set. Imports torch only in functions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config.launch import positive
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

SHAPES = ("quickstart", "d512x12", "d256x8", "smollm2-135m", "qwen2.5-0.5b", "wordy", "tiny")
"""The keys of `shapes.SHAPES`, repeated here because that module imports torch."""

BENCH_MODEL = Path("runs/bench-model")
QUICKSTART = Path("runs/quickstart")

RANDOM_SHAPES = ("quickstart", "d512x12")
"""The default of `--shape` in benchmarks of models with random weights."""


def add_shape_flag(parser: argparse.ArgumentParser, default: Sequence[str] = RANDOM_SHAPES) -> None:
    """`--shape`: one or more models with random weights."""
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        nargs="+",
        default=default,
        help=f"models with random weights (default: {' '.join(default)})",
    )


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """`--model`; check it with `check_model`."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a model in Hugging Face's format, instead of random weights",
    )


def check_model(args: argparse.Namespace, default: Sequence[str]) -> None:
    """Raise ConfigError if `--model` is given along with a flag for random weights.

    `default` is the default of `--shape`.
    """
    if args.model is None:
        return
    if args.shape != default or getattr(args, "vocab", None) is not None:
        raise ConfigError(
            "--shape and --vocab are for models with random weights; leave them out, or leave out "
            "--model"
        )
    args.shape = default[:1]


def add_count_flag(
    parser: argparse.ArgumentParser, name: str, default: int, meaning: str = ""
) -> None:
    """`--NAME N`, an integer of at least 1."""
    parser.add_argument(
        f"--{name}",
        metavar="N",
        type=positive,
        default=default,
        help=f"{meaning} (default: {default})" if meaning else f"default: {default}",
    )


def add_batches_flag(parser: argparse.ArgumentParser, default: Sequence[int]) -> None:
    """`--batch`: one or more batch sizes."""
    parser.add_argument(
        "--batch",
        metavar="N",
        type=positive,
        nargs="+",
        default=list(default),
        help=f"batch sizes (default: {' '.join(map(str, default))})",
    )


def add_greedy_flag(parser: argparse.ArgumentParser) -> None:
    """`--greedy`; read it with `temperature_of`."""
    parser.add_argument(
        "--greedy", action="store_true", help="take the most likely token instead of sampling"
    )


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """`--device`, for benchmarks of a trained policy."""
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="device on which a trained policy decodes (default: cpu)",
    )


def add_settings_flag(parser: argparse._ActionsContainer, meaning: str) -> None:
    """`--set KEY=VALUE ...`, settings of the runs that the benchmark starts."""
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", default=[], help=meaning)


def add_compute_flags(parser: argparse.ArgumentParser) -> None:
    """`--dtype` and `--threads`; apply them with `settle_torch`."""
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    add_threads_flag(parser)


def add_threads_flag(parser: argparse.ArgumentParser) -> None:
    """`--threads`."""
    parser.add_argument("--threads", metavar="N", type=positive, help="default: PyTorch's")


def temperature_of(args: argparse.Namespace) -> float:
    """0 with `--greedy`, else 1."""
    return 0.0 if args.greedy else 1.0


def device_of(args: argparse.Namespace) -> torch.device:
    """The device of `--device`; the CPU without that flag."""
    import torch

    return torch.device(getattr(args, "device", None) or "cpu")


def settle_torch(args: argparse.Namespace) -> torch.dtype:
    """Set torch's number of threads by `--threads`; return the dtype of `--dtype`."""
    import torch

    from slipstream.models.numerics import dtype_from_name

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return dtype_from_name(args.dtype, device_of(args))
