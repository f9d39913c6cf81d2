"""The quickstart: trains a small reasoning model from random weights in minutes, by SFT and then
RL.

    measure the CPU -> choose a recipe -> SFT -> evaluate -> train a draft head -> RL (GRPO), with
    co-training of the head -> evaluate -> decode the same responses with and without drafts
    -> print a table

With `cold_start`, RL starts without a draft head. The head learns from RL's rollouts; until it is
better, drafts come from earlier text (`history`). With `agent`, the model learns the task `lookup`:
it calls a tool, and RL teaches it to do so no more than needed. With `sft_control`, SFT also
continues for as long as RL took, to show that RL gains more than further SFT would. `slipstream
train` and `eval` can do all of this, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from slipstream.build.data import validation_prompts
from slipstream.build.engine import make_engine
from slipstream.build.rollouts import eval_settings
from slipstream.checkpoint.files import write_json
from slipstream.checkpoint.state import draft_folder, huggingface_folder
from slipstream.config.launch import INTERRUPTED, program
from slipstream.config.load import CONFIG_FILE, load_config
from slipstream.config.mode import HEAD_ALONE
from slipstream.deadlines import close_parts
from slipstream.errors import ConfigError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.protocol import InferenceEngine
from slipstream.loops.evaluate import Evaluation
from slipstream.loops.evaluate import evaluate as run_evaluation
from slipstream.metrics.batch_metrics import accuracy_interval, paired_difference
from slipstream.metrics.loggers import METRICS_FILE, read_jsonl
from slipstream.metrics.picture import plot_run
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.numerics import cpu_has_bf16_units
from slipstream.run.console import conversation
from slipstream.run.draft_phase import draft_phase
from slipstream.run.event_loop import run_async
from slipstream.run.folder import has_checkpoint
from slipstream.run.side_by_side import SideBySide, side_by_side
from slipstream.run.snapshot import computed_with
from slipstream.run.train import (
    PICTURE,
    Run,
    claim_folder,
    draw_report,
    open_run,
    opened,
    rl_phase,
    sft_phase,
)
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import Sample

SPECULATION = ["speculative.enable=true", "speculative.train.enable_drafter_training=true"]
"""Settings for drafts in the rollouts."""

COLD_START = [
    "speculative.eagle.spec_model_path=null",
    "speculative.spec_strategy=union",
    # A new head needs more training, with a higher learning rate that decays.
    "speculative.train.training_interval_steps=4",
    "speculative.train.updates_per_training=24",
    "speculative.train.optim.lr=1e-3",
    "speculative.train.optim.muon_lr=0.04",
    "speculative.train.optim.lr_scheduler_type=linear",
]
"""Settings for drafts without a head at the start."""

AGENT_RECIPE = "quickstart_agent"

TITLES = {"countdown": "mini-Countdown", "lookup": "look-ups in a table"}
"""What the tables call the tasks."""

PROBLEMS = 1024
"""The number of held-out problems in the final comparison."""

COMPARED = 64
"""The number of responses that are decoded with and without drafts; a quarter of them also a few at
a time."""

FEW = 4
"""A few at a time: this many, as at the end of a rollout."""

DRAFT = "draft"
"""The folder of the draft head in the run folder."""

SUMMARY = "summary.json"

READABLE = 64
"""A shown sample answer has at most this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """The evaluation of a policy on the held-out problems."""

    name: str
    evaluation: Evaluation
    seconds: float

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.evaluation.groups for sample in group.samples]

    @property
    def lengths(self) -> list[int]:
        return [sample.response_length for sample in self.samples]

    @property
    def turns(self) -> float | None:
        """Mean number of turns of the policy; None without tools."""
        records = [sample.episode for sample in self.samples if sample.episode is not None]
        return float(np.mean([record.turns for record in records])) if records else None

    @property
    def tokens_per_second(self) -> float:
        return sum(self.lengths) / self.seconds


