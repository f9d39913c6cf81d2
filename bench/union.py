"""The union of a draft head and history, against each of them, where only history is good.

    python -m bench.union --policy FOLDER [--batch 1 4] [--rounds 3]

The policy repeats texts of the prompts, so history drafts well. The head is new, so nearly all of
its drafts are wrong. The union should be as fast as history alone. All contenders generate the same
tokens, or the benchmark fails. They are interleaved, each with a new engine in each round; prints
the median of the paired ratios to decoding without drafts, with minimum and maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.chat_requests import chat_prompts, flags_of, requests_for
from slipstream.bench.timing import alternate, ratio
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.history import HistoryProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.selector import PredefinedSelector
from slipstream.inference.speculation.union import HeadTime, UnionProposer
from slipstream.models.decoder import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.numerics import default_dtype
from slipstream.types import SamplingParams

TEXTS = (
    "A river carries sand and stones from the mountains to the sea, and builds new land there.",
    "The baker mixes flour, water, salt and yeast, waits for two hours, and heats the oven.",
    "In winter the lake freezes, and children walk over the ice to the school on the other side.",
    "A lighthouse keeper writes down the wind, the clouds and the ships of each day in a book.",
    "Bees visit thousands of flowers for a spoon of honey, and tell the others where they were.",
    "The train leaves at seven, crosses the bridge, and stops in three villages before noon.",
    "Glass is made of sand, soda and lime, which melt together in a furnace at great heat.",
    "An old map shows a road through the forest that nobody has used for a hundred years.",
)
CONTENDERS = ("plain", "history", "head", "union, head in every step", "union")
PLAN = DraftPlan.chain(5)


class _Always(HeadTime):
    def drafts(self, most: int, requests: int, compared: float, both: float, alone: float) -> int:
        return most


def _engine(name: str, policy: Decoder, settings: EngineSettings) -> Engine:
    if name == "plain":
        return Engine(policy, settings)

    def head() -> EagleProposer:
        model = DraftHead(policy.config)
        model.init_weights(0)
        return EagleProposer(model, dtype=settings.dtype)

    proposer: Proposer
    if name == "history":
        proposer = HistoryProposer()
    elif name == "head":
        proposer = head()
    else:
        proposer = UnionProposer(
            head(), HistoryProposer(), HeadTime() if name == "union" else _Always()
        )
    return Engine(policy, settings, proposer=proposer, selector=PredefinedSelector(PLAN))


def main(folder: Path, batches: Sequence[int], rounds: int) -> None:
    """Measure and print."""
    policy = load_checkpoint(folder)
    prompts = chat_prompts(folder, [f"Repeat this text word for word, twice: {t}" for t in TEXTS])
    asked = requests_for(prompts, len(prompts), SamplingParams(temperature=0.0, max_tokens=64))
    settings = EngineSettings(dtype=default_dtype(policy.device), max_model_len=1024)
    expected: list[list[int]] = []

    def run(name: str, batch: int) -> None:
        engine = _engine(name, policy, settings)
        found = [
            list(done.token_ids)
            for start in range(0, len(asked), batch)
            for done in engine.run(asked[start : start + batch])
        ]
        expected.extend(found if not expected else ())
        if found != expected:
            raise SystemExit(f"{name} changed the tokens")

    for batch in batches:
        times = alternate({name: partial(run, name, batch) for name in CONTENDERS}, rounds=rounds)
        for name in CONTENDERS[1:]:
            gain = ratio(times["plain"].wall, times[name].wall)
            print(
                f"{batch} running, {name}: {gain.median:.2f}x [{gain.min:.2f}..{gain.max:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    given = flags_of(__doc__, batches=(1, 4), rounds=3)
    main(given.policy, given.batch, given.rounds)
