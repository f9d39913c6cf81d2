"""EAGLE-3 heads through the command line: training for a fixed policy, co-training, exact resume,
and settings that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slipstream.checkpoint.layout import head_folder
from slipstream.checkpoint.manager import TRACKER
from slipstream.checkpoint.state import cotraining_file, draft_folder, huggingface_folder
from slipstream.checkpoint.tree import load_tree
from slipstream.cli import main
from slipstream.metrics.loggers import read_jsonl
from slipstream.metrics.names import check_names
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.files import load_draft_head
from slipstream.models.hf_io import load_config
from tests.run.helpers import (
    assert_same_result,
    assert_same_rl,
    records_of,
    result_of,
    rl_only,
    tiny,
    write_reward,
)
from tests.run.test_cotraining import LEARN, OPPORTUNISTIC, SETTINGS, TRAIN
from tests.run.test_decoded_features import CROWDED, DECODED, assert_same_tree
from tests.run.test_draft_phase import SETTINGS as DRAFT
from tests.run.test_draft_phase import Stopped

LAYERS = "actor_rollout_ref.model.init.num_layers=4"
EAGLE = "speculative.eagle"
THIRD = (f"{EAGLE}.spec_algorithm=EAGLE3", f"{EAGLE}.aux_hidden_state_layer_ids=[0,1,3]")
VOCABULARY = f"{EAGLE}.draft_vocab_size=12"
RL = (*SETTINGS, LAYERS, *LEARN, *THIRD)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a policy with four layers, with recorded rollouts."""
    folder = tmp_path_factory.mktemp("policy") / "run"
    assert main(tiny(folder, LAYERS, "data.val_size=2", "trainer.val_before_train=false")) == 0
    return folder


def line(trained: Path, folder: Path, *overrides: str) -> list[str]:
    return [
        "draft",
        "--checkpoint",
        str(trained),
        f"trainer.default_local_dir={folder}",
        *DRAFT,
        *overrides,
    ]