@dataclass(slots=True)
class PhaseClock:
    """Measures seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> float:
        """Add the time since the last call to the phase `name`."""
        now = time.perf_counter()
        spent, self.started = now - self.started, now
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        return spent


def main(
    output: Path,
    seed: int,
    recipe: str,
    sft_control: bool,
    bf16: bool,
    speculation: bool = True,
    cold_start: bool = False,
    agent: bool = False,
) -> int:
    """Run the quickstart in the folder `output`. Returns the exit status (130 if interrupted).

    Without `speculation` there is no draft head; with `cold_start` there is none before RL. The
    trained policy is the same. With `agent` the model learns to call a tool, and the head learns
    during RL, from all turns. Raises ConfigError for a cold start without speculation, and for
    `agent` with another recipe.
    """
    if agent and recipe not in ("auto", AGENT_RECIPE):
        raise ConfigError(
            f"--agent has a recipe of its own, but --recipe={recipe}; remove one of them"
        )
    if cold_start and not speculation:
        raise ConfigError(
            "--cold-start needs a draft head, but --no-speculation disables it; remove one of them"
        )
    # If the output is not a terminal, do not cut lines.
    console = Console(soft_wrap=not sys.stdout.isatty())
    compute = ComputeThread()
    recipe = AGENT_RECIPE if agent else recipe
    begun = _begun(output) if recipe == "auto" else None
    chosen, dtype, reason = begun or compute.run(lambda: choose_recipe(recipe, bf16=bf16))
    console.print(f"recipe {chosen} in {dtype}: {reason}", highlight=False)
    overrides = [
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={output}",
        # The recipes are sized for CPUs, and the measurement is for this CPU.
        "trainer.device=cpu",
        f"actor_rollout_ref.actor.dtype={dtype}",
        f"actor_rollout_ref.rollout.dtype={dtype}",
    ]
    if speculation:
        # The head trains on responses of the SFT policy, and RL's rollouts draft with it.
        overrides += [*SPECULATION, f"speculative.eagle.spec_model_path={output / DRAFT}"]
        if cold_start or agent:
            overrides += COLD_START
    config = load_config(overrides, recipe=chosen)
    clock = PhaseClock()
    with opened(config, compute) as run:
        done = run_async(_run_phases, run, clock, sft_control)
    if done is None:
        again = f"slipstream quickstart --output {output} --seed {seed}"
        again += " --agent" if agent else f" --recipe {chosen}"
        again += ("" if bf16 else " --no-bf16") + (" --sft-control" if sft_control else "")
        again += "" if speculation else " --no-speculation"
        again += " --cold-start" if cold_start else ""
        console.print(f"stopped; `{again}` resumes from here", highlight=False, soft_wrap=True)
        return INTERRUPTED
    rated, compared = done
    summary = summarize(run, rated, clock, chosen, dtype, compared)
    write_json(output / SUMMARY, summary)
    plot_run([output / "sft" / METRICS_FILE, output / METRICS_FILE], output / PICTURE)
    report(console, run, rated, summary, draw_report(output))
    return 0


def _begun(output: Path) -> tuple[str, str, str] | None:
    """The recipe, dtype and reason of the run in `output`, if there is one: on resume, a new
    measurement must not choose another recipe."""
    if not has_checkpoint(output):
        return None
    config = load_config(file=output / CONFIG_FILE, complete=False, notify=lambda text: None)
    actor = config.actor_rollout_ref.actor
    return config.trainer.experiment_name, actor.dtype, f"as at the start of the run in {output}"


def choose_recipe(recipe: str, *, bf16: bool) -> tuple[str, str, str]:
    """Measure matrix products and return (recipe, dtype, reason) for this machine."""
    units = bf16 and cpu_has_bf16_units()
    dtype = torch.bfloat16 if units else torch.float32
    rate = matmul_rate(dtype)
    name = str(dtype).removeprefix("torch.")
    measured = f"{rate:.0f} GFLOP/s in {name} with {torch.get_num_threads()} threads"
    if not units:
        measured += ", bf16 switched off" if not bf16 else ", this CPU has no bf16 units"
    if recipe != "auto":
        return recipe, name, f"as asked ({measured})"
    if rate >= FAST_GFLOPS:
        return "quickstart", name, measured
    return "quickstart_small", name, f"{measured}: the smaller model, to finish in minutes"


FAST_GFLOPS = 600.0
"""At this measured rate or more, the full recipe should finish within seven minutes. Estimated from
its steps at 380 GFLOP/s, where SFT alone would take six minutes."""


def matmul_rate(dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measured GFLOP/s of matrix products with the sizes that training uses."""
    a, b = torch.randn(1024, 192, dtype=dtype), torch.randn(192, 768, dtype=dtype)
    rates = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        rates.append(2 * 1024 * 192 * 768 / (time.perf_counter() - start) / 1e9)
    return float(np.median(rates))


