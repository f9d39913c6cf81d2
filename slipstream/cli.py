"""The `slipstream` command: parses the command line, calls one function, prints its result.

This module knows commands and flags. The functions are in `run`, `preflight`, `report` and `bench`;
each is imported only when its command runs, so that `--help` and errors in settings appear at once.
`config.launch` reads settings, and `launchers.command` starts training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.bench import command as bench
from slipstream.config.launch import (
    EXIT_CODES,
    add_debug_flag,
    add_source_flags,
    config_from,
    exit_status,
    parser,
    port,
    positive,
    print_settings,
    read_overrides,
)
from slipstream.config.load import CONFIG_FILE, load_config
from slipstream.config.mode import HEAD_ALONE
from slipstream.errors import CheckpointError, ConfigError
from slipstream.heap import (
    keep_freed_memory,
    skip_collection_at_exit,
    without_garbage_collector,
)
from slipstream.launchers.command import add_train_flags, start
from slipstream.metrics.timeline import mark_command_start
from slipstream.reading import reason, shown

DRAFT_LAYOUTS = ("vllm", "sglang")
"""The keys of `models.draft.layouts.LAYOUTS`, repeated here because that module imports torch."""

_SETTINGS = "[--recipe NAME | --config FILE] [key=value ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command. `run` gets the parsed flags, and the other arguments as overrides."""

    name: str
    summary: str
    usage: str
    examples: str
    flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], int]
    takes_settings: bool = True


def _run_training(args: argparse.Namespace, overrides: list[str]) -> int:
    return start(config_from(args, overrides), args)


def _run_sft(args: argparse.Namespace, overrides: list[str]) -> int:
    return _run_training(args, [*overrides, "trainer.mode=sft"])


def _run_rl(args: argparse.Namespace, overrides: list[str]) -> int:
    return _run_training(args, [*overrides, "trainer.mode=rl"])


def _eval_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        required=True,
        help="a checkpoint of a run; uses the run's settings unless --recipe or --config is given",
    )
    command.add_argument(
        "--problems", metavar="N", type=positive, help="number of problems (default: all)"
    )
    command.add_argument(
        "--output", metavar="FILE", type=Path, help="also write scores and responses to this file"
    )
    add_source_flags(command)


def _existing_checkpoint(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} does not exist; check --checkpoint")
    return folder


def _run_settings(checkpoint: Path) -> Path | None:
    """The settings file of the run that `checkpoint` belongs to; None if there is none."""
    resolved = checkpoint.resolve()
    # The deepest folder of a policy is <run>/sft/global_step_N/actor/huggingface.
    for folder in (resolved, *list(resolved.parents)[:4]):
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE
    return None


def _run_eval(args: argparse.Namespace, overrides: list[str]) -> int:
    checkpoint = _existing_checkpoint(args.checkpoint)
    file = _run_settings(checkpoint)
    if file is None and not (args.recipe or args.config or args.config_name or overrides):
        raise ConfigError(
            f"found no {CONFIG_FILE} in {checkpoint} or its parents, so the problems are unknown; "
            "add --recipe NAME, --config FILE or data.val_files=FILE"
        )
    config = config_from(args, overrides, file=file, complete=False)
    if args.cfg:
        print_settings(config)
        return 0
    with without_garbage_collector():
        from slipstream.run.train import evaluate

    return evaluate(config, checkpoint, args.problems, args.output)


def _draft_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="the policy: a run or one of its checkpoints; uses the run's settings and writes "
        "the head "
        "to its folder `draft` (default: actor_rollout_ref.model.path)",
    )
    add_source_flags(command)


def _run_draft(args: argparse.Namespace, overrides: list[str]) -> int:
    file = None
    if args.checkpoint is not None:
        checkpoint = _existing_checkpoint(args.checkpoint)
        file = _run_settings(checkpoint)
        home = checkpoint if file is None else file.parent
        given = [
            f"actor_rollout_ref.model.path={checkpoint}",
            "actor_rollout_ref.model.init=null",
            f"trainer.default_local_dir={home / 'draft'}",
            # The settings say where the run resumed from; its draft head has its own checkpoints.
            "trainer.resume_mode=auto",
            "trainer.resume_from_path=null",
            *HEAD_ALONE,
        ]
        overrides = [*given, *overrides]
    config = config_from(args, overrides, file=file)
    if args.cfg:
        print_settings(config)
        return 0
    with without_garbage_collector():
        from slipstream.run.draft_phase import main as draft

    return draft(config)


