"""How many tokens drafts from history yield, by replaying recorded rollouts of a run.

    python -m bench.history --policy FOLDER --rollouts RUN/rollouts/1.jsonl ... [--batch 64 8 1]

Replays each file as one rollout, `--batch` responses at a time, one token per step. At each token
it asks for a chain of five drafts, and compares it with the recorded response. Prints the share of
tokens at which history has a draft, and means per token: drafts, accepted drafts, and accepted
ones of all drafts. Takes no model, and measures no time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from transformers import AutoTokenizer

from slipstream.bench.flags import add_batches_flag
from slipstream.inference.speculation.history import HistoryProposer

DRAFTS = 5

Sample = tuple[list[int], list[int]]
"""Prompt and response."""


def replay(rollouts: Sequence[Sequence[Sample]], running: int) -> tuple[int, int, int, int]:
    """Number of tokens, of tokens with drafts, of drafts, and of accepted drafts."""
    history = HistoryProposer()
    tokens = found = drafted = accepted = 0
    for rollout in rollouts:
        for start in range(0, len(rollout), running):
            batch = dict(enumerate(rollout[start : start + running]))
            for name, (prompt, _) in batch.items():
                history.begin(str(name), prompt, prompt, None)
            for step in range(max(len(response) for _, response in batch.values())):
                batch = {n: sample for n, sample in batch.items() if step < len(sample[1])}
                for name, (_, response) in batch.items():
                    drafts = history.drafts(str(name), DRAFTS)
                    pairs = zip(drafts, response[step:], strict=False)
                    tokens += 1
                    found += bool(drafts)
                    drafted += len(drafts)
                    accepted += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                names = list(map(str, batch))
                history.observe(names, [[r[step]] for _, r in batch.values()], None)
                for name, (_, response) in batch.items():
                    if step + 1 == len(response):
                        history.end(str(name))
    return tokens, found, drafted, accepted


def main(given: argparse.Namespace) -> None:
    """Replay and print."""
    tokenizer = AutoTokenizer.from_pretrained(given.policy)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    lines = [path.read_text(encoding="utf-8").splitlines() for path in given.rollouts]
    rows = [[json.loads(line) for line in file] for file in lines]
    rollouts = [[(ids(row["input"]), ids(row["output"])) for row in file] for file in rows]
    for running in given.batch:
        tokens, found, drafted, accepted = replay(rollouts, running)
        print(
            f"{running} running, {tokens} tokens: {found / tokens:.2f} with drafts, "
            f"{drafted / tokens:.2f} drafts and {accepted / tokens:.2f} accepted per token, "
            f"{accepted / max(drafted, 1):.2f} of the drafts accepted"
        )


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--rollouts", type=Path, required=True, nargs="+", metavar="FILE")
    add_batches_flag(parser, (64, 8, 1))
    return parser.parse_args()


if __name__ == "__main__":
    main(_flags())