async def _run_phases(
    run: Run, clock: PhaseClock, sft_control: bool
) -> tuple[list[Rated], list[SideBySide]] | None:
    """Run all phases. Returns the evaluated policies and the comparisons of decoding; None if the
    run was stopped."""
    speculation = run.config.speculative.enable
    sft = await sft_phase(run)
    if sft is None:
        return None
    clock.lap("sft")
    rated = [await rate(run, "after SFT", sft)]
    clock.lap("evaluate")
    if run.config.speculative.eagle.spec_model_path is not None:
        with run.span("draft"):
            head = await train_head(run, sft)
        if head is None:
            return None
        clock.lap("draft")
    if not await rl_phase(run, sft):
        return None
    clock.lap("rl")
    # Of all processes of the run.
    spent = clock.seconds["rl"] = max(clock.seconds["rl"], _trained_seconds(run.folder))
    clock.seconds["sft"] = max(clock.seconds["sft"], _trained_seconds(run.folder / "sft"))
    policy = run.snapshots("rl").manager.latest()
    assert policy is not None, "rl_phase ends with a checkpoint"
    after = await rate(run, "after RL", huggingface_folder(policy))
    clock.lap("evaluate")
    if sft_control:
        with run.span("sft_control"):
            continued = await continue_sft(run, sft, spent)
        if continued is None:
            return None
        clock.lap("sft_control")
        rated.append(await rate(run, "after more SFT", continued))
        clock.lap("evaluate")
    compared: list[SideBySide] = []
    if speculation:
        with run.span("compare"):
            compared = await compare_decoding(run, policy)
        clock.lap("compare")
    return [*rated, after], compared


def _trained_seconds(folder: Path) -> float:
    """Seconds of the steps and validations of a phase, over all processes that ran it."""
    names = ("timing_s/step", "timing_s/testing")
    lines = read_jsonl(folder / METRICS_FILE)
    return sum(metrics.get(name, 0.0) for _, metrics in lines for name in names)


async def rate(run: Run, name: str, policy: Path) -> Rated:
    """Evaluate a policy on `PROBLEMS` held-out problems, sampled at temperature 1."""
    with run.span("evaluate", what=name):
        return await _rate(run, name, policy)


async def _rate(run: Run, name: str, policy: Path) -> Rated:
    config = run.config
    prompts = validation_prompts(config, run.tokenizer, run.task, count=PROBLEMS)

    def make() -> InferenceEngine:
        return make_engine(config, load_checkpoint(policy), run.tokenizer, run.compute)

    engine = run.compute.run(make)
    run.progress.note(f"{name}: {len(prompts)} held-out problems")
    started = time.perf_counter()
    settings = eval_settings(config, run.tokenizer)
    evaluation = await run_evaluation([engine], prompts, run.rewards, settings)
    close_parts(run.deadlines, engine)
    return Rated(name=name, evaluation=evaluation, seconds=time.perf_counter() - started)


async def train_head(run: Run, policy: Path) -> Path | None:
    """Train a draft head for `policy` in the folder `draft` of the run. None if stopped."""
    folder = run.folder / DRAFT
    config = load_config(
        [
            f"trainer.default_local_dir={folder}",
            f"actor_rollout_ref.model.path={policy}",
            "actor_rollout_ref.model.init=null",
            "speculative.eagle.spec_model_path=null",
            *HEAD_ALONE,
        ],
        file=run.folder / CONFIG_FILE,
    )
    claim_folder(folder, config)
    return await draft_phase(
        open_run(config, folder, run.progress, run.interrupt, run.compute, run.deadlines)
    )