def _reward_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "dump",
        metavar="DUMP",
        type=Path,
        help="a JSON Lines file from a run's rollouts/, or from verl",
    )
    command.add_argument(
        "--fn",
        metavar="FILE[:NAME]",
        help="Python file with the reward function, named compute_score unless NAME is given "
        "(default: the built-in function for each line's data source)",
    )
    command.add_argument(
        "--kwargs", metavar="JSON", type=_mapping, help="extra keyword arguments for the function"
    )
    command.add_argument("--data-source", metavar="NAME", help="use this data source for all lines")
    command.add_argument("--limit", metavar="N", type=positive, help="score only the first N lines")
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="also write scores, failures and times to this file",
    )
    command.add_argument(
        "--raise",
        dest="reraise",
        action="store_true",
        help="re-raise the function's first error, for a debugger",
    )
    add_debug_flag(command)


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not valid JSON: {reason(error)}"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'{shown(text)} is not a JSON object; write for example {{"scale": 2}}'
        )
    return value


def _run_reward(args: argparse.Namespace, _: list[str]) -> int:
    from slipstream.rewards.foreground import main as reward

    return reward(
        args.dump,
        args.fn,
        kwargs=args.kwargs,
        data_source=args.data_source,
        limit=args.limit,
        output=args.output,
        reraise=args.reraise,
    )


def _data_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help="gsm8k, math or trajectories")
    command.add_argument(
        "sources",
        metavar="SOURCE",
        type=Path,
        nargs="+",
        help="the published file or folder of the data set; for trajectories, JSON Lines or JSON "
        "files",
    )
    command.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        required=True,
        help="folder for train.parquet and test.parquet; for trajectories, the file to write",
    )
    group = command.add_argument_group(
        "trajectories", "finished conversations or rollout dumps become samples"
    )
    group.add_argument(
        "--to",
        choices=["sft", "rl"],
        help="sft: rows for sft.train_files. rl: samples with exact token ids and log-probs",
    )
    group.add_argument(
        "--min-reward", metavar="X", type=float, help="sft: keep rewards of at least X"
    )
    group.add_argument(
        "--best-of-group",
        metavar="N",
        type=positive,
        help="sft: keep the N highest rewards of each group",
    )
    group.add_argument(
        "--truncated",
        choices=["keep", "drop"],
        help="trajectories that a limit ended (default: drop for sft, keep for rl)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="check the samples with this tokenizer: that its chat template renders them, or that "
        "its vocabulary has their ids",
    )
    add_debug_flag(command)


def _run_data(args: argparse.Namespace, _: list[str]) -> int:
    if args.name == "trajectories":
        return _run_trajectories(args)
    for flag in ("to", "min_reward", "best_of_group", "truncated", "tokenizer"):
        if getattr(args, flag) is not None:
            raise ConfigError(
                f"--{flag.replace('_', '-')} has no effect on {args.name}; remove it, or write "
                "slipstream data trajectories"
            )
    if len(args.sources) > 1:
        raise ConfigError(f"{args.name} takes one SOURCE, got {len(args.sources)}; give a folder")
    from slipstream.data.preprocess import convert

    for path, rows in convert(args.name, args.sources[0], args.output).items():
        print(f"{rows:>8} rows  {path}")
    return 0


def _run_trajectories(args: argparse.Namespace) -> int:
    if args.to is None:
        raise ConfigError("slipstream data trajectories needs --to sft or --to rl")
    from slipstream.data.convert_trajectories import convert

    for line in convert(
        args.sources,
        args.to,
        args.output,
        min_reward=args.min_reward,
        best_of_group=args.best_of_group,
        truncated=args.truncated,
        tokenizer_path=args.tokenizer,
    ):
        print(line)
    return 0


def _export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        required=True,
        help="a run, one of its checkpoints, or a folder with only the model or head to export",
    )
    command.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder to write to; must be new or empty",
    )
    command.add_argument(
        "--draft",
        metavar="ENGINE",
        choices=DRAFT_LAYOUTS,
        help="export the draft head instead of the model, in the layout that this engine loads: "
        "vllm (Llama family) or sglang (Llama and Qwen2 families)",
    )
    command.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="dtype of the weights (default: auto, the dtype in the checkpoint)",
    )
    add_debug_flag(command)


