"""Co-training of a draft head in RL: it does not change the policy, and it resumes exactly."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.build import cotraining as build_cotraining
from slipstream.checkpoint.manager import TRACKER
from slipstream.checkpoint.state import cotraining_file, draft_folder
from slipstream.checkpoint.tree import load_tree
from slipstream.cli import main
from slipstream.drafter import interval
from slipstream.drafter.worker import DraftWorker
from slipstream.metrics.loggers import read_jsonl
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import save_draft_head
from slipstream.models.hf_io import read_tensors
from tests.drafter.helpers import adopting_orphans, wait_for_end
from tests.run.helpers import (
    assert_same_result,
    assert_same_rl,
    policy,
    result_of,
    rl_only,
    steps_of,
    write_reward,
)

TRAIN = "speculative.train"
LEARN = (
    "speculative.enable=true",
    "speculative.eagle.tune_algorithm=PREDEFINED",
    "speculative.eagle.spec_steps=2",
    f"{TRAIN}.enable_drafter_training=true",
    f"{TRAIN}.training_interval_steps=2",
    f"{TRAIN}.updates_per_training=3",
    f"{TRAIN}.held_out_every=2",
    f"{TRAIN}.batch_size_per_gpu=4",
)
SETTINGS = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "data.train_batch_size=6",
    "data.val_size=2",
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a run with co-training, and its reward function."""
    root = tmp_path_factory.mktemp("learned")
    reward = write_reward(root)
    assert main(rl_only(root / "run", *SETTINGS, *LEARN, reward=reward)) == 0
    return root / "run", reward


