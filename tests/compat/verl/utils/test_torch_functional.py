"""verl's tensor helpers, with values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.compat.verl.utils import torch_functional as verl_F
from slipstream.compat.verl.utils.model import compute_position_id_with_mask
from tests.data.helpers import char_tokenizer, ids

VALUES = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 6.0, 8.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])


def test_masked_statistics() -> None:
    assert verl_F.masked_sum(VALUES, MASK).item() == 17.0
    assert verl_F.masked_sum(VALUES, MASK, axis=-1).tolist() == [3.0, 14.0]
    assert verl_F.masked_mean(VALUES, MASK).item() == pytest.approx(17 / 4)
    assert verl_F.masked_mean(VALUES, MASK, axis=1).tolist() == pytest.approx([1.5, 7.0])
    assert verl_F.masked_mean(VALUES, MASK, axis=(0, 1)).item() == pytest.approx(17 / 4)
    assert verl_F.masked_mean(VALUES, 0 * MASK).item() == 0.0
    values = torch.tensor([1.0, 3.0, 100.0])
    mask = torch.tensor([1, 1, 0])
    assert verl_F.masked_var(values, mask).item() == pytest.approx(2.0)
    assert verl_F.masked_var(values, mask, unbiased=False).item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="needs at least 2 values, but the mask has 1"):
        verl_F.masked_var(values, torch.tensor([1, 0, 0]))
    whitened = verl_F.masked_whiten(values, mask)
    assert whitened.tolist()[:2] == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])
    kept = verl_F.masked_whiten(values, mask, shift_mean=False)
    assert kept.tolist()[:2] == pytest.approx([2 - 1 / math.sqrt(2), 2 + 1 / math.sqrt(2)])


def test_log_probs_and_entropies() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [2.0, 2.0]]])
    labels = torch.tensor([[1, 0]])
    expected = [math.log(0.75), math.log(0.5)]
    for function in (verl_F.logprobs_from_logits, verl_F.logprobs_from_logits_naive):
        assert function(logits, labels).tolist() == [pytest.approx(expected)]
    entropy = [-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)]
    assert verl_F.entropy_from_logits(logits).tolist() == [pytest.approx(entropy)]
    chunked = verl_F.entropy_from_logits_with_chunking(logits[0], chunk_size=1)
    assert chunked.tolist() == pytest.approx(entropy)
    impossible = torch.tensor([0.0, -torch.inf])
    assert verl_F.entropy_from_logits(impossible).item() == 0.0
    squares = verl_F.calculate_sum_pi_squared_from_logits(logits)
    assert squares.tolist() == [pytest.approx([0.0625 + 0.5625, 0.5])]
    assert verl_F.gather_from_labels(logits, labels).tolist() == [
        pytest.approx([math.log(3.0), 2.0])
    ]


def test_log_probs_of_the_response_are_those_of_the_previous_positions() -> None:
    input_ids = torch.tensor([[7, 1, 0]])
    logits = torch.zeros(1, 3, 2)
    logits[0, 0, 1] = math.log(3.0)
    found = verl_F.log_probs_from_logits_response(input_ids, logits, 2)
    assert found.tolist() == [pytest.approx([math.log(0.75), math.log(0.5)])]


def test_clip_by_value() -> None:
    x, low, high = (torch.tensor(v) for v in ([0.0, 5.0, 2.0], [1.0, 1.0, 1.0], [3.0, 3.0, 3.0]))
    assert verl_F.clip_by_value(x, low, high).tolist() == [1.0, 3.0, 2.0]


# The examples of verl's documentation.
RESPONSES = torch.tensor(
    [
        [20, 10, 34, 1, 0, 0, 0],
        [78, 0, 76, 2, 1, 0, 0],
        [23, 98, 1, 0, 0, 0, 0],
        [33, 3, 98, 45, 1, 0, 0],
    ]
)


def test_response_masks_end_at_the_first_end_token() -> None:
    assert verl_F.get_response_mask(RESPONSES, 1).sum(1).tolist() == [4, 5, 3, 5]
    both = verl_F.get_response_mask(RESPONSES, [1, 2], dtype=torch.bool)
    assert both.sum(1).tolist() == [4, 4, 3, 5]
    assert both[0].tolist() == [True] * 4 + [False] * 3
    assert verl_F.get_response_mask(RESPONSES, 99).all()


def test_padding() -> None:
    assert verl_F.pad_2d_list_to_length([[1, 2], [3]], 9).tolist() == [[1, 2], [3, 9]]
    assert verl_F.pad_2d_list_to_length([[1], []], 9, max_length=3).tolist() == [
        [1, 9, 9],
        [9, 9, 9],
    ]
    rows = torch.tensor([[1, 2]])
    assert verl_F.pad_sequence_to_length(rows, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert verl_F.pad_sequence_to_length(rows, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert verl_F.pad_sequence_to_length(rows, 1, 9) is rows


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])],
)
def test_truncation(truncation: str, expected: list[int]) -> None:
    values = torch.tensor([[1, 2, 3, 4, 5]])
    found, mask = verl_F.postprocess_data(values, values > 1, 3, 0, truncation=truncation)  # type: ignore[arg-type]
    assert found.tolist() == [expected]
    assert mask.tolist() == [[value > 1 for value in expected]]


def test_short_and_overlong_ids() -> None:
    values, ones = torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    found, mask = verl_F.postprocess_data(values, ones, 4, 9)
    assert (found.tolist(), mask.tolist()) == ([[9, 9, 1, 2]], [[0, 0, 1, 1]])
    found, mask = verl_F.postprocess_data(values, ones, 4, 9, left_pad=False)
    assert (found.tolist(), mask.tolist()) == ([[1, 2, 9, 9]], [[1, 1, 0, 0]])
    assert verl_F.remove_pad_token(found, mask) == [[1, 2]]
    with pytest.raises(ValueError, match="2 tokens are more than max_length=1; set truncation"):
        verl_F.postprocess_data(values, ones, 1, 9)
    with pytest.raises(ValueError, match="truncation='end' is unknown"):
        verl_F.postprocess_data(values, ones, 4, 9, truncation="end")  # type: ignore[arg-type]


def test_texts_are_tokenized_and_padded() -> None:
    found, mask = verl_F.tokenize_and_postprocess_data("ab", char_tokenizer(), 3, 5)
    assert found.tolist() == [[5, *ids("ab")]]
    assert mask.tolist() == [[0, 1, 1]]


def test_positions_start_at_the_first_token() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]
