"""The digest of a model's weights."""

from __future__ import annotations

from copy import deepcopy

import torch

from slipstream.models.digest import weights_digest
from tests.inference.helpers import make_decoder


def test_equal_weights_have_equal_digests_and_others_do_not() -> None:
    decoder = make_decoder(3)
    digest = weights_digest(decoder)
    assert len(digest) == 32
    assert weights_digest(deepcopy(decoder)) == digest
    with torch.no_grad():
        decoder.model.norm.weight[0] += 1e-3
    assert weights_digest(decoder) != digest
