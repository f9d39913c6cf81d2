"""Whether every algorithm learns: RL with each, from one policy (`slipstream bench learning`).

Each run is a process of its own with the settings of the policy's run, the same seed and the same
prompts; only the algorithm differs. What counts is the validation reward at the end against that
before, on the same problems.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.rl_line import run_line, start_of
from slipstream.checkpoint.layout import policy_folder
from slipstream.config.load import CONFIG_FILE
from slipstream.errors import ConfigError, check_at_least_one, did_you_mean
from slipstream.metrics.loggers import METRICS_FILE, read_jsonl

_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
_ADV = "algorithm.adv_estimator"
_TWO = f"{_ACTOR}.ppo_mini_batch_size=8"
"""Two optimizer steps a batch: with one the ratio is 1 and no clip binds."""


_SMALLER = f"{_ACTOR}.optim.lr=0.00015"
"""For what takes larger steps at the same rate: little signal of its own, or nothing clipped."""


def _loss(name: str, *more: str) -> list[str]:
    return [f"{_LOSS}={name}", _TWO, *more]


RUNS: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": [
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{_ACTOR}.loss_scale_factor=100",
    ],
    # One response of a group teaches.
    "grpo_passk": [f"{_ADV}=grpo_passk", _SMALLER],
    "rloo": [f"{_ADV}=rloo"],
    "opo": [f"{_ADV}=opo"],
    "gpg": [f"{_ADV}=gpg", f"{_LOSS}=gpg"],
    "remax": [f"{_ADV}=remax", _SMALLER],
    "reinforce_plus_plus": [f"{_ADV}=reinforce_plus_plus"],
    "reinforce_plus_plus_baseline": [f"{_ADV}=reinforce_plus_plus_baseline"],
    "gae": [f"{_ADV}=gae", "critic.optim.lr=0.001", "trainer.critic_warmup=2"],
    "gdpo": [f"{_ADV}=gdpo", "algorithm.gdpo_reward_keys=[score]"],
    "optimal_token_baseline": [f"{_ADV}=optimal_token_baseline"],
    "tir_optimal_token_baseline": [f"{_ADV}=tir_optimal_token_baseline"],
    "on_policy_distillation": [
        f"{_ADV}=on_policy_distillation",
        "actor_rollout_ref.ref.path={end}",
        _TWO,
    ],
    "vanilla": _loss("vanilla", f"{_ACTOR}.clip_ratio_high=0.28"),
    "gspo": _loss(
        "gspo",
        f"{_ACTOR}.clip_ratio_low=0.0003",
        f"{_ACTOR}.clip_ratio_high=0.0004",
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ),
    "sapo": _loss("sapo", _SMALLER),
    "clip_cov": _loss("clip_cov"),
    "kl_cov": _loss("kl_cov", _SMALLER),
    "geo_mean": _loss("geo_mean"),
    "cispo": _loss("cispo", _SMALLER),
    "dppo_tv": _loss("dppo_tv"),
    "dppo_kl": _loss("dppo_kl"),
    "dro": _loss("dro", f"{_ACTOR}.policy_loss.dro_beta=0.1", _SMALLER),
    "bypass_mode": [_TWO, "algorithm.rollout_correction.bypass_mode=true"],
    "token_is": [_TWO, "algorithm.rollout_correction.preset=decoupled_token_is"],
    "dapo": [
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=10",
        f"{_ACTOR}.clip_ratio_high=0.28",
        _TWO,
    ],
    "pf_ppo": ["algorithm.use_pf_ppo=true"],
    "full_kl": [f"{_ACTOR}.use_kl_loss=true", f"{_ACTOR}.kl_loss_type=full"],
    "lora": ["actor_rollout_ref.model.lora_rank=16", f"{_ACTOR}.optim.lr=0.001"],
}
"""Name -> what it sets. `{end}` is the last policy of the run folder, a teacher."""

BATCH = (
    "data.train_batch_size=16",
    "actor_rollout_ref.rollout.n=8",
    f"{_ACTOR}.optim.lr=0.0003",
    "speculative.enable=false",
    "speculative.eagle.spec_model_path=null",
    "speculative.train.enable_drafter_training=false",
    "actor_rollout_ref.rollout.one_thread_below=0",
)
"""Settings of all runs: gradients with less noise than the quickstart's, and no draft model."""

REWARD = "critic/score/mean"

