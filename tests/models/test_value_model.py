"""The value model: a decoder with a scalar head."""

from __future__ import annotations

import pytest
import torch

from slipstream.models.value_model import ValueModel
from tests.models.helpers import FAMILIES, make_decoder, random_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_the_policys_and_there_is_no_lm_head(family: str) -> None:
    policy = make_decoder(family, tie_word_embeddings=False)
    model = ValueModel.of(policy)
    names = {name for name, _ in model.named_parameters()}
    assert names == {n for n, _ in policy.named_parameters() if n != "lm_head.weight"} | {
        "score.weight",
        "score.bias",
    }
    ids = random_ids(2, 32)
    positions = torch.arange(32).expand(2, 32)
    with torch.no_grad():
        ours, theirs = (
            m.pack(torch.float32).forward(ids, positions).final for m in (model, policy)
        )
    assert torch.equal(ours, theirs)
    assert torch.equal(model.score(ours), torch.zeros(2, 32))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.score.bias.fill_(0.5)
    expected = (ours.double() * model.score.weight.double()).sum(-1) + 0.5
    torch.testing.assert_close(model.score(ours).double(), expected, atol=1e-5, rtol=1e-5)
