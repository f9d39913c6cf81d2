"""Which models can be a reference policy or a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.build.policy import (
    initial_policy,
    make_backend,
    make_decoder,
    make_reference,
)
from slipstream.config import Config, Hardware, load_config
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import CheckpointError
from slipstream.models import Decoder, save_checkpoint
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimSettings
from slipstream.training.protocol import ReferencePolicy

KL = "actor_rollout_ref.actor.use_kl_loss=true"


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


def load(*overrides: str) -> Config:
    cpu = Hardware(gpus=0)
    return load_config(overrides, recipe="tiny", hardware=cpu, notify=lambda _: None)


def test_reference_that_does_not_fit_the_policy_is_refused(
    compute: ComputeThread, tmp_path: Path
) -> None:
    policy = make_decoder(load(), build_tokenizer(), None)
    wider = Decoder(replace(policy.config, vocab_size=policy.config.vocab_size + 16))
    wider.init_weights(1)

    def save(name: str, decoder: Decoder, tokens: int | None) -> None:
        tokenizer = None if tokens is None else build_tokenizer(tokens).save_pretrained
        save_checkpoint(decoder, tmp_path / name, save_tokenizer=tokenizer)

    def make(name: str, *more: str) -> ReferencePolicy | None:
        config = load(KL, f"actor_rollout_ref.ref.path={tmp_path / name}", *more)
        backend = make_backend(config, policy, compute, optim=OptimSettings(lr=0.0))
        return make_reference(config, build_tokenizer(), None, policy, compute, backend)

    own = len(build_tokenizer())
    save("same", policy, own)
    save("other", policy, own + 16)
    save("wider", wider, own)
    save("bare", wider, None)
    assert make("same") is not None
    # The tokenizer is the same, and embeddings are padded differently. Losses over the whole
    # vocabulary need equal sizes.
    assert make("wider") is not None
    with pytest.raises(CheckpointError, match="the reference's vocabulary has"):
        make("wider", "actor_rollout_ref.actor.kl_loss_type=full")
    with pytest.raises(CheckpointError, match="the reference's vocabulary has"):
        make("wider", "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full")
    with pytest.raises(CheckpointError, match=r"other: the reference's tokenizer is not the pol"):
        make("other")
    with pytest.raises(CheckpointError, match=r"the reference's vocabulary.* with the policy's to"):
        make("bare")


def test_a_folder_in_the_home_folder_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_checkpoint(make_decoder(load(), build_tokenizer(), None), tmp_path / "policy")
    config = load("actor_rollout_ref.model.init=null", "actor_rollout_ref.model.path='~/policy'")
    assert initial_policy(config) == tmp_path / "policy"