async def compare_decoding(run: Run, checkpoint: Path) -> list[SideBySide]:
    """Compare decoding with and without drafts, for the policy and the draft head of an RL
    checkpoint: with as many responses at once as in an RL step, and with a few at a time, as at
    the end of a rollout."""
    config = load_config(
        [
            f"speculative.eagle.spec_model_path={draft_folder(checkpoint)}",
            # No history drafts: they would repeat the responses of the previous round.
            "speculative.spec_strategy=eagle",
        ],
        file=run.folder / CONFIG_FILE,
    )
    at_once = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    prompts = validation_prompts(config, run.tokenizer, run.task, count=COMPARED)
    run.progress.note(
        f"{COMPARED} responses, {at_once} at a time, and some {FEW} at a time: plainly and with "
        "drafts, in turns"
    )

    def make() -> InferenceEngine:
        decoder, note = load_checkpoint(huggingface_folder(checkpoint)), run.progress.note
        return make_engine(config, decoder, run.tokenizer, run.compute, speculate=note)

    engine = run.compute.run(make)
    assert isinstance(engine, EmbeddedEngine)  # the only engine with draft heads
    try:
        settings = eval_settings(config, run.tokenizer)
        return [
            await side_by_side(
                engine, prompts[:count], run.rewards, settings, at_once=some, rounds=9, warm_up=3
            )
            for count, some in ((COMPARED, at_once), (COMPARED // 4, FEW))
        ]
    finally:
        close_parts(run.deadlines, engine)


async def continue_sft(run: Run, sft: Path, seconds: float) -> Path | None:
    """Continue SFT for about `seconds`, with new demonstrations and a new warm-up and decay."""
    history = read_jsonl(run.folder / "sft" / METRICS_FILE)
    per_step = float(np.median([metrics["timing_s/step"] for _, metrics in history]))
    folder = run.folder / "sft_control"
    steps = max(1, round(seconds / per_step))
    if has_checkpoint(folder):
        begun = load_config(file=folder / CONFIG_FILE, complete=False, notify=lambda text: None)
        steps = begun.sft.total_training_steps
    config = load_config(
        [
            f"trainer.default_local_dir={folder}",
            f"actor_rollout_ref.model.path={sft}",
            "actor_rollout_ref.model.init=null",
            f"sft.total_training_steps={steps}",
            "trainer.mode=sft",
            # Demonstrations that SFT has not seen.
            f"data.seed={run.config.trainer.seed + 1_000_000}",
        ],
        file=run.folder / "config.yaml",
    )
    claim_folder(folder, config)
    more = open_run(config, folder, run.progress, run.interrupt, run.compute, run.deadlines)
    return await sft_phase(more)


def summarize(
    run: Run,
    rated: Sequence[Rated],
    clock: PhaseClock,
    recipe: str,
    dtype: str,
    compared: Sequence[SideBySide] = (),
) -> dict[str, Any]:
    """All values of the table, with settings and machine, as JSON values."""
    by_name = {r.name: r for r in rated}
    before, after = rated[0], rated[-1]
    more = by_name.get("after more SFT")
    history = read_jsonl(run.folder / METRICS_FILE)
    steps = [metrics for _, metrics in history if "rollout/tokens_per_second" in metrics]
    sft = [metrics for _, metrics in read_jsonl(run.folder / "sft" / METRICS_FILE)]
    intervals = {r.name: list(accuracy_interval(r.evaluation.correct)[1:]) for r in rated}
    gains = {"rl_minus_sft": _gain(before, after)}
    if more is not None:
        gains["rl_minus_sft_continued"] = _gain(more, after)
    return {
        "recipe": recipe,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "seed": run.config.trainer.seed,
        "accuracy_sft": before.evaluation.accuracy,
        "accuracy_sft_continued": None if more is None else more.evaluation.accuracy,
        "accuracy_rl": after.evaluation.accuracy,
        "accuracy_ci": {**intervals, **gains},
        "problems": len(before.samples),
        "steps": {"sft": len(sft), "rl": len(steps)},
        "tokens": {
            "sft": sum(m["sft/tokens_per_second"] * m["timing_s/step"] for m in sft),
            "rl": sum(m["perf/total_num_tokens"] for m in steps),
            "rl_sampled": sum(m["response_length/mean"] * m["rollout/num_samples"] for m in steps),
        },
        "seconds": {**clock.seconds, "total": sum(clock.seconds.values())},
        "seconds_rl": {
            name: sum(m.get(f"timing_s/{name}", 0.0) for m in steps)
            for name in ("gen", "update_actor", "sync", "testing", "save_checkpoint")
        },
        "tokens_per_second_rollout": float(
            np.median([m["rollout/tokens_per_second"] for m in steps])
        ),
        "evaluation": {
            r.name: {
                "tokens_per_second": r.tokens_per_second,
                "turns": r.turns,
                "median_length": float(np.median(r.lengths)),
                "longest": max(r.lengths),
            }
            for r in rated
        },
        "rollout_log_probs_differing": sum(
            m["training/rollout_log_probs_differing"] for m in steps
        ),
        **(decoding_summary(compared) if compared else {}),
        **(drafts_summary(history) if compared else {}),
        "versions": computed_with(),
    }


def decoding_summary(compared: Sequence[SideBySide]) -> dict[str, Any]:
    """The comparisons of decoding as JSON values."""
    return {
        "rollout_speedup": compared[0].speedup,
        "tokens_identical": all(pair.identical for pair in compared),
        "accept_length": compared[0].accept_length,
        "rollout_comparison": [asdict(pair) for pair in compared],
    }


def drafts_summary(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Any]:
    """The draft head during RL, as JSON values: the number of steps with drafts, tokens per
    verification in the first and last tenth of these steps, versions, seconds of training, the
    first step from which it made most drafts (average over a tenth of the steps), and its share of
    the drafts in the last tenth."""
    steps = [(step, m) for step, m in history if "spec/on_fraction" in m]
    if not steps:
        return {}
    few = max(1, len(steps) // 10)
    lengths = [m["spec/accept_length"] for _, m in steps if "spec/accept_length" in m] or [1.0]
    # Steps without drafts do not count. An average over steps, because history drafts vary a lot.
    drafting = [(step, m["spec/head_fraction"]) for step, m in steps if "spec/head_fraction" in m]
    windows = [drafting[max(0, i - few + 1) : i + 1] for i in range(len(drafting))]
    after = [window[-1][0] for window in windows if np.mean([f for _, f in window]) <= 0.5]
    last = steps[-1][1]
    return {
        "drafts": {
            "steps": float(len(drafting)),
            "accept_length_first": float(np.mean(lengths[:few])),
            "accept_length_last": float(np.mean(lengths[-few:])),
            "head_from_step": max(after, default=0) + 1,
            "head_share_last": float(np.mean([f for _, f in drafting[-few:]] or [0.0])),
            "versions": last.get("drafter/version", 0.0),
            "hold_backs": last.get("drafter/hold_backs", 0.0),
            "updates": last.get("drafter/updates", 0.0),
            "seconds": sum(m.get("timing_s/drafter", 0.0) for _, m in steps),
        }
    }


def _gain(a: Rated, b: Rated) -> list[float]:
    """[difference, low, high] of the accuracies on the same problems, by a paired bootstrap."""
    return list(paired_difference(a.evaluation.correct, b.evaluation.correct))


def report(
    console: Console,
    run: Run,
    rated: Sequence[Rated],
    summary: dict[str, Any],
    drawn: Sequence[str] = (),
) -> None:
    """Print the final table: accuracy, speed, some problems, and the paths of the results."""
    output, task = run.folder, str(run.config.data.task)
    has_turns = rated[0].turns is not None
    title = f"{TITLES.get(task, task)}, {summary['problems']} held-out problems"
    table = Table(title=title)
    columns = ["", "accuracy (95 %)", "tokens/s", "median", "longest"]
    columns += ["turns"] if has_turns else []
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for r in rated:
        low, high = summary["accuracy_ci"][r.name]
        table.add_row(
            r.name,
            f"{r.evaluation.accuracy:.3f} ({low:.3f} to {high:.3f})",
            f"{r.tokens_per_second:.0f}",
            f"{np.median(r.lengths):.0f}",
            f"{max(r.lengths)}",
            *([f"{r.turns:.2f}"] if has_turns else []),
        )
    console.print(table)
    for name, against in (("rl_minus_sft", "SFT"), ("rl_minus_sft_continued", "more SFT")):
        if name in summary["accuracy_ci"]:
            gain, low, high = summary["accuracy_ci"][name]
            console.print(
                f"RL over {against}: {100 * gain:+.1f} points "
                f"(paired 95 % interval {100 * low:+.1f} to {100 * high:+.1f})",
                highlight=False,
            )
    console.print()
    decode = partial(run.tokenizer.decode, skip_special_tokens=True)
    for before, after in examples(rated[0].samples, rated[-1].samples):
        console.print(f"problem      {before.prompt[0]['content']}", highlight=False)  # type: ignore[index]
        for name, sample in (("after SFT", before), ("after RL", after)):
            for line in _answered(name, sample, decode):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    seconds = summary["seconds"]
    console.print(
        f"\n{seconds['total']:.0f} s: SFT {seconds['sft']:.0f}, "
        + (f"draft head {seconds['draft']:.0f}, " if "draft" in seconds else "")
        + f"RL {seconds['rl']:.0f} "
        f"({summary['steps']['rl']} steps, {summary['tokens_per_second_rollout']:.0f} tokens/s in "
        f"rollouts), evaluation {seconds['evaluate']:.0f}; log-probs of rollout and trainer differ "
        f"for {summary['rollout_log_probs_differing']:.0f} of "
        f"{summary['tokens']['rl_sampled']:.0f} tokens",
        highlight=False,
    )
    if "drafts" in summary:
        console.print(_of_drafts(summary["drafts"], summary["steps"]["rl"]), highlight=False)
    if "rollout_speedup" in summary:
        for pair in summary["rollout_comparison"]:
            console.print(_compared(pair), highlight=False)
    policy = huggingface_folder(output / f"global_step_{summary['steps']['rl']}")
    console.print(f"picture      {output / PICTURE}", highlight=False, soft_wrap=True)
    for line in drawn:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"summary      {output / SUMMARY}", highlight=False, soft_wrap=True)
    console.print(f"policy       {policy}  (AutoModelForCausalLM.from_pretrained)", highlight=False)
    again = AGENT_RECIPE if has_turns else "quickstart_small"
    console.print(
        f"next         {program()} eval --checkpoint {output} --problems 2048\n"
        f"             {program()} train --recipe {again} "
        "trainer.default_local_dir=runs/mine actor_rollout_ref.rollout.n=16",
        highlight=False,
        soft_wrap=True,
    )


def examples(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Two problems that RL learned to solve and one that it fails: the first ones with short
    answers."""
    pairs = list(zip(before, after, strict=True))
    most = READABLE if before[0].episode is None else 3 * READABLE
    pairs = [(b, a) for b, a in pairs if max(b.response_length, a.response_length) <= most]
    learned = [(b, a) for b, a in pairs if is_right(a) and not is_right(b)]
    failed = [(b, a) for b, a in pairs if not is_right(a)]
    return [*learned[:2], *failed[:1]]


def is_right(sample: Sample) -> bool:
    """Return whether an answer is right. A right one may have cost more than its reward."""
    return sample.reward_parts.get("acc", sample.reward) > 0


def _of_drafts(drafts: Mapping[str, float], steps: int) -> str:
    """One line about the draft head during RL."""
    began = drafts["head_from_step"]
    drafted = drafts["steps"]
    if not drafted:
        return f"drafts in RL: none in {steps} steps; head training took {drafts['seconds']:.1f} s"
    who = f"the head made {drafts['head_share_last']:.0%} of the drafts in the last steps"
    if began > 1:
        who += f", most of them from step {began} on" if began <= steps else ", history the others"
    rested = steps - drafted
    if rested:
        who += f"; {rested:.0f} of {steps} steps had no drafts"
    return (
        f"drafts in RL: {drafts['accept_length_first']:.2f} tokens per verification in the first "
        f"steps, {drafts['accept_length_last']:.2f} in the last; {who}; head training took "
        f"{drafts['seconds']:.1f} s, {drafts['versions']:.0f} versions published, "
        f"{drafts['hold_backs']:.0f} held back"
    )


def _compared(pair: Mapping[str, Any]) -> str:
    drafts = (
        f"drafts in {pair['on_fraction']:.0%} of the time, "
        f"mean accepted length {pair['accept_length']:.2f}"
    )
    if not pair["on_fraction"]:
        drafts = "no drafts: at this batch size no draft plan is faster on this machine"
    return (
        f"the same {pair['tokens']} tokens, {pair['responses']} responses"
        + (" at once" if pair["at_once"] == pair["responses"] else f", {pair['at_once']} at a time")
        + f": plain {pair['plain_seconds']:.2f} s, speculative {pair['speculative_seconds']:.2f} s "
        f"({pair['speedup']:.2f}x; half of {pair['rounds']} rounds within "
        f"{pair['speedup_low']:.2f}x to {pair['speedup_high']:.2f}x, plain once more within "
        f"{pair['noise_low']:.2f}x to {pair['noise_high']:.2f}x), "
        f"identical {'yes' if pair['identical'] else 'NO'}, {drafts}"
    )


def _answered(name: str, sample: Sample, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The lines of a sample's response, or of its conversation."""
    mark = "right" if is_right(sample) else "wrong"
    if sample.episode is None:
        return [f"  {name:<9}  {mark}  {sample.response}"]
    turns = f"{sample.episode.turns} turn{'s' if sample.episode.turns > 1 else ''}"
    lines = [f"    {line}" for line in conversation(sample, decode)]
    return [f"  {name:<9}  {mark}, {turns}", *lines]
