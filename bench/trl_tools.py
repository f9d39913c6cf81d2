"""GRPO with a tool: ours against TRL's `GRPOTrainer`, on the built-in task `lookup`.

    python -m bench.trl_tools --policy RUN [--steps 12] [--rounds 3] [--threads N]
        [--precision float32 ...] [--json FILE]

RUN is a run of `slipstream quickstart --agent`. First our engine samples episodes, and both systems
get them as fixed batches: prompts, turns of the policy, and answers of the tool with mask 0. Loss,
gradients and optimizer steps must agree (`trl_parity`), otherwise nothing is timed. Then the runs
of `trl_compare` take turns of one step each: the same prompts, samples per prompt, limits of tokens
and turns, and settings of the optimizer. TRL gets the same tool as a method of its
`environment_factory`, whose `reset` gets the table of the row.

TRL's tool loop works in rounds: all samples generate one turn, then the tools answer, and all texts
so far are prefilled again. A sample that ends early waits for the last one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.trl_command import add_run_flags, trl_bench
from bench.trl_compare import UPDATES, dtype_of, run_parity, training_row
from bench.trl_parity import FixedBatch
from bench.trl_runs import (
    PRECISIONS,
    WARM_UP,
    ContenderRun,
    TrlBench,
    ab_bench,
    check_fixed,
    compose,
    run_round,
    trl_command,
    trl_settings,
)
from slipstream.bench.ab import PLAIN, arms_of, command, last_rollouts
from slipstream.bench.interleaved_runs import run_interleaved
from slipstream.bench.printing import print_rows, progress, shown
from slipstream.bench.record import ResultRow, Spread, write_rows
from slipstream.bench.rl_line import start_of
from slipstream.bench.timing import ratio
from slipstream.config.schema import Config
from slipstream.data.lookup import DATA_SOURCE as LOOKUP
from slipstream.data.trajectories import read_trajectories
from slipstream.errors import EngineError
from slipstream.types import Sample

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def tool_settings(config: Config) -> dict[str, Any]:
    """Settings of TRL's tool loop. Raises ConfigError, with the setting's name, for a setting that
    TRL does not have."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    check_fixed(
        {
            f"{_MULTI_TURN}.history": (multi_turn.history, "append"),
            f"{_MULTI_TURN}.max_user_turns": (multi_turn.max_user_turns, None),
            f"{_MULTI_TURN}.max_tool_seconds": (multi_turn.max_tool_seconds, None),
        }
    )
    turns = multi_turn.max_assistant_turns
    # TRL counts the rounds of tool calls; each is followed by a turn.
    return {"max_tool_calling_iterations": None if turns is None else turns - 1}


