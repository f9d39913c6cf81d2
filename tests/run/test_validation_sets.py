"""Several validation sets in one run, each with its own sampling settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.data.tokenizer import build_tokenizer, save_tokenizer
from tests.run.helpers import ROLLOUT, metrics_of, records_of, rl_only, write_reward

BY_SOURCE = f"{ROLLOUT}.val_kwargs.by_source"


def line(folder: Path, *overrides: str) -> list[str]:
    save_tokenizer(build_tokenizer(), folder / "tokenizer")
    # The rows alternate between the two data sources, in both files.
    for name in ("one", "two"):
        rows = [
            {"prompt": f"{i} + {len(name)} =", "data_source": ("easy", "team/hard")[i % 2]}
            for i in range(4)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rl_only(
        folder / "run",
        "data.task=null",
        f"data.tokenizer={folder / 'tokenizer'}",
        f"data.train_files={folder / 'one.jsonl'}",
        f"data.val_files=[{folder / 'one.jsonl'},{folder / 'two.jsonl'}]",
        "data.shuffle=false",
        "trainer.total_training_steps=1",
        *overrides,
        reward=write_reward(folder),
    )


def test_each_validation_set_has_its_own_settings(tmp_path: Path) -> None:
    hard = f"{BY_SOURCE}={{team/hard: {{n: 4, do_sample: true, temperature: 1}}}}"
    assert main(line(tmp_path, hard)) == 0
    metrics = metrics_of(tmp_path / "run")[1]
    assert "val-core/easy/acc/mean@1" in metrics
    assert "val-core/team/hard/acc/mean@4" in metrics
    assert "val-aux/team/hard/acc/pass@2" in metrics
    assert metrics["val-aux/easy/num_prompts"] == metrics["val-aux/team/hard/num_prompts"] == 4
    rows = records_of(tmp_path / "run" / "validation")["1.jsonl"]
    assert [row["group"] for row in rows] == [n for n in range(8) for _ in range(1 + 3 * (n % 2))]
    assert [row["uid"] for row in rows if row["group"] % 2 == 0] == [
        f"{name}.jsonl:{row}" for name in ("one", "two") for row in (0, 2)
    ]
    hard_ones = [row["response_ids"] for row in rows if row["group"] == 1]
    assert len({tuple(tokens) for tokens in hard_ones}) > 1


def test_settings_of_one_set_do_not_change_responses_of_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    hard = f"{BY_SOURCE}={{team/hard: {{n: 2, do_sample: true, temperature: 1}}}}"
    assert main(line(tmp_path / "a")) == 0
    assert main(line(tmp_path / "b", hard)) == 0
    easy = [
        [row["response_ids"] for row in rows if row["data_source"] == "easy"]
        for rows in (records_of(tmp_path / n / "run/validation")["1.jsonl"] for n in "ab")
    ]
    assert easy[0] == easy[1]
    assert len(easy[0]) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{hard: {n: 1}}", "by_source names 'hard', but no validation prompt has that data source"),
        ("{easy: 4}", "by_source.easy=4 must be a mapping, such as {n: 8}"),
        ("{easy: {m: 4}}", "by_source.easy.m is not a setting"),
        ("{easy: {n: 4}}", "by_source.easy.n=4 "),
        ("{easy: {n: x}}", "by_source.easy.n"),
        ("{easy: {temperature: 1}}", "by_source.easy.temperature=1 has no effect"),
        ("{easy: {do_sample: true}}", "by_source.easy.do_sample=true needs a temperature"),
        ("{easy: {top_p: 0}}", "by_source.easy.top_p=0"),
    ],
)
def test_invalid_by_source_settings_are_refused(
    tmp_path: Path, settings: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(tmp_path, f"{BY_SOURCE}={settings}")) in (2, 3)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
