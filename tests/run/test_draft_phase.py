"""`slipstream draft`: its files, exact resume, and settings that it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.bench.speculation.trained import _trained_for
from slipstream.build.draft import default_muon_lr
from slipstream.checkpoint.interrupt import GracefulInterrupt
from slipstream.checkpoint.layout import head_folder, policy_folder
from slipstream.checkpoint.state import huggingface_folder
from slipstream.cli import main
from slipstream.drafter.sequences import DraftSequence
from slipstream.errors import DataError
from slipstream.loops.draft import DraftLoopSettings, train_draft_head
from slipstream.loops.draft_data import Responder, read_rollouts
from slipstream.metrics.loggers import read_jsonl
from slipstream.metrics.names import check_names, deterministic
from slipstream.models.digest import weights_digest
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import load_draft_head, save_draft_head
from slipstream.models.hf_io import load_checkpoint, load_config
from slipstream.run import draft_phase
from slipstream.run.eval_export import _head_source
from tests.drafter.helpers import new_head, sequences, trainer, vocab_of
from tests.fuzz.checkpoints import seal
from tests.inference.helpers import shared_decoder
from tests.models.helpers import config as sizes
from tests.run.helpers import assert_same_result, records_of, result_of, steps_of, tiny

SETTINGS = (
    "speculative.draft.total_training_steps=7",
    "speculative.draft.steps_per_round=3",
    "speculative.draft.samples_per_round=6",
    "speculative.draft.held_out_samples=5",
    "speculative.draft.accept_depth=3",
    "speculative.draft.save_freq=1",
    "speculative.train.batch_size_per_gpu=2",
    "speculative.draft.optim.lr_warmup_steps=2",
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with recorded rollouts."""
    folder = tmp_path_factory.mktemp("policy") / "run"
    assert main(tiny(folder, "data.val_size=2", "trainer.val_before_train=false")) == 0
    return folder


def line(policy: Path, folder: Path, *overrides: str) -> list[str]:
    return [
        "draft",
        "--checkpoint",
        str(policy),
        f"trainer.default_local_dir={folder}",
        *SETTINGS,
        *overrides,
    ]


