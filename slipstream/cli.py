"""The `slipstream` command: parses a line, calls one function, prints.

Knows commands and flags; what they do is in `loops` (`run`, `quickstart`), imported only when a
command runs, so that help and settings errors come at once. Settings are `config.launch`'s matter.
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
    add_dry_run_flag,
    add_source_flags,
    config_from,
    exit_status,
    parser,
    positive,
    print_settings,
    read_overrides,
)
from slipstream.config.load import CONFIG_FILE
from slipstream.config.mode import HEAD_ALONE, resolve_mode
from slipstream.errors import CheckpointError, ConfigError
from slipstream.metrics.timeline import command_begins

DRAFT_LAYOUTS = ("vllm", "sglang")
"""Keys of `models.draft.layouts.LAYOUTS`, which would import torch."""

_SETTINGS = "[--recipe NAME | --config FILE] [key=value ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One sub-command. `run` gets the parsed flags and the rest of the line as overrides."""

    name: str
    summary: str
    usage: str
    examples: str
    flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[str]], int]
    takes_settings: bool = True


def _train_flags(command: argparse.ArgumentParser) -> None:
    add_source_flags(command)
    add_dry_run_flag(command)


def _run_training(args: argparse.Namespace, overrides: list[str]) -> int:
    config = config_from(args, overrides)
    if args.cfg:
        print_settings(config)
        return 0
    mode = resolve_mode(config)
    if args.dry_run:
        from slipstream.preflight.dry_run import dry_run

        return dry_run(config, mode)
    from slipstream.run.train import train

    return train(config, mode)


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
        help="a checkpoint of a run; without --recipe or --config, the run's own settings are used",
    )
    command.add_argument(
        "--problems", metavar="N", type=positive, help="problems to solve (default: all)"
    )
    command.add_argument(
        "--output", metavar="FILE", type=Path, help="also write scores and responses there"
    )
    add_source_flags(command)


def _existing_checkpoint(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} does not exist; check --checkpoint")
    return folder


def _run_settings(checkpoint: Path) -> Path | None:
    """The settings that the run of `checkpoint` kept, beside it or above it."""
    resolved = checkpoint.resolve()
    # From a policy's folder: <run>/sft/global_step_N/actor/huggingface.
    for folder in (resolved, *list(resolved.parents)[:4]):
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE
    return None


def _run_eval(args: argparse.Namespace, overrides: list[str]) -> int:
    checkpoint = _existing_checkpoint(args.checkpoint)
    file = _run_settings(checkpoint)
    if file is None and not (args.recipe or args.config or args.config_name or overrides):
        raise ConfigError(
            f"no {CONFIG_FILE} beside or above {checkpoint}, so what to evaluate on is not known; "
            "add --recipe NAME, --config FILE or data.val_files=FILE"
        )
    config = config_from(args, overrides, file=file, complete=False)
    if args.cfg:
        print_settings(config)
        return 0
    from slipstream.run.train import evaluate

    return evaluate(config, checkpoint, args.problems, args.output)


def _draft_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="the policy: a run, or a checkpoint of one, whose settings are used; the head goes to "
        "the folder `draft` of the run (default: actor_rollout_ref.model.path)",
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
            # Where the run itself went on from is not where its draft head does.
            "trainer.resume_mode=auto",
            "trainer.resume_from_path=null",
            *HEAD_ALONE,
        ]
        overrides = [*given, *overrides]
    config = config_from(args, overrides, file=file)
    if args.cfg:
        print_settings(config)
        return 0
    from slipstream.run.draft_phase import main as draft

    return draft(config)


