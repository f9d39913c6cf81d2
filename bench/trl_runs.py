"""Settings of the comparison with TRL, and one round of interleaved training of all contenders.

Used by `trl_compare` and `trl_tools`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.trl_parity import AGG_MODES
from slipstream.bench.ab import FROZEN, PLAIN, AbBench, arms_of, command, read_outcome
from slipstream.bench.interleaved_runs import Interleavable, interleave, started_runs
from slipstream.bench.peer_process import PEERS_REMEDY, PeerProcess, peer_command
from slipstream.bench.rl_line import start_of
from slipstream.build.data import make_task, make_tokenizer
from slipstream.checkpoint.layout import head_folder
from slipstream.config.load import CONFIG_FILE, load_config
from slipstream.config.schema import Config
from slipstream.config.tree import show
from slipstream.data.countdown import CountdownTask
from slipstream.data.lookup import DATA_SOURCE as LOOKUP
from slipstream.data.registry import Task
from slipstream.errors import ConfigError, check_at_least_one
from slipstream.metrics.loggers import read_jsonl
from slipstream.types import Prompt

PRECISIONS = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16-autocast", "bfloat16-weights", "float32"),
}
"""Our dtype -> precisions of TRL. `bfloat16-autocast` has weights in fp32 and products in bf16,
like ours. `bfloat16-weights` has weights, optimizer and everything else in bf16. `float32` is
included because conversions can make bf16 slower than fp32."""

WARM_UP = 3
"""The first steps of each run, which do not count."""

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlBench:
    """GRPO with the configuration of the run folder `policy`, from the folder's SFT policy.

    Our runs take `steps` steps (at least `WARM_UP` + 1) in each of `rounds` rounds. The final
    policies are compared on `problems` held-out problems (0: no comparison). `dtype` None is the
    run's. `precisions` are TRL's; empty: those of `PRECISIONS`. Raises ConfigError for impossible
    values and for a folder that is not a run.
    """

    policy: Path
    steps: int = 100
    rounds: int = 3
    problems: int = 1024
    dtype: str | None = None
    threads: int = 2
    precisions: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least_one(self, "rounds", "threads")
        if self.steps <= WARM_UP:
            raise ConfigError(
                f"steps={self.steps}: the first {WARM_UP} steps are a warm-up and do not count; "
                f"give at least {WARM_UP + 1}"
            )
        if self.problems < 0:
            raise ConfigError(f"problems={self.problems} must be at least 0; 0: no comparison")
        known = PRECISIONS["bfloat16"]
        for name in self.precisions:
            if name not in known:
                raise ConfigError(f"unknown precision {name!r} of TRL; known: {', '.join(known)}")
        if not (self.policy / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{self.policy} is not a run folder: it has no {CONFIG_FILE}; `make quickstart` "
                "makes runs/quickstart"
            )


@dataclass(slots=True)
class ContenderRun:
    """One contender in one round: the seconds of each step, as measured here, and its metrics."""

    folder: Path
    seconds: list[float] = field(default_factory=list)
    steps: list[Mapping[str, float]] = field(default_factory=list)
    weights: str = ""

    def total(self, name: str) -> float:
        """The sum of a metric over all steps."""
        return sum(step[name] for step in self.steps)


class _Timed:
    """A run that adds the time of each step to `ran`, except the last call, which only ends."""

    def __init__(self, run: Interleavable, ran: ContenderRun) -> None:
        self._run, self._ran = run, ran

    def take_step(self) -> bool:
        """Take and time a step."""
        start = time.perf_counter()
        more = self._run.take_step()
        if more:
            self._ran.seconds.append(time.perf_counter() - start)
        return more

    def end(self) -> None:
        """End the run."""
        self._run.end()


class _TrlRun:
    """TRL in its process. It takes steps until `enough` returns True for its results so far."""

    def __init__(
        self, process: PeerProcess, ran: ContenderRun, enough: Callable[[ContenderRun], bool]
    ) -> None:
        self._process, self._ran, self._enough = process, ran, enough

    def take_step(self) -> bool:
        """Let TRL take a step, unless it has done enough."""
        if self._enough(self._ran):
            return False
        self._ran.steps.append(_of_trl(self._process.ask("step")))
        return True

    def end(self) -> None:
        """Let TRL write its model to the folder of the run."""
        self._process.ask("finish", folder=str(self._ran.folder))


def trl_command() -> tuple[str, ...]:
    """The command that starts TRL's process. Raises ConfigError if TRL is not installed."""
    return peer_command(".venv-trl", "bench/peers/trl_peer.py", remedy=PEERS_REMEDY)