def batches_of(samples: Sequence[Sample], group_size: int) -> list[FixedBatch]:
    """One batch per prompt, with all its samples. Prompts whose samples have equal rewards are left
    out: their advantages are 0."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.uid, []).append(sample)
    draws = random.Random(0)
    return [
        FixedBatch(
            group_size=group_size,
            prompt_ids=[sample.prompt_ids for sample in group],
            completion_ids=[sample.response_ids for sample in group],
            rewards=[sample.reward for sample in group],
            shifts=[[draws.gauss(0, 0.4) for _ in sample.response_ids] for sample in group],
            masks=[
                [int(mask) for mask in sample.loss_mask[len(sample.prompt_ids) :]]
                for sample in group
            ],
        )
        for group in groups.values()
        if len(group) == group_size and len({sample.reward for sample in group}) > 1
    ]


def joined(groups: Sequence[FixedBatch]) -> FixedBatch:
    """The groups of `batches_of` whose prompts have the most frequent length, as one batch.

    TRL pads shorter prompts on the left and counts the padding as positions. The rotary angles of
    other positions round differently, and gradients of such a batch differ by 5e-5.
    """
    by_length: dict[int, list[FixedBatch]] = {}
    for group in groups:
        by_length.setdefault(len(group.prompt_ids[0]), []).append(group)
    batches = max(by_length.values(), key=len)
    return FixedBatch(
        group_size=batches[0].group_size,
        prompt_ids=list(chain.from_iterable(batch.prompt_ids for batch in batches)),
        completion_ids=list(chain.from_iterable(batch.completion_ids for batch in batches)),
        rewards=list(chain.from_iterable(batch.rewards for batch in batches)),
        shifts=list(chain.from_iterable(batch.shifts for batch in batches)),
        masks=list(chain.from_iterable(batch.masks or () for batch in batches)),
    )


def sampled_episodes(
    bench: TrlBench, config: Config, start: Path, say: Callable[[str], None]
) -> list[Sample]:
    """The episodes of the first step of our run from the policy `start`."""
    ab = ab_bench(bench, 1, config.trainer.seed)
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        line = command(ab, start, arms_of(None)[PLAIN], folder)
        run_interleaved({PLAIN: line}, say, config.actor_rollout_ref.model.external_lib)
        read = read_trajectories([last_rollouts(folder)])
    return [one.recorded for one in read if one.recorded is not None]


def run(bench: TrlBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Measure; one row per parity case, then one per contender. Raises ConfigError for settings
    that cannot be compared and if TRL is not installed, EngineError if parity or a run fails."""
    trl = trl_command()
    config = compose(bench)
    settings = {**trl_settings(config, LOOKUP), **tool_settings(config)}
    model = start_of(bench.policy)
    groups = batches_of(sampled_episodes(bench, config, model, say), settings["group_size"])
    if len(groups) < UPDATES:
        raise EngineError(
            f"only {len(groups)} prompts of the first step have samples with different rewards, "
            f"and the comparison needs {UPDATES}; give --set data.train_batch_size="
            f"{2 * settings['prompts_per_step']}"
        )
    batch = joined(groups)
    masks = list(chain.from_iterable(batch.masks or ()))
    say(
        f"parity: {len(batch.rewards)} of our episodes with {len(masks)} tokens, "
        f"{masks.count(0)} of them of the tool"
    )
    rows = run_parity(model, batch, groups[:UPDATES], settings, trl, bench.threads, say)
    dtype = dtype_of(config)
    found: dict[str, list[ContenderRun]] = {}
    for number in range(bench.rounds):
        with TemporaryDirectory() as folder:
            ran, versions = run_round(
                bench,
                config,
                settings,
                bench.precisions or PRECISIONS[dtype],
                Path(folder),
                trl,
                say,
                number,
            )
        for name, one in ran.items():
            found.setdefault(name, []).append(one)
    for name in found:
        row = training_row(bench, name, found, [], dtype, settings, versions)
        rows.append(
            replace(
                row, benchmark="trl_tools", values={**row.values, **_values(bench, name, found)}
            )
        )
    return rows


def _values(
    bench: TrlBench, name: str, found: Mapping[str, Sequence[ContenderRun]]
) -> dict[str, float | Spread]:
    """Values of a contender by round: turns, time per sampled token, and both times over ours
    without drafts."""
    counted = slice(WARM_UP, bench.steps)

    def times(of: Sequence[ContenderRun]) -> tuple[list[float], list[float]]:
        """By round: medians over steps of the time in seconds, and of the time per token in ms."""
        steps = [median(one.seconds[counted]) for one in of]
        tokens = [
            median(
                1000 * seconds / step["tokens"]
                for seconds, step in zip(one.seconds[counted], one.steps[counted], strict=True)
            )
            for one in of
        ]
        return steps, tokens

    (steps, tokens), (our_steps, our_tokens) = times(found[name]), times(found[PLAIN])
    turns = [
        sum(step["turns"] for step in one.steps[counted]) / len(one.steps[counted])
        for one in found[name]
    ]
    return {
        "turns_per_step": Spread.of(turns),
        "ms_per_sampled_token": Spread.of(tokens),
        "step_over_ours": ratio(steps, our_steps),
        "sampled_token_over_ours": ratio(tokens, our_tokens),
    }


def timed_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows of contenders, without those of parity."""
    return [row for row in rows if row.benchmark == "trl_tools"]


def main(line: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="RUN")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.set_defaults(problems=0)
    add_run_flags(parser, steps=12)
    args = parser.parse_args(line)
    rows = run(trl_bench(args), progress)
    print_rows("GRPO with a tool, against TRL", timed_rows(rows))
    for row in timed_rows(rows):
        if row.contender.startswith("trl-"):
            print(
                f"  {row.contender}: {shown(row.values['step_over_ours'])} times our time of a "
                f"step, {shown(row.values['sampled_token_over_ours'])} times our time per sampled "
                "token"
            )
    if args.json is not None:
        write_rows(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
