"""Kills a run repeatedly, and compares its final result with that of an uninterrupted run.

`python -m tests.run.killing --kills 20` prints where the run was killed, and fails if any result
differs. With `--agent` the policy calls a tool, and its episodes have several turns and branches.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.run.helpers import (
    ACTOR,
    ROLLOUT,
    assert_same_result,
    finish,
    result_of,
    start,
    tiny,
    write_reward,
)

STEPS = 6
STATEFUL = (
    f"sft.total_training_steps={STEPS}",
    "sft.save_freq=1",
    "sft.test_freq=3",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=3",
    "data.train_batch_size=4",
    # Every part with a state: mini-batch order, stale engine weights, an adaptive coefficient,
    # optimizer moments and a learning-rate schedule.
    "trainer.sync_every=2",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.shuffle=true",
    f"{ACTOR}.optim.optimizer=Muon",
    f"{ACTOR}.optim.lr=0.01",
    f"{ACTOR}.optim.lr_scheduler_type=cosine",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=20",
)


AGENT_SFT = 60
"""Steps of SFT after which the policy calls the tool."""

AGENT = (
    "data.task=lookup",
    "data.task_kwargs.max_steps=3",
    "data.max_prompt_length=24",
    "data.max_response_length=112",
    "data.val_size=4",
    f"{ROLLOUT}.n=3",
    f"{ROLLOUT}.multi_turn.history=rerender",
    f"sft.total_training_steps={AGENT_SFT}",
    "sft.batch_tokens=1024",
    "sft.max_tokens_per_micro_batch=1024",
    "sft.optim.lr=1e-2",
    "sft.save_freq=10",
    "sft.test_freq=30",
    "speculative.enable=true",
    "speculative.spec_strategy=history",
    "actor_rollout_ref.model.init.hidden_size=64",
    "actor_rollout_ref.model.init.intermediate_size=128",
    f"{ACTOR}.optim.lr=0.001",
)
"""A run in which the policy calls a tool."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The position of a run when it was killed."""

    phase: str
    step: int
    saving: bool

    def __str__(self) -> str:
        return f"{self.phase} after step {self.step}{', while saving' if self.saving else ''}"


def line_of(folder: Path, reward: Path, *, agent: bool = False) -> list[str]:
    if agent:
        return tiny(folder, *STATEFUL, *AGENT)
    return tiny(folder, *STATEFUL, reward=reward)


def kill_until_done(
    line: list[str], folder: Path, output: Path, kills: int, seed: int, *, sft: int = STEPS
) -> list[Kill]:
    """Run `line` with `kills` SIGKILLs spread over the last steps of SFT, which has `sft` steps,
    and those of RL, every second one during a save. Then let it finish. Returns the kills that hit
    a running process."""
    rng = random.Random(seed)
    targets = sorted(sft - STEPS + rng.uniform(0, 2 * STEPS) for _ in range(kills))
    done: list[Kill] = []
    for number, target in enumerate(targets):
        # Folders left by earlier kills are not saves in progress.
        left = _saving(folder)
        process = start(line, output)
        during_save = number % 2 == 1
        while process.is_alive() and not (
            sum(_steps(folder)) >= int(target) and (not during_save or _saving(folder) - left)
        ):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05 if during_save else 0.4))
        if process.is_alive():
            _stop(process)
            done.append(_where(folder, sft, saving=bool(_saving(folder) - left)))
        elif process.exitcode != 0:
            raise AssertionError(output.read_text(encoding="utf-8"))
    process = start(line, output)
    if finish(process, output) != 0:
        raise AssertionError(output.read_text(encoding="utf-8"))
    return done


def _stop(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _steps(folder: Path) -> tuple[int, int]:
    """The numbers of logged steps of SFT and of RL."""
    counts = []
    for path in (folder / "sft" / "metrics.jsonl", folder / "metrics.jsonl"):
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:  # A run that resumes may remove the file at any time.
            lines = []
        counts.append(sum(1 for text in lines if not text.startswith(b'{"step": 0,')))
    return counts[0], counts[1]


def _saving(folder: Path) -> set[Path]:
    """Checkpoints that are being written, or whose process was killed while writing them."""
    return {path for root in (folder, folder / "sft") for path in root.glob(".saving.*")}


def _where(folder: Path, last: int, *, saving: bool) -> Kill:
    sft, rl = _steps(folder)
    in_rl = sft == last and (folder / "sft" / f"global_step_{last}").exists()
    return Kill("rl" if in_rl else "sft", rl if in_rl else sft, saving)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to leave both runs")
    parser.add_argument("--agent", action="store_true", help="a run whose policy calls a tool")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        reward = write_reward(root)
        started = time.perf_counter()
        uninterrupted = line_of(root / "whole", reward, agent=args.agent)
        process = start(uninterrupted, root / "whole.txt")
        if finish(process, root / "whole.txt") != 0:
            print((root / "whole.txt").read_text(encoding="utf-8"))
            return 1
        print(f"uninterrupted: {time.perf_counter() - started:.1f} s")
        line = line_of(root / "killed", reward, agent=args.agent)
        sft = AGENT_SFT if args.agent else STEPS
        killed_folder, output = root / "killed", root / "killed.txt"
        kills = kill_until_done(line, killed_folder, output, args.kills, args.seed, sft=sft)
        for kill in kills:
            print(f"killed: {kill}")
        whole, killed = result_of(root / "whole"), result_of(root / "killed")
        assert_same_result(whole, killed)
        where = Counter(kill.phase for kill in kills)
        print(
            f"{len(kills)} kills with SIGKILL ({where['sft']} in SFT, {where['rl']} in RL, "
            f"{sum(kill.saving for kill in kills)} while saving): all of {len(whole)} results are "
            f"equal, bit for bit: {', '.join(whole)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
