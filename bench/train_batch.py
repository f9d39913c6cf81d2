"""Benchmark of host memory and time from scored samples to the loss, without the model.

    python -m bench.train_batch [--tokens N] [--spread S] [--runs K] [--against CHECKOUT]

Each case makes synthetic groups with N response tokens in all and trains on them with
`Learner.learn`. The training backend is the real one, but log-probs come from a formula of the
label instead of the model's forward pass. So the benchmark measures columns, advantages,
mini-batches, packing and losses. `--against` also runs the code of another checkout, in interleaved
runs. Each run is a separate process.

Prints medians of K runs: bytes per response token of the samples, additional bytes per response
token at the peak of the update (resident memory), and seconds. Exits with an error if metrics or
weights differ between two runs of a case.
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
"""`grpo`: GRPO with mini-batches of 64 prompts (four by default), old and reference log-probs.
`corrected`: the same with rollout correction (importance weights and rejection) and a KL penalty in
the reward. `gae`: the same as `grpo` with a critic and GAE."""

PROMPT, GROUP, MEDIAN, SPREAD = 64, 8, 400, 0.8
"""Prompt tokens, samples per group, and the log-normal distribution of response lengths: median,
and standard deviation of the logarithm."""

VOCAB = 32_000


def make_groups(tokens: int, spread: float) -> list[Any]:
    """Scored groups with `tokens` response tokens in all. `spread`: as `SPREAD`."""
    from slipstream.types import Group, Prompt, Sample, Segment, Status, VersionSpan

    rng, groups, left = random.Random(0), list[Any](), tokens
    while left:
        group_index = len(groups)
        prompt = Prompt(uid=f"p{group_index}", ids=[rng.randrange(VOCAB) for _ in range(PROMPT)])
        samples = []
        for index in range(GROUP):
            length = min(left, max(1, int(rng.lognormvariate(0, spread) * MEDIAN)))
            if not length:
                break
            left -= length
            sample = Sample.from_prompt(prompt, group_index=group_index, index=index)
            segment = Segment(
                role="assistant",
                ids=[rng.randrange(VOCAB) for _ in range(length)],
                loss_mask=[1.0] * length,
                log_probs=[_float32(-rng.expovariate(1.0)) for _ in range(length)],
                sampling_log_probs=[_float32(-rng.expovariate(1.0)) for _ in range(length)],
                spans=[VersionSpan(0, 0, length)],
            )
            sample.append(segment)
            sample.status, sample.reward = Status.COMPLETED, rng.random()
            samples.append(sample)
        groups.append(Group(index=group_index, prompt=prompt, samples=samples))
    return groups


def _float32(value: float) -> float:
    """Round to float32, as an engine's log-probs are."""
    import struct

    out: float = struct.unpack("f", struct.pack("f", value))[0]
    return out


def make_learner(case: str) -> tuple[Any, Callable[[], str]]:
    """A learner of a case with a formula in place of the model, and a function that returns a hash
    of the weights."""
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
    """Run one update and return its memory, time, metrics and weight hash. Needs a new process,
    because it measures resident memory."""
    import anyio

    from slipstream.metrics.resident import FreedMemory
    from slipstream.metrics.timers import Timers

    learner, digest = make_learner(case)

    async def learn(groups: Sequence[Any]) -> dict[str, float]:
        found: dict[str, float] = await learner.learn(1, groups, Timers(), print)
        return found

    # A small update first, so that memory of imports and caches does not count.
    anyio.run(learn, make_groups(2_000, spread))
    FreedMemory().give_back()
    before = _resident("VmRSS")
    groups = make_groups(tokens, spread)
    FreedMemory().give_back()
    held = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
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
    """The value of a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux")


def run_once(checkout: Path, case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run `measure` in a new process with the code of `checkout`."""
    line = [sys.executable, str(Path(__file__).resolve()), "--one", case]
    line += ["--tokens", str(args.tokens), "--spread", str(args.spread)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        line, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Host memory and time from samples to the loss.")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="total response tokens")
    parser.add_argument(
        "--spread",
        type=float,
        default=SPREAD,
        help="standard deviation of the logarithm of response lengths; 0 makes all lengths equal",
    )
    parser.add_argument("--runs", type=int, default=3, help="runs per case; medians are printed")
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
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
            medians = {
                key: statistics.median(run[key] for run in runs)
                for key in ("samples", "path", "seconds")
            }
            print(
                f"| {case} | {name} | {medians['samples']:.0f} | {medians['path']:.0f} "
                f"| {medians['seconds']:.2f} |",
                flush=True,
            )
        all_runs = [run for runs in found.values() for run in runs]
        for key in ("metrics", "weights"):
            if any(run[key] != all_runs[0][key] for run in all_runs):
                raise SystemExit(f"{case}: {key} differ between runs")


if __name__ == "__main__":
    main()
