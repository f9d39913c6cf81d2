"""Chat requests to a pretrained policy, and the flags of the benchmarks that send them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from slipstream.bench.flags import add_batches_flag, add_count_flag
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams


def chat_prompts(folder: Path, messages: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each message as a user's only turn, by the policy's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for message in messages:
        turn = [{"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        found.append(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    return found


def requests_for(
    prompts: Sequence[Sequence[int]], count: int, params: SamplingParams
) -> list[GenerateRequest]:
    """Return `count` requests, which take turns through the prompts."""
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=tuple(prompts[i % len(prompts)]),
            params=params,
            key=NoiseKey(seed=1, namespace="bench", epoch=0, uid=str(i)),
        )
        for i in range(count)
    ]


def flags_of(doc: str | None, *, batches: Sequence[int], rounds: int) -> argparse.Namespace:
    """Parse `--policy`, `--batch` and `--rounds` of a module with the docstring `doc`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="FOLDER")
    add_batches_flag(parser, batches)
    add_count_flag(parser, "rounds", rounds)
    return parser.parse_args()