def _run_export(args: argparse.Namespace, _: list[str]) -> int:
    checkpoint = _existing_checkpoint(args.checkpoint)
    with without_garbage_collector():
        from slipstream.run.train import export

    return export(checkpoint, args.output, args.dtype, args.draft)


def _quickstart_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="run folder (default: runs/quickstart; with --agent: runs/quickstart_agent)",
    )
    command.add_argument(
        "--agent",
        action="store_true",
        help="train an agent instead: it answers questions by calling a tool",
    )
    command.add_argument("--seed", metavar="N", type=int, default=1, help="seed (default: 1)")
    command.add_argument(
        "--recipe",
        choices=["auto", "quickstart", "quickstart_small"],
        default="auto",
        help="auto (default): measure the machine and use the largest recipe that fits",
    )
    command.add_argument(
        "--sft-control",
        action="store_true",
        help="also train SFT for as long as RL took, for comparison",
    )
    command.add_argument(
        "--no-bf16", dest="bf16", action="store_false", help="compute everything in float32"
    )
    command.add_argument(
        "--no-speculation",
        dest="speculation",
        action="store_false",
        help="decode without a draft head; the trained policy is the same",
    )
    command.add_argument(
        "--cold-start",
        action="store_true",
        help="start RL without a trained draft head; the head then learns from RL's rollouts",
    )
    add_debug_flag(command)


def _run_quickstart(args: argparse.Namespace, _: list[str]) -> int:
    with without_garbage_collector():
        from slipstream.run.quickstart import main as quickstart

    return quickstart(
        args.output or Path("runs", "quickstart_agent" if args.agent else "quickstart"),
        args.seed,
        args.recipe,
        args.sft_control,
        args.bf16,
        args.speculation,
        args.cold_start,
        args.agent,
    )


def _config_flags(command: argparse.ArgumentParser) -> None:
    add_source_flags(command, show_flag=False)


def _run_config(args: argparse.Namespace, rest: list[str]) -> int:
    keys = [text for text in rest if "=" not in text and not text.startswith("~")]
    overrides = [text for text in rest if text not in keys]
    if keys:
        from slipstream.config.docs import describe

        print("\n\n".join(describe(key) for key in keys))
    if overrides or not keys:
        print_settings(config_from(args, overrides, complete=False))
    return 0


def _runs_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="a run folder; the page overlays several runs",
    )


def _report_flags(command: argparse.ArgumentParser) -> None:
    _runs_argument(command)
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write (default: report.html in the run folder; for several runs, in this "
        "folder)",
    )
    add_debug_flag(command)


def _run_report(args: argparse.Namespace, _: list[str]) -> int:
    from slipstream.report.page import REPORT_FILE, write_report

    folder = args.runs[0] if len(args.runs) == 1 else Path()
    output = args.output or folder / REPORT_FILE
    for note in write_report(args.runs, output):
        print(f"note: {note}")
    print(f"report       {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0


def _watch_flags(command: argparse.ArgumentParser) -> None:
    _runs_argument(command)
    command.add_argument(
        "--port", metavar="N", type=port, help="port (default: the first free port from 6780)"
    )
    add_debug_flag(command)


def _run_watch(args: argparse.Namespace, _: list[str]) -> int:
    from slipstream.report.watch import serve

    return serve(args.runs, args.port)


def _doctor_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    command.add_argument(
        "--folder",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="folder for runs (default: the current folder)",
    )
    command.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="check a running server of vLLM or SGLang, such as http://host:8000; can be repeated",
    )
    command.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="check the servers and the Python of actor_rollout_ref.rollout.server in this file",
    )
    add_debug_flag(command)


def _run_doctor(args: argparse.Namespace, _: list[str]) -> int:
    with without_garbage_collector():
        from slipstream.preflight.doctor import doctor

    urls, python, engine = args.url, None, "vllm"
    if args.config is not None:
        config = load_config(file=args.config, complete=False, notify=lambda _: None)
        rollout = config.actor_rollout_ref.rollout
        urls, python = [*rollout.server.urls, *urls], rollout.server.python
        engine = rollout.name
    return doctor(args.folder, as_json=args.json, urls=urls, python=python, engine=engine)


