"""A draft head in vLLM: the requests to vLLM, the rows, and refused policies and settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import export
from bench.export import Accepted, ExportBench, gaps_at_divergence, ratio_of
from slipstream.bench.contenders import Contender, VllmSettings, Workload
from slipstream.bench.record import ResultRow, Spread, this_machine
from slipstream.bench.speculation.trained import Trained
from slipstream.errors import ConfigError
from slipstream.models.draft.eagle1 import DraftHead
from tests.models.helpers import make_decoder


def trained(family: str = "llama") -> Trained:
    decoder = make_decoder(family, head_dim=16)
    head = DraftHead(decoder.config)
    head.init_weights(0)
    return Trained(decoder=decoder, head=head, prompts=[(1, 2, 3), (4, 5), (6,)], max_model_len=40)


def test_responses_and_acceptance_of_both_engines_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = trained()
    asked: list[tuple[int, str, Workload]] = []
    writes = {0: 7, 1: 7, 2: 0}

    @contextmanager
    def vllm(
        name: str, settings: VllmSettings, folder: Path, positions: int, temperature: float
    ) -> Iterator[Contender]:
        assert temperature == 0
        assert settings.gaps
        # The files that vLLM loads.
        assert (folder / "config.json").exists()
        depth, counted = 0, {}
        if settings.speculative is not None:
            head = Path(str(settings.speculative["model"]))
            assert "EagleLlamaForCausalLM" in (head / "config.json").read_text()
            assert (head / "model.safetensors").exists()
            depth = int(str(settings.speculative["num_speculative_tokens"]))
            counted = {
                "vllm:spec_decode_num_drafts": 10.0,
                "vllm:spec_decode_num_accepted_tokens": 5.0,
            }
        contender = Contender(generate=lambda w: [], dtype="float32", threads=1)

        def generate(workload: Workload) -> list[list[int]]:
            asked.append((depth, name, workload))
            gaps = [[0.5, 0.25] * (length // 2) for length in workload.lengths]
            contender.answers.append({"seconds": 0.5, "speculation": counted, "gaps": gaps})
            # Only the second token of the first response can differ.
            first = [0, writes[depth]] if (1, 2, 3) in workload.prompts else [0, 0]
            tokens = [[0] * length for length in workload.lengths]
            tokens[0][:2] = first
            return tokens

        contender.generate = generate
        yield contender

    monkeypatch.setattr(export, "load_trained", lambda policy: given)
    monkeypatch.setattr(export, "vllm_of", vllm)
    bench = ExportBench(policy=Path("run"), depths=(1, 2), prompts=3, new_tokens=8, at_once=2)
    rows = export.run(bench, lambda text: None)
    assert [depth for depth, _, _ in asked] == [0, 0, 1, 1, 2, 2]
    assert [w.prompts for _, _, w in asked[:2]] == [((1, 2, 3), (4, 5)), ((6,),)]
    assert [row.case for row in rows] == ["chains of 1", "chains of 2"]
    for row in rows:
        values = row.values
        assert values["vllm_tokens_per_verification"] == 1.5
        assert row.seconds.median == 1.0
        ours = values["tokens_per_verification"]
        assert isinstance(ours, float)
        assert 1 <= ours <= 3
        assert ratio_of(row) == pytest.approx(1.5 / ours)
        # The fake vLLM writes zeros, with gaps of 0.5 and 0.25 nats.
        assert values["same_responses"] == 0
        assert values["largest_gap_where_they_part"] == 0.5
        assert values["vllm_median_gap"] == 0.375
    same = [row.values["vllm_same_as_plain"] for row in rows]
    assert same == [1.0, pytest.approx(2 / 3)]
    # The responses diverge at the second token.
    assert [row.values["vllm_largest_gap_where_they_part"] for row in rows] == [0.0, 0.25]
    assert [export.largest_gap(row) for row in rows] == [0.5, 0.5]
    assert not export.good(rows)


def test_the_gap_is_taken_at_the_first_different_token() -> None:
    one = Accepted(
        token_ids=[[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        per_verification=1.0,
        seconds=0.0,
        gaps=[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]],
    )
    assert gaps_at_divergence(one, [[1, 2, 3], [4, 0, 0], [7, 8, 0]]) == [0.5, 0.9]


@pytest.mark.parametrize(
    ("dtype", "over", "ours", "theirs", "good"),
    [
        ("float32", 0.91, 0.0, 0.0, True),
        ("float32", 1.11, 0.0, 0.0, False),
        ("float32", 1.0, 0.125, 0.0, False),
        ("float32", 1.0, 0.0, 0.125, False),
        ("bfloat16", 1.0, 0.125, 0.125, True),
        ("bfloat16", 1.0, 0.125, 0.5, False),
    ],
)
def test_good_needs_equal_acceptance_and_divergence_only_at_ties(
    dtype: str, over: float, ours: float, theirs: float, good: bool
) -> None:
    row = ResultRow(
        benchmark="export",
        case="chains of 1",
        contender="vllm",
        dtype=dtype,
        threads=1,
        seconds=Spread.of([0.0]),
        machine=this_machine(),
        values={
            "vllm_over_ours": over,
            "largest_gap_where_they_part": ours,
            "vllm_largest_gap_where_they_part": theirs,
        },
    )
    assert export.good([row]) == good


def test_other_families_and_impossible_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "load_trained", lambda policy: trained("qwen3"))
    with pytest.raises(ConfigError, match=r"family qwen3.*init.family=llama"):
        export.run(ExportBench(policy=Path("run")), lambda text: None)
    monkeypatch.setattr(export, "load_trained", lambda policy: trained())
    with pytest.raises(ConfigError, match=r"--new-tokens 64: .* lower --new-tokens to 37"):
        export.run(ExportBench(policy=Path("run")), lambda text: None)
    with pytest.raises(ConfigError, match="at least 1"):
        ExportBench(policy=Path("run"), depths=(0,))
    with pytest.raises(ConfigError, match="at_once"):
        ExportBench(policy=Path("run"), at_once=0)
