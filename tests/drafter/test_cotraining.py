"""Slices of co-training: what they train on, what they let pass, and that they resume exactly."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from slipstream.drafter.acceptance import Acceptance, Loss
from slipstream.drafter.buffer import BufferedSequence, BufferSettings, DraftBuffer
from slipstream.drafter.collector import CollectorSettings, FeatureCollector
from slipstream.drafter.cotraining import CoTraining, CoTrainSettings
from slipstream.drafter.sequences import PolicyEnds
from slipstream.drafter.trainer import DraftTrainSettings
from slipstream.errors import CheckpointError, ConfigError
from slipstream.metrics.names import check_names
from slipstream.training.optim import OptimSettings
from slipstream.types import SamplingParams
from tests.drafter.helpers import ends_of, new_head, requests, responses
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
    """With responses of the toy policy, as if RL step 1 had brought them."""
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
        kept = BufferedSequence(sequence=one.sequence, key=one.key, step=1, version=6)
        if number < held_out:
            collector._held_out.append(kept)
        else:
            collector.buffer.add(kept)
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


def test_a_head_that_accepts_more_is_passed_on_as_the_next_version() -> None:
    made, ends = cotraining(), ends_of(shared_decoder())
    before = tensors(made)
    trained_to = [made.trained_to]
    first = made.slice(ends, step=1)
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
    second = made.slice(ends, step=2)
    # Measured on the same responses, against what is in use.
    assert second.metrics["drafter/accept_length/before"] == metrics["drafter/accept_length/after"]


@pytest.mark.parametrize("name", ["acceptance", "topk_mass"])
def test_losses_of_acceptance_are_reported_where_they_count(name: str) -> None:
    ends = ends_of(shared_decoder())
    with_it, without = (
        cotraining(held_out=0, count=24, **{f"{name}_weight": weight}).slice(ends, step=1).metrics  # type: ignore[arg-type]
        for weight in (1.0, 0.0)
    )
    check_names(with_it)
    assert 0 < with_it[f"drafter/{name}_loss"] < with_it["drafter/loss"]
    assert f"drafter/{name}_loss" not in without


def test_a_head_that_accepts_less_is_held_back() -> None:
    made, ends = cotraining(), ends_of(shared_decoder())
    for step in (1, 2):
        assert made.slice(ends, step=step).adopted
    good = tensors(made)
    with torch.no_grad():
        made.trainer.head.fc.weight.copy_(torch.randn_like(made.trainer.head.fc.weight))
    worse = made.slice(ends, step=3)
    assert worse.metrics["drafter/updates"] > 20
    assert worse.held_back
    assert not worse.adopted
    assert (made.version, made.hold_backs) == (2, 1)
    assert same(good, tensors(made))


def test_small_losses_add_up_until_they_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ends = cotraining(), ends_of(shared_decoder())
    losses = iter([0.02, 0.02, 0.02, -0.05, 0.02])

    def measured(self: Acceptance, other: Acceptance) -> Loss:
        return Loss(next(losses), 0.03**2)

    monkeypatch.setattr(Acceptance, "loss_against", measured)
    adopted = [made.slice(ends, step=step).adopted for step in (1, 2)]
    # 0.04 with an error of 0.042; then 0.06 with one of 0.052.
    assert adopted == [True, True]
    resumed = cotraining(seed=2)
    resumed.load_state_dict(made.state_dict())
    assert resumed.lost == made.lost == Loss(0.02 + 0.02, 0.03**2 + 0.03**2)
    assert resumed.slice(ends, step=3).held_back
    assert resumed.slice(ends, step=4).adopted
    assert resumed.lost == Loss()
    assert resumed.slice(ends, step=5).adopted


def test_nothing_is_passed_on_that_could_not_be_measured() -> None:
    made = cotraining(held_out=0)
    done = made.slice(ends_of(shared_decoder()), step=1)
    assert not done.adopted
    assert made.trainer.step == 10
    assert made.hold_backs == 1
    assert "drafter/acceptance_rate" not in done.metrics


def test_a_slice_whose_loss_is_not_finite_leaves_the_head_as_it_was() -> None:
    made, ends = cotraining(ema_decay=0.9), ends_of(shared_decoder())
    assert made.slice(ends, step=1).adopted
    before, sequences = tensors(made), [kept.sequence for kept in made.collector.buffer._kept]
    # The second batch of the slice: the first has moved the head.
    good = [s.features_TF.clone() for s in sequences]
    for sequence in sequences[len(sequences) // 2 :]:
        sequence.features_TF.fill_(float("nan"))
    failed = made.slice(ends, step=2)
    assert not failed.adopted
    assert not failed.held_back
    assert "not both finite" in str(failed.failure)
    check_names(failed.metrics)
    assert (made.version, made.failures) == (1, 1)
    assert same(before, tensors(made))
    assert same(before, dict(made.trainer.head.named_parameters()))
    # What led there has no part in the next average.
    assert int(made.average.n_averaged) == 0
    for sequence, features in zip(sequences, good, strict=True):
        sequence.features_TF.copy_(features)
    after = made.slice(ends, step=3)
    assert after.failure is None
    assert after.adopted
    assert after.metrics["drafter/failed_slices"] == 1


def test_a_slice_ends_where_all_has_been_learned_from_and_where_it_is_stopped() -> None:
    made, ends = cotraining(count=40), ends_of(shared_decoder())
    asked: list[int] = []

    def stop() -> bool:
        asked.append(made.trainer.step)
        return made.trainer.step == 3

    made.slice(ends, step=1, stop=stop)
    assert made.trainer.step == 3
    assert asked == [0, 1, 2, 3]
    while (before := made.trainer.step) < 100:
        made.slice(ends, step=2)
        if made.trainer.step == before:
            break
    assert 3 < made.trainer.step < 60
    empty = made.slice(ends, step=3)
    assert not empty.adopted
    assert not empty.held_back
    assert "drafter/loss" not in empty.metrics


def test_the_state_of_another_version_is_refused() -> None:
    state = cotraining().state_dict()
    del state["lost"]
    with pytest.raises(CheckpointError, match="has no lost: another version wrote it; begin anew"):
        cotraining().load_state_dict(state)


def test_a_resumed_one_gives_the_same_heads() -> None:
    ends = ends_of(shared_decoder())
    whole, first = cotraining(ema_decay=0.9), cotraining(ema_decay=0.9)
    for made in (whole, first):
        made.slice(ends, step=1)
    second = cotraining(seed=2, count=8, ema_decay=0.9)
    state, used = first.state_dict(), tensors(first)
    # A checkpoint may be written while training goes on.
    first.slice(ends, step=2)
    second.load_state_dict(state)
    assert same(tensors(second), used)
    ours, theirs = whole.slice(ends, step=2), second.slice(ends, step=2)
    assert ours.adopted == theirs.adopted
    assert same(
        dict(whole.trainer.head.named_parameters()), dict(second.trainer.head.named_parameters())
    )
    assert same(whole.average.state_dict(), second.average.state_dict())
    assert {k: v for k, v in ours.metrics.items() if k != "drafter/seconds"} == {
        k: v for k, v in theirs.metrics.items() if k != "drafter/seconds"
    }


@pytest.mark.parametrize("name", ["updates", "batch_size", "accept_depth"])
def test_counts_below_one_are_refused(name: str) -> None:
    values = {"updates": 1, "batch_size": 1, "accept_depth": 1, name: 0}
    with pytest.raises(ConfigError, match=f"co-training: {name}=0"):
        CoTrainSettings(
            train=DraftTrainSettings(optim=OptimSettings(lr=1e-3)), ema_decay=0.0, **values
        )


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_an_average_that_would_never_move_is_refused(decay: float) -> None:
    train = DraftTrainSettings(optim=OptimSettings(lr=1e-3))
    with pytest.raises(ConfigError, match="co-training: ema_decay="):
        CoTrainSettings(train=train, updates=1, batch_size=1, accept_depth=1, ema_decay=decay)


def test_what_is_published_is_the_average_of_the_weights() -> None:
    """By hand, from the weights after each step of the same training without an average."""
    ends = ends_of(shared_decoder())
    made, plain = cotraining(ema_decay=0.95), cotraining()
    average: dict[str, Tensor] = {}
    for number in range(1, 4):
        made.slice(ends, step=number)
    steps = record_steps(plain, ends, slices=3)
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


def record_steps(made: CoTraining, ends: PolicyEnds, *, slices: int) -> list[dict[str, Tensor]]:
    """The weights in training after each optimizer step."""
    found: list[dict[str, Tensor]] = []
    update = made.average.update_parameters

    def recorded(model: torch.nn.Module) -> None:
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        update(model)

    made.average.update_parameters = recorded  # type: ignore[method-assign]
    for number in range(1, slices + 1):
        made.slice(ends, step=number)
    return found
