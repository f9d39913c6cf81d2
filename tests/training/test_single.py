"""The one-process backend: gradients against transformers, resume, publishing, and sinks."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from slipstream.algorithms import Normalizers
from slipstream.algorithms.full_kl import KLDirection
from slipstream.errors import CheckpointError, ConfigError, DataError, TrainingError
from slipstream.kernels.team import kernels_supported
from slipstream.metrics.resident import FreedMemory, resident_bytes
from slipstream.models import Decoder
from slipstream.models.decoder import PackedDecoder
from slipstream.models.hf_io import load_checkpoint
from slipstream.sampling.truncate import truncate
from slipstream.training import (
    LossFn,
    LossInputs,
    LossOutputs,
    OptimSettings,
    SingleProcessBackend,
    TrainingBackend,
    policy_loss_fn,
    sft_loss,
)
from slipstream.training.columns import train_batch
from slipstream.training.losses import FULL_KL
from slipstream.types import Features, SamplingParams, TrainBatch, TrainRow
from tests.training.helpers import (
    as_rows,
    assert_same,
    by_row,
    gradients,
    make_batch,
    make_row,
    make_rows,
    relative_difference,
    tiny_backend,
    tiny_decoder,
    weights,
)

LENGTHS = [9, 40, 17, 65, 33, 12, 50]
FULL_LOSS = policy_loss_fn(entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.1)


def updates(backend: SingleProcessBackend, first: int, last: int) -> dict[str, float]:
    """Run the updates `first` .. `last - 1`, each on another batch."""
    metrics: dict[str, float] = {}
    for number in range(first, last):
        metrics = backend.forward_backward(make_batch(LENGTHS, seed=number), FULL_LOSS).wait()
        metrics.update(backend.optim_step().wait())
    return metrics


def in_float64(decoder: Decoder) -> Any:
    """The same model as a transformers model in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = decoder.config.to_hf()
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.load_state_dict(dict(decoder.named_parameters()), strict=False)
    return model


def reference_gradients(
    decoder: Decoder, batch: TrainBatch, full_kl: tuple[Decoder, KLDirection] | None = None
) -> dict[str, torch.Tensor]:
    """FULL_LOSS with token-mean in float64, by transformers, row by row, without padding, gathering
    or micro-batches; with `full_kl` its KL is over the whole vocabulary."""
    model = in_float64(decoder)
    other = None if full_kl is None else in_float64(full_kl[0])
    total = torch.zeros((), dtype=torch.float64)
    for row in as_rows(batch):
        assert row.advantages is not None
        assert row.old_log_probs is not None
        assert row.ref_log_probs is not None
        ids = torch.tensor(row.tokens)[None]
        law = torch.log_softmax(model(ids).logits[0], -1)
        if full_kl is not None and other is not None:
            theirs = torch.log_softmax(other(ids).logits[0], -1).detach()
            p, q = (law, theirs) if full_kl[1] == "reverse" else (theirs, law)
            whole = (p.exp() * (p - q)).sum(-1)
        for t in range(1, len(row.tokens)):
            if not row.loss_mask[t]:
                continue
            lp = law[t - 1, row.tokens[t]]
            entropy = -(law[t - 1].exp() * law[t - 1]).sum()
            advantage = row.advantages[t]
            ratio = torch.exp(lp - row.old_log_probs[t])
            pg = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if advantage < 0:
                pg = pg.clamp(max=-advantage * 3.0)
            gap = row.ref_log_probs[t] - lp
            kl = (gap.exp() - gap - 1).clamp(max=10.0) if full_kl is None else whole[t - 1]
            total = total + (pg - 0.02 * entropy + 0.1 * kl) * row.loss_mask[t]
    (total / batch.num_target_tokens).backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def test_implements_the_training_backend_protocol() -> None:
    backend: TrainingBackend = tiny_backend()
    assert backend.weight_version == 0
    backend.close()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_full_kl_equals_that_of_the_distributions(direction: KLDirection) -> None:
    batch, other = make_batch(LENGTHS), tiny_decoder(seed=3)
    backend = tiny_backend(max_rows_per_micro_batch=3)
    with pytest.raises(TrainingError, match="call use_full_kl"):
        backend.compute_full_kl(batch, direction).wait()
    backend.use_full_kl(other)
    found = by_row(batch, backend.compute_full_kl(batch, direction).wait())
    laws = []
    for decoder in (backend.decoder, other):
        assert isinstance(decoder, Decoder)
        packed = decoder.pack(torch.float32)
        heads = [
            packed.forward(torch.tensor([row.tokens]), torch.arange(len(row.tokens))[None]).final[0]
            for row in as_rows(batch)
        ]
        laws.append([torch.log_softmax(packed.lm_head(h).double(), -1) for h in heads])
    for row, values, own, theirs in zip(as_rows(batch), found, *laws, strict=True):
        p, q = (own, theirs) if direction == "reverse" else (theirs, own)
        kl = (p.exp() * (p - q)).sum(-1)[:-1] * (torch.tensor(row.loss_mask[1:]) != 0)
        torch.testing.assert_close(torch.tensor(values), F.pad(kl, (1, 0)).float())
    # Without `in_loss` the loss does not get it.
    seen: list[LossInputs] = []

    def look(inputs: LossInputs) -> LossOutputs:
        seen.append(inputs)
        return FULL_LOSS(inputs)

    backend.forward_backward(batch, look).wait()
    assert all(inputs.full_kl is None for inputs in seen)
    backend.close()