_ACCURACY = re.compile(r"val-core/.+/acc/mean@\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningBench:
    """RL of `steps` steps from the policy that the SFT in the run folder `policy` ended with, with
    each algorithm of `only` (none: all of `RUNS`). Raises ConfigError for unknown names and counts
    below 1."""

    policy: Path
    steps: int = 30
    only: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least_one(self, "steps")
        for name in self.only:
            if name not in RUNS:
                raise ConfigError(
                    f"--only {name} is not known{did_you_mean(name, RUNS)} (known: "
                    f"{', '.join(RUNS)})"
                )
        if not (self.policy / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{self.policy} is no run folder: it has no {CONFIG_FILE}; `make quickstart` makes "
                "runs/quickstart"
            )


def run(bench: LearningBench, say: Callable[[str], None]) -> list[ResultRow]:
    """Train with each; a row for each. Raises EngineError where a run fails."""
    rows = []
    with TemporaryDirectory() as folder:
        for name in bench.only or RUNS:
            say(f"RL, {name}")
            target = Path(folder) / name
            run_line(command(bench, name, target), say)
            rows.append(row(bench, name, read_steps(target)))
    return rows


def command(bench: LearningBench, name: str, target: Path) -> list[str]:
    """The line of one run, into the folder `target`."""
    end = policy_folder(bench.policy).resolve()
    return [
        *(sys.executable, "-m", "slipstream.cli", "rl"),
        *("--config", str(bench.policy / CONFIG_FILE)),
        f"actor_rollout_ref.model.path={start_of(bench.policy)}",
        "actor_rollout_ref.model.init=null",
        f"trainer.default_local_dir={target}",
        "trainer.resume_mode=disable",
        "trainer.logger=[file]",
        f"trainer.test_freq={bench.steps}",
        "trainer.val_before_train=true",
        f"trainer.total_training_steps={bench.steps}",
        *BATCH,
        *(setting.replace("{end}", str(end)) for setting in RUNS[name]),
        *bench.settings,
    ]


def read_steps(folder: Path) -> list[Mapping[str, float]]:
    """Metrics of all lines, in order; the first and the last one have a validation."""
    return [metrics for _, metrics in read_jsonl(folder / METRICS_FILE)]


def validated(metrics: Mapping[str, float]) -> float | None:
    """The accuracy of a validation, where there was one."""
    return next((metrics[name] for name in metrics if _ACCURACY.fullmatch(name)), None)


def row(bench: LearningBench, name: str, lines: Sequence[Mapping[str, float]]) -> ResultRow:
    """What one run came to."""
    steps = [line for line in lines if "timing_s/step" in line]
    rewards = [line[REWARD] for line in steps if REWARD in line]
    few = max(1, len(rewards) // 6)
    found = [value for value in map(validated, lines) if value is not None]
    return ResultRow(
        benchmark="learning",
        case=f"{len(steps)} steps",
        contender=name,
        dtype="",
        threads=None,
        seconds=Spread.of([sum(line["timing_s/step"] for line in steps)]),
        machine=this_machine(),
        values={
            "validation_before": found[0],
            "validation_after": found[-1],
            "gain": found[-1] - found[0],
            "reward_first": fmean(rewards[:few]),
            "reward_last": fmean(rewards[-few:]),
        },
        settings={
            "policy": str(bench.policy),
            "set": " ".join(RUNS[name]),
            "rewards": " ".join(f"{reward:.3f}" for reward in rewards),
        },
    )


def table(rows: Sequence[ResultRow]) -> str:
    """A line for each."""
    columns = ("validation_before", "validation_after", "reward_first", "reward_last")
    heading = "".join(f"{name.replace('_', ' '):>20}" for name in columns)
    lines = [f"  {'':<30}{heading}{'seconds':>10}"]
    for one in rows:
        cells = "".join(f"{float(one.values[name]):>20.3f}" for name in columns)  # type: ignore[arg-type]
        lines.append(f"  {one.contender:<30}{cells}{one.seconds.median:>10.0f}")
    return "\n".join(lines)


def not_learned(rows: Sequence[ResultRow]) -> list[str]:
    """Algorithms whose validation reward did not rise."""
    return [row.contender for row in rows if float(row.values["gain"]) <= 0]  # type: ignore[arg-type]


def plot(rows: Sequence[ResultRow], out: Path) -> Path:
    """Curves of the training reward, one small picture for each algorithm, all to one scale; the
    PNG `out`, whose folder is made."""
    # Imported here: benches run without drawing, too.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from slipstream.metrics.picture import INK, MUTED

    width = 5
    height = -(-len(rows) // width)
    figure = Figure(figsize=(2.2 * width, 1.5 * height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    all_axes = list(figure.subplots(height, width, sharex=True, sharey=True, squeeze=False).flat)
    for axes in all_axes:
        axes.axis("off")
    for axes, one in zip(all_axes, rows, strict=False):
        axes.axis("on")
        rewards = [float(value) for value in str(one.settings["rewards"]).split()]
        axes.plot(range(1, len(rewards) + 1), rewards, color=MUTED, linewidth=0.8)
        smooth = [fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
        axes.plot(range(1, len(rewards) + 1), smooth, color=INK, linewidth=1.4)
        axes.set_title(one.contender, fontsize=8)
        axes.tick_params(labelsize=6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.supxlabel("RL step", fontsize=8)
    figure.supylabel("mean reward of a batch; bold: of five steps", fontsize=8)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out