def _reward_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "dump", metavar="DUMP", type=Path, help="JSON lines of a run's rollouts/, or VERL's"
    )
    command.add_argument(
        "--fn",
        metavar="FILE[:NAME]",
        help="Python file of the reward function, compute_score unless named (default: the "
        "built-in one of each line's data source)",
    )
    command.add_argument(
        "--kwargs", metavar="JSON", type=_mapping, help="what the function is called with besides"
    )
    command.add_argument(
        "--data-source", metavar="NAME", help="the data source of all lines, whatever they say"
    )
    command.add_argument("--limit", metavar="N", type=positive, help="score the first N only")
    command.add_argument(
        "--output", metavar="FILE", type=Path, help="also write scores, failures and times there"
    )
    command.add_argument(
        "--raise",
        dest="reraise",
        action="store_true",
        help="let the first error of the function through, for a debugger",
    )
    add_debug_flag(command)


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no mapping; write {{"scale": 2}}')
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
    command.add_argument("name", metavar="NAME", help="gsm8k or math")
    command.add_argument(
        "source", metavar="SOURCE", type=Path, help="file or folder of the data set as published"
    )
    command.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        required=True,
        help="where train.parquet and test.parquet go",
    )
    add_debug_flag(command)


def _run_data(args: argparse.Namespace, _: list[str]) -> int:
    from slipstream.data.preprocess import convert

    for path, rows in convert(args.name, args.source, args.output).items():
        print(f"{rows:>8} rows  {path}")
    return 0


def _export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        required=True,
        help="a run, a checkpoint of one, or a folder that holds just what is exported",
    )
    command.add_argument(
        "--output", metavar="DIR", type=Path, required=True, help="folder to write, new or empty"
    )
    command.add_argument(
        "--draft",
        metavar="ENGINE",
        choices=DRAFT_LAYOUTS,
        help="write the draft head instead of the model, as this engine loads EAGLE heads: vllm "
        "(of Llama's family) or sglang (of Llama's and Qwen2's)",
    )
    command.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="type of the weights (default: auto, as they are in the checkpoint)",
    )
    add_debug_flag(command)


def _run_export(args: argparse.Namespace, _: list[str]) -> int:
    checkpoint = _existing_checkpoint(args.checkpoint)
    from slipstream.run.train import export

    return export(checkpoint, args.output, args.dtype, args.draft)


def _quickstart_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("runs/quickstart"),
        help="run folder (default: runs/quickstart)",
    )
    command.add_argument("--seed", metavar="N", type=int, default=1, help="seed (default: 1)")
    command.add_argument(
        "--recipe",
        choices=["auto", "quickstart", "quickstart_small"],
        default="auto",
        help="auto (default): measure the machine and take the larger recipe that fits it",
    )
    command.add_argument(
        "--sft-control",
        action="store_true",
        help="also spend the RL part's time on more SFT, to compare with",
    )
    command.add_argument(
        "--no-bf16", dest="bf16", action="store_false", help="compute in float32 throughout"
    )
    command.add_argument(
        "--no-speculation",
        dest="speculation",
        action="store_false",
        help="decode plainly, without a draft head; the same policy comes out",
    )
    command.add_argument(
        "--cold-start",
        action="store_true",
        help="begin RL without a draft head, which then learns from RL's own rollouts",
    )
    add_debug_flag(command)


def _run_quickstart(args: argparse.Namespace, _: list[str]) -> int:
    from slipstream.run.quickstart import main as quickstart

    return quickstart(
        args.output,
        args.seed,
        args.recipe,
        args.sft_control,
        args.bf16,
        args.speculation,
        args.cold_start,
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
        "runs", metavar="RUN", type=Path, nargs="+", help="a run folder; several are overlaid"
    )


def _report_flags(command: argparse.ArgumentParser) -> None:
    _runs_argument(command)
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="where the page goes (default: report.html in the run folder; of several runs, here)",
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
        "--port", metavar="N", type=positive, help="default: the first free one from 6780 on"
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
        help="where runs are to be (default: the present folder)",
    )
    add_debug_flag(command)


def _run_doctor(args: argparse.Namespace, _: list[str]) -> int:
    from slipstream.preflight.doctor import doctor

    return doctor(args.folder, as_json=args.json)


