"""A draft head in vLLM: what it is asked, what comes of the answers, and who is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.bench import export
from slipstream.bench.contenders import Contender, VllmSettings, Workload
from slipstream.bench.export import ExportBench, ratio_of
from slipstream.bench.record import Row, Spread, this_machine
from slipstream.bench.trained import Trained
from slipstream.errors import ConfigError
from slipstream.models.draft_head import DraftHead
from tests.models.helpers import make_decoder


def trained(family: str = "llama") -> Trained:
    decoder = make_decoder(family, head_dim=16)
    head = DraftHead(decoder.config)
    head.init_weights(0)
    return Trained(decoder=decoder, head=head, prompts=[(1, 2, 3), (4, 5), (6,)], max_model_len=40)


def test_both_are_compared_prompt_by_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    given = trained()
    asked: list[tuple[int, str, Workload]] = []

    @contextmanager
    def vllm(
        name: str, settings: VllmSettings, folder: Path, positions: int, temperature: float
    ) -> Iterator[Contender]:
        assert temperature == 0
        assert settings.speculative is not None
        head = Path(str(settings.speculative["model"]))
        # As vLLM loads them.
        assert (folder / "config.json").exists()
        assert "EagleLlamaForCausalLM" in (head / "config.json").read_text()
        assert (head / "model.safetensors").exists()
        depth = int(str(settings.speculative["num_speculative_tokens"]))
        contender = Contender(generate=lambda w: [], dtype="float32", threads=1)

        def generate(workload: Workload) -> list[list[int]]:
            asked.append((depth, name, workload))
            contender.answers.append(
                {
                    "seconds": 0.5,
                    "speculation": {
                        "vllm:spec_decode_num_drafts": 10.0,
                        "vllm:spec_decode_num_accepted_tokens": 5.0,
                    },
                }
            )
            return [[0] * length for length in workload.lengths]

        contender.generate = generate
        yield contender

    monkeypatch.setattr(export, "load_trained", lambda policy: given)
    monkeypatch.setattr(export, "vllm_of", vllm)
    bench = ExportBench(policy=Path("run"), depths=(1, 2), prompts=3, new_tokens=8, at_once=2)
    rows = export.run(bench, lambda text: None)
    assert [depth for depth, _, _ in asked] == [1, 1, 2, 2]
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
        # The stand-in writes zeros.
        assert values["same_responses"] == 0
    assert not export.good(rows)


@pytest.mark.parametrize(
    ("over", "same", "good"), [(0.91, 1.0, True), (1.11, 1.0, False), (1.0, 0.5, False)]
)
def test_as_much_has_to_be_accepted_of_the_same_responses(
    over: float, same: float, good: bool
) -> None:
    row = Row(
        benchmark="export",
        case="chains of 1",
        contender="vllm",
        dtype="float32",
        threads=1,
        seconds=Spread.of([0.0]),
        machine=this_machine(),
        values={"vllm_over_ours": over, "same_responses": same},
    )
    assert export.good([row]) == good


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "load_trained", lambda policy: trained("qwen3"))
    with pytest.raises(ConfigError, match=r"family qwen3.*init.family=llama"):
        export.run(ExportBench(policy=Path("run")), lambda text: None)
    monkeypatch.setattr(export, "load_trained", lambda policy: trained())
    with pytest.raises(ConfigError, match=r"--new-tokens 64: .* room for 37 after a prompt"):
        export.run(ExportBench(policy=Path("run")), lambda text: None)
    with pytest.raises(ConfigError, match="at least 1"):
        ExportBench(policy=Path("run"), depths=(0,))
    with pytest.raises(ConfigError, match="at_once"):
        ExportBench(policy=Path("run"), at_once=0)
