"""Tests that need a GPU, from one operation to a whole run: `pytest -m gpu tests`.

Equal bits are promised on CPUs only: on GPUs, the order of sums depends on the number of rows. So
values are compared within rounding, and most tokens must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from slipstream import cli
from slipstream.inference.engine import Engine
from slipstream.inference.engine.recorder import CudaRecorder
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.union import UnionProposer
from slipstream.metrics.loggers import read_jsonl
from slipstream.models.decoder import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.model import DraftModel
from slipstream.sampling.noise import gumbel_noise, hash_words
from slipstream.training import policy_loss_fn
from slipstream.types import GenerateRequest, Generation
from tests.inference.helpers import make_decoder, make_engine, make_request, mixed_requests
from tests.run.helpers import rl_only, steps_of, write_reward
from tests.training.helpers import (
    gradients,
    make_batch,
    relative_difference,
    tiny_backend,
    tiny_decoder,
    weights,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def requests() -> list[GenerateRequest]:
    """Requests with all kinds of sampling: greedy, truncated, and with a temperature."""
    return mixed_requests(12)


def long_requests() -> list[GenerateRequest]:
    """Requests so long that steps of the same shape are recorded as CUDA graphs."""
    return [
        make_request(str(i), [5 + i, 9], max_tokens=150, temperature=i % 2, ignore_eos=True)
        for i in range(4)
    ]


def agreement(a: Sequence[Generation], b: Sequence[Generation]) -> float:
    """The share of responses whose tokens are all equal."""
    theirs = {g.request_id: g.token_ids for g in b}
    return sum(g.token_ids == theirs[g.request_id] for g in a) / len(a)


def test_noise_equals_that_of_a_cpu() -> None:
    keys = torch.tensor([(5, -7), (2**31 - 1, -(2**31)), (0, 1)], dtype=torch.int32)
    positions = torch.tensor([0, 3, 2**20])
    here = hash_words(keys, positions, 5000)
    assert torch.equal(hash_words(keys.to(DEVICE), positions.to(DEVICE), 5000).cpu(), here)
    noise = gumbel_noise(keys.to(DEVICE), positions.to(DEVICE), 5000).cpu()
    torch.testing.assert_close(noise, gumbel_noise(keys, positions, 5000), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eager", [False, True])
def test_fp32_rollouts_equal_those_of_a_cpu(eager: bool) -> None:
    here = make_engine(make_decoder()).run(requests())
    there = make_engine(make_decoder().to(DEVICE), enforce_eager=eager).run(requests())
    assert agreement(there, here) >= 0.9


def proposer_of(name: str, decoder: Decoder, *, recorded: bool) -> Proposer:
    head: DraftModel = DraftHead(decoder.config)
    if name == "eagle3":
        head = Eagle3Head(decoder.config, (1, 2, 3), None)
    head.init_weights(1)
    record = CudaRecorder() if recorded else None
    eagle = EagleProposer(head.to(DEVICE), dtype=torch.float32, record=record)
    return UnionProposer(eagle, HistoryProposer()) if name == "union" else eagle


@pytest.mark.parametrize("plan", ["3_1_4", "4_3_8"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "union"])
def test_drafts_do_not_change_most_responses(name: str, plan: str) -> None:
    decoder = make_decoder(num_layers=4).to(DEVICE)
    plain = [make_engine(decoder).run(asked) for asked in (requests(), long_requests())]
    engines: list[Engine] = []
    for recorded in (False, True):
        proposer = proposer_of(name, decoder, recorded=recorded)
        engines.append(
            make_engine(
                decoder,
                proposer=proposer,
                plan=DraftPlan.parse(plan),
                enforce_eager=not recorded,
            )
        )
    for engine in engines:
        assert agreement(engine.run(requests()), plain[0]) >= 0.9
        assert agreement(engine.run(long_requests()), plain[1]) >= 0.5
        stats = engine.stats()
        assert stats.accepted_tokens > 0
        assert stats.draft_tokens > stats.accepted_tokens
    graphs = engines[1]._runner.graphs
    assert graphs is not None
    assert graphs.replayed > 0


def test_fp32_training_step_is_close_to_that_of_a_cpu() -> None:
    loss = policy_loss_fn(entropy_coeff=0.02, use_kl_loss=True, kl_loss_coef=0.1)
    batch = make_batch([9, 40, 17, 65, 33])
    backends = [tiny_backend(tiny_decoder(), device=device) for device in ("cpu", DEVICE)]
    metrics = [backend.forward_backward(batch, loss).wait() for backend in backends]
    here, there = (gradients(backend) for backend in backends)
    assert metrics[1]["actor/pg_loss"] == pytest.approx(metrics[0]["actor/pg_loss"], abs=1e-5)
    assert relative_difference({k: v.cpu() for k, v in there.items()}, here) < 1e-4
    for backend in backends:
        backend.optim_step().wait()
    here, there = (weights(backend) for backend in backends)
    assert relative_difference({k: v.cpu() for k, v in there.items()}, here) < 1e-3


SPECULATION = (
    "speculative.enable=true",
    "speculative.train.enable_drafter_training=true",
    "speculative.train.training_interval_steps=2",
    "speculative.train.updates_per_training=2",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_with_cotraining_trains_and_resumes(dtype: str, tmp_path: Path) -> None:
    reward = write_reward(tmp_path)
    settings = (
        "trainer.device=cuda",
        f"actor_rollout_ref.actor.dtype={dtype}",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=4",
        "trainer.save_freq=2",
        *SPECULATION,
    )
    folder = tmp_path / "run"
    assert (
        cli.main(rl_only(folder, "trainer.total_training_steps=3", *settings, reward=reward)) == 0
    )
    more = rl_only(folder, "trainer.total_training_steps=4", *settings, reward=reward)
    assert cli.main(more) == 0
    assert steps_of(folder)[-1] == 4
    logged = dict(read_jsonl(folder / "metrics.jsonl"))
    assert {1, 2, 3, 4} <= logged.keys()
    for step in (1, 2, 3, 4):
        assert logged[step]["actor/grad_norm"] > 0
        drift = logged[step]["training/rollout_probs_diff_mean"]
        assert drift < (1e-4 if dtype == "float32" else 0.05)
    assert any(metrics.get("spec/accept_length", 0.0) >= 1.0 for metrics in logged.values())
