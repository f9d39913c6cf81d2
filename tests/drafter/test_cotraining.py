"""Slices of co-training: training, the held-out check, and exact resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor

from slipstream.drafter.acceptance import Acceptance, Regression
from slipstream.drafter.buffer import BufferedSequence, BufferSettings, DraftBuffer
from slipstream.drafter.collector import CollectorSettings, FeatureCollector
from slipstream.drafter.cotraining import CoTraining, CoTrainSettings
from slipstream.drafter.linear_start import start_linear
from slipstream.drafter.sequences import VocabLayers, written
from slipstream.drafter.trainer import DraftTrainSettings
from slipstream.errors import CheckpointError, ConfigError, TrainingError
from slipstream.metrics.names import check_names
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.training.optim import OptimSettings
from slipstream.types import SamplingParams
from tests.drafter.helpers import new_head, requests, responses, vocab_of
from tests.inference.helpers import shared_decoder


def cotraining(
    *,
    held_out: int = 24,
    count: int = 64,
    seed: int = 1,
    acceptance_weight: float = 0.0,
    topk_mass_weight: float = 0.0,
    ema_decay: float = 0.0,
) -> CoTraining:
    """Co-training on responses of the toy policy, as if collected in RL step 1."""
    decoder = shared_decoder()
    collector = FeatureCollector(
        DraftBuffer(BufferSettings(max_uses=10)),
        CollectorSettings(
            params=SamplingParams(max_tokens=24),
            max_length=64,
            held_out=max(held_out, 1),
            held_out_every=8,
        ),
    )
    for number, one in enumerate(
        r for r in responses(decoder, requests(count)) if r.sequence.slots
    ):
        entry = BufferedSequence(sequence=one.sequence, key=one.key, step=1, version=6)
        if number < held_out:
            collector._held_out.append(entry)
        else:
            collector.buffer.add(entry)
    head = new_head(decoder, seed)
    torch.nn.init.zeros_(head.fc.weight)
    settings = CoTrainSettings(
        train=DraftTrainSettings(
            optim=OptimSettings(lr=1e-2),
            acceptance_weight=acceptance_weight,
            topk_mass_weight=topk_mass_weight,
        ),
        updates=10,
        batch_size=8,
        accept_depth=2,
        ema_decay=ema_decay,
    )
    return CoTraining(head, collector, settings)


def tensors(made: CoTraining) -> dict[str, Tensor]:
    return dict(made.published())


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_better_head_is_adopted_as_the_next_version() -> None:
    made, vocab = cotraining(), vocab_of(shared_decoder())
    before = tensors(made)
    trained_to = [made.trained_to]
    first = made.slice(vocab, step=1)
    assert first.adopted
    assert (made.version, made.hold_backs) == (1, 0)
    assert [*trained_to, made.trained_to] == [None, 6]
    assert not same(before, tensors(made))
    assert same(tensors(made), dict(made.trainer.head.named_parameters()))
    metrics = first.metrics
    check_names(metrics)
    assert metrics["drafter/updates"] == 10
    assert metrics["drafter/tokens_seen"] > 10 * 8 * 3
    assert metrics["drafter/accept_length/after"] > metrics["drafter/accept_length/before"]
    assert metrics["drafter/acceptance_rate"] == metrics["drafter/acceptance_rate/after"]
    second = made.slice(vocab, step=2)
    # `before` of the second slice measures the adopted head on the same responses.
    assert second.metrics["drafter/accept_length/before"] == metrics["drafter/accept_length/after"]


@pytest.mark.parametrize("name", ["acceptance", "topk_mass"])
def test_acceptance_losses_are_reported_if_their_weight_is_set(name: str) -> None:
    vocab = vocab_of(shared_decoder())
    with_it, without = (
        cotraining(held_out=0, count=24, **{f"{name}_weight": weight}).slice(vocab, step=1).metrics  # type: ignore[arg-type]
        for weight in (1.0, 0.0)
    )
    check_names(with_it)
    assert 0 < with_it[f"drafter/{name}_loss"] < with_it["drafter/loss"]
    assert f"drafter/{name}_loss" not in without


def test_worse_head_is_held_back() -> None:
    made, vocab = cotraining(), vocab_of(shared_decoder())
    for step in (1, 2):
        assert made.slice(vocab, step=step).adopted
    good = tensors(made)
    with torch.no_grad():
        made.trainer.head.fc.weight.copy_(torch.randn_like(made.trainer.head.fc.weight))
    worse = made.slice(vocab, step=3)
    assert worse.metrics["drafter/updates"] > 20
    assert worse.held_back
    assert not worse.adopted
    assert (made.version, made.hold_backs) == (2, 1)
    assert same(good, tensors(made))


def test_small_regressions_add_up_until_a_better_head(monkeypatch: pytest.MonkeyPatch) -> None:
    made, vocab = cotraining(), vocab_of(shared_decoder())
    shares = iter([0.02, 0.02, 0.02, -0.05, 0.02])

    def measured(self: Acceptance, other: Acceptance) -> Regression:
        return Regression(next(shares), 0.03**2)

    monkeypatch.setattr(Acceptance, "regression_from", measured)
    adopted = [made.slice(vocab, step=step).adopted for step in (1, 2)]
    # 0.04 with a standard error of 0.042 is chance; 0.06 with 0.052 is not.
    assert adopted == [True, True]
    resumed = cotraining(seed=2)
    resumed.load_state_dict(made.state_dict())
    assert resumed.regression == made.regression == Regression(0.04, 0.03**2 + 0.03**2)
    assert resumed.slice(vocab, step=3).held_back
    assert resumed.slice(vocab, step=4).adopted
    assert resumed.regression == Regression()
    assert resumed.slice(vocab, step=5).adopted


def test_head_is_held_back_without_held_out_responses() -> None:
    made = cotraining(held_out=0)
    done = made.slice(vocab_of(shared_decoder()), step=1)
    assert not done.adopted
    assert made.trainer.step == 10
    assert made.hold_backs == 1
    assert "drafter/acceptance_rate" not in done.metrics


def test_non_finite_loss_keeps_the_head_in_use() -> None:
    made, vocab = cotraining(ema_decay=0.9), vocab_of(shared_decoder())
    assert made.slice(vocab, step=1).adopted
    before, sequences = tensors(made), [entry.sequence for entry in made.collector.buffer._entries]
    # NaN comes in a later batch of the slice, so earlier ones have changed the head.
    good = [s.features_TF.clone() for s in sequences]
    for sequence in sequences[len(sequences) // 2 :]:
        sequence.features_TF.fill_(float("nan"))
    failed = made.slice(vocab, step=2)
    assert not failed.adopted
    assert not failed.held_back
    assert "not finite" in str(failed.failure)
    check_names(failed.metrics)
    assert (made.version, made.failures) == (1, 1)
    assert same(before, tensors(made))
    assert same(before, dict(made.trainer.head.named_parameters()))
    # The next average starts anew.
    assert int(made.average.n_averaged) == 0
    for sequence, features in zip(sequences, good, strict=True):
        sequence.features_TF.copy_(features)
    after = made.slice(vocab, step=3)
    assert after.failure is None
    assert after.adopted
    assert after.metrics["drafter/failed_slices"] == 1


def test_slice_ends_when_stopped_and_when_the_buffer_is_used_up() -> None:
    made, vocab = cotraining(count=40), vocab_of(shared_decoder())
    asked: list[int] = []

    def stop() -> bool:
        asked.append(made.trainer.step)
        return made.trainer.step == 3

    made.slice(vocab, step=1, stop=stop)
    assert made.trainer.step == 3
    assert asked == [0, 1, 2, 3]
    while (before := made.trainer.step) < 100:
        made.slice(vocab, step=2)
        if made.trainer.step == before:
            break
    assert 3 < made.trainer.step < 60
    empty = made.slice(vocab, step=3)
    assert not empty.adopted
    assert not empty.held_back
    assert "drafter/loss" not in empty.metrics


def test_rejects_the_state_of_another_version() -> None:
    state = cotraining().state_dict()
    del state["lost"]
    with pytest.raises(CheckpointError, match=r"has no lost, .*trainer\.resume_mode=disable"):
        cotraining().load_state_dict(state)


def test_resumed_cotraining_is_bitwise_equal() -> None:
    vocab = vocab_of(shared_decoder())
    whole, first = cotraining(ema_decay=0.9), cotraining(ema_decay=0.9)
    for made in (whole, first):
        made.slice(vocab, step=1)
    second = cotraining(seed=2, count=8, ema_decay=0.9)
    state, used = first.state_dict(), tensors(first)
    # A checkpoint may be written while training continues.
    first.slice(vocab, step=2)
    second.load_state_dict(state)
    assert same(tensors(second), used)
    ours, theirs = whole.slice(vocab, step=2), second.slice(vocab, step=2)
    assert ours.adopted == theirs.adopted
    assert same(
        dict(whole.trainer.head.named_parameters()), dict(second.trainer.head.named_parameters())
    )
    assert same(whole.average.state_dict(), second.average.state_dict())
    assert {k: v for k, v in ours.metrics.items() if k != "drafter/seconds"} == {
        k: v for k, v in theirs.metrics.items() if k != "drafter/seconds"
    }


@pytest.mark.parametrize("is_new", [True, False])
def test_first_slice_of_a_new_head_begins_with_a_linear_predictor(is_new: bool) -> None:
    made, vocab = cotraining(count=60), vocab_of(shared_decoder())
    still = replace(made.settings.train, optim=OptimSettings(lr=0.0))
    made.settings = replace(made.settings, is_new=is_new, train=still)
    made.trainer.settings = still
    made.trainer.reset_optimizer()
    expected, before = (
        new_head(shared_decoder()),
        made.trainer.head.state_dict()["fc.weight"].clone(),
    )
    assert start_linear(expected, [entry.sequence for entry in made.collector.buffer], vocab)
    for step in (1, 2):
        made.slice(vocab, step=step)
        found = made.trainer.head.state_dict()["fc.weight"]
        assert torch.equal(found, expected.fc.weight if is_new else before)


def test_trained_head_is_not_replaced_by_a_linear_predictor() -> None:
    made, trained = cotraining(count=60), new_head(shared_decoder(), seed=5)
    still = replace(made.settings.train, optim=OptimSettings(lr=0.0))
    made.settings = replace(made.settings, is_new=True, train=still)
    made.trainer.settings = still
    made.start_from(trained.state_dict(), version=3, trained_to=6)
    made.slice(vocab_of(shared_decoder()), step=1)
    assert torch.equal(made.trainer.head.state_dict()["fc.weight"], trained.fc.weight)


@pytest.mark.parametrize("name", ["updates", "batch_size", "accept_depth"])
def test_rejects_counts_below_one(name: str) -> None:
    values: dict[str, Any] = {"updates": 1, "batch_size": 1, "accept_depth": 1, name: 0}
    with pytest.raises(ConfigError, match=f"co-training: {name}=0"):
        CoTrainSettings(
            train=DraftTrainSettings(optim=OptimSettings(lr=1e-3)), ema_decay=0.0, **values
        )


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_rejects_ema_decay_outside_0_to_1(decay: float) -> None:
    train = DraftTrainSettings(optim=OptimSettings(lr=1e-3))
    with pytest.raises(ConfigError, match="co-training: ema_decay="):
        CoTrainSettings(train=train, updates=1, batch_size=1, accept_depth=1, ema_decay=decay)


def test_published_weights_are_the_moving_average() -> None:
    """Against an average computed from the weights after each step of the same training without
    averaging."""
    vocab = vocab_of(shared_decoder())
    made, plain = cotraining(ema_decay=0.95), cotraining()
    average: dict[str, Tensor] = {}
    for number in range(1, 4):
        made.slice(vocab, step=number)
    steps = record_steps(plain, vocab, slices=3)
    for number, weights in enumerate(steps):
        keep = min(0.95, number / (number + 1))
        average = {
            name: keep * average[name] + (1 - keep) * new if average else new
            for name, new in weights.items()
        }
    assert len(steps) == 30
    assert same(steps[-1], dict(made.trainer.head.named_parameters()))
    trained = dict(made.average.module.named_parameters())
    assert not same(steps[-1], trained)
    for name, value in average.items():
        torch.testing.assert_close(trained[name], value)


def record_steps(made: CoTraining, vocab: VocabLayers, *, slices: int) -> list[dict[str, Tensor]]:
    """Run `slices` slices and return the trained weights after each optimizer step."""
    found: list[dict[str, Tensor]] = []
    update = made.average.update_parameters

    def recorded(model: torch.nn.Module) -> None:
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        update(model)

    made.average.update_parameters = recorded  # type: ignore[method-assign]
    for number in range(1, slices + 1):
        made.slice(vocab, step=number)
    return found


def with_vocabulary(tokens: list[int]) -> CoTraining:
    made = cotraining(count=40)
    head = DraftHead(shared_decoder().config, tokens)
    head.init_weights(1)
    torch.nn.init.zeros_(head.fc.weight)
    return CoTraining(head, made.collector, made.settings)


def test_the_draft_vocabulary_follows_the_tokens_of_the_policy() -> None:
    decoder, vocab = shared_decoder(), vocab_of(shared_decoder())
    tokens = [*range(decoder.config.vocab_size - 20, decoder.config.vocab_size)]
    made = with_vocabulary(tokens)
    entries = made.collector.entries
    counts = Counter(t for entry in entries for t in written(entry.sequence))
    first = made.slice(vocab, step=1)
    check_names(first.metrics)
    assert made.trainer.head.tokens is not None
    best = set(made.trainer.head.tokens)
    assert len(best) == len(tokens)
    rest = max(n for t, n in counts.items() if t not in best)
    assert min(counts[t] for t in best) >= rest > 0
    covered = sum(counts[t] for t in best) / counts.total()
    assert first.metrics["drafter/vocabulary_coverage"] == pytest.approx(covered)
    before = sum(counts[t] for t in tokens) / counts.total()
    assert first.metrics["drafter/vocabulary_coverage/before"] == pytest.approx(before)
    # The vocabulary is part of the version that is published.
    assert first.adopted
    assert tuple(tensors(made)["draft_tokens"].tolist()) == made.trainer.head.tokens
    # The same responses are not counted twice, and the vocabulary stays.
    assert made.token_counts is not None
    total = float(made.token_counts.counts.sum())
    second = made.slice(vocab, step=2)
    assert float(made.token_counts.counts.sum()) == total / 2
    assert set(made.trainer.head.tokens) == best
    assert second.metrics["drafter/vocabulary_coverage"] == pytest.approx(covered)
    resumed = with_vocabulary(tokens)
    resumed.load_state_dict(made.state_dict())
    assert resumed.token_counts is not None
    assert torch.equal(resumed.token_counts.counts, made.token_counts.counts)
    assert resumed.trainer.head.tokens == made.trainer.head.tokens
    assert resumed.slice(vocab, step=3).metrics == pytest.approx(
        made.slice(vocab, step=3).metrics | {"drafter/seconds": ANY}
    )


def test_the_first_slice_of_a_new_head_lowers_the_size_of_its_draft_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, vocab = [*range(20)], vocab_of(shared_decoder())

    def new(sizes: bool = True) -> CoTraining:
        made = with_vocabulary(tokens)
        made.settings = replace(made.settings, is_new=True, sizes_vocabulary=sizes)
        return made

    counted: list[int] = []

    def best(responses: list[list[int]], config: object, prompts: list[object]) -> int:
        assert len(prompts) == len(responses) == len(set(prompts))
        counted.append(len(responses))
        return 9

    monkeypatch.setattr("slipstream.drafter.cotraining.best_size", best)
    made = new()
    first = made.slice(vocab, step=1)
    check_names(first.metrics)
    assert counted == [len(made.collector.entries)]
    assert first.adopted
    assert first.metrics["drafter/vocabulary_tokens"] == 9
    published = tensors(made)["draft_tokens"].tolist()
    assert len(published) == 9
    assert made.token_counts is not None
    assert published == made.token_counts.most_frequent(
        9, always=made.used.config.eos_token_ids, before=tokens
    )
    # Later slices keep the size.
    made.slice(vocab, step=2)
    assert len(counted) == 1
    # A resumed run begins with a head of the first size.
    resumed = new()
    resumed.load_state_dict(made.state_dict())
    assert same(tensors(resumed), tensors(made))
    again, expected = resumed.slice(vocab, step=3).metrics, made.slice(vocab, step=3).metrics
    assert again == expected | {"drafter/seconds": ANY}
    assert same(resumed.average.state_dict(), made.average.state_dict())
    assert len(counted) == 1
    other = made.state_dict()
    other["head"]["draft_tokens"] = other["head"]["draft_tokens"][:5]
    with pytest.raises(CheckpointError, match=r"\[5\] draft tokens, but its average \[9\]"):
        new().load_state_dict(other)
    from_head = new()
    from_head.start_from(tensors(made), 1, 6)
    assert from_head.trainer.head.tokens == from_head.used.tokens == made.used.tokens
    with pytest.raises(CheckpointError, match="draft_tokens"):
        new(sizes=False).load_state_dict(made.state_dict())


def test_a_failed_first_slice_of_a_new_head_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.drafter.cotraining.best_size", lambda *_: 9)
    vocab = vocab_of(shared_decoder())
    made = with_vocabulary([*range(20)])
    made.settings = replace(made.settings, is_new=True, sizes_vocabulary=True)
    trainer: Any = made.trainer
    train, calls = trainer._train_on, [0]

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise TrainingError("not finite")
        return train(*arguments)

    trainer._train_on = failing
    assert made.slice(vocab, step=1).failure == "not finite"
    assert made.trainer.step == 2
    assert made.trainer.head.draft_vocab_size == made.used.draft_vocab_size == 20
    assert made.slice(vocab, step=2).adopted
    assert made.used.draft_vocab_size == 9


def test_a_held_back_head_of_another_size_is_saved_and_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.drafter.cotraining.best_size", lambda *_: 9)
    vocab = vocab_of(shared_decoder())

    def new() -> CoTraining:
        made = with_vocabulary([*range(20)])
        made.settings = replace(made.settings, is_new=True, sizes_vocabulary=True)
        return made

    made = new()
    with monkeypatch.context() as context:
        context.setattr(Regression, "significant", True)
        assert made.slice(vocab, step=1).held_back
    assert (made.trainer.head.draft_vocab_size, made.used.draft_vocab_size) == (9, 20)
    resumed = new()
    resumed.load_state_dict(made.state_dict())
    assert (resumed.trainer.head.draft_vocab_size, resumed.used.draft_vocab_size) == (9, 20)
    expected = made.slice(vocab, step=2).metrics
    assert resumed.slice(vocab, step=2).metrics == expected | {"drafter/seconds": ANY}
    assert same(tensors(resumed), tensors(made))


def test_few_responses_do_not_choose_the_size_of_a_draft_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.drafter.cotraining.best_size", lambda *_: 9)
    monkeypatch.setattr("slipstream.drafter.cotraining._FEWEST_RESPONSES", 1000)
    made = with_vocabulary([*range(20)])
    made.settings = replace(made.settings, is_new=True, sizes_vocabulary=True)
    made.slice(vocab_of(shared_decoder()), step=1)
    assert made.trainer.head.draft_vocab_size == 20


@pytest.mark.parametrize("size", [None, 100])
def test_the_first_slice_never_raises_the_size_of_a_draft_vocabulary(
    size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.drafter.cotraining.best_size", lambda *_: size)
    made = with_vocabulary([*range(20)])
    made.settings = replace(made.settings, is_new=True, sizes_vocabulary=True)
    made.slice(vocab_of(shared_decoder()), step=1)
    assert made.trainer.head.draft_vocab_size == 20


def test_a_head_that_drafts_all_tokens_has_no_token_counts() -> None:
    made = cotraining(count=24)
    assert made.token_counts is None
    assert (
        "drafter/vocabulary_coverage" not in made.slice(vocab_of(shared_decoder()), step=1).metrics
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"used": torch.tensor([1, 1, 2])}, "used.*draft_tokens.*each once and in ascending order"),
        ({"average": torch.tensor([1, 2, 1000])}, "average.*draft_tokens.*tokens of the policy's"),
        ({"token_counts": -1.0}, "token_counts has numbers below 0"),
    ],
)
def test_a_wrong_saved_vocabulary_is_refused(change: dict[str, Any], message: str) -> None:
    made = with_vocabulary([1, 2, 3])
    state = made.state_dict()
    for name, value in change.items():
        if name == "token_counts":
            state[name][0] = value
        else:
            key = next(key for key in state[name] if key.endswith("draft_tokens"))
            state[name][key] = value
    with pytest.raises(CheckpointError, match=message):
        with_vocabulary([1, 2, 3]).load_state_dict(state)
    assert made.used.tokens == (1, 2, 3)
