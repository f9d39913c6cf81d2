"""A new head starts as the ridge regression of each feature on its inputs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from slipstream.drafter.linear_start import RIDGE, start_linear
from slipstream.drafter.sequences import DraftSequence, VocabLayers
from slipstream.models.draft.eagle3 import Eagle3Head
from tests.drafter.helpers import new_head, sequences, vocab_of
from tests.inference.helpers import shared_decoder
from tests.models.helpers import config as sizes


def regression(data: list[DraftSequence], vocab: VocabLayers) -> torch.Tensor:
    """fc by the definition, in float64, from the tokens that the policy wrote."""
    inputs, outputs = [], []
    for each in data:
        features = each.features_TF.double()
        for t in range(len(each.tokens) - 2):
            if each.loss_mask[t + 2]:
                embedded = vocab.embedding_VD[each.tokens[t + 1]].double()
                inputs.append(torch.cat([embedded, features[t]]))
                outputs.append(features[t + 1])
    x, y = torch.stack(inputs), torch.stack(outputs)
    gram = x.T @ x
    penalty = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    solved: torch.Tensor = torch.linalg.solve(gram + penalty, x.T @ y).T
    return solved


def test_fc_is_the_ridge_regression_and_the_layer_adds_nothing() -> None:
    decoder = shared_decoder()
    head, vocab, data = new_head(decoder), vocab_of(decoder), sequences(decoder, 40)
    assert start_linear(head, data, vocab)
    expected = regression(data, vocab)
    torch.testing.assert_close(head.fc.weight.double(), expected, rtol=1e-3, atol=1e-4)
    one = data[0]
    features = one.features_TF[None]
    ids = torch.tensor([one.tokens])[:, : features.shape[1]]
    with torch.no_grad():
        (state,) = head.pack(torch.float32).unroll(
            ids.roll(-1, -1), features, vocab.embedding_VD, 1
        )
        linear = torch.cat([F.embedding(ids.roll(-1, -1), vocab.embedding_VD), features], -1)
    torch.testing.assert_close(state, linear @ head.fc.weight.T, rtol=1e-4, atol=1e-4)


def test_a_head_without_features_or_with_too_few_tokens_stays() -> None:
    decoder = shared_decoder()
    data, vocab = sequences(decoder, 40), vocab_of(decoder)
    head = new_head(decoder)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    assert not start_linear(head, data[:1], vocab)
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in before.items())
    assert not start_linear(Eagle3Head(sizes("llama", num_layers=6), (0, 1, 2)), data, vocab)