@pytest.fixture(scope="module")
def finished(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "draft"
    assert main(line(trained, folder, *THIRD, VOCABULARY)) == 0
    return folder


def test_saved_eagle3_head_loads_with_its_layers_and_vocabulary(
    trained: Path, finished: Path
) -> None:
    config = load_config(huggingface_folder(trained / "global_step_2"))
    head = load_draft_head(head_folder(finished), config)
    assert isinstance(head, Eagle3Head)
    assert (head.aux_layers, head.draft_vocab_size) == ((0, 1, 3), 12)
    lines = dict(read_jsonl(finished / "metrics.jsonl"))
    for metrics in lines.values():
        check_names(metrics)
    assert "draft/value_loss" not in lines[7]
    assert lines[7]["draft/loss"] < lines[1]["draft/loss"]


def test_resumed_training_equals_uninterrupted_training(
    trained: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "draft"
    with monkeypatch.context() as patch:
        Stopped(patch, 4)
        assert main(line(trained, folder, *THIRD, VOCABULARY)) == 130
    assert main(line(trained, folder, *THIRD, VOCABULARY)) == 0
    assert_same_result(result_of(finished), result_of(folder))


def test_resume_refuses_another_head_architecture(
    trained: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(finished, folder)
    # With this file, the run would be refused earlier, for its other settings.
    (folder / "config.yaml").unlink()
    for other in ((), THIRD, (*THIRD, f"{EAGLE}.draft_vocab_size=13")):
        more = "speculative.draft.total_training_steps=9"
        assert main(line(trained, folder, *other, more)) == 4
        assert "another algorithm, or with other auxiliary layers" in capsys.readouterr().err
        (folder / "config.yaml").unlink(missing_ok=True)


def test_training_from_a_given_head_keeps_its_architecture(
    trained: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"{EAGLE}.spec_model_path={finished}"
    assert main(line(trained, tmp_path / "draft", given)) == 0
    config = load_config(huggingface_folder(trained / "global_step_2"))
    again = load_draft_head(head_folder(tmp_path / "draft"), config)
    assert again.is_like(load_draft_head(head_folder(finished), config))
    for wrong, found in (
        (f"{EAGLE}.draft_vocab_size=13", "it is 12"),
        (f"{EAGLE}.draft_vocab_size=null", "it is 12"),
        (f"{EAGLE}.aux_hidden_state_layer_ids=[0,1,2]", "it is (0, 1, 3)"),
    ):
        capsys.readouterr()
        assert main(line(trained, tmp_path / "other", given, wrong)) == 2
        said = capsys.readouterr().err
        assert found in said
        assert "spec_model_path=null" in said


@pytest.mark.parametrize("algorithm", [(), THIRD])
def test_draft_vocabulary_has_the_most_frequent_recorded_tokens(
    trained: Path,
    tmp_path: Path,
    algorithm: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pattern = trained / "rollouts" / "*.jsonl"
    given = f"speculative.draft.rollout_files=[{pattern}]"
    assert main(line(trained, tmp_path / "draft", *algorithm, VOCABULARY, given)) == 0
    config = load_config(huggingface_folder(trained / "global_step_2"))
    assert f"draft vocabulary: 12 of {config.vocab_size} tokens" in capsys.readouterr().out
    head = load_draft_head(head_folder(tmp_path / "draft"), config)
    answers = [r["response_ids"] for rs in records_of(trained / "rollouts").values() for r in rs]
    counts = {t: sum(a.count(t) for a in answers) for t in range(config.vocab_size)}
    # End tokens are always in it, however often they occur.
    least = min(counts[t] for t in head.tokens or () if t not in config.eos_token_ids)
    assert head.tokens == tuple(sorted(head.tokens or ()))
    assert all(n <= least for t, n in counts.items() if t not in (head.tokens or ()))


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        (THIRD[:1], 2, "2, 2 and 1 of 4, are not three layers in order"),
        ((THIRD[0], f"{EAGLE}.aux_hidden_state_layer_ids=[0,1,4]"), 2, "not of [0, 1, 4]"),
        ((*THIRD, f"{EAGLE}.draft_vocab_size=100000"), 2, "set a number from "),
        ((*THIRD, f"{TRAIN}.value_weight=1"), 2, "an EAGLE3 head predicts no features"),
        (
            (*THIRD, VOCABULARY, f"{TRAIN}.topk_mass_weight=0.1", f"{EAGLE}.spec_topk=12"),
            2,
            "set speculative.eagle.spec_topk below 12",
        ),
        ((f"{EAGLE}.draft_vocab_size=100000",), 2, "set a number from "),
        (THIRD[1:], 2, "aux_hidden_state_layer_ids has no effect with"),
    ],
)
def test_impossible_settings_are_refused(
    trained: Path,
    tmp_path: Path,
    settings: tuple[str, ...],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(line(trained, tmp_path / "draft", *settings)) == status
    assert message in capsys.readouterr().err


def test_head_of_a_qwen3_policy_is_exported_for_vllm_and_sglang(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for layout in ("vllm", "sglang"):
        output = tmp_path / layout
        export = ["export", "--checkpoint", str(finished), "--output", str(output)]
        assert main([*export, "--draft", layout]) == 0
        raw = json.loads((output / "config.json").read_text())
        assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
        assert load_draft_head(output).is_like(load_draft_head(head_folder(finished)))
    assert "EAGLE3" in capsys.readouterr().out


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a run that co-trains a new head, and its reward function."""
    root = tmp_path_factory.mktemp("learned")
    reward = write_reward(root)
    assert main(rl_only(root / "run", *RL, reward=reward)) == 0
    return root / "run", reward


def test_cotraining_changes_neither_rollouts_nor_policy_weights(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, reward = learned
    assert main(rl_only(tmp_path / "off", *SETTINGS, LAYERS, reward=reward)) == 0
    assert_same_rl(folder, tmp_path / "off")
    steps = dict(read_jsonl(folder / "metrics.jsonl"))
    assert [steps[n]["drafter/updates"] for n in range(1, 5)] == [0, 3, 3, 6]
    assert "drafter/feature_loss" not in steps[4]
    head = load_draft_head(draft_folder(folder / "global_step_4"))
    assert isinstance(head, Eagle3Head)
    # Features have three auxiliary layers and the final hidden states.
    kept = load_tree(cotraining_file(folder / "global_step_4"))["collector"]["buffer"]["kept"]
    assert {tuple(one["features"].shape[1:]) for one in kept} == {(4 * 32,)}


def test_resumed_run_has_the_same_head(learned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, reward = learned
    again = tmp_path / "run"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "global_step_4")
    (again / TRACKER).write_text("2")
    assert main(rl_only(again, *RL, reward=reward)) == 0
    assert_same_result(result_of(again), result_of(folder))


def test_decoded_features_give_the_same_head(learned: tuple[Path, Path], tmp_path: Path) -> None:
    folder, reward = learned
    assert main(rl_only(tmp_path / "run", *RL, *CROWDED, DECODED, reward=reward)) == 0
    for step in (2, 4):
        ours, theirs = (
            load_tree(cotraining_file(root / f"global_step_{step}"))
            for root in (tmp_path / "run", folder)
        )
        assert_same_tree(ours, theirs)
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert steps[4]["drafter/decoded_samples"] > 0


def test_opportunistic_training_changes_neither_rollouts_nor_policy_weights(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, reward = learned
    assert main(rl_only(tmp_path / "run", *RL, OPPORTUNISTIC, reward=reward)) == 0
    assert_same_rl(tmp_path / "run", folder)
    steps = dict(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert steps[4]["drafter/restarts"] == 0
    assert isinstance(load_draft_head(draft_folder(tmp_path / "run" / "global_step_4")), Eagle3Head)


def test_new_head_in_rl_cannot_have_a_draft_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(rl_only(tmp_path / "run", *RL, VOCABULARY)) == 2
    assert "set speculative.eagle.draft_vocab_size=null" in capsys.readouterr().err
    long = (f"{TRAIN}.buffer_bytes=20000",)
    assert main(rl_only(tmp_path / "run", *RL, *long)) == 2
    assert "speculative.train.buffer_bytes=20000" in capsys.readouterr().err
