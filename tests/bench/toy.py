"""A small untrained policy for tests of benchmarks that need a trained one."""

from __future__ import annotations

from types import ModuleType

import pytest

from slipstream.bench.speculation.trained import Trained
from slipstream.models.draft.eagle1 import DraftHead
from tests.inference.helpers import shared_decoder


def with_toy(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    prompts: list[tuple[int, ...]],
    max_model_len: int = 40,
) -> Trained:
    """Make `load_trained` of `module` return an untrained policy and an untrained head."""
    decoder = shared_decoder()
    head = DraftHead(decoder.config)
    head.init_weights(1)
    toy = Trained(decoder=decoder, head=head, prompts=prompts, max_model_len=max_model_len)
    monkeypatch.setattr(module, "load_trained", lambda folder, device, most: toy)
    return toy