def trl_settings(config: Config, task: str = CountdownTask.name) -> dict[str, Any]:
    """Settings with which TRL trains on `task` as `config` says. Raises ConfigError, with the
    setting's name, for another task and for a setting that TRL does not have or treats
    differently."""
    actor, rollout, algorithm = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.algorithm,
    )
    batch, longest = config.data.train_batch_size, config.data.max_response_length
    fixed: dict[str, tuple[object, object]] = {
        "data.task": (config.data.task, task),
        "custom_reward_function.path": (config.custom_reward_function.path, None),
        "reward_model.reward_manager": (config.reward_model.reward_manager, "naive"),
        "reward_model.enable": (config.reward_model.enable, False),
        "algorithm.adv_estimator": (algorithm.adv_estimator, "grpo"),
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, False),
        "algorithm.filter_groups.enable": (algorithm.filter_groups.enable, False),
        f"{_ACTOR}.policy_loss.loss_mode": (actor.policy_loss.loss_mode, "vanilla"),
        f"{_ACTOR}.ppo_mini_batch_size": (actor.ppo_mini_batch_size or batch, batch),
        f"{_ACTOR}.ppo_epochs": (actor.ppo_epochs, 1),
        f"{_ACTOR}.entropy_coeff": (actor.entropy_coeff, 0.0),
        f"{_ACTOR}.use_kl_loss": (actor.use_kl_loss, False),
        f"{_ACTOR}.optim.optimizer": (actor.optim.optimizer, "AdamW"),
        f"{_ACTOR}.optim.lr_scheduler_type": (actor.optim.lr_scheduler_type, "constant"),
        f"{_ACTOR}.optim.lr_warmup_steps_ratio": (actor.optim.lr_warmup_steps_ratio, 0.0),
        "actor_rollout_ref.model.lora_rank": (config.actor_rollout_ref.model.lora_rank, 0),
        f"{_ROLLOUT}.temperature": (rollout.temperature, 1.0),
        f"{_ROLLOUT}.top_k": (rollout.top_k, -1),
        f"{_ROLLOUT}.top_p": (rollout.top_p, 1.0),
    }
    check_fixed(fixed)
    loss_types = {str(mode): name for name, mode in AGG_MODES.items()}
    if actor.loss_agg_mode not in loss_types:
        raise ConfigError(
            f"{_ACTOR}.loss_agg_mode={actor.loss_agg_mode} has no counterpart in TRL; set one of "
            f"{', '.join(loss_types)}"
        )
    if actor.loss_scale_factor not in (None, longest):
        raise ConfigError(
            f"{_ACTOR}.loss_scale_factor={actor.loss_scale_factor:g}: TRL divides by the longest "
            f"completion; set {_ACTOR}.loss_scale_factor={longest}"
        )
    return {
        "prompts_per_step": batch,
        "group_size": rollout.n,
        "max_completion_length": longest,
        "lr": actor.optim.lr,
        "warmup_steps": max(0, actor.optim.lr_warmup_steps),
        "betas": list(actor.optim.betas),
        "eps": actor.optim.eps,
        "weight_decay": actor.optim.weight_decay,
        "grad_clip": actor.grad_clip,
        "loss_type": loss_types[actor.loss_agg_mode],
        "epsilon": actor.clip_ratio,
        "scale_rewards": "group" if algorithm.norm_adv_by_std_in_grpo else "none",
    }


def check_fixed(fixed: Mapping[str, tuple[object, object]]) -> None:
    """Raise ConfigError, with the setting's name, if a value is not the only one that can be
    compared. `fixed` has both by name."""
    for name, (value, wanted) in fixed.items():
        if value != wanted:
            raise ConfigError(
                f"{name}={show(value)} has no counterpart in this comparison with TRL; set "
                f"{name}={show(wanted)}"
            )


def compose(bench: TrlBench, *more: str) -> Config:
    """The settings of the policy's run, changed by the bench's settings and by `more`."""
    return load_config(
        [*dtype_settings(bench), *bench.settings, *more],
        file=bench.policy / CONFIG_FILE,
        notify=lambda _: None,
        complete=False,
    )


def dtype_settings(bench: TrlBench) -> list[str]:
    if bench.dtype is None:
        return []
    return [f"{part}.dtype={bench.dtype}" for part in (_ACTOR, _ROLLOUT)]


def task_of(config: Config, model: Path) -> CountdownTask:
    task = make_task(config, make_tokenizer(config, model))
    assert isinstance(task, CountdownTask), "trl_settings refuses other tasks"
    return task