def _run_bench(args: argparse.Namespace, _: list[str]) -> int:
    return bench.run(args)


COMMANDS = (
    Command(
        name="train",
        summary="train: SFT, RL, or SFT and then RL, whichever the settings ask for",
        usage=f"slipstream train [--dry-run] {_SETTINGS}",
        examples="""\
  slipstream train --recipe tiny
  slipstream train --recipe quickstart trainer.seed=2 actor_rollout_ref.rollout.n=16
  slipstream train data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=checkpoints/base trainer.test_freq=10
  slipstream train --recipe quickstart --dry-run
  slipstream train --config-path conf --config-name mine --cfg job""",
        flags=_train_flags,
        run=_run_training,
    ),
    Command(
        name="sft",
        summary="train: supervised fine-tuning only",
        usage=f"slipstream sft [--dry-run] {_SETTINGS}",
        examples="""\
  slipstream sft --recipe quickstart
  slipstream sft sft.train_files=demonstrations.jsonl sft.total_training_steps=200 \\
      actor_rollout_ref.model.path=checkpoints/base""",
        flags=_train_flags,
        run=_run_sft,
    ),
    Command(
        name="rl",
        summary="train: reinforcement learning only",
        usage=f"slipstream rl [--dry-run] {_SETTINGS}",
        examples="""\
  slipstream rl data.train_files=train.parquet actor_rollout_ref.model.path=checkpoints/sft \\
      custom_reward_function.path=reward.py trainer.total_training_steps=100""",
        flags=_train_flags,
        run=_run_rl,
    ),
    Command(
        name="draft",
        summary="train a draft head for a policy, and measure how many of its drafts are right",
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
        summary="try a reward function on the responses that a run has written",
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
        summary="turn a public data set into files to train and validate on",
        usage="slipstream data NAME SOURCE --output DIR",
        examples="""\
  slipstream data gsm8k downloads/gsm8k/main --output data/gsm8k
  slipstream data math downloads/MATH --output data/math
  slipstream rl data.train_files=data/gsm8k/train.parquet data.val_files=data/gsm8k/test.parquet \\
      actor_rollout_ref.model.path=models/Qwen2.5-0.5B""",
        flags=_data_flags,
        run=_run_data,
        takes_settings=False,
    ),
    Command(
        name="export",
        summary="write a checkpoint's model, or its draft head, as other programs load it",
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
        summary="learn to play Countdown on this machine, in minutes, and report",
        usage="slipstream quickstart [--output DIR] [--seed N] [--recipe NAME] [--sft-control] "
        "[--no-bf16] [--no-speculation]",
        examples="""\
  slipstream quickstart
  slipstream quickstart --output runs/second --seed 2 --sft-control""",
        flags=_quickstart_flags,
        run=_run_quickstart,
        takes_settings=False,
    ),
    Command(
        name="report",
        summary="draw a run, or several together, as one page that opens offline",
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
        summary="show that page in a browser while the run goes on",
        usage="slipstream watch RUN [RUN ...] [--port N]",
        examples="""\
  slipstream watch runs/mine
  ssh -t -L 6780:localhost:6780 HOST slipstream watch runs/mine --port 6780    # elsewhere""",
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
        summary="say what is here, whether it is fine, and what to do where it is not",
        usage="slipstream doctor [--json] [--folder DIR]",
        examples="""\
  slipstream doctor
  slipstream doctor --json""",
        flags=_doctor_flags,
        run=_run_doctor,
        takes_settings=False,
    ),
    Command(
        name="bench",
        summary="measure rollouts, training steps and start-up on this machine",
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
        epilog=f"`slipstream COMMAND --help` explains one.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"slipstream {__version__}")
    top.add_argument(
        "command", choices=[command.name for command in COMMANDS], help=argparse.SUPPRESS
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's); returns the exit code.

    Unusable flags end the program with code 2, as argparse does.
    """
    command_begins()
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