@pytest.fixture(scope="module")
def finished(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "draft"
    assert main(line(policy, folder)) == 0
    return folder


def steps_of_best(checkpoint: Path) -> int:
    """The step of the best head that a checkpoint knows."""
    step: int = json.loads((checkpoint / "data.json").read_text())["best"]["step"]
    return step


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


class Stopped:
    """Stops a training after the given number of steps, like a first Ctrl-C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        original = draft_phase._DraftPhase._completed

        def completed(phase: Any, step: int, metrics: dict[str, float]) -> dict[str, float]:
            if step == after:
                interrupt: GracefulInterrupt = phase._run.interrupt
                interrupt.request()
            return original(phase, step, metrics)

        monkeypatch.setattr(draft_phase._DraftPhase, "_completed", completed)


def test_muon_rate_of_new_heads_falls_with_the_width() -> None:
    assert [default_muon_lr(width) for width in (32, 192)] == [0.05, 0.05]
    assert default_muon_lr(576) == pytest.approx(0.00962, abs=1e-5)


def test_run_writes_head_metrics_and_checkpoints(policy: Path, finished: Path) -> None:
    assert steps_of(finished) == [3, 6, 7]
    config = load_config(huggingface_folder(policy / "global_step_2"))
    head = load_draft_head(head_folder(finished), config)
    assert head_folder(finished) == finished / "global_step_7" / "draft"
    assert all(torch.isfinite(p).all() for p in head.parameters())
    # The benchmarks find the head of a policy by this digest.
    weights = load_checkpoint(huggingface_folder(policy / "global_step_2"))
    assert _trained_for(finished) == weights_digest(weights)
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [step for step, _ in lines] == list(range(8))
    for _, metrics in lines:
        check_names(metrics)
    measured = [step for step, metrics in lines if "draft/accept_depth_3" in metrics]
    assert measured == [0, 3, 6, 7]


def test_responses_in_which_tokens_were_counted_are_not_generated_again(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    respond = Responder.respond

    def counted(self: Responder, prompts: Any, namespace: str, *more: Any) -> Any:
        rounds.append(len(prompts))
        return respond(self, prompts, namespace, *more)

    monkeypatch.setattr(Responder, "respond", counted)
    whole = line(policy, tmp_path / "all", "speculative.eagle.draft_vocab_size=null")
    assert main(whole) == 0
    # Held-out prompts, and three rounds.
    assert sorted(rounds) == [5, 6, 6, 6]
    rounds.clear()
    assert main(line(policy, tmp_path / "few", "speculative.eagle.draft_vocab_size=20")) == 0
    assert sorted(rounds) == [5, 6, 6, 6]


def test_acceptance_table_is_printed_before_and_after(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(policy, tmp_path / "draft")) == 0
    out = capsys.readouterr().out
    assert "all drafts to this depth accepted (share)" in out
    best = steps_of_best(tmp_path / "draft" / "global_step_7")
    assert out.count("  before    ") == out.count(f"  after step {best}    ") == 2
    assert [f"held out, step {step}: " in out for step in (3, 6, 7)] == [True] * 3
    assert f"draft head   {tmp_path / 'draft' / 'global_step_7' / 'draft'}" in out


@pytest.mark.parametrize("after", [2, 3, 4])
def test_resumed_training_equals_uninterrupted_training(
    policy: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    folder = tmp_path / "draft"
    with monkeypatch.context() as patch:
        Stopped(patch, after)
        assert main(line(policy, folder)) == 130
    assert steps_of(folder)[-1] == after
    assert main(line(policy, folder)) == 0
    whole, resumed = result_of(finished), result_of(folder)
    assert_same_result(whole, resumed)


def test_stopped_training_shows_the_acceptance_of_its_head(
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Stopped(monkeypatch, 4)
    assert main(line(policy, tmp_path / "draft")) == 130
    out = capsys.readouterr().out
    assert "held out, step 4: " in out
    assert "all drafts to this depth accepted (share)" in out


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> None:
    """After step 3, each measurement finds a worse head."""
    original = draft_phase._DraftPhase._measure

    def measured(phase: Any) -> dict[str, float]:
        scale = 0.9 ** max(phase._trainer.step - 3, 0)
        return {name: scale * value for name, value in original(phase).items()}

    monkeypatch.setattr(draft_phase._DraftPhase, "_measure", measured)


@pytest.mark.usefixtures("falling")
def test_training_ends_early_with_the_best_head(
    policy: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    patient = line(policy, folder, "speculative.draft.total_training_steps=60")
    constant = "speculative.draft.optim.lr_scheduler_type=constant"
    assert main([*patient, constant, "speculative.draft.patience=2"]) == 0
    out = capsys.readouterr().out
    assert steps_of(folder)[-1] == 9
    assert "the head of step 3 is better" in out
    assert "no head after step 3 was better on held-out responses" in out
    checkpoints = [folder / f"global_step_{step}" for step in (3, 9)]
    first, last = (load_file(each / "draft" / "model.safetensors") for each in checkpoints)
    newest = load_file(checkpoints[1] / "draft" / "newest" / "model.safetensors")
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())
    assert not torch.equal(newest["fc.weight"], last["fc.weight"])
    assert steps_of_best(checkpoints[1]) == 3
    # The same command does not go on; with more patience it does, from the newest head.
    assert main([*patient, constant, "speculative.draft.patience=2"]) == 0
    assert "speculative.draft.patience=-1" in capsys.readouterr().out
    assert main([*patient, constant, "speculative.draft.patience=4"]) == 0
    assert steps_of(folder)[-1] == 15
    ones = tmp_path / "one"
    assert (
        main(
            [
                *line(policy, ones, "speculative.draft.total_training_steps=60"),
                constant,
                "speculative.draft.patience=4",
            ]
        )
        == 0
    )
    assert_same_result(result_of(ones), result_of(folder))


@pytest.mark.usefixtures("falling")
@pytest.mark.parametrize("after", [4, 5])
def test_resumed_training_keeps_the_best_head(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "draft"
    assert main(line(policy, whole)) == 0
    with monkeypatch.context() as patch:
        Stopped(patch, after)
        assert main(line(policy, folder)) == 130
    assert main(line(policy, folder)) == 0
    assert_same_result(result_of(whole), result_of(folder))
    assert steps_of_best(folder / "global_step_7") == 3


@pytest.mark.parametrize(
    ("best", "message"),
    [
        ({"step": 3}, "beside draft/ there are 0 other heads"),
        ({"step": 8}, "from 0 to 7"),
        ({"metrics": {}}, "draft/accept_depth_1"),
        ({"metrics": {"draft/accept_depth_1": 1.5, "draft/accept_length_1": 1.0}}, "from 0 to 1"),
    ],
)
def test_best_head_that_no_training_writes_is_refused(
    policy: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    best: dict[str, Any],
    message: str,
) -> None:
    checkpoint = tmp_path / "draft" / "global_step_7"
    shutil.copytree(finished, tmp_path / "draft")
    if steps_of_best(checkpoint) != 7:
        shutil.rmtree(checkpoint / "draft" / "newest")
    data = json.loads((checkpoint / "data.json").read_text())
    data["best"] = {**data["best"], "step": 7, **best}
    (checkpoint / "data.json").write_text(json.dumps(data))
    seal(checkpoint)
    assert main(line(policy, tmp_path / "draft")) == 4
    assert message in error_of(capsys)


def test_overfitting_is_reported_once(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [
        "speculative.draft.total_training_steps=80",
        "speculative.draft.steps_per_round=40",
        "speculative.draft.samples_per_round=2",
        "speculative.draft.patience=-1",
    ]
    assert main(line(policy, tmp_path / "draft", *many)) == 0
    out = capsys.readouterr().out
    assert out.count("warning: the head overfits its training responses") == 1
    assert "speculative.draft.samples_per_round" in out


def test_rounds_have_the_steps_of_their_epochs(policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    epochs = ["speculative.draft.steps_per_round=null", "speculative.draft.epochs_per_round=2"]
    few = ["speculative.draft.samples_per_round=3", "speculative.draft.total_training_steps=6"]
    assert main(line(policy, folder, *epochs, *few)) == 0
    # Two passes over three responses in batches of two.
    assert steps_of(folder) == [4, 6]


def test_killed_training_resumes_from_its_last_checkpoint(
    policy: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    original = draft_phase._DraftPhase._completed

    def completed(phase: Any, step: int, metrics: dict[str, float]) -> dict[str, float]:
        if step == 5:
            raise Killed
        return original(phase, step, metrics)

    folder = tmp_path / "draft"
    with monkeypatch.context() as patch:
        patch.setattr(draft_phase._DraftPhase, "_completed", completed)
        with pytest.raises(Killed):
            main(line(policy, folder))
    assert steps_of(folder) == [3]
    assert main(line(policy, folder)) == 0
    whole, resumed = result_of(finished), result_of(folder)
    for name in ("rl data.json", "rl draft/model.safetensors", "rl actor/optimizer.safetensors"):
        assert resumed[name] == whole[name]
    assert resumed["rl metrics"] == whole["rl metrics"]


def test_finished_training_is_not_repeated(
    policy: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "draft")
    (tmp_path / "draft" / "config.yaml").unlink()
    assert main(line(policy, tmp_path / "draft")) == 0
    assert "all 7 steps" in capsys.readouterr().out


def test_head_is_trained_on_recorded_rollouts(policy: Path, tmp_path: Path) -> None:
    records = records_of(policy / "rollouts")
    assert sorted(records) == ["1.jsonl", "2.jsonl"]
    pattern = policy / "rollouts" / "*.jsonl"
    vocab_size = load_config(huggingface_folder(policy / "global_step_2")).vocab_size
    found = read_rollouts([str(pattern)], vocab_size=vocab_size)
    assert found == [
        (record["prompt_ids"], record["response_ids"])
        for name in sorted(records)
        for record in records[name]
    ]
    folder = tmp_path / "draft"
    assert main(line(policy, folder, f"speculative.draft.rollout_files=[{pattern}]")) == 0
    state = json.loads((folder / "global_step_7" / "data.json").read_text())
    assert state["source"] == {"taken": 18, "count": len(found)}


def test_training_starts_from_a_given_head(policy: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    assert main(line(policy, folder, f"speculative.eagle.spec_model_path={finished}")) == 0
    last = dict(read_jsonl(finished / "metrics.jsonl"))[7]
    first = dict(read_jsonl(folder / "metrics.jsonl"))[0]
    names = [name for name in first if name.startswith("draft/accept")]
    assert len(names) == 6
    assert {name: first[name] for name in names} == {name: last[name] for name in names}


def test_resume_refuses_a_policy_with_other_weights(
    policy: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "draft")
    (tmp_path / "draft" / "config.yaml").unlink()
    other = policy / "sft"
    assert main(line(other, tmp_path / "draft")) == 4
    assert "for a policy with other weights" in error_of(capsys)


def test_resume_refuses_a_checkpoint_of_another_phase(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(policy / "global_step_2", tmp_path / "draft" / "global_step_2")
    assert main(line(policy, tmp_path / "draft")) == 4
    assert "checkpoint of phase 'rl', not of draft head training" in error_of(capsys)


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["actor_rollout_ref.rollout.name=hf"], 2, "returns no hidden states"),
        (
            ["data.task=null", "sft.total_training_steps=0"],
            2,
            "needs prompts for the policy to answer",
        ),
        (["trainer.val_only=true"], 2, "trainer.val_only=true trains nothing"),
        (
            ["speculative.draft.optim.lr_warmup_steps=7"],
            2,
            "lr_scheduler_type=constant or more steps",
        ),
        (["speculative.train.max_seq_len=3"], 3, "speculative.train.max_seq_len=3"),
        (["speculative.draft.rollout_files=[none.jsonl]"], 3, "none.jsonl"),
    ],
)
def test_impossible_settings_are_refused(
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    code: int,
    message: str,
) -> None:
    assert main(line(policy, tmp_path / "draft", *overrides)) == code
    assert message in error_of(capsys)


def test_random_policy_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    assert main(["draft", "--recipe", "tiny", f"trainer.default_local_dir={folder}"]) == 2
    assert "set actor_rollout_ref.model.path=FOLDER" in error_of(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not a recorded rollout"),
        ('{"status": "completed", "response_ids": [1]}', "KeyError"),
        ('{"status": "completed", "prompt_ids": [1], "response_ids": [99]}', "vocabulary of 64"),
        ('{"status": "failed", "prompt_ids": [1], "response_ids": [2]}', "contain no response"),
    ],
)
def test_unreadable_rollout_file_names_line_and_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(DataError, match=message):
        read_rollouts([str(path)], vocab_size=64)


class Counted:
    """A source of sequences that counts its rounds."""

    def __init__(self, data: list[DraftSequence]) -> None:
        self._data = data
        self.rounds = 0

    @property
    def drawn(self) -> int | None:
        return 4 * self.rounds

    def next_round(self, stop: Callable[[], bool]) -> list[DraftSequence] | None:
        self.rounds += 1
        return None if stop() else self._data[4 * self.rounds - 4 : 4 * self.rounds]

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rounds = state["rounds"]


def test_draft_loop_stopped_and_resumed_gives_the_same_head() -> None:
    decoder = shared_decoder()
    vocab, data = vocab_of(decoder), sequences(decoder, 24)
    settings = DraftLoopSettings(total_steps=5, steps_per_round=2, batch_size=2, seed=0)
    whole, positions = trainer(new_head(decoder)), list[tuple[Any, bool]]()
    done = train_draft_head(
        whole,
        Counted(data),
        vocab,
        settings,
        after_round=lambda position, last: positions.append((position["rounds"], last)),
    )
    assert (done, positions) == (True, [(1, False), (2, False), (3, True)])
    part, source, kept = trainer(new_head(decoder)), Counted(data), list[dict[str, Any]]()
    ended = train_draft_head(
        part,
        source,
        vocab,
        settings,
        stop=lambda: part.step == 3,
        after_round=lambda position, last: kept.append(dict(position)),
    )
    assert (ended, part.step, kept) == (False, 3, [{"rounds": 1}, {"rounds": 1}])
    source.load_state_dict(kept[-1])
    assert train_draft_head(part, source, vocab, settings)
    for one, other in zip(whole.head.parameters(), part.head.parameters(), strict=True):
        assert torch.equal(one, other)
    assert deterministic({"draft/loss": 1.0, "draft/tokens_per_second": 2.0}) == {"draft/loss": 1.0}


def test_head_is_exported_for_vllm_and_sglang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = DraftHead(sizes("llama"))
    head.init_weights(3)
    save_draft_head(head, tmp_path / "head")
    output = tmp_path / "deep" / "out"
    export = ["export", "--checkpoint", str(tmp_path / "head"), "--output", str(output)]
    assert main([*export, "--draft", "sglang"]) == 0
    printed = capsys.readouterr().out
    assert "SGLang, llama, float32" in printed
    assert f"--speculative-draft-model-path {output}" in printed
    back = load_draft_head(output, head.config).state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in head.state_dict().items())
    assert "fc.bias" in load_file(output / "model.safetensors")
    assert not list(output.parent.glob(".*"))
    assert main([*export, "--draft", "vllm"]) == 4, "a second export does not write over the first"
    again = ["export", "--checkpoint", str(output), "--output", str(tmp_path / "vllm")]
    assert main([*again, "--draft", "vllm", "--dtype", "bfloat16"]) == 0
    assert f'"model": "{tmp_path / "vllm"}"' in capsys.readouterr().out
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    assert "fc.bias" not in tensors
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_export_finds_the_head_in_a_run_folder(
    policy: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(policy, run)
    export = ["export", "--checkpoint", str(run), "--output", str(tmp_path / "out")]
    assert main([*export, "--draft", "sglang"]) == 4
    assert f"train one with `slipstream draft --checkpoint {run}`" in error_of(capsys)
    # The folder of a policy contains no head.
    model = ["export", "--checkpoint", str(policy_folder(run)), *export[3:]]
    assert main([*model, "--draft", "sglang"]) == 4
    assert "has no draft head" in error_of(capsys)
    shutil.copytree(finished, run / "draft")
    assert _head_source(run) == run / "draft" / "global_step_7" / "draft"
    assert _head_source(run / "draft") == run / "draft" / "global_step_7" / "draft"
    # No engine has a class for a Qwen3 head. No files are left behind.
    assert main([*export, "--draft", "sglang"]) == 2
    assert "no class for EAGLE heads of the family qwen3" in error_of(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
