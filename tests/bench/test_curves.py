"""Curves for the pages of algorithms: what is drawn, and where it is shown."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from bench.learning import RUNS
from slipstream import cli
from slipstream.build.policy import make_decoder
from slipstream.config import CONFIG_FILE, load_config, to_yaml
from slipstream.data.tokenizer import build_tokenizer, save_tokenizer
from slipstream.errors import DataError
from slipstream.models.hf_io import save_checkpoint

ROOT = Path(__file__).parents[2]
ACCURACY = "val-core/countdown/acc/mean@1"
AUX = "val-aux/countdown/acc/mean@1"


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    """The script, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("curves", ROOT / "bench" / "curves.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(reward: float, accuracy: float | None = None) -> dict[str, float]:
    found = {"timing_s/step": 1.0, "critic/score/mean": reward}
    if accuracy is not None:
        found |= {
            ACCURACY: accuracy,
            f"{AUX}/ci_low": accuracy - 0.1,
            f"{AUX}/ci_high": accuracy + 0.1,
        }
    return found


LINES = [{ACCURACY: 0.4}, line(0.2), line(0.3, 0.5), line(0.4), line(0.5, 0.7)]


def policy(folder: Path) -> Path:
    """A run folder of the tiny recipe, with a policy of random weights."""
    config = load_config([], recipe="tiny", notify=lambda _: None)
    tokenizer = build_tokenizer()
    save_checkpoint(make_decoder(config, tokenizer, None), folder)
    save_tokenizer(tokenizer, folder)
    (folder / CONFIG_FILE).write_text(to_yaml(config), encoding="utf-8")
    return folder


def test_every_page_has_a_run(curves: ModuleType) -> None:
    folder = ROOT / "docs" / "algorithms"
    pages = [page for pages in curves.PAGES.values() for page in pages]
    written = [path.relative_to(folder).as_posix() for path in folder.glob("*/*.md")]
    assert sorted(pages) == sorted(written)
    assert curves.PAGES.keys() <= RUNS.keys()


def test_accuracies_stand_at_the_steps_they_were_measured_after(curves: ModuleType) -> None:
    expected = [(0, 0.4, 0.4, 0.4), (2, 0.5, 0.4, 0.6), (4, 0.7, 0.6, 0.8)]
    assert curves.accuracies(LINES) == [pytest.approx(point) for point in expected]


def test_a_picture_is_drawn_and_shown_once(
    curves: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = curves.draw("grpo", LINES, tmp_path / "curves")
    assert picture == tmp_path / "curves" / "grpo.png"
    assert picture.stat().st_size > 10_000
    monkeypatch.setattr(curves, "DOCS", tmp_path)
    page = tmp_path / "advantages" / "grpo.md"
    page.parent.mkdir()
    page.write_text("# `grpo`\n")
    assert curves.show(page, picture, "By a command.")
    assert not curves.show(page, picture, "By another.")
    assert page.read_text().endswith("/grpo.png)\n\n(By a command.)\n")
    assert page.read_text().count("](../curves/grpo.png)") == 1
    with pytest.raises(DataError, match="grpo: nothing to draw, 0 rewards and 1 validations"):
        curves.draw("grpo", LINES[:1], tmp_path)


def test_it_trains_from_a_run_and_draws(
    curves: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def here(line: Sequence[str], say: Callable[[str], None]) -> None:
        """The command in this process, which has imported all that it needs."""
        assert cli.main(line[line.index("slipstream.cli") + 1 :]) == 0

    monkeypatch.setattr(curves, "run_line", here)
    run = policy(tmp_path / "run")
    small = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2"]
    given = ["--policy", str(run), "--steps", "1", "--only", "rloo", "--out", str(tmp_path / "out")]
    status = curves.main([*given, "--", *small, "actor_rollout_ref.actor.ppo_mini_batch_size=2"])
    assert status == 0, capsys.readouterr().out
    assert (tmp_path / "out" / "rloo.png").is_file()
    assert "RL, rloo: algorithm.adv_estimator=rloo" in capsys.readouterr().out
    assert curves.main(["--policy", str(tmp_path), "--only", "rloo"]) == 2
