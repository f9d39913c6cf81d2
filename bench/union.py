"""The union of a draft head and history, against each of them, where only history is good.

    python -m bench.union --policy FOLDER [--batch 1 4] [--rounds 3]

The policy repeats texts of the prompts, so history drafts well. The head is new, so nearly all of
its drafts are wrong. The union should be as fast as history alone. All contenders generate the same
tokens, or the benchmark fails. They are interleaved, each with a new engine in each round; prints
the median of the paired ratios to decoding without drafts, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

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
    def asks(self, drafts: int, requests: int, both: float, alone: float) -> bool:
        return True


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


def _requests(tokenizer: PreTrainedTokenizerBase) -> list[GenerateRequest]:
    found = []
    for number, text in enumerate(TEXTS):
        message = [{"role": "user", "content": f"Repeat this text word for word, twice: {text}"}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(str(prompt), add_special_tokens=False)["input_ids"]
        found.append(
            GenerateRequest(
                request_id=str(number),
                prompt_ids=tuple(ids),
                params=SamplingParams(temperature=0.0, max_tokens=64),
                key=NoiseKey(seed=1, namespace="bench", epoch=0, uid=str(number)),
            )
        )
    return found


def main(folder: Path, batches: Sequence[int], rounds: int) -> None:
    """Measure and print."""
    policy = load_checkpoint(folder)
    asked = _requests(AutoTokenizer.from_pretrained(folder))
    settings = EngineSettings(dtype=default_dtype(policy.device), max_model_len=1024)
    for batch in batches:
        seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        expected: list[list[int]] = []
        for number in range(1 + rounds):
            for name in CONTENDERS:
                engine, started = _engine(name, policy, settings), time.perf_counter()
                found = [
                    list(done.token_ids)
                    for start in range(0, len(asked), batch)
                    for done in engine.run(asked[start : start + batch])
                ]
                if number:  # the first round compiles kernels
                    seconds[name].append(time.perf_counter() - started)
                expected = expected or found
                if found != expected:
                    raise SystemExit(f"{name} changed the tokens")
        for name in CONTENDERS[1:]:
            pairs = zip(seconds["plain"], seconds[name], strict=True)
            ratios = [plain / own for plain, own in pairs]
            print(
                f"{batch} running, {name}: {median(ratios):.2f}x "
                f"[{min(ratios):.2f}..{max(ratios):.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    main(given.policy, given.batch, given.rounds)
