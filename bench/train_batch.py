"""Host memory and time of the path from scored samples to the loss, without the model.

    python -m bench.train_batch [--tokens N] [--spread S] [--runs K] [--against CHECKOUT]

Each case makes synthetic groups of N response tokens in all and gives them to `Learner.learn`. The
backend is the real one, but a formula of the label replaces the model's forward pass. What is left
is the handling of data: columns, advantages, mini-batches, packing and losses. With `--against`
the code of another checkout runs as well, in interleaved runs. Every run is a process of its own.

Prints medians over K runs: bytes per response token that the samples hold, bytes per response token
that the path adds at its peak (resident memory), and seconds. Fails if metrics or weights differ
between two runs of one case.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CASES = ("grpo", "corrected", "gae")
"""`grpo`: four mini-batches, old and reference log-probs. `corrected`: in addition importance
weights and rejection against the rollout's log-probs, and a KL penalty in the reward. `gae`: the
first one with a critic and GAE."""

PROMPT, GROUP, MEDIAN, SPREAD = 64, 8, 400, 0.8
"""Prompt tokens, samples per group, and the log-normal law of response lengths: its median, and the
standard deviation of the logarithm."""

VOCAB = 32_000


def make_groups(tokens: int, spread: float) -> list[Any]:
    """Groups with `tokens` response tokens in all, as a rollout returns them."""
    from slipstream.types import Group, Prompt, Sample, Segment, Status, VersionSpan

    draw, groups, left = random.Random(0), list[Any](), tokens
    while left:
        index = len(groups)
        prompt = Prompt(uid=f"p{index}", ids=[draw.randrange(VOCAB) for _ in range(PROMPT)])
        samples = []
        for place in range(GROUP):
            length = min(left, max(1, int(draw.lognormvariate(0, spread) * MEDIAN)))
            if not length:
                break
            left -= length
            sample = Sample.from_prompt(prompt, group_index=index, index=place)
            segment = Segment(
                role="assistant",
                ids=[draw.randrange(VOCAB) for _ in range(length)],
                loss_mask=[1.0] * length,
                log_probs=[_float32(-draw.expovariate(1.0)) for _ in range(length)],
                sampling_log_probs=[_float32(-draw.expovariate(1.0)) for _ in range(length)],
                spans=[VersionSpan(0, 0, length)],
            )
            sample.append(segment)
            sample.status, sample.reward = Status.COMPLETED, draw.random()
            samples.append(sample)
        groups.append(Group(index=index, prompt=prompt, samples=samples))
    return groups


def _float32(value: float) -> float:
    """An engine's log-probs are float32."""
    import struct

    out: float = struct.unpack("f", struct.pack("f", value))[0]
    return out