def _run_bench(args: argparse.Namespace, _: list[str]) -> int:
    return bench.run(args)


COMMANDS = (
    Command(
        name="train",
        summary="train with SFT, RL, or SFT and then RL, as the settings say",
        usage=f"slipstream train [--dry-run] {_SETTINGS}",
        examples="""\
  slipstream train --recipe tiny
  slipstream train --recipe quickstart trainer.seed=2 actor_rollout_ref.rollout.n=16
  slipstream train data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=checkpoints/base trainer.test_freq=10
  slipstream train --recipe quickstart --dry-run
  slipstream train --config-path conf --config-name mine --cfg job""",
        flags=add_train_flags,
        run=_run_training,
    ),
    Command(
        name="sft",
        summary="train with supervised fine-tuning (SFT) only",
        usage=f"slipstream sft [--dry-run] {_SETTINGS}",
        examples="""\
  slipstream sft --recipe quickstart
  slipstream sft sft.train_files=demonstrations.jsonl sft.total_training_steps=200 \\
      actor_rollout_ref.model.path=checkpoints/base""",
        flags=add_train_flags,
        run=_run_sft,
    ),
    Command(
        name="rl",
        summary="train with reinforcement learning (RL) only",
        usage=f"slipstream rl [--dry-run] {_SETTINGS}",
        examples="""\
  slipstream rl data.train_files=train.parquet actor_rollout_ref.model.path=checkpoints/sft \\
      custom_reward_function.path=reward.py trainer.total_training_steps=100""",
        flags=add_train_flags,
        run=_run_rl,
    ),
    Command(
        name="draft",
        summary="train a draft head for a policy and measure its acceptance",
        usage=f"slipstream draft [--checkpoint DIR] {_SETTINGS}",
        examples="""\
  slipstream draft --checkpoint runs/quickstart
  slipstream draft --checkpoint runs/mine speculative.draft.total_training_steps=2000
  slipstream draft --checkpoint runs/mine \\
      'speculative.draft.rollout_files=[runs/mine/rollouts/*.jsonl]'
  slipstream draft data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=models/Qwen2.5-0.5B trainer.default_local_dir=runs/draft""",
        flags=_draft_flags,
        run=_run_draft,
    ),
    Command(
        name="eval",
        summary="score a checkpoint on validation problems",
        usage=f"slipstream eval --checkpoint DIR [--problems N] [--output FILE] {_SETTINGS}",
        examples="""\
  slipstream eval --checkpoint checkpoints/slipstream/run/global_step_50 --problems 200
  slipstream eval --checkpoint checkpoints/slipstream/run/global_step_50 data.seed=7""",
        flags=_eval_flags,
        run=_run_eval,
    ),
    Command(
        name="reward",
        summary="try a reward function on the recorded responses of a run",
        usage="slipstream reward DUMP [--fn FILE[:NAME]] [--kwargs JSON] [--limit N] "
        "[--output FILE]",
        examples="""\
  slipstream reward runs/quickstart/rollouts/1.jsonl
  slipstream reward runs/mine/rollouts/20.jsonl --fn my_reward.py:brevity --kwargs '{"scale": 2}'
  python -m pdb -c continue -m slipstream.cli reward dump.jsonl --fn my_reward.py --raise""",
        flags=_reward_flags,
        run=_run_reward,
        takes_settings=False,
    ),
    Command(
        name="data",
        summary="convert a public data set, or finished trajectories, into training files",
        usage="slipstream data NAME SOURCE --output DIR\n"
        "       slipstream data trajectories FILE [FILE ...] --to {sft,rl} --output FILE [flags]",
        examples="""\
  slipstream data gsm8k downloads/gsm8k/main --output data/gsm8k
  slipstream data math downloads/MATH --output data/math
  slipstream data trajectories agent.jsonl --to sft --min-reward 0.5 --output demonstrations.jsonl
  slipstream data trajectories runs/mine/rollouts/1.jsonl --to rl --output samples.jsonl
  slipstream rl data.train_files=data/gsm8k/train.parquet data.val_files=data/gsm8k/test.parquet \\
      actor_rollout_ref.model.path=models/Qwen2.5-0.5B""",
        flags=_data_flags,
        run=_run_data,
        takes_settings=False,
    ),
    Command(
        name="export",
        summary="export the model or draft head of a checkpoint for other programs",
        usage="slipstream export --checkpoint DIR --output DIR [--draft ENGINE] [--dtype TYPE]",
        examples="""\
  slipstream export --checkpoint checkpoints/slipstream/run/global_step_50 --output model
  slipstream export --checkpoint global_step_50 --output model --dtype bfloat16
  slipstream export --checkpoint runs/mine --output head --draft sglang""",
        flags=_export_flags,
        run=_run_export,
        takes_settings=False,
    ),
    Command(
        name="quickstart",
        summary="train a small model to play Countdown, or to use a tool, in minutes",
        usage="slipstream quickstart [--agent] [--output DIR] [--seed N] [--recipe NAME] "
        "[--sft-control] [--no-bf16] [--no-speculation]",
        examples="""\
  slipstream quickstart
  slipstream quickstart --agent
  slipstream quickstart --output runs/second --seed 2 --sft-control""",
        flags=_quickstart_flags,
        run=_run_quickstart,
        takes_settings=False,
    ),
    Command(
        name="report",
        summary="write an HTML report of one or several runs; it opens offline",
        usage="slipstream report RUN [RUN ...] [--output FILE]",
        examples="""\
  slipstream report runs/quickstart
  slipstream report runs/plain runs/drafted --output compared.html""",
        flags=_report_flags,
        run=_run_report,
        takes_settings=False,
    ),
    Command(
        name="watch",
        summary="serve the report on localhost while the run continues",
        usage="slipstream watch RUN [RUN ...] [--port N]",
        examples="""\
  slipstream watch runs/mine
  ssh -t -L 6780:localhost:6780 HOST slipstream watch runs/mine --port 6780    # a remote run""",
        flags=_watch_flags,
        run=_run_watch,
        takes_settings=False,
    ),
    Command(
        name="config",
        summary="print the settings of a run, or explain an option",
        usage=f"slipstream config [KEY ...] {_SETTINGS}",
        examples="""\
  slipstream config --recipe quickstart trainer.seed=2
  slipstream config trainer.resume_mode actor_rollout_ref.rollout""",
        flags=_config_flags,
        run=_run_config,
    ),
    Command(
        name="doctor",
        summary="check the installation and suggest fixes",
        usage="slipstream doctor [--json] [--folder DIR] [--url URL] [--config FILE]",
        examples="""\
  slipstream doctor
  slipstream doctor --url http://localhost:8000
  slipstream doctor --json""",
        flags=_doctor_flags,
        run=_run_doctor,
        takes_settings=False,
    ),
    Command(
        name="bench",
        summary="measure speed on this machine: decoding, rollouts, speculation, training",
        usage=bench.USAGE,
        examples=bench.EXAMPLES,
        flags=bench.add_flags,
        run=_run_bench,
        takes_settings=False,
    ),
)


