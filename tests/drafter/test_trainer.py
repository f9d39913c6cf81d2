"""The trainer of a draft head: training improves acceptance, stops early, and resumes exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.drafter.acceptance import measure_acceptance
from slipstream.drafter.losses import draft_loss
from slipstream.drafter.sequences import DraftSequence, collate, passes
from slipstream.drafter.trainer import DraftTrainer, DraftTrainSettings, Metrics
from slipstream.errors import CheckpointError, ConfigError, TrainingError
from slipstream.metrics.names import check_names
from slipstream.models.decoder import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.model import DraftModel
from slipstream.training.optim import OptimSettings
from tests.drafter.helpers import new_head, requests, responses, sequences, trainer, vocab_of
from tests.inference.helpers import VOCAB, make_decoder, shared_decoder


def same(one: DraftModel, other: DraftModel) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_training_improves_acceptance() -> None:
    decoder = shared_decoder()
    head, vocab = new_head(decoder), vocab_of(decoder)
    held_out = responses(decoder, requests(40, seed=8))
    torch.nn.init.zeros_(head.fc.weight)
    before = measure_acceptance(head, held_out, vocab, depth=2)
    made = trainer(head, lr=1e-2)
    history = made.train(passes(sequences(decoder, 64), 16, "learn"), vocab, steps=40)
    after = measure_acceptance(head, held_out, vocab, depth=2)
    assert made.step == len(history) == 40
    check_names(history[0])
    assert history[-1]["draft/loss"] < 0.8 * history[0]["draft/loss"]
    assert after.at_depth(1) > before.at_depth(1) + 0.05
    assert after.at_depth(2) > before.at_depth(2) + 0.05


@pytest.mark.parametrize("tokens", [None, [*range(0, VOCAB, 2)]])
def test_training_improves_acceptance_of_an_eagle3_head(tokens: list[int] | None) -> None:
    decoder = make_decoder(num_layers=4)
    head, vocab = Eagle3Head(decoder.config, (0, 1, 3), tokens), vocab_of(decoder)
    head.init_weights(1)
    known = responses(decoder, requests(32, seed=8), aux_layers=head.aux_layers)
    before = measure_acceptance(head, known, vocab, depth=3)
    made = trainer(head, lr=1e-2, value_weight=0.0, soft_weight=1.0, depth=3, depth_decay=0.8)
    data = [one.sequence for one in known if one.sequence.slots]
    history = made.train(passes(data, 16, "learn"), vocab, steps=60)
    after = measure_acceptance(head, known, vocab, depth=3)
    check_names(history[0])
    assert "draft/value_loss" not in history[0]
    assert history[-1]["draft/loss"] < 0.95 * history[0]["draft/loss"]
    for k in (1, 2, 3):
        assert after.at_depth(k) > before.at_depth(k) + 0.05


def test_acceptance_loss_alone_improves_acceptance() -> None:
    decoder = shared_decoder()
    head, vocab, data = new_head(decoder), vocab_of(decoder), sequences(decoder, 48)
    known = responses(decoder, requests(48))
    torch.nn.init.zeros_(head.fc.weight)
    before = measure_acceptance(head, known, vocab, depth=2)
    made = trainer(head, lr=1e-2, value_weight=0.0, soft_weight=0.0, acceptance_weight=1.0, depth=2)
    history = made.train(passes(data, 16, "learn"), vocab, steps=30)
    after = measure_acceptance(head, known, vocab, depth=2)
    check_names(history[0])
    losses = [metrics["draft/acceptance_loss"] for metrics in history]
    assert losses[-1] < 0.8 * losses[0]
    assert after.at_depth(1) > before.at_depth(1) + 0.05
    assert after.at_depth(2) > before.at_depth(2) + 0.05


def test_top_k_mass_loss_alone_decreases() -> None:
    decoder = shared_decoder()
    head, vocab, data = new_head(decoder), vocab_of(decoder), sequences(decoder, 48)
    torch.nn.init.zeros_(head.fc.weight)
    weights = {"value_weight": 0.0, "soft_weight": 0.0, "topk_mass_weight": 1.0}
    made = trainer(head, lr=1e-2, topk=2, **weights)
    history = made.train(passes(data, 16, "learn"), vocab, steps=30)
    check_names(history[0])
    losses = [metrics["draft/topk_mass_loss"] for metrics in history]
    # An untrained head picks its two candidates at random.
    chance = 2 / decoder.config.vocab_size
    assert losses[0] == pytest.approx(-math.log(chance), rel=1e-3)
    assert losses[-1] < 0.8 * losses[0]


def overfitted(sequences: Sequence[DraftSequence], decoder: Decoder) -> DraftHead:
    """A head trained for 400 steps on these sequences only."""
    head = new_head(decoder)
    made = trainer(head, lr=1e-2, depth=3, soft_weight=1.0)
    made.train(passes(sequences, 16, "by heart"), vocab_of(decoder), steps=400)
    return head


def _late(features_TF: Tensor) -> Tensor:
    return torch.cat([features_TF[:1], features_TF[:-1]])


ALIGNMENTS: dict[str, Callable[[DraftSequence], DraftSequence]] = {
    "right": lambda s: s,
    "features one late": lambda s: replace(s, features_TF=_late(s.features_TF)),
    "tokens one late": lambda s: replace(s, tokens=[s.tokens[0], *s.tokens[:-1]]),
    "tokens one early": lambda s: replace(s, tokens=[*s.tokens[1:], 0]),
}


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_head_can_overfit_only_correctly_aligned_sequences(name: str) -> None:
    decoder = shared_decoder()
    known = [r for r in responses(decoder, requests(16, seed=3)) if r.sequence.slots]
    head = overfitted([ALIGNMENTS[name](r.sequence) for r in known], decoder)
    measured = measure_acceptance(head, known, vocab_of(decoder), depth=3)
    shares = [measured.at_depth(k) for k in (1, 2, 3)]
    assert len(known) == 16
    if name == "right":
        # The exact value depends on rounding, so on the processor.
        assert min(shares) > 0.9
    else:
        assert max(shares) < 0.85


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_resumed_training_is_bitwise_equal(name: str) -> None:
    decoder = shared_decoder()
    vocab, data = vocab_of(decoder), sequences(decoder, 24)
    optim = OptimSettings(
        lr=1e-3,
        optimizer=name,  # type: ignore[arg-type]
        muon_lr=0.02 if name == "Muon" else None,
        warmup_steps=2,
        schedule="linear",
        total_steps=7,
    )
    whole = trainer(new_head(decoder), optim=optim, feature_noise=0.3)
    whole.train(passes(data, 8, "r"), vocab, steps=7)
    first = trainer(new_head(decoder), optim=optim, feature_noise=0.3)
    first.train(passes(data, 8, "r"), vocab, steps=3)
    second = trainer(new_head(decoder, seed=2), optim=optim, feature_noise=0.3)
    second.head.load_state_dict(first.head.state_dict())
    second.load_state_dict(first.state_dict())
    second.train(itertools.islice(passes(data, 8, "r"), 3, None), vocab, steps=4)
    assert second.step == 7
    assert same(second.head, whole.head)
    assert not same(first.head, whole.head)


def test_stop_ends_training_before_the_next_batch_is_taken() -> None:
    decoder = shared_decoder()
    made = trainer(new_head(decoder))
    taken: list[int] = []
    seen: list[int] = []

    def batches() -> itertools.count[int]:
        return itertools.count()

    def source() -> object:
        for number, batch in zip(batches(), passes(sequences(decoder, 8), 4, "s"), strict=False):
            taken.append(number)
            yield batch

    def note(step: int, metrics: Metrics) -> None:
        seen.append(step)

    history = made.train(
        source(),  # type: ignore[arg-type]
        vocab_of(decoder),
        stop=lambda: len(seen) == 3,
        after_step=note,
    )
    assert (len(history), made.step, seen, taken) == (3, 3, [1, 2, 3], [0, 1, 2])
    assert made.train([], vocab_of(decoder), steps=5) == []


def test_learning_rate_follows_warmup_and_schedule() -> None:
    decoder = shared_decoder()
    optim = OptimSettings(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6)
    made = trainer(new_head(decoder), optim=optim, grad_clip=1e-6)
    history = made.train(passes(sequences(decoder, 8), 4, "l"), vocab_of(decoder), steps=6)
    assert [m["draft/lr"] for m in history] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_gradient_norm_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = shared_decoder()
    vocab, data = vocab_of(decoder), sequences(decoder, 8)
    norms: list[float] = []
    for clip in (None, 1e-3):
        made = trainer(new_head(decoder), grad_clip=clip)

        def step(number: int, made: DraftTrainer = made) -> None:
            grads = [p.grad for p in made.head.parameters() if p.grad is not None]
            norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))

        monkeypatch.setattr(made._optimizer, "step", step)
        (metrics,) = made.train([data], vocab)
        norms.append(metrics["draft/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[2] == pytest.approx(1e-3, rel=1e-2)
    assert norms[3] == pytest.approx(norms[1], rel=1e-6)


def test_non_finite_loss_raises_and_changes_nothing() -> None:
    decoder = shared_decoder()
    made, clean = trainer(new_head(decoder)), new_head(decoder)
    good = sequences(decoder, 4)
    bad = DraftSequence(
        tokens=good[0].tokens,
        features_TF=torch.full_like(good[0].features_TF, float("nan")),
        loss_mask=good[0].loss_mask,
    )
    with pytest.raises(TrainingError, match=r"step 1: loss nan .*speculative\.train\.optim"):
        made.train([[bad]], vocab_of(decoder))
    assert made.step == 0
    assert same(made.head, clean)


def test_rejects_the_state_of_another_head() -> None:
    decoder = shared_decoder()
    made = trainer(new_head(decoder))
    made.train([sequences(decoder, 4)], vocab_of(decoder))
    state = made.state_dict()
    del state["optimizer"]["adamw"]["fc.weight"]
    with pytest.raises(CheckpointError, match=r"disagree about parameter 'fc\.weight'"):
        trainer(new_head(decoder)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="'optimizer' is missing"):
        trainer(new_head(decoder)).load_state_dict({"step": 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 0}, "depth=0 must be at least 1"),
        ({"soft_weight": -1.0}, "soft_weight=-1.0 must be a finite number"),
        ({"soft_weight": 0.0, "value_weight": 0.0}, "leave nothing to learn"),
        ({"acceptance_weight": -1.0}, "acceptance_weight=-1.0 must be a finite number"),
        ({"topk_mass_weight": -1.0}, "topk_mass_weight=-1.0 must be a finite number"),
        ({"topk": 0}, "topk=0 must be at least 1"),
        ({"grad_clip": 0.0}, "grad_clip=0.0 must be > 0"),
    ],
)
def test_rejects_impossible_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftTrainSettings(optim=OptimSettings(lr=1.0), **settings)  # type: ignore[arg-type]


def test_noise_is_added_to_inputs_and_not_to_targets() -> None:
    decoder = shared_decoder()
    made = trainer(new_head(decoder), feature_noise=0.5)
    batch = collate(sequences(decoder, 4), vocab_of(decoder))
    noise = made._noise(batch)
    assert noise is not None
    assert 0.24 < float(noise.max()) <= 0.25
    assert -0.25 <= float(noise.min()) < -0.24
    packed = made.head.pack(torch.float32)
    plain, noisy = draft_loss(packed, batch), draft_loss(packed, batch, noise=noise)
    assert noisy.value is not None
    assert plain.value is not None
    assert float(noisy.value) > float(plain.value)
    again = made._noise(batch)
    made.step += 1
    later = made._noise(batch)
    assert again is not None
    assert later is not None
    assert torch.equal(noise, again)
    assert not torch.equal(noise, later)
