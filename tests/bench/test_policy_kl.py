"""KL between two checkpoints, on responses in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream.bench.policy_kl import policy_kl
from slipstream.bench.speculation.trained import CPU
from slipstream.errors import DataError
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import save_checkpoint
from tests.models.helpers import logits, make_decoder

TEXTS = [([1, 2, 3], [4, 5, 6, 7]), ([8, 9], [10]), ([3], [])]


def a_policy(folder: Path, shift: float = 0.0) -> Decoder:
    decoder = make_decoder()
    with torch.no_grad():
        noise = torch.Generator().manual_seed(1)
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=shift)
    save_checkpoint(decoder, folder)
    return decoder


def rollouts(path: Path) -> Path:
    lines = [json.dumps({"prompt_ids": p, "response_ids": r}) + "\n" for p, r in TEXTS]
    path.write_text("".join(lines))
    return path


@torch.no_grad()
def test_it_is_the_mean_over_response_tokens(tmp_path: Path) -> None:
    old, new = a_policy(tmp_path / "old"), a_policy(tmp_path / "new", shift=0.1)
    found = policy_kl(tmp_path / "old", tmp_path / "new", rollouts(tmp_path / "r.jsonl"), CPU)
    terms = []
    for prompt, response in TEXTS:
        text = prompt + response
        then, now = (_all_log_probs(policy, text) for policy in (old, new))
        for t in range(len(prompt) - 1, len(text) - 1):
            terms.append(float((now[t].exp() * (now[t] - then[t])).sum()))
    assert len(terms) == 5
    assert found == pytest.approx(sum(terms) / 5, rel=1e-4)
    assert found > 0.01


def test_a_policy_has_not_moved_from_itself(tmp_path: Path) -> None:
    a_policy(tmp_path / "old")
    assert policy_kl(tmp_path / "old", tmp_path / "old", rollouts(tmp_path / "r.jsonl"), CPU) == 0


def test_without_responses_there_is_nothing_to_compare_on(tmp_path: Path) -> None:
    a_policy(tmp_path / "old")
    (tmp_path / "r.jsonl").write_text(json.dumps({"prompt_ids": [1], "response_ids": []}) + "\n")
    with pytest.raises(DataError, match="no response tokens"):
        policy_kl(tmp_path / "old", tmp_path / "old", tmp_path / "r.jsonl", CPU)


def _all_log_probs(policy: Decoder, text: list[int]) -> torch.Tensor:
    return logits(policy, torch.tensor([text]))[0].double().log_softmax(-1)