def test_cotraining_changes_neither_rollouts_nor_policy_weights(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, reward = learned
    assert main(rl_only(tmp_path / "off", *SETTINGS, reward=reward)) == 0
    assert_same_rl(folder, tmp_path / "off")


def test_cotraining_metrics_are_logged(learned: tuple[Path, Path]) -> None:
    steps = dict(read_jsonl(learned[0] / "metrics.jsonl"))
    assert [steps[n]["drafter/updates"] for n in range(1, 5)] == [0, 3, 3, 6]
    assert [steps[n]["drafter/publishes"] + steps[n]["drafter/hold_backs"] for n in (2, 4)] == [
        1,
        2,
    ]
    assert steps[2].keys() >= {"drafter/loss", "drafter/accept_length/after", "timing_s/drafter"}
    assert "drafter/loss" not in steps[3]
    # The head of step 2 was trained on responses of policy version 1. The engines have version 2.
    if steps[2]["drafter/publishes"]:
        assert [steps[n].get("drafter/staleness_versions") for n in (1, 2, 3)] == [None, 1, 2]
        again = steps[4]["drafter/publishes"] > 1
        assert steps[4]["drafter/staleness_versions"] == (1 if again else 3)
    assert steps[1]["drafter/buffer_samples"] > 0


def test_cotraining_continues_past_the_steps_of_slipstream_draft(tmp_path: Path) -> None:
    """The learning-rate schedule of `slipstream draft` does not apply to co-training."""
    steps = (
        "speculative.draft.total_training_steps=1",
        "speculative.draft.optim.lr_warmup_steps=0",
    )
    line = rl_only(tmp_path / "run", *SETTINGS, *LEARN, *steps, reward=write_reward(tmp_path))
    assert main(line) == 0
    first, last = (
        load_tree(cotraining_file(tmp_path / "run" / f"global_step_{step}"))["head"]
        for step in (2, 4)
    )
    assert not any(torch.equal(first[name], last[name]) for name in first)


def test_checkpoint_contains_the_head_in_use(learned: tuple[Path, Path]) -> None:
    first, last = (
        read_tensors(draft_folder(learned[0] / f"global_step_{step}")) for step in (2, 4)
    )
    assert first.keys() == last.keys()
    assert "fc.weight" in last


def test_resumed_run_has_the_same_head(learned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, reward = learned
    again = tmp_path / "run"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "global_step_4")
    (again / TRACKER).write_text("2")
    assert main(rl_only(again, *SETTINGS, *LEARN, reward=reward)) == 0
    assert_same_result(result_of(again), result_of(folder))


OPPORTUNISTIC = f"{TRAIN}.mode=opportunistic"
"""Added to `LEARN`, the head is trained whenever a core is idle."""

KILLED = """
import os, signal, sys
from slipstream.cli import main
from slipstream.drafter.trainer import DraftTrainer
from slipstream.drafter.worker import DraftWorker
from slipstream.inference.embedded import EmbeddedEngine

where, number, calls = sys.argv[1], int(sys.argv[2]), []
train, publish = DraftTrainer._train_on, EmbeddedEngine.update_drafter
learn = DraftWorker.learn

def count(place):
    if place == where:
        calls.append(place)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

def trained(self, *arguments):
    count("in a slice")
    return train(self, *arguments)

async def published(self, update):
    count("before the engine has it")
    await publish(self, update)
    count("when the engine has it")

def learned(self, *arguments):
    learn(self, *arguments)
    count("when its process has the rows")

DraftTrainer._train_on, EmbeddedEngine.update_drafter = trained, published
DraftWorker.learn = learned
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("where", "number", "mode"),
    [
        # The second step of the second slice, after a checkpoint.
        ("in a slice", 5, "interval"),
        ("in a slice", 2, "interval"),
        ("before the engine has it", 2, "interval"),
        ("when the engine has it", 2, "interval"),
        ("when its process has the rows", 3, "opportunistic"),
    ],
)
def test_run_killed_during_cotraining_equals_uninterrupted_run(
    learned: tuple[Path, Path], tmp_path: Path, where: str, number: int, mode: str
) -> None:
    folder, reward = learned
    more = [OPPORTUNISTIC] if mode == "opportunistic" else []
    line = rl_only(tmp_path / "run", *SETTINGS, *LEARN, *more, reward=reward)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, where, str(number), *line], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "global_step_4").exists()
    assert main(line) == 0
    if mode == "interval":
        # Includes the metrics of the head.
        assert_same_result(result_of(tmp_path / "run"), result_of(folder))
    assert_same_rl(tmp_path / "run", folder)


KILLED_WHILE_WRITING = """
import os, signal, sys, threading
from slipstream.cli import main
from slipstream.drafter.trainer import DraftTrainer
from slipstream.drafter import interval

save, train, begun, saves = interval.save_draft_head, DraftTrainer._train_on, threading.Event(), []

def saved(head, folder):
    saves.append(folder)
    if len(saves) == 3:
        # Wait until the head is trained in step 4: RL has continued during the save.
        assert begun.wait(60)
        save(head, folder)
        os.kill(os.getpid(), signal.SIGKILL)
    save(head, folder)

def trained(self, *arguments):
    if len(saves) == 3:
        begun.set()
        threading.Event().wait()
    return train(self, *arguments)

interval.save_draft_head, DraftTrainer._train_on = saved, trained
sys.exit(main(sys.argv[1:]))
"""


def test_run_killed_during_a_background_save_resumes_from_the_previous_checkpoint(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, reward = learned
    run = tmp_path / "run"
    every = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1")
    line = rl_only(run, *SETTINGS, *LEARN, *every, reward=reward)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, *line], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (half,) = run.glob(".saving.global_step_3.*")
    assert (draft_folder(half) / "model.safetensors").exists()
    assert steps_of(run) == [2]
    assert [step for step, _ in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]
    assert main(line) == 0
    assert_same_result(result_of(run), result_of(folder))
    # The incomplete checkpoint is gone, and so are the heads of checkpoints that are not kept.
    assert list(run.glob("*global_step_*/draft")) == [run / "global_step_4" / "draft"]


def test_head_that_cannot_be_written_ends_the_run_and_keeps_the_previous_checkpoint(
    learned: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, reward = learned
    calls: list[Path] = []

    def second_fails(head: DraftHead, path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_draft_head(head, path)

    monkeypatch.setattr(interval, "save_draft_head", second_fails)
    run = tmp_path / "run"
    line = rl_only(run, *SETTINGS, *LEARN, reward=reward)
    assert main(line) == 4
    error = capsys.readouterr().err
    assert "disk full while saving" in error
    assert f"{run}/global_step_2 stays the latest checkpoint" in error
    assert steps_of(run) == [2]
    assert main(line) == 0
    assert_same_result(result_of(run), result_of(folder))


def test_saved_head_contains_no_policy_weights(learned: tuple[Path, Path]) -> None:
    checkpoint = learned[0] / "global_step_4"
    names = read_tensors(draft_folder(checkpoint)).keys()
    assert not any("embed" in name or "lm_head" in name for name in names)
    state = load_tree(cotraining_file(checkpoint))
    moments = state["trainer"]["optimizer"]
    for one in (state["head"], state["used"], {**moments["adamw"], **moments["muon"]}):
        assert one.keys() == names


def test_opportunistic_training_changes_neither_rollouts_nor_policy_weights(
    learned: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, reward = learned
    line = rl_only(tmp_path / "run", *SETTINGS, *LEARN, OPPORTUNISTIC, reward=reward)
    assert main(line) == 0
    assert_same_rl(tmp_path / "run", folder)
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert steps[4]["drafter/restarts"] == 0
    assert steps[4]["rollout/idle_core_seconds"] >= 0
    # A checkpoint has the head in use. Both modes of co-training resume from it.
    state = load_tree(cotraining_file(tmp_path / "run" / "global_step_4"))
    assert state.keys() == {"used", "version", "trained_to"}
    more = "trainer.total_training_steps=5"
    assert main([*line, more]) == 0
    capsys.readouterr()
    given = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_4'}",
    )
    line = rl_only(tmp_path / "other", *SETTINGS, *LEARN, more, *given, reward=reward)
    assert main(line) == 0
    assert "its optimizer starts anew" in capsys.readouterr().out
    ours, theirs = policy(tmp_path / "run", 5), policy(tmp_path / "other", 5)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_opportunistic_training_on_all_cores_uses_the_core_lent_by_the_engine(
    learned: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reward = learned
    told: list[bool] = []
    set_running = DraftWorker.set_running

    def noted(self: DraftWorker, running: bool) -> None:
        told.append(running)
        set_running(self, running)

    monkeypatch.setattr(DraftWorker, "set_running", noted)
    monkeypatch.setattr(build_cotraining, "usable_cores", torch.get_num_threads)
    more = [OPPORTUNISTIC, "actor_rollout_ref.rollout.one_thread_below=4"]
    if torch.get_num_threads() == 1:
        monkeypatch.setattr(build_cotraining, "usable_cores", lambda: 2)
        more.append("trainer.num_threads=2")
    assert main(rl_only(tmp_path / "run", *SETTINGS, *LEARN, *more, reward=reward)) == 0
    assert_same_rl(tmp_path / "run", folder)
    # A core is lent in every rollout after the first, in the validation, and at the end of the run,
    # so that the process can end. Training starts at the end of the first rollout.
    assert told[::2] == [True] * len(told[::2])
    assert told[1::2] == [False] * len(told[1::2])
    assert len(told) >= 7


def test_killed_training_process_is_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_on, pids = DraftWorker.learn, list[int]()

    def learn_and_die(self: DraftWorker, *arguments: Any, **more: Any) -> None:
        hand_on(self, *arguments, **more)
        pids.append(self.pid)
        if len(pids) == 2:
            os.kill(self.pid, signal.SIGKILL)
            # Wait until it is dead: otherwise the run may end before it notices.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(DraftWorker, "learn", learn_and_die)
    reward = write_reward(tmp_path)
    line = rl_only(tmp_path / "run", *SETTINGS, *LEARN, OPPORTUNISTIC, reward=reward)
    assert main(line) == 0
    assert "ended with status -9; a new process starts from the head in use" in (
        capsys.readouterr().out
    )
    assert len(set(pids)) == 2
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [steps[n]["drafter/restarts"] for n in (2, 4)] == [0, 1]


KILLED_WHILE_STOPPED = """
import os, signal, sys, time
from pathlib import Path
from slipstream.cli import main
from slipstream.drafter.worker import DraftWorker
from slipstream.build import cotraining

set_running = DraftWorker.set_running

def note_stop(self, running):
    set_running(self, running)
    if not running:
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.001)
        print("stopped:", self.pid, self._path, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

DraftWorker.set_running = note_stop
cotraining.usable_cores = lambda: 2
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux shows them")
def test_killed_run_leaves_no_stopped_training_process(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    """Orphans are adopted within the session, where no other process would continue them."""
    few = ("trainer.num_threads=2", "actor_rollout_ref.rollout.one_thread_below=2")
    line = rl_only(tmp_path / "run", *SETTINGS, *LEARN, OPPORTUNISTIC, *few, reward=learned[1])
    # No pipe: a process left behind would keep it open.
    with adopting_orphans(), (tmp_path / "output.txt").open("w+") as output:
        done = subprocess.run(
            [sys.executable, "-c", KILLED_WHILE_STOPPED, *line],
            stdout=output,
            stderr=output,
            check=False,
        )
        output.seek(0)
        said = output.read()
        assert done.returncode == -signal.SIGKILL, said
        pid, folder = said.split("stopped:")[1].split()[:2]
        wait_for_end(int(pid))
    assert not Path(folder).exists()


COUNTED = """
import os, sys, threading
from slipstream.cli import main
status = main(sys.argv[1:])
print("threads left:", len(os.listdir("/proc/self/task")) - threading.active_count())
sys.exit(status)
"""


def test_main_thread_starts_no_openmp_team(tmp_path: Path) -> None:
    """Two OpenMP teams on the same cores wait for each other, which slows down the rest of the run
    by half. The head is so large that torch would use several threads to load, train and publish
    it, and the last batch so large that it would for the columns of the batch."""
    reward = write_reward(tmp_path)
    sizes = [f"actor_rollout_ref.model.init.{n}=256" for n in ("hidden_size", "intermediate_size")]
    left = {}
    for name, more in {
        "plain": (),
        "learning": LEARN,
        "with a head": (*LEARN, f"speculative.eagle.spec_model_path={tmp_path}/learning/head"),
        "large": ("data.train_batch_size=64", "trainer.total_training_steps=1"),
    }.items():
        folder = tmp_path / name.split()[0]
        line = rl_only(folder, *SETTINGS, *sizes, *more, "trainer.num_threads=2", reward=reward)
        done = subprocess.run(
            [sys.executable, "-c", COUNTED, *line], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        left[name] = int(done.stdout.split("threads left:")[1])
        if name == "learning":
            shutil.copytree(draft_folder(folder / "global_step_4"), folder / "head")
    tokens = read_jsonl(tmp_path / "large" / "metrics.jsonl")[0][1]["perf/total_num_tokens"]
    assert tokens > 4000
    assert left["learning"] == left["with a head"] == left["large"] == left["plain"]
