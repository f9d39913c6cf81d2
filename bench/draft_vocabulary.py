"""The draft vocabulary of an EAGLE head: coverage, speed of drafting, and speed of training.

    python -m bench.draft_vocabulary --policy FOLDER [--batch 1 8] [--rounds 5]

The policy answers short questions at temperature 1. Prints, for all tokens and for several sizes:
the share of tokens of half of the responses that the most frequent tokens of the other half cover;
milliseconds of a decode step with four drafts by a new head, beside a step without drafts; and
tokens per second of head training. All engines generate the same tokens, or the benchmark fails.
Contenders are interleaved; times are medians.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.chat_requests import chat_prompts, flags_of, requests_for
from slipstream.bench.timing import alternate
from slipstream.drafter.sequences import DraftSequence, VocabLayers, policy_features
from slipstream.drafter.trainer import DraftTrainer, DraftTrainSettings
from slipstream.drafter.vocabulary import SIZES, TokenCounts, best_size
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.selector import PredefinedSelector
from slipstream.models.decoder import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.numerics import default_dtype
from slipstream.training.optim import OptimSettings
from slipstream.types import SamplingParams

SUBJECTS = (
    *("rivers", "music", "Python", "tigers", "bread", "history", "space", "trains", "gold"),
    *("rain", "love", "chess", "mountains", "robots", "tea", "plants", "cities", "paint"),
    *("whales", "football", "money", "sleep", "windows", "bridges", "fire", "glass", "salt"),
    *("oceans", "bees", "cars", "books", "birds"),
)
RESPONSES, LENGTH = 256, 200
STEP_TOKENS = 32
TRAIN_SEQUENCES, TRAIN_STEPS = 32, 4
PLAN = DraftPlan.chain(4)


def main(policy: Path, batches: Sequence[int], rounds: int) -> None:
    """Measure and print."""
    decoder = load_checkpoint(policy)
    asked = chat_prompts(policy, [f"Tell me about {subject}." for subject in SUBJECTS])
    dtype, vocab_size = default_dtype(decoder.device), decoder.config.vocab_size
    settings = EngineSettings(dtype=dtype, max_num_seqs=64, max_model_len=512)
    done = Engine(decoder, settings).run(requests_for(asked, RESPONSES, _params(LENGTH)))
    answers = [list(each.token_ids) for each in done]
    counts, halves = TokenCounts(vocab_size), (TokenCounts(vocab_size), TokenCounts(vocab_size))
    for number, answer in enumerate(answers):
        counts.add(answer)
        halves[number % 2].add(answer)
    sizes = [size for size in SIZES if size < vocab_size]
    print(
        f"{sum(map(len, answers)):,} tokens of {vocab_size:,}, "
        f"{int((counts.counts > 0).sum()):,} different; chosen size: "
        f"{best_size(answers, decoder.config) or 'all'}"
    )
    covered = {size: halves[1].coverage(halves[0].most_frequent(size)) for size in sizes}
    ends = decoder.config.eos_token_ids
    heads = {
        size: DraftHead(
            decoder.config, None if size is None else counts.most_frequent(size, always=ends)
        )
        for size in (None, *sizes)
    }
    for head in heads.values():
        head.init_weights(0)
    speeds = _training_speeds(decoder, heads, asked, answers, dtype)
    steps = {
        batch: _step_times(decoder, heads, settings, asked, batch, rounds) for batch in batches
    }
    for batch, times in steps.items():
        print(f"a step without drafts, batch {batch}: {1e3 * times[-1]:.2f} ms")
    for size in heads:
        shown = ", ".join(f"batch {batch}: {1e3 * t[size]:.2f} ms" for batch, t in steps.items())
        print(
            f"{size or 'all':>6} tokens: coverage {covered.get(size or 0, 1.0):.3f}; a step with "
            f"four drafts, {shown}; training {speeds[size]:,.0f} tokens/s"
        )


def _step_times(
    decoder: Decoder,
    heads: dict[int | None, DraftHead],
    settings: EngineSettings,
    asked: Sequence[list[int]],
    batch: int,
    rounds: int,
) -> dict[int | None, float]:
    """Median seconds of a decode step for each head; key -1: without drafts."""
    engines: dict[int | None, Engine] = {-1: Engine(decoder, settings)}
    for size, head in heads.items():
        engines[size] = Engine(
            decoder,
            settings,
            proposer=EagleProposer(head, dtype=settings.dtype),
            selector=PredefinedSelector(PLAN),
        )
    expected: list[list[int]] = []
    steps: dict[str, list[int]] = {str(size): [] for size in engines}

    def run(size: int | None, engine: Engine) -> None:
        before = engine.stats().decode_steps
        done = engine.run(requests_for(asked, batch, _params(STEP_TOKENS)))
        found = [list(g.token_ids) for g in done]
        expected.extend(found if not expected else ())
        if found != expected:
            raise SystemExit(f"a draft vocabulary of {size} changed the tokens")
        steps[str(size)].append(engine.stats().decode_steps - before)

    times = alternate({str(s): partial(run, s, e) for s, e in engines.items()}, rounds=rounds)
    # All rounds of an engine have the same number of steps.
    return {size: median(times[str(size)].wall) / steps[str(size)][-1] for size in engines}


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens)


def _training_speeds(
    decoder: Decoder,
    heads: dict[int | None, DraftHead],
    asked: Sequence[list[int]],
    answers: Sequence[list[int]],
    dtype: torch.dtype,
) -> dict[int | None, float]:
    """Median tokens per second of training a copy of each head."""
    pairs = [(asked[i % len(asked)], answers[i]) for i in range(TRAIN_SEQUENCES)]
    with torch.no_grad():
        packed = decoder.pack(dtype)
    features = policy_features(packed, [prompt + answer for prompt, answer in pairs])
    sequences = [
        DraftSequence(
            tokens=prompt + answer,
            features_TF=rows,
            loss_mask=[0.0] * len(prompt) + [1.0] * len(answer),
        )
        for (prompt, answer), rows in zip(pairs, features, strict=True)
    ]
    vocab = VocabLayers.of(decoder, dtype)
    optim = OptimSettings(lr=1e-3, optimizer="Muon", muon_lr=0.05, total_steps=100)
    speeds: dict[int | None, float] = {}
    for size, head in heads.items():
        own = head.blank()
        own.load_state_dict(head.state_dict())
        trainer = DraftTrainer(
            own, DraftTrainSettings(optim=optim, compute_dtype=dtype, soft_weight=0.5)
        )
        steps = trainer.train([sequences] * (1 + TRAIN_STEPS), vocab)
        speeds[size] = median(step["draft/tokens_per_second"] for step in steps[1:])
    return speeds


if __name__ == "__main__":
    given = flags_of(__doc__, batches=(1, 8), rounds=5)
    main(given.policy, given.batch, given.rounds)