@pytest.mark.parametrize(("kind", "direction"), FULL_KL.items())
def test_full_kl_in_the_loss(kind: str, direction: KLDirection) -> None:
    batch, other = make_batch(LENGTHS), tiny_decoder(seed=3)
    expected = reference_gradients(tiny_decoder(), batch, (other, direction))
    loss = policy_loss_fn(entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kind)
    found = []
    for rows in (1, 3, 100):
        backend = tiny_backend(max_tokens_per_micro_batch=None, max_rows_per_micro_batch=rows)
        backend.use_full_kl(other, direction)
        found.append(backend.forward_backward(batch, loss).wait()["actor/kl_loss"])
        assert relative_difference(gradients(backend), expected) < 1e-5
        backend.close()
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    assert found[0] > 0.01


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(4, 70), min_size=1, max_size=7),
    limits=st.one_of(
        st.tuples(st.integers(80, 400), st.none()), st.tuples(st.none(), st.integers(1, 4))
    ),
)
@example(lengths=[6, 35], limits=(80, None))
def test_gradients_and_metrics_do_not_depend_on_the_split(
    lengths: list[int], limits: tuple[int | None, int | None]
) -> None:
    batch = make_batch(lengths)
    expected = reference_gradients(tiny_decoder(), batch)
    whole = tiny_backend(max_tokens_per_micro_batch=100_000)
    whole_metrics = whole.forward_backward(batch, FULL_LOSS).wait()

    backend = tiny_backend(max_tokens_per_micro_batch=limits[0], max_rows_per_micro_batch=limits[1])
    metrics = backend.forward_backward(batch, FULL_LOSS).wait()

    assert relative_difference(gradients(backend), gradients(whole)) < 5e-6
    # fp32 against float64. If the tokens' gradients nearly cancel, rounding errors matter more. In
    # the example their sum is a hundredth of that with one token less.
    assert relative_difference(gradients(backend), expected) < 1e-4
    assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-7)
    backend.close()
    whole.close()


def test_metric_names() -> None:
    backend = tiny_backend(optim=OptimSettings(lr=1e-3, warmup_steps=10))
    metrics = updates(backend, 0, 1)

    assert set(metrics) == {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/kl_loss",
        "actor/kl_coef",
        "actor/grad_norm",
        "actor/lr",
        "training/rollout_probs_diff_max",
        "training/rollout_probs_diff_mean",
        "training/rollout_log_probs_bitwise_equal",
        "training/rollout_log_probs_differing",
        "training/skipped_steps",
    }
    assert metrics["actor/lr"] == pytest.approx(1e-4)
    assert 0 < metrics["actor/entropy"] <= math.log(64)


