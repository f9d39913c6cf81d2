"""Responses of a tiny policy with features, and other helpers for tests of draft heads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.sequences import DraftSequence, VocabLayers, policy_features
from slipstream.drafter.trainer import DraftTrainer, DraftTrainSettings
from slipstream.models import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.model import DraftModel
from slipstream.training.optim import OptimSettings
from slipstream.types import GenerateRequest
from tests.inference.helpers import make_engine, make_request, random_prompt


def new_head(decoder: Decoder, seed: int = 1) -> DraftHead:
    head = DraftHead(decoder.config)
    head.init_weights(seed)
    return head


def requests(count: int, *, seed: int = 0, **settings: Any) -> list[GenerateRequest]:
    rng = random.Random(seed)
    return [
        make_request(
            f"{seed}/{i}",
            random_prompt(rng, rng.randrange(1, 12)),
            max_tokens=rng.randrange(2, 24),
            hidden=True,
            **settings,
        )
        for i in range(count)
    ]


def responses(
    decoder: Decoder, asked: Sequence[GenerateRequest], *, aux_layers: tuple[int, ...] = ()
) -> list[HeldOut]:
    done = make_engine(decoder, aux_layers=aux_layers).run(asked)
    with torch.no_grad():
        policy = decoder.pack(torch.float32)
    before = policy_features(policy, [r.prompt_ids for r in asked], aux_layers=aux_layers)
    found = []
    for request, answer, features in zip(asked, done, before, strict=True):
        assert answer.hidden_states is not None
        sequence = DraftSequence(
            tokens=[*request.prompt_ids, *answer.token_ids],
            features_TF=torch.cat([features[:-1], answer.hidden_states]),
            loss_mask=[0.0] * len(request.prompt_ids) + [1.0] * len(answer.token_ids),
        )
        found.append(HeldOut(sequence=sequence, key=request.key, params=request.params))
    return found


def sequences(
    decoder: Decoder, count: int, *, seed: int = 0, aux_layers: tuple[int, ...] = ()
) -> list[DraftSequence]:
    found = [
        r.sequence for r in responses(decoder, requests(count, seed=seed), aux_layers=aux_layers)
    ]
    return [s for s in found if s.slots]


def vocab_of(decoder: Decoder) -> VocabLayers:
    return VocabLayers.of(decoder, torch.float32)


def trainer(head: DraftModel, lr: float = 3e-3, **settings: Any) -> DraftTrainer:
    optim = settings.pop("optim", OptimSettings(lr=lr, weight_decay=0.0, warmup_steps=2))
    return DraftTrainer(head, DraftTrainSettings(optim=optim, **settings))


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process adopt orphans, like a login manager. It is in their session, so Linux does
    not resume suspended orphans."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    assert prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0, 0, 0, 0)


def wait_for_end(orphan: int, seconds: float = 120.0) -> None:
    """Wait until an adopted process has ended. After `seconds`, kill it and fail."""
    deadline = time.monotonic() + seconds
    while os.waitpid(orphan, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(orphan, 9)
            os.waitpid(orphan, 0)
            raise AssertionError("the orphaned process did not end")
        time.sleep(0.01)
