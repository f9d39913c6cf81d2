"""`slipstream bench`: the list of all benchmarks, and the dispatch to one of them.

Each benchmark has a module that owns its flags, its measurement and what it prints (`benchmark`).
That module is imported only when its benchmark was named, so `slipstream bench --help` stays fast.
Benchmarks that prove the project's own claims are in the repository's package `bench`, which an
installed wheel does not contain.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slipstream
from slipstream.bench.benchmark import Benchmark
from slipstream.bench.record import write_rows
from slipstream.config.launch import add_debug_flag
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """A benchmark's name, its module, and one line of help."""

    name: str
    module: str
    help: str

    @property
    def needs_checkout(self) -> bool:
        """Whether the module is in the repository's package `bench`."""
        return not self.module.startswith("slipstream.")


ENTRIES = (
    Entry(
        "rollout",
        "slipstream.bench.rollout_command",
        "rollouts with and without drafts, or the embedded engine against other engines",
    ),
    Entry(
        "decode",
        "slipstream.bench.decode_command",
        "decoding without drafts by batch size, against transformers, vLLM and llama.cpp",
    ),
    Entry(
        "speculation",
        "slipstream.bench.speculation.command",
        "speed of a trained policy by draft plan and batch size",
    ),
    Entry(
        "lossless",
        "slipstream.bench.lossless.command",
        "drafts against plain decoding, compared bit for bit",
    ),
    Entry(
        "train",
        "slipstream.bench.train_command",
        "a training step against the matrix-product rate, or RL with and without drafts",
    ),
    Entry(
        "scoring",
        "slipstream.bench.scoring_command",
        "answers scored per second, and the cost of slow and stuck reward functions",
    ),
    Entry(
        "trl",
        "bench.trl_command",
        "GRPO against TRL: equal losses first, then interleaved steps, then accuracy (checkout)",
    ),
    Entry(
        "peers",
        "bench.peers_command",
        "decode and trl in one Markdown table (checkout)",
    ),
    Entry(
        "selector",
        "bench.selector_command",
        "time lost by choosing draft plans, against the best plans in hindsight (checkout)",
    ),
    Entry(
        "learning",
        "bench.learning",
        "RL with every algorithm: does the reward rise? (checkout)",
    ),
    Entry(
        "logprob",
        "bench.logprob_command",
        "log-probs under a large LM head, in chunks against all logits at once (checkout)",
    ),
    Entry(
        "export",
        "bench.export_command",
        "a trained draft head in vLLM against the same head here (checkout)",
    ),
    Entry(
        "startup",
        "bench.startup",
        "`slipstream --help` against an idle Python (checkout)",
    ),
)
"""All benchmarks. Those with `(checkout)` in their help need a checkout of the repository."""

_NAMES = "{" + ",".join(entry.name for entry in ENTRIES) + "}"

USAGE = f"slipstream bench {_NAMES} [flags]"

EXAMPLES = """\
  slipstream bench rollout --json rollout.json
  slipstream bench rollout --case mixed --shape d512x12 --threads 1
  slipstream bench rollout --policy runs/bench-model --peer vllm-bfloat16-compiled
  slipstream bench decode --peer hf vllm --shape d512x12 --batch 1 8 32
  slipstream bench decode --peer llamacpp --model ./smollm2 --dtype bfloat16
  slipstream bench speculation --policy runs/bench-model --heads runs/one runs/other
  slipstream bench lossless --json lossless.json
  slipstream bench train --dtype bfloat16 --profile
  slipstream bench train --ab speculation --policy runs/quickstart --steps 20
  slipstream bench scoring

in a checkout of the repository:
  slipstream bench trl --policy runs/quickstart --steps 20 --rounds 1
  slipstream bench peers --json peers.json
  slipstream bench selector --trace runs/mine/speculation.jsonl
  slipstream bench learning --policy runs/quickstart --plot learning.png
  slipstream bench logprob --vocab 151936 --tokens 2048
  slipstream bench export --policy runs/llama
  slipstream bench startup"""


class _LazyParser(argparse.ArgumentParser):
    """The parser of one benchmark. It imports the benchmark and adds its flags when it is used."""

    entry: Entry | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Ends the program with code 2 if the benchmark needs a checkout and there is none."""
        entry, self.entry = self.entry, None
        if entry is not None:
            try:
                load(entry).add_flags(self)
            except ConfigError as error:
                self.error(str(error))
            self.add_argument(
                "--json", metavar="FILE", type=Path, help="also write the rows to this file"
            )
            add_debug_flag(self)
        return super().parse_known_args(args, namespace)


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add one sub-command per benchmark."""
    kinds = command.add_subparsers(
        prog="slipstream bench", dest="benchmark", metavar=_NAMES, parser_class=_LazyParser
    )
    kinds.required = True
    for entry in ENTRIES:
        kinds.add_parser(entry.name, help=entry.help, description=entry.help).entry = entry


def run(args: argparse.Namespace) -> int:
    """Run the benchmark of the parsed flags, print its rows and write them to `--json`.

    Returns the exit status: 1 if a check of the benchmark failed.
    """
    benchmark = load(next(entry for entry in ENTRIES if entry.name == args.benchmark))
    rows = benchmark.run(args)
    if args.json is not None:
        write_rows(args.json, rows, benchmark.summary(args, rows))
    return benchmark.say(args, rows)


def load(entry: Entry) -> Benchmark:
    """Import a benchmark. Raises ConfigError if it needs a checkout and there is none."""
    if entry.needs_checkout:
        root = checkout()
        if root is None:
            raise ConfigError(
                f"`slipstream bench {entry.name}` is not part of the installed package; clone the "
                "repository, run `make install` there, then "
                f"`.venv/bin/slipstream bench {entry.name}`"
            )
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    benchmark = importlib.import_module(entry.module).BENCHMARK
    assert isinstance(benchmark, Benchmark)
    return benchmark


def checkout() -> Path | None:
    """The checkout that contains the imported package; None if an installed wheel was imported."""
    root = Path(slipstream.__file__).parents[1]
    own = (root / "pyproject.toml", root / "bench" / "__init__.py")
    return root if all(path.is_file() for path in own) else None
