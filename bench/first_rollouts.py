"""The first rollouts of a new engine with drafts, against plain decoding.

    python -m bench.first_rollouts --policy RUN [--head run|new|linear|FOLDER] [--batch 64 8 1]
        [--rollouts 3] [--rounds 5] [--tokens 256] [--contenders union eagle history again]

The requests are as in RL: groups of eight samples of a prompt of the run's task, at temperature 1.
A rollout has the number of requests that run at once, but at least eight. In each round all
contenders get new engines, with the selector and the plans of the default settings, and take turns
rollout by rollout. All contenders generate the same tokens, or the benchmark fails.

Prints the speed over plain decoding of each rollout, as median of the rounds with minimum and
maximum, and of all rollouts together. `again` is a second plain engine: its ratios show the noise.
`ready` is the union with a selector that never drafts: its ratios show the cost of readiness.
The last columns are means per round: the share of the contender's time in decode steps with drafts,
and tokens per verification.

`--head`: the run's head, one with random weights, one that starts as a linear predictor, or one in
a folder.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from slipstream.bench.flags import add_batches_flag, add_count_flag
from slipstream.bench.printing import progress
from slipstream.bench.speculation.trained import load_trained
from slipstream.bench.timing import ratio
from slipstream.build.data import make_task, make_tokenizer, validation_prompts
from slipstream.build.process import import_external
from slipstream.build.speculation import make_selector
from slipstream.checkpoint.layout import policy_folder
from slipstream.config.load import CONFIG_FILE, load_config
from slipstream.config.schema import Config
from slipstream.drafter.linear_start import start_linear
from slipstream.drafter.sequences import DraftSequence, VocabLayers, policy_features
from slipstream.drafter.vocabulary import TokenCounts, best_size
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.selector import PredefinedSelector
from slipstream.inference.speculation.union import UnionProposer
from slipstream.models.decoder import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.numerics import default_dtype
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

PLAIN, AGAIN, READY = "plain", "again", "ready"
SAMPLES = 8
_TAUGHT = 128
"""Responses to which a linear start is fitted."""

_LINEAR_PROMPTS = _TAUGHT // SAMPLES
"""Prompts of these responses. No rollout has them."""


@dataclass(slots=True)
class _Contender:
    """Seconds by rollout, then by round, and counters."""

    make: Callable[[], Engine]
    seconds: list[list[float]] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    yields: list[float] = field(default_factory=list)


class _Requests:
    """Rollouts of groups of samples."""

    def __init__(self, run: Path, tokens: int, prompts: int) -> None:
        """`prompts` is the number of prompts of all rollouts together."""
        config: Config = load_config(file=run / CONFIG_FILE, notify=lambda _: None)
        import_external(config)
        tokenizer = make_tokenizer(config, policy_folder(run))
        task = make_task(config, tokenizer)
        count = prompts + _LINEAR_PROMPTS
        found = validation_prompts(config, tokenizer, task, count=count)
        self._prompts: list[Sequence[int]] = [prompt.ids for prompt in found]
        self._params = SamplingParams(temperature=1.0, max_tokens=tokens)

    def rollout(self, number: int, running: int) -> list[list[GenerateRequest]]:
        """The batches of a rollout. Each begins when the one before it has ended."""
        total = max(running, SAMPLES)
        first = _LINEAR_PROMPTS + number * (total // SAMPLES)
        flat = self._samples(first, total, f"{number}")
        return [flat[start : start + running] for start in range(0, total, running)]

    def linear(self) -> list[GenerateRequest]:
        """The requests whose responses a linear start is fitted to."""
        return self._samples(0, _TAUGHT, "linear")

    def _samples(self, first: int, total: int, name: str) -> list[GenerateRequest]:
        """`total` requests for the prompts from `first` on."""
        return [
            GenerateRequest(
                request_id=f"{name}/{i}",
                prompt_ids=tuple(self._prompts[(first + i // SAMPLES) % len(self._prompts)]),
                params=self._params,
                key=NoiseKey(seed=1, namespace="bench", uid=f"{name}/{i}"),
            )
            for i in range(total)
        ]


def _head(
    name: str, run: Path, policy: Decoder, requests: _Requests, settings: EngineSettings
) -> DraftModel:
    if name == "run":
        return load_trained(run, most=1).head
    if name not in ("new", "linear"):
        return load_draft_head(Path(name), policy.config)
    if name == "new":
        head = DraftHead(policy.config)
        head.init_weights(0)
        return head
    asked = requests.linear()
    done = Engine(policy, settings).run(asked)
    counts = TokenCounts(policy.config.vocab_size)
    texts, masks = list[list[int]](), list[list[float]]()
    for request, answer in zip(asked, done, strict=True):
        counts.add(answer.token_ids)
        texts.append([*request.prompt_ids, *answer.token_ids])
        masks.append([0.0] * len(request.prompt_ids) + [1.0] * len(answer.token_ids))
    size = best_size([answer.token_ids for answer in done], policy.config)
    ends = policy.config.eos_token_ids
    head = DraftHead(
        policy.config, None if size is None else counts.most_frequent(size, always=ends)
    )
    head.init_weights(0)
    with torch.no_grad():
        features = policy_features(policy.pack(settings.dtype), texts)
    sequences = [
        DraftSequence(tokens=text, features_TF=states, loss_mask=mask)
        for text, states, mask in zip(texts, features, masks, strict=True)
    ]
    if not start_linear(head, sequences, VocabLayers.of(policy, settings.dtype)):
        raise SystemExit("too few responses for a linear start")
    return head


def _maker(
    name: str, policy: Decoder, settings: EngineSettings, head: DraftModel
) -> Callable[[], Engine]:
    def make() -> Engine:
        if name in (PLAIN, AGAIN):
            return Engine(policy, settings)
        proposer: Proposer = HistoryProposer()
        if name != "history":
            eagle = EagleProposer(head, dtype=settings.dtype)
            proposer = eagle if name == "eagle" else UnionProposer(eagle, HistoryProposer())
        selector = make_selector(Config())
        if name == READY:
            selector = PredefinedSelector(DraftPlan.chain(1), bs_threshold=0)
        return Engine(policy, settings, proposer=proposer, selector=selector)

    return make


def _round(
    contenders: dict[str, _Contender], rollouts: Sequence[Sequence[Sequence[GenerateRequest]]]
) -> None:
    engines = {name: contender.make() for name, contender in contenders.items()}
    gc.collect()
    for number, batches in enumerate(rollouts):
        written: dict[str, list[list[int]]] = {}
        order = list(contenders)
        for name in order if number % 2 == 0 else reversed(order):
            started = time.perf_counter()
            done = [g for batch in batches for g in engines[name].run(batch)]
            contenders[name].seconds[number].append(time.perf_counter() - started)
            written[name] = [g.token_ids for g in done]
        wrong = [name for name in order if written[name] != written[PLAIN]]
        if wrong:
            raise SystemExit(f"{wrong[0]} changed the tokens")
    for name, contender in contenders.items():
        stats = engines[name].stats()
        contender.drafting.append(stats.draft_seconds / stats.decode_seconds)
        contender.yields.append(1 + stats.accepted_tokens / max(stats.verifications, 1))


def main(given: argparse.Namespace) -> None:
    """Measure and print."""
    policy = load_checkpoint(policy_folder(given.policy))
    most = max(given.batch) // SAMPLES or 1
    requests = _Requests(given.policy, given.tokens, given.rollouts * most)
    settings = EngineSettings(dtype=default_dtype(policy.device), max_model_len=1024)
    head = _head(given.head, given.policy, policy, requests, settings)
    names = [PLAIN, *given.contenders]
    for running in given.batch:
        contenders = {
            name: _Contender(
                _maker(name, policy, settings, head), [[] for _ in range(given.rollouts)]
            )
            for name in names
        }
        rollouts = [requests.rollout(i, running) for i in range(given.rollouts)]
        if running == given.batch[0]:
            # Kernels are compiled or loaded from disk at their first calls.
            for contender in contenders.values():
                contender.make().run(rollouts[0][0])
        for number in range(given.rounds):
            turn = list(contenders)
            if number % 2:
                turn.reverse()
            _round({name: contenders[name] for name in turn}, rollouts)
            for name in names:
                last = " ".join(f"{seconds[-1]:.2f}" for seconds in contenders[name].seconds)
                progress(f"{running} running, round {number + 1}, {name}: {last} s")
        plain = contenders[PLAIN]
        means = [f"{median(seconds):.2f}" for seconds in plain.seconds]
        print(f"{running} running, plain: {' '.join(means)} s", flush=True)
        for name in names[1:]:
            found = contenders[name]
            parts = [
                ratio(above, below)
                for above, below in zip(plain.seconds, found.seconds, strict=True)
            ]
            sums = ([sum(of) for of in zip(*c.seconds, strict=True)] for c in (plain, found))
            whole = ratio(*sums)
            cells = " ".join(f"{p.median:.2f} [{p.min:.2f}..{p.max:.2f}]" for p in parts)
            print(
                f"  {name:<8} {cells}  all {whole.median:.3f} [{whole.min:.3f}..{whole.max:.3f}]"
                f"  drafting {median(found.drafting):.3f}, {median(found.yields):.2f} tokens",
                flush=True,
            )


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="RUN")
    parser.add_argument("--head", default="run", metavar="run|new|linear|FOLDER")
    parser.add_argument("--tokens", type=int, default=256, metavar="N")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=(AGAIN, READY, "union", "eagle", "history"),
        default=[AGAIN, "union", "eagle", "history"],
    )
    add_batches_flag(parser, (64, 32, 16, 8, 4, 1))
    add_count_flag(parser, "rollouts", 3)
    add_count_flag(parser, "rounds", 5)
    return parser.parse_args()


if __name__ == "__main__":
    main(_flags())
