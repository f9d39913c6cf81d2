"""The text of a response, as reward functions get it."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.data.response_text import response_decoder
from slipstream.rewards.protocol import response_text
from slipstream.types import Sample, Segment, Status, StopReason
from tests.data.helpers import STYLES, byte_tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
ANSWER = "<think>b</think><answer>a</answer>"


def tokenizer() -> Any:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>", *TAGS]
    return byte_tokenizer(special, STYLES["chatml"], eos_token=special[0])


@pytest.mark.parametrize(
    ("generated", "text", "skipped"),
    [
        (f"{ANSWER}<|im_end|>", ANSWER, "ba"),
        (f"{ANSWER}<|endoftext|>", ANSWER, "ba"),
        (ANSWER, ANSWER, "ba"),
        ("a<|im_end|>b", "a<|im_end|>b", "ab"),
        ("<|im_end|>", "", ""),
        ("", "", ""),
    ],
)
def test_only_the_end_token_is_left_out(generated: str, text: str, skipped: str) -> None:
    own = tokenizer()
    ids = own(generated)["input_ids"]
    assert response_decoder(own)(ids) == text
    assert response_decoder(own, skip_special_tokens=True)(ids) == skipped


def test_the_end_tokens_of_the_policy_are_left_out() -> None:
    own = tokenizer()
    ids = own("a<|eom|>")["input_ids"]
    assert response_decoder(own)(ids) == "a<|eom|>"
    assert response_decoder(own, ends=[ids[-1]])(ids) == "a"


@pytest.mark.parametrize(
    ("reason", "text"),
    [(StopReason.EOS, "a"), (StopReason.LENGTH, "a<|eom|>"), (StopReason.STOP_TOKEN, "a<|eom|>")],
)
def test_the_token_that_ended_a_sample_is_left_out(reason: StopReason, text: str) -> None:
    own = tokenizer()
    ids = own("a<|eom|>")["input_ids"]
    sample = Sample(
        segments=[Segment.given("prompt", [1]), Segment.given("assistant", ids)],
        status=Status.COMPLETED,
        stop_reason=reason,
    )
    assert response_text(sample, response_decoder(own)) == text


def test_the_text_of_an_episode_covers_all_branches() -> None:
    def branch(text: str) -> Sample:
        ids = tokenizer()(text)["input_ids"]
        return Sample(segments=[Segment.given("prompt", [1]), Segment.given("assistant", ids)])

    sample = branch("cd<|im_end|>")
    sample.earlier, sample.stop_reason = [branch("ab<|im_end|>")], StopReason.EOS
    assert response_text(sample, tokenizer().decode) == "ab<|im_end|>cd"
