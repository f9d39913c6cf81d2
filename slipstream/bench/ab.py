"""The same RL with and without drafts, interleaved (`slipstream bench train --ab speculation`).

    plain         no drafts
    speculation   a fixed draft head
    co-trained    the draft head is co-trained with the policy; it starts untrained if the policy's
                  run has no head. With the right settings it trains on cores that decoding leaves
                  idle.
    in chains     as co-trained, but with chains only; this run exists if the settings allow trees
    head only     as co-trained, without drafts from earlier text; this run and the next one exist
                  with speculative.spec_strategy=union
    history only  drafts from earlier text, without a draft head

Each run is a separate process with the settings of the policy's run, the same initial weights and
the same seed. Their steps are interleaved (`interleaved_runs`). All runs must write the same
responses and end with the same weights, bit for bit. Only the times and the final draft heads may
differ. Libraries for GPUs round differently for other batch shapes, so on a GPU the benchmark
measures instead how often responses of the first step, which come from equal weights, diverge from
those of the plain run. That must be rare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from slipstream.bench.interleaved_runs import SETTINGS, run_interleaved
from slipstream.bench.policy_kl import policy_kl
from slipstream.bench.record import ResultRow, Spread, median_of, this_machine
from slipstream.bench.rl_line import start_of
from slipstream.bench.timing import ratio, step_ratio
from slipstream.build.policy import device_of
from slipstream.checkpoint.layout import head_folder, policy_folder
from slipstream.config.load import CONFIG_FILE, load_config
from slipstream.errors import CheckpointError, ConfigError, EngineError, check_at_least_one
from slipstream.metrics.loggers import METRICS_FILE, read_jsonl

PLAIN, FROZEN, COTRAINED, CHAINS = "plain", "speculation", "co-trained", "in chains"
HEAD, HISTORY = "head only", "history only"

PARTS = ("gen", "update_actor", "drafter", "sync")
"""Parts of a step whose share of the time is shown."""

DEVICE = "device"
"""Key of a row's settings: the device of the run. On a GPU the runs are not equal bit for bit,
because its libraries round differently for other batch shapes."""

DIVERGENCE = "first_step_parted"
"""Key of a row's values: responses of the first step that diverge from the plain run's, divided by
the tokens at which they could have diverged (all tokens up to the first different one)."""

MAX_DIVERGENCE = 0.05
"""Largest divergence allowed on a GPU. Rounding rarely changes a token; a wrong draft token that is
accepted changes many."""

ACCEPT_CURVE = "accept_length_by_tenth"
"""Key of a row's settings: mean accepted length in each tenth of the steps; empty without
drafts."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbBench:
    """RL with the configuration of the run folder `policy`. It starts from the folder's SFT policy,
    or from its newest policy if there was no SFT. `steps` is the number of RL steps (None: the
    configured number). `settings` are key=value for all runs. Raises ConfigError for counts below 1
    and for a folder that is not a run."""

    policy: Path
    steps: int | None = None
    rounds: int = 1
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least_one(self, "rounds")
        if self.steps is not None:
            check_at_least_one(self, "steps")
        if not (self.policy / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{self.policy} is not a run folder: it has no {CONFIG_FILE}; `make quickstart` "
                "makes runs/quickstart"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The output of one run: the metrics of its steps, a hash of all responses with their log-probs
    and rewards, a hash of the last weights, and the token ids of the first step's responses by
    sample."""

    steps: Sequence[Metrics]
    responses: str
    weights: str
    first: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def seconds(self, part: str) -> float:
        """Seconds of a part of the step, summed over all steps."""
        return sum(step.get(f"timing_s/{part}", 0.0) for step in self.steps)

    def values(self, name: str) -> list[float]:
        """A metric's values in the steps that have it."""
        return [step[name] for step in self.steps if name in step]


def run(bench: AbBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Measure; one row per run. Raises EngineError if a run fails."""
    start, head = start_of(bench.policy), _head(bench.policy)
    config = load_config(
        bench.settings, file=bench.policy / CONFIG_FILE, notify=lambda _: None, complete=False
    )
    eagle = config.speculative.eagle
    # A bandit has its own list of plans, to which `spec_topk` does not apply.
    trees = eagle.spec_topk > 1 and eagle.tune_algorithm in ("COST", "PREDEFINED")
    both = config.speculative.spec_strategy == "union"
    arms = arms_of(head, trees=trees, both=both)
    outcomes: dict[str, list[RunOutcome]] = {name: [] for name in arms}
    kl, device = 0.0, device_of(config)
    for number in range(bench.rounds):
        with TemporaryDirectory() as folder:
            targets = {name: Path(folder) / name for name in arms}
            say(f"RL, {', '.join(arms)} interleaved, {number + 1} of {bench.rounds}")
            lines = {name: command(bench, start, arms[name], targets[name]) for name in arms}
            run_interleaved(lines, say, config.actor_rollout_ref.model.external_lib)
            for name in arms:
                outcomes[name].append(read_outcome(targets[name]))
            # Once is enough: all runs end with the same weights, or the comparison has failed.
            # After the last round, because it takes GPU memory that the runs need.
            if number == bench.rounds - 1:
                last = targets[PLAIN]
                ended = policy_folder(last), last_rollouts(last)
                kl = policy_kl(start, *ended, device)
    rows = [_row(bench, name, outcomes, head, device.type) for name in arms]
    return [replace(row, values={**row.values, "policy_kl": kl}) for row in rows]


def arms_of(head: Path | None, *, trees: bool = False, both: bool = False) -> dict[str, list[str]]:
    """The settings of each run, by name. `head` is the draft head, None if there is none; `trees`
    tells whether the settings allow draft trees, and `both` whether drafts come from a head and
    from earlier text."""
    given = f"speculative.eagle.spec_model_path={'null' if head is None else head}"
    off, on = "speculative.train.enable_drafter_training=false", "speculative.enable=true"
    # If no head is trained, a core that decoding frees stays idle.
    alone = [off, "actor_rollout_ref.rollout.one_thread_below=0"]
    arms = {PLAIN: ["speculative.enable=false", "speculative.eagle.spec_model_path=null", *alone]}
    if head is not None:
        arms[FROZEN] = [on, given, *alone]
    arms[COTRAINED] = [on, given, off.replace("false", "true")]
    if trees:
        chains = ["speculative.eagle.spec_topk=1", "speculative.eagle.spec_verify_tokens=null"]
        arms[CHAINS] = [*arms[COTRAINED], *chains]
    if both:
        arms[HEAD] = [*arms[COTRAINED], "speculative.spec_strategy=eagle"]
        no_head = "speculative.eagle.spec_model_path=null"
        arms[HISTORY] = [on, no_head, *alone, "speculative.spec_strategy=history"]
    return arms


def command(bench: AbBench, start: Path, arm: Sequence[str], target: Path) -> list[str]:
    """The arguments of `slipstream` for one run, which writes to the folder `target`."""
    steps = [] if bench.steps is None else [f"trainer.total_training_steps={bench.steps}"]
    return [
        *("rl", "--config", str(bench.policy / CONFIG_FILE)),
        f"actor_rollout_ref.model.path={start}",
        "actor_rollout_ref.model.init=null",
        f"trainer.default_local_dir={target}",
        "trainer.resume_mode=disable",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        *steps,
        *bench.settings,
        *arm,
        *SETTINGS,
    ]


def read_outcome(folder: Path) -> RunOutcome:
    """The output in the folder of a finished run. Raises CheckpointError if it did not finish."""
    files = _rollouts(folder)
    steps = [metrics for _, metrics in read_jsonl(folder / METRICS_FILE)]
    steps = [metrics for metrics in steps if "timing_s/step" in metrics]
    if not files or len(files) != len(steps):
        raise CheckpointError(f"{folder}: {len(steps)} RL steps and {len(files)} files of rollouts")
    weights = sorted(policy_folder(folder).glob("*.safetensors"))
    rows = [json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines()]
    return RunOutcome(
        steps=steps,
        responses=_hash(files),
        weights=_hash(weights),
        first={f"{row['uid']}/{row['index']}": row["response_ids"] for row in rows},
    )


def last_rollouts(folder: Path) -> Path:
    """The file with the rollouts of the last step."""
    return _rollouts(folder)[-1]


def identical(outcomes: Sequence[RunOutcome]) -> bool:
    """Whether all runs wrote the same responses and ended with the same weights."""
    return len({(outcome.responses, outcome.weights) for outcome in outcomes}) == 1


def divergence(mine: RunOutcome, plain: RunOutcome) -> float:
    """The number of responses of the first step that diverge from the plain run's, divided by the
    number of tokens at which they could have. Raises EngineError if the samples differ."""
    if mine.first.keys() != plain.first.keys():
        raise EngineError("the first steps of two runs have different samples: the prompts differ")
    tokens = divergences = 0
    for sample, ours in mine.first.items():
        theirs = plain.first[sample]
        same = 0
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                break
            same += 1
        differ = same < max(len(ours), len(theirs))
        tokens, divergences = tokens + same + differ, divergences + differ
    return divergences / max(tokens, 1)


def summary(rows: Sequence[ResultRow]) -> dict[str, object]:
    """By name: `identical` for all runs; the largest `DIVERGENCE`; the speed of rollouts and of
    whole steps over the plain run's; with both heads, the final mean accepted length of the
    co-trained head over the fixed head's, minus 1 (0.1: a tenth longer); with trees, the speed of
    rollouts with trees over those with chains only."""
    ours = [row for row in rows if row.contender != PLAIN]

    def speedups(name: str) -> dict[str, float]:
        return {row.contender: median_of(row.values[name]) for row in ours}

    found: dict[str, object] = {
        "identical": all(row.values["identical"] == 1 for row in rows),
        DIVERGENCE: max(median_of(row.values[DIVERGENCE]) for row in rows),
        "rollout_speedup": speedups("rollout_speedup"),
        "step_speedup": speedups("step_speedup"),
    }
    ends = {
        row.contender: median_of(row.values["accept_length_last"])
        for row in ours
        if "accept_length_last" in row.values
    }
    chains = [row for row in ours if row.contender == CHAINS]
    if chains:
        found["trees_over_chains"] = median_of(chains[0].values["rollouts_with_trees"])
        by_step = "by_step_with_trees"
        found["trees_over_chains_by_step"] = median_of(chains[0].values[by_step])
        found["trees_over_chains_error"] = median_of(chains[0].values[f"{by_step}_error"])
    if {FROZEN, COTRAINED} <= ends.keys():
        found["accept_length_over_frozen"] = ends[COTRAINED] / ends[FROZEN] - 1
    return found


def curve(values: Sequence[float], points: int = 10) -> list[float]:
    """Means over `points` parts of `values` of nearly equal size; the values themselves if there
    are fewer of them."""
    if not values:
        return []
    count = min(points, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(bounds)]


def _row(
    bench: AbBench,
    name: str,
    outcomes: Mapping[str, Sequence[RunOutcome]],
    head: Path | None,
    device: str,
) -> ResultRow:
    mine, plain = outcomes[name], outcomes[PLAIN]

    def seconds(of: Sequence[RunOutcome], part: str) -> list[float]:
        return [outcome.seconds(part) for outcome in of]

    last = mine[-1]
    values: dict[str, float | Spread] = {
        "rollout_seconds": Spread.of(seconds(mine, "gen")),
        "rollout_speedup": ratio(seconds(plain, "gen"), seconds(mine, "gen")),
        "step_speedup": ratio(seconds(plain, "step"), seconds(mine, "step")),
        "identical": float(identical([*mine, *plain])),
        DIVERGENCE: max(divergence(a, b) for a, b in zip(mine, plain, strict=True)),
    }
    if name == CHAINS:
        trees = outcomes[COTRAINED]
        values["rollouts_with_trees"] = ratio(seconds(mine, "gen"), seconds(trees, "gen"))
        steps = [[s for o in of for s in o.values("timing_s/gen")] for of in (mine, trees)]
        by_step, error = step_ratio(*steps)
        values |= {"by_step_with_trees": by_step, "by_step_with_trees_error": error}
    for part in PARTS:
        values[f"share_{part}"] = median(o.seconds(part) / o.seconds("step") for o in mine)
    values["idle_core_seconds"] = median(sum(o.values("rollout/idle_core_seconds")) for o in mine)
    used = [o.values("drafter/cpu_seconds")[-1:] for o in mine]
    if all(used):
        values["drafter_cpu_seconds"] = median(seconds for (seconds,) in used)
    for metric, shown in (
        ("spec/accept_length", "accept_length"),
        ("drafter/accept_length/before", "held_out_accept_length"),
        ("critic/rewards/mean", "reward"),
    ):
        found = last.values(metric)
        if found:
            # Single steps differ by chance, so these are means over the first and the last tenth.
            few = max(1, len(found) // 10)
            values |= {f"{shown}_first": fmean(found[:few]), f"{shown}_last": fmean(found[-few:])}
    return ResultRow(
        benchmark="train",
        case="ab speculation",
        contender=name,
        dtype="",
        threads=None,
        seconds=Spread.of(seconds(mine, "step")),
        machine=this_machine(),
        values=values,
        settings={
            "policy": str(bench.policy),
            "head": "none" if head is None else str(head),
            "steps": len(last.steps),
            "responses_sha256": last.responses,
            "weights_sha256": last.weights,
            DEVICE: device,
            ACCEPT_CURVE: " ".join(f"{v:.2f}" for v in curve(last.values("spec/accept_length"))),
        },
    )


def _rollouts(folder: Path) -> list[Path]:
    return sorted((folder / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem))


def _head(policy: Path) -> Path | None:
    folder = policy / "draft"
    return head_folder(folder).resolve() if folder.is_dir() else None


def _hash(files: Sequence[Path]) -> str:
    """SHA-256 of the contents of all files, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