def run_round(
    bench: TrlBench,
    config: Config,
    settings: Mapping[str, Any],
    precisions: Sequence[str],
    folder: Path,
    trl: Sequence[str],
    say: Callable[[str], None],
    number: int,
) -> tuple[dict[str, ContenderRun], dict[str, str]]:
    """Train all contenders once, with the seed of the round. Also returns TRL's versions."""
    seed = config.trainer.seed + number
    ab = ab_bench(bench, bench.steps, seed)
    arms = _arms(bench.policy)
    start = start_of(bench.policy)
    lines = {name: command(ab, start, arms[name], folder / name) for name in arms}
    ran = {name: ContenderRun(folder / name) for name in arms}
    limit = 2 * bench.steps
    prompts = folder / "prompts.jsonl"
    seeded = compose(bench, f"trainer.seed={seed}")
    task = make_task(seeded, make_tokenizer(seeded, start))
    assert task is not None, "trl_settings refuses data sets"
    write_prompts(task, prompts, limit * settings["prompts_per_step"])
    external = config.actor_rollout_ref.model.external_lib
    versions: dict[str, str] = {}

    def enough(of: ContenderRun) -> bool:
        """TRL has sampled the same number of tokens, or has used up the prompts (twice the
        steps)."""
        theirs_done, ours_done = len(of.steps), len(ran[PLAIN].seconds)
        if theirs_done < bench.steps or ours_done < bench.steps:
            return False
        budget = sum(step["tokens"] for step in _steps_of(ran[PLAIN].folder))
        return of.total("tokens") >= budget or theirs_done == limit

    with ExitStack() as stack:
        runs: list[Interleavable] = []
        for name, started in stack.enter_context(started_runs(lines, say, external)).items():
            runs.append(_Timed(started, ran[name]))
        for precision in precisions:
            name = f"trl-{precision}"
            say(f"round {number + 1} of {bench.rounds}: starting {name}")
            process = stack.enter_context(PeerProcess(name, trl))
            answer = process.ask(
                "begin",
                task=task.name,
                model=str(start),
                prompts=str(prompts),
                precision=precision,
                threads=bench.threads,
                settings={**settings, "max_steps": limit + 1, "seed": seed},
            )
            versions = dict(answer["versions"])
            ran[name] = ContenderRun(folder / name)
            runs.append(_Timed(_TrlRun(process, ran[name], enough), ran[name]))
        say(f"round {number + 1} of {bench.rounds}: {', '.join(ran)} interleaved, seed {seed}")
        interleave(runs, partial(_say_steps, say, bench.steps))
    for name in arms:
        ran[name].steps = _steps_of(ran[name].folder)
        ran[name].weights = read_outcome(ran[name].folder).weights
    return ran, versions


def ab_bench(bench: TrlBench, steps: int, seed: int) -> AbBench:
    """Our runs of `steps` steps with the settings of `bench`."""
    return AbBench(
        policy=bench.policy,
        steps=steps,
        settings=(
            *dtype_settings(bench),
            *bench.settings,
            f"trainer.seed={seed}",
            f"trainer.num_threads={bench.threads}",
        ),
    )


def _say_steps(say: Callable[[str], None], steps: int, done: int) -> None:
    """Report every tenth step, because a round takes many minutes."""
    if done % 10 == 0:
        say(f"  {done} steps; Slipstream has {min(done, steps)} of {steps}")


def _arms(policy: Path) -> dict[str, list[str]]:
    """Settings of our runs: without drafts, and with the policy's fixed head if there is one."""
    folder = policy / "draft"
    head = head_folder(folder).resolve() if folder.is_dir() else None
    arms = arms_of(head)
    return {name: arms[name] for name in (PLAIN, FROZEN) if name in arms}


def write_prompts(task: Task, file: Path, count: int) -> None:
    """Write the first `count` training prompts of the task, in the order in which a run uses
    them."""
    lines = []
    for index in range(count):
        prompt = task.prompt("train", index)
        entry = {
            "messages": prompt.messages,
            "ids": prompt.ids,
            "columns": _columns(prompt),
        }
        lines.append(json.dumps(entry) + "\n")
    file.write_text("".join(lines))


def _columns(prompt: Prompt) -> dict[str, Any]:
    """What TRL's data set holds of a prompt besides its messages."""
    if prompt.data_source != LOOKUP:
        return dict(prompt.ground_truth)
    given = prompt.extra_info["tools_kwargs"]["look_up"]["create_kwargs"]
    # As text: a column of dictionaries would get the keys of all rows in each row.
    table = json.dumps(given["table"])
    return {"answer": prompt.ground_truth, "table": table, "cost": given["cost"]}


def _steps_of(folder: Path) -> list[Mapping[str, float]]:
    """Times, sampled tokens, turns and reward of each step of our run."""
    lines = [metrics for _, metrics in read_jsonl(folder / "metrics.jsonl")]
    return [
        {
            "generation": step["timing_s/gen"],
            "reward": step["timing_s/reward"],
            "tokens": round(step["rollout/tokens_per_second"] * step["timing_s/gen"]),
            # Samples without tools have one turn.
            "turns": step.get("episode/turns/mean", 1.0) * step["rollout/num_samples"],
            "reward_mean": step["critic/score/mean"],
        }
        for step in lines
        if "timing_s/step" in step
    ]


def _of_trl(answer: Mapping[str, Any]) -> Mapping[str, float]:
    return {
        "generation": answer["generation_seconds"],
        "reward": answer["reward_seconds"],
        "tokens": answer["tokens"],
        "turns": answer["turns"],
        "reward_mean": fmean(answer["rewards"]),
    }