def test_rows_without_old_log_probs_are_on_policy() -> None:
    batch = make_batch(LENGTHS)
    batch.old_log_probs = None
    backend = tiny_backend()
    metrics = backend.forward_backward(batch, policy_loss_fn()).wait()
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0
    on_policy = gradients(backend)

    explicit = tiny_backend()
    batch.old_log_probs = explicit.compute_log_probs(batch).wait()
    explicit.forward_backward(batch, policy_loss_fn()).wait()
    assert_same(on_policy, gradients(explicit))

    # Some rows with, some without.
    rows = as_rows(batch)
    rows[0].old_log_probs = rows[3].old_log_probs = None
    mixed = tiny_backend()
    mixed.forward_backward(train_batch(rows), policy_loss_fn()).wait()
    assert_same(on_policy, gradients(mixed))


def test_compute_log_probs_equals_the_update_pass_bitwise() -> None:
    batch = make_batch(LENGTHS)
    backend = tiny_backend(max_tokens_per_micro_batch=100)
    batch.rollout_log_probs = backend.compute_log_probs(batch).wait()

    metrics = backend.forward_backward(batch, policy_loss_fn()).wait()

    assert metrics["training/rollout_log_probs_bitwise_equal"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["training/rollout_log_probs_differing"] == 0
    assert metrics["training/rollout_probs_diff_max"] == 0.0
    assert metrics["training/rollout_probs_diff_mean"] == 0.0


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_same_inputs_give_the_same_weights_bitwise(optimizer: str) -> None:
    optim = OptimSettings(lr=1e-3, muon_lr=0.02, optimizer=optimizer)  # type: ignore[arg-type]
    first, second = tiny_backend(optim=optim), tiny_backend(optim=optim)
    updates(first, 0, 3)
    updates(second, 0, 3)
    assert_same(weights(first), weights(second))


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_resume_is_bitwise_equal(optimizer: str, tmp_path: Path) -> None:
    optim = OptimSettings(
        lr=1e-3,
        muon_lr=0.02,
        optimizer=optimizer,  # type: ignore[arg-type]
        schedule="cosine",
        warmup_steps=2,
        total_steps=6,
    )
    straight = tiny_backend(optim=optim)
    updates(straight, 0, 2)
    straight.publish()
    state = straight.state_dict()
    straight.save_policy(tmp_path)
    last = updates(straight, 2, 5)

    resumed = tiny_backend(load_checkpoint(tmp_path), optim=optim)
    resumed.load_state_dict(state)
    assert resumed.weight_version == 1
    assert updates(resumed, 2, 5) == last
    assert_same(weights(straight), weights(resumed))


def test_rejects_incomplete_states_and_states_with_gradients() -> None:
    backend = tiny_backend()
    with pytest.raises(CheckpointError, match="'counts' is missing"):
        backend.load_state_dict({"optimizer": {}})
    backend.forward_backward(make_batch(LENGTHS), FULL_LOSS).wait()
    with pytest.raises(TrainingError, match="would lose gradients"):
        backend.state_dict()


def test_gradient_checkpointing_changes_no_bit() -> None:
    plain, recomputing = tiny_backend(), tiny_backend(gradient_checkpointing=True)
    for backend in (plain, recomputing):
        backend.forward_backward(make_batch(LENGTHS), FULL_LOSS).wait()
    assert_same(gradients(plain), gradients(recomputing))


def test_bf16_gradients_are_close_to_fp32_and_master_weights_stay_fp32() -> None:
    exact, rough = tiny_backend(), tiny_backend(dtype=torch.bfloat16)
    for backend in (exact, rough):
        backend.forward_backward(make_batch(LENGTHS, policy=False), sft_loss()).wait()
    assert relative_difference(gradients(rough), gradients(exact)) < 0.03
    rough.optim_step().wait()
    assert {w.dtype for w in weights(rough).values()} == {torch.float32}


def test_gradients_of_batches_add_up_until_optim_step() -> None:
    backend, other = tiny_backend(), tiny_backend()
    loss = sft_loss()
    for seed in (0, 1):
        backend.forward_backward(make_batch(LENGTHS, seed=seed), loss).wait()
    summed = gradients(backend)
    other.forward_backward(make_batch(LENGTHS, seed=1), loss).wait()
    alone = gradients(other)
    other.optim_step().wait()
    assert gradients(other) == {}
    backend.optim_step().wait()
    with pytest.raises(TrainingError, match="without gradients"):
        backend.optim_step().wait()
    assert relative_difference(summed, alone) > 0.1


def test_clipping_limits_the_update_and_reports_the_norm_before_it() -> None:
    batch = make_batch(LENGTHS)
    free = tiny_backend(grad_clip=None)
    free.forward_backward(batch, FULL_LOSS).wait()
    size = math.sqrt(sum(float(g.square().sum()) for g in gradients(free).values()))

    clipped = tiny_backend(grad_clip=size / 10)
    clipped.forward_backward(batch, FULL_LOSS).wait()
    metrics = clipped.optim_step().wait()

    assert metrics["actor/grad_norm"] == pytest.approx(size, rel=1e-5)
    moment = clipped.state_dict()["optimizer"]["adamw"]
    kept = math.sqrt(sum(float(s["exp_avg"].square().sum()) for s in moment.values()))
    assert kept == pytest.approx(0.1 * size / 10, rel=1e-3)


def broken(good: LossFn, *, in_gradient: bool) -> LossFn:
    def compute(inputs: LossInputs) -> LossOutputs:
        out = good(inputs)
        if in_gradient:
            # sqrt has an infinite slope at 0, so the loss is finite but its gradient is not.
            return replace(out, loss=out.loss + (out.loss - out.loss.detach()).sqrt())
        return replace(out, loss=out.loss * math.nan)

    return compute


@pytest.mark.parametrize("in_gradient", [False, True])
def test_non_finite_updates_are_skipped_and_counted(in_gradient: bool) -> None:
    backend = tiny_backend(max_nonfinite_steps=2)
    updates(backend, 0, 1)
    before = weights(backend)
    state = backend.state_dict()["optimizer"]
    bad = broken(FULL_LOSS, in_gradient=in_gradient)

    for skipped in (1, 2):
        backend.forward_backward(make_batch(LENGTHS), bad).wait()
        assert backend.optim_step().wait()["training/skipped_steps"] == skipped
    assert_same(before, weights(backend))
    assert backend.state_dict()["optimizer"]["adamw"].keys() == state["adamw"].keys()
    # A finite update resets the count.
    assert updates(backend, 1, 2)["training/skipped_steps"] == 2
    for _ in range(2):
        backend.forward_backward(make_batch(LENGTHS), bad).wait()
        backend.optim_step().wait()
    backend.forward_backward(make_batch(LENGTHS), bad).wait()
    with pytest.raises(TrainingError, match=r"3 updates in a row.*learning rate"):
        backend.optim_step().wait()


def test_failing_loss_leaves_no_gradients() -> None:
    backend = tiny_backend(max_tokens_per_micro_batch=80)
    calls: list[int] = []

    def fails_later(inputs: LossInputs) -> LossOutputs:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("user code")
        return FULL_LOSS(inputs)

    with pytest.raises(ValueError, match="user code"):
        backend.forward_backward(make_batch(LENGTHS), fails_later).wait()
    assert gradients(backend) == {}


def test_published_buckets_keep_their_values() -> None:
    backend = tiny_backend()
    before = weights(backend)
    quick, slow, again = backend.publish(), backend.publish(), backend.publish(advance=False)
    assert (quick.version, slow.version, again.version) == (1, 2, 2)
    early = dict(quick.tensors())

    updates(backend, 0, 1)

    assert_same(early, before)
    assert_same(dict(slow.tensors()), before)
    assert_same(dict(again.tensors()), before)
    assert list(slow.tensors()) == []
    now = dict(backend.publish().tensors())
    assert_same(now, weights(backend))
    assert not torch.equal(now["model.norm.weight"], before["model.norm.weight"])
    assert backend.weight_version == 3


def test_publish_does_not_wait_and_rejects_a_running_update() -> None:
    async def main() -> None:
        backend = tiny_backend()
        await backend.forward_backward(make_batch(LENGTHS), FULL_LOSS)
        step = backend.optim_step()
        if not step.done():
            with pytest.raises(TrainingError, match="mixture of two versions"):
                backend.publish()
        await step
        assert backend.publish().version == 1

    anyio.run(main)


def test_weights_round_trip_and_reject_missing_tensors() -> None:
    backend = tiny_backend()
    other = weights(tiny_backend(tiny_decoder(seed=5)))
    outstanding = backend.publish()
    before = weights(backend)

    backend.load_weights(other).wait()

    assert_same(weights(backend), other)
    assert_same(dict(outstanding.tensors()), before)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        backend.load_weights({k: v for k, v in other.items() if k != "model.norm.weight"}).wait()


class RecordingSink:
    def __init__(self, wanted: set[int], aux_layers: tuple[int, ...] = ()) -> None:
        self.wanted = wanted
        self.aux_layers = aux_layers
        self.received: list[Features] = []

    def select(self, batch: TrainBatch) -> set[int]:
        return self.wanted

    def receive(self, features: Features) -> None:
        self.received.append(features)


@pytest.mark.parametrize("in_update", [True, False])
def test_sink_gets_aligned_unpadded_detached_features(in_update: bool) -> None:
    rows = make_rows(LENGTHS)
    for index, row in enumerate(rows):
        row.uid = f"row{index}"
    # Nothing to learn in row 4, but its features are wanted.
    rows[4].loss_mask = [0.0] * len(rows[4].tokens)
    batch = train_batch(rows)
    backend = tiny_backend(max_tokens_per_micro_batch=130)
    updates(backend, 0, 1)
    sink = RecordingSink({1, 4, 6}, aux_layers=(0, 1))
    if in_update:
        backend.forward_backward(batch, FULL_LOSS, sink=sink).wait()
    else:
        backend.compute_log_probs(batch, sink=sink).wait()

    assert {f.uid for f in sink.received} == {"row1", "row4", "row6"}
    with torch.no_grad():
        packed = backend.decoder.pack(torch.float32)
    for features in sink.received:
        row = rows[int(features.uid[3:])]
        ids = torch.tensor(row.tokens + [0] * (-len(row.tokens) % 16))[None]
        with torch.no_grad():
            alone = packed.forward(ids, torch.arange(ids.shape[1])[None], aux_layers=(0, 1))
        length = len(row.tokens)
        assert features.tokens == row.tokens
        assert features.loss_mask == row.loss_mask
        assert torch.equal(features.hidden, alone.final[0, :length])
        assert features.aux_layers is not None
        assert alone.aux_layers is not None
        assert torch.equal(features.aux_layers, alone.aux_layers[0, :length])
        assert features.aux_layers.untyped_storage().nbytes() == features.aux_layers.nbytes
        assert not features.hidden.requires_grad
        assert features.hidden.untyped_storage().nbytes() == features.hidden.nbytes
        assert features.optimizer_step == 1


def test_log_probs_are_zero_off_target_and_rows_without_targets_are_not_computed() -> None:
    batch = make_batch([20, 30])
    batch.loss_mask[20:] = 0.0
    out = by_row(batch, tiny_backend().compute_log_probs(batch).wait())
    assert out[1] == [0.0] * 30
    assert out[0][:3] == [0.0] * 3
    assert all(-20 < x < 0 for x in out[0][3:])


def test_padding_may_reach_beyond_the_models_positions() -> None:
    batch = make_batch([25])
    short = tiny_decoder(max_positions=25)
    roomy = tiny_decoder(max_positions=512)
    assert torch.equal(
        tiny_backend(short).compute_log_probs(batch).wait(),
        tiny_backend(roomy).compute_log_probs(batch).wait(),
    )


def test_invalid_batches_raise_when_awaited() -> None:
    backend = tiny_backend()
    empty = train_batch([TrainRow(tokens=[1, 2], loss_mask=[1.0, 0.0])])
    with pytest.raises(DataError, match="no target token"):
        backend.forward_backward(empty, sft_loss()).wait()
    with pytest.raises(DataError, match="no target token"):
        backend.compute_log_probs(empty).wait()
    with pytest.raises(DataError, match="budget of 256"):
        backend.compute_log_probs(make_batch([300])).wait()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": torch.float16}, "float16 is not one of"),
        ({"grad_clip": 0.0}, "grad_clip=0.0"),
        ({"max_nonfinite_steps": -1}, "max_nonfinite_steps=-1"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch=0"),
        ({"max_tokens_per_micro_batch": None}, "are both null"),
        ({"log_prob_chunk": 10}, "log_prob_chunk=10 must be a positive multiple of 4"),
    ],
)
def test_rejects_impossible_settings(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        tiny_backend(**options)


def test_losses_get_the_counts_of_the_whole_batch() -> None:
    seen: list[tuple[Normalizers, int]] = []

    def spy(inputs: LossInputs) -> LossOutputs:
        seen.append((inputs.normalizers, inputs.num_targets))
        return sft_loss()(inputs)

    backend = tiny_backend(max_tokens_per_micro_batch=80)
    backend.forward_backward(make_batch(LENGTHS), spy).wait()

    targets = sum(n - 3 for n in LENGTHS)
    expected = Normalizers(num_tokens=targets, num_sequences=len(LENGTHS), horizon=65.0)
    assert len(seen) > 2
    assert set(seen) == {(expected, targets)}


def test_skipped_updates_advance_the_schedule() -> None:
    backend = tiny_backend(optim=OptimSettings(lr=1.0, warmup_steps=4))
    rates = []
    for loss in (sft_loss(), broken(sft_loss(), in_gradient=False), sft_loss()):
        backend.forward_backward(make_batch(LENGTHS), loss).wait()
        rates.append(backend.optim_step().wait()["actor/lr"])
    assert rates == [0.25, 0.5, 0.75]


@torch.no_grad()
def test_log_probs_over_the_ids_that_a_sampler_kept() -> None:
    backend = tiny_backend(max_rows_per_micro_batch=2)
    batch = make_batch([5, 9, 7], policy=False)
    cuts = SamplingParams(max_tokens=1, top_k=6, top_p=0.8)
    kept = backend.compute_kept_ids(batch, cuts).wait()
    full = by_row(batch, backend.compute_log_probs(batch).wait())
    assert isinstance(backend.decoder, Decoder)
    packed = backend.decoder.pack(torch.float32)
    for row, ids, log_probs in zip(as_rows(batch), kept, full, strict=True):
        tokens = torch.tensor([row.tokens])
        hidden = packed.forward(tokens, torch.arange(len(row.tokens))[None]).final[0]
        log_p = torch.log_softmax(packed.lm_head(hidden), dim=-1)
        for t, own in enumerate(ids):
            if not row.loss_mask[t]:
                assert len(own) == 0
                continue
            one = torch.ones(1)
            support = truncate(log_p[t - 1][None], 6 * one, 0.8 * one.double(), 0 * one.double())
            assert list(own) == support[0].nonzero().squeeze(-1).tolist()
            assert 1 <= len(own) <= 6
            if row.tokens[t] not in own:
                own.append(row.tokens[t])
            mass = float(log_p[t - 1][list(own)].logsumexp(0))
            log_probs[t] -= mass
    batch.kept_ids = kept
    replayed = by_row(batch, backend.compute_log_probs(batch).wait())
    for found, expected in zip(replayed, full, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    backend.close()


@pytest.mark.usefixtures("without_kernels")
def test_padding_may_reach_beyond_the_window() -> None:
    config = replace(
        tiny_decoder().config, family="mistral", sliding_window=20, windowed_layers=(0, 1)
    )
    decoder = Decoder(config)
    decoder.init_weights(0)
    backend = tiny_backend(decoder)
    rng = random.Random(0)
    assert len(backend.compute_log_probs(train_batch([make_row(rng, 20)])).wait()) == 20
    with pytest.raises(DataError, match=r"row 0 .* has 21 tokens, .* has sliding_window"):
        backend.compute_log_probs(train_batch([make_row(rng, 21)])).wait()
    backend.close()


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("by", ["a micro-batch", "an optimizer step"])
def test_freed_memory_is_returned_with_gradient_checkpointing(
    by: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreedMemory, "EVERY_SECONDS", 0)
    # The first forward pass of a process allocates memory that stays.
    with contextlib.closing(tiny_backend()) as warm:
        warm.compute_log_probs(make_batch(LENGTHS)).wait()
    backend = tiny_backend(gradient_checkpointing=checkpointing)
    # What a step needs is measured after the first return.
    backend.forward_backward(make_batch(LENGTHS), FULL_LOSS).wait()
    backend.optim_step().wait()
    if by == "an optimizer step":
        backend.forward_backward(make_batch(LENGTHS), FULL_LOSS).wait()
    pieces = [torch.zeros(1000) for _ in range(20_000)]
    last = pieces.pop()
    before = resident_bytes()
    pieces.clear()
    if by == "an optimizer step":
        backend.optim_step().wait()
    else:
        backend.compute_log_probs(make_batch(LENGTHS)).wait()
    # 80 MB were freed below a block that is still in use. By default they are kept.
    assert (resident_bytes() < before - 60e6) == checkpointing
    assert float(last.sum()) == 0
    backend.close()


@pytest.mark.skipif(not kernels_supported(), reason="sequences need padding without kernels")
def test_shared_prompts_change_the_gradient_by_rounding_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(64) for _ in range(n)] for n in (20, 3)]
    batch = train_batch(
        [
            TrainRow(
                tokens=[*prompts[i % 2], *(rng.randrange(64) for _ in range(2 + i))],
                loss_mask=[0.0] * len(prompts[i % 2]) + [1.0] * (2 + i),
            )
            for i in range(8)
        ]
    )
    computed: list[int] = []
    run = PackedDecoder.forward

    def forward(packed: PackedDecoder, ids: torch.Tensor, *given: Any, **more: Any) -> Any:
        shared = more.get("shared")
        copied = 0 if shared is None else sum(count for _, _, count in shared.copies)
        computed.append(ids.shape[1] - copied)
        return run(packed, ids, *given, **more)

    monkeypatch.setattr(PackedDecoder, "forward", forward)
    found, sinks = [], [RecordingSink({0, 3, 5}, (1,)) for _ in range(2)]
    for share_prompts, sink in zip((True, False), sinks, strict=True):
        backend = tiny_backend(share_prompts=share_prompts)
        log_probs = backend.compute_log_probs(batch).wait()
        metrics = backend.forward_backward(batch, sink=sink).wait()
        found.append((log_probs, metrics, gradients(backend)))
        backend.close()
    tokens = batch.num_tokens
    # Log-probs without gradients are computed as before.
    assert computed == [tokens, tokens - 3 * 20 - 3 * 3, tokens, tokens]
    (shared, with_sharing, ours), (alone, without, theirs) = found
    assert torch.equal(shared, alone)
    assert with_sharing == pytest.approx(without, rel=1e-6)
    assert relative_difference(ours, theirs) < 1e-5
    pairs = zip(*(sorted(s.received, key=lambda f: f.tokens) for s in sinks), strict=True)
    for features, others in pairs:
        assert features.tokens == others.tokens
        assert torch.equal(features.hidden, others.hidden)
        assert features.aux_layers is not None
        assert others.aux_layers is not None
        assert torch.equal(features.aux_layers, others.aux_layers)

    # Two rows of the long prompt fit into a micro-batch. Those of the short one save too little.
    computed.clear()
    backend = tiny_backend(share_prompts=True, max_tokens_per_micro_batch=64)
    backend.forward_backward(batch).wait()
    assert sum(computed) < tokens
    assert relative_difference(gradients(backend), theirs) < 1e-5