def make_learner(case: str) -> tuple[Any, Callable[[], str]]:
    """A learner without a model, and a function that returns the digest of the weights."""
    import torch

    from slipstream.algorithms import FixedKLController, RolloutCorrectionConfig
    from slipstream.deadlines import Deadlines
    from slipstream.loops.learner import Learner
    from slipstream.loops.rl_batch import KLInReward
    from slipstream.loops.rl_config import RLTrainingConfig
    from slipstream.models import Decoder, ModelConfig
    from slipstream.models.value_model import ValueModel
    from slipstream.training import OptimSettings, SingleProcessBackend
    from slipstream.training.critic import Critic
    from slipstream.training.losses import policy_loss_fn
    from slipstream.training.step import ForwardResult, micro_batches

    config = ModelConfig(
        family="qwen3",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=65_536,
    )
    decoder = Decoder(config)
    decoder.init_weights(0)
    weight = decoder.model.norm.weight

    def forward(packed: Any, micro: Any, **more: Any) -> Any:
        labels = micro.labels[: len(micro.target_slots)]
        log_probs = -(0.5 + (labels % 7).float() / 4) * weight[0]
        no_states: Any = None
        return ForwardResult(
            micro=micro, log_probs=log_probs, entropies=-log_probs.detach(), hidden=no_states
        )

    single: Any = importlib.import_module("slipstream.training.single")
    single.forward = forward
    backend = SingleProcessBackend(decoder, optim=OptimSettings(lr=1e-3))
    critic: Any = None
    if case == "gae":
        critic = Critic(ValueModel.of(decoder), optim=OptimSettings(lr=1e-3))
        value = critic.model.score.weight
        torch.nn.init.constant_(value, 0.01)

        def values(batch: Any) -> Any:
            for micro in micro_batches(
                batch,
                also=(),
                settings=critic._settings,
                pad_id=0,
                max_positions=65_536,
                device=torch.device("cpu"),
                padded=False,
            ):
                labels = micro.labels[: len(micro.target_slots)]
                yield micro, micro.scatter((labels % 5).float() * value.sum())

        critic._forward = values
    corrected = case == "corrected"
    settings = RLTrainingConfig(
        num_steps=1,
        max_prompt_length=PROMPT,
        max_response_length=32_768,
        loss=policy_loss_fn(use_kl_loss=not corrected),
        adv_estimator="gae" if case == "gae" else "grpo",
        compared=case != "gae",
        correction=RolloutCorrectionConfig(
            rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.3_3.0"
        )
        if corrected
        else None,
        mini_batch_size=64,
    )
    learner = Learner(
        backend,
        settings,
        Deadlines(),
        reference=backend,
        critic=critic,
        kl_in_reward=KLInReward(FixedKLController(0.01), "kl") if corrected else None,
    )

    def digest() -> str:
        parts = [p.detach().numpy().tobytes() for p in decoder.parameters()]
        if critic is not None:
            parts += [p.detach().numpy().tobytes() for p in critic.model.parameters()]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    return learner, digest


def measure(case: str, tokens: int, spread: float) -> dict[str, Any]:
    """In a process of its own: one update."""
    import anyio

    from slipstream.inference.engine.memory import FreedMemory
    from slipstream.metrics.timers import Timers

    learner, digest = make_learner(case)

    async def learn(groups: Sequence[Any]) -> dict[str, float]:
        found: dict[str, float] = await learner.learn(1, groups, Timers(), print)
        return found

    anyio.run(learn, make_groups(2_000, spread))
    FreedMemory().give_back()
    before = _resident("VmRSS")
    groups = make_groups(tokens, spread)
    FreedMemory().give_back()
    held = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    metrics = anyio.run(learn, groups)
    seconds = time.perf_counter() - start
    return {
        "samples": (held - before) / tokens,
        "path": (_resident("VmHWM") - held) / tokens,
        "seconds": seconds,
        "metrics": metrics,
        "weights": digest(),
    }


def _resident(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux")


def run_once(checkout: Path, case: str, given: argparse.Namespace) -> dict[str, Any]:
    line = [sys.executable, str(Path(__file__).resolve()), "--one", case]
    line += ["--tokens", str(given.tokens), "--spread", str(given.spread)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        line, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Host memory and time from samples to the loss.")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="response tokens in all")
    parser.add_argument(
        "--spread", type=float, default=SPREAD, help="of response lengths; 0: all are equal"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs per case; medians are printed")
    parser.add_argument("--against", type=Path, help="another checkout, to compare with")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.tokens, args.spread)))
        return
    here = Path(__file__).resolve().parent.parent
    checkouts = {"this checkout": here}
    if args.against is not None:
        checkouts = {str(args.against): args.against.resolve(), **checkouts}
    print("| case | code | samples, bytes/token | path adds, bytes/token | path, s |")
    print("|---|---|---|---|---|", flush=True)
    for case in CASES:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
        for _ in range(args.runs):
            for name, checkout in checkouts.items():
                found[name].append(run_once(checkout, case, args))
        for name, runs in found.items():
            middle = {
                key: statistics.median(run[key] for run in runs)
                for key in ("samples", "path", "seconds")
            }
            print(
                f"| {case} | {name} | {middle['samples']:.0f} | {middle['path']:.0f} "
                f"| {middle['seconds']:.2f} |",
                flush=True,
            )
        every = [run for runs in found.values() for run in runs]
        for key in ("metrics", "weights"):
            if any(run[key] != every[0][key] for run in every):
                raise SystemExit(f"{case}: {key} differ between runs")


if __name__ == "__main__":
    main()