def _overview() -> argparse.ArgumentParser:
    width = max(len(command.name) for command in COMMANDS)
    names = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    top = argparse.ArgumentParser(
        prog="slipstream",
        usage="slipstream COMMAND ...",
        description="RL post-training of reasoning language models.\n\ncommands:\n" + names,
        epilog=f"`slipstream COMMAND --help` explains a command.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"slipstream {__version__}")
    top.add_argument(
        "command", choices=[command.name for command in COMMANDS], help=argparse.SUPPRESS
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: `sys.argv`) and return the exit code.

    Invalid flags end the program with exit code 2, as in argparse.
    """
    mark_command_start()
    keep_freed_memory()
    skip_collection_at_exit()
    line = list(sys.argv[1:] if argv is None else argv)
    if not line:
        _overview().print_help()
        return 2
    name = _overview().parse_args(line[:1]).command
    command = next(command for command in COMMANDS if command.name == name)
    flags = parser(
        f"slipstream {name}",
        command.summary,
        f"examples:\n{command.examples}\n",
        command.usage,
    )
    command.flags(flags)
    args, rest = flags.parse_known_args(line[1:])
    overrides = read_overrides(flags, rest)
    if overrides and not command.takes_settings:
        flags.error(f"unknown argument {overrides[0]}")
    return exit_status(lambda: command.run(args, overrides), debug=args.debug)


if __name__ == "__main__":
    sys.exit(main())
