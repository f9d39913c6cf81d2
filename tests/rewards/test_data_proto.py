"""`DataProto` has the fields and methods that reward functions for verl use."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from slipstream.rewards.data_proto import DataProto, proto_of
from slipstream.types import Sample, Segment


def sample(prompt: list[int], answer: list[int], **extra: object) -> Sample:
    return Sample(
        prompt=f"{prompt}?",
        segments=[
            Segment.given("prompt", prompt),
            Segment(
                role="assistant",
                ids=answer,
                loss_mask=[1.0] * len(answer),
                log_probs=[-1.0] * len(answer),
                sampling_log_probs=[-1.0] * len(answer),
            ),
        ],
        uid=f"u{len(prompt)}",
        data_source="sums",
        ground_truth=sum(prompt),
        extra_info=extra,
    )


def test_proto_of_has_verls_fields() -> None:
    data = proto_of([sample([1, 2], [7, 8, 9], state="a"), sample([3], [4])], ["x", "y"])
    expected = {
        "prompts": [[1, 2], [0, 3]],
        "responses": [[7, 8, 9], [4, 0, 0]],
        "response_mask": [[1, 1, 1], [1, 0, 0]],
        "input_ids": [[1, 2, 7, 8, 9], [0, 3, 4, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4], [0, 0, 1, 1, 1]],
    }
    assert {k: v.tolist() for k, v in data.batch.items()} == expected
    assert len(data) == len(data.batch) == 2
    assert data.batch.batch_size == (2,)
    others = {k: list(v) for k, v in data.non_tensor_batch.items()}
    assert others == {
        "data_source": ["sums", "sums"],
        "reward_model": [
            {"ground_truth": 3, "style": "rule"},
            {"ground_truth": 3, "style": "rule"},
        ],
        "extra_info": [{"state": "a"}, {}],
        "uid": ["u2", "u1"],
        "raw_prompt": ["[1, 2]?", "[3]?"],
        "response_text": ["x", "y"],
        "state": ["a", None],
    }
    assert data.batch["state"][0] == "a"
    with pytest.raises(KeyError, match=r"'stat' is not a field of the batch .*responses.*state"):
        data.batch["stat"]


def test_tool_tokens_are_not_in_the_response_mask() -> None:
    one = sample([1], [2, 3])
    one.segments.append(Segment.given("tool", [4]))
    assert proto_of([one], [""]).batch["response_mask"].tolist() == [[1, 1, 0]]


def test_indexing_returns_rows_and_batches() -> None:
    data = proto_of([sample([1], [4], k=0), sample([2], [5], k=1), sample([3], [6], k=2)], "abc")
    row = data[-1]
    assert row.batch["responses"].tolist() == [6]
    assert row.non_tensor_batch["k"] == 2
    assert row.batch["k"] == 2
    assert [r.non_tensor_batch["response_text"] for r in data] == ["a", "b", "c"]
    assert data[1:].batch["responses"].tolist() == [[5], [6]]
    assert list(data[[2, 0]].non_tensor_batch["k"]) == [2, 0]
    assert list(data[np.array([True, False, True])].non_tensor_batch["k"]) == [0, 2]
    with pytest.raises(IndexError, match="row 3 of a batch of 3"):
        data[3]


def test_batches_can_be_pickled() -> None:
    data = pickle.loads(pickle.dumps(proto_of([sample([1], [4], k=[1, 2])], ["a"])))
    assert data.batch["responses"].tolist() == [[4]]
    assert data.batch["k"][0] == [1, 2]
    assert len(data.batch) == 1


def test_from_single_dict_separates_tensors() -> None:
    data = DataProto.from_single_dict({"x": torch.zeros(2, 3), "y": ["a", [1]]}, {"step": 4})
    assert list(data.batch) == ["x"]
    assert list(data.non_tensor_batch["y"]) == ["a", [1]]
    assert data.meta_info == {"step": 4}
    with pytest.raises(ValueError, match=r"differ in length: {'x': 2, 'y': 1}"):
        DataProto.from_single_dict({"x": torch.zeros(2), "y": ["a"]})
    assert len(DataProto()) == 0


def rows(*values: int, **fields: object) -> DataProto:
    return DataProto({"x": torch.tensor(values)}, {"name": [str(v) for v in values], **fields})


def test_splitting_selecting_reordering_and_renaming() -> None:
    data = rows(1, 2, 3, 4)
    assert [p.batch["x"].tolist() for p in data.chunk(2)] == [[1, 2], [3, 4]]
    assert [p.batch["x"].tolist() for p in data.split(3)] == [[1, 2, 3], [4]]
    with pytest.raises(ValueError, match="4 rows cannot be divided into 3 equal parts"):
        data.chunk(3)
    assert data.slice(1, 3).non_tensor_batch["name"].tolist() == ["2", "3"]
    assert data.select_idxs([3, 0]).batch["x"].tolist() == [4, 1]
    mask = torch.tensor([True, False, True, False])
    assert data.select_idxs(mask).non_tensor_batch["name"].tolist() == ["1", "3"]
    data.reorder(torch.tensor([3, 2, 1, 0]))
    assert data.batch["x"].tolist() == [4, 3, 2, 1]
    assert data.batch["name"].tolist() == ["4", "3", "2", "1"]
    assert data.rename("x", "y").batch["y"].tolist() == [4, 3, 2, 1]
    assert "x" not in data.batch


def test_mini_batches_contain_every_row_once_per_epoch() -> None:
    batches = list(rows(1, 2, 3, 4).make_iterator(2, epochs=2, seed=1))
    assert [len(batch) for batch in batches] == [2] * 4
    for epoch in (batches[:2], batches[2:]):
        assert sorted(x for batch in epoch for x in batch.batch["x"].tolist()) == [1, 2, 3, 4]
    again = list(rows(1, 2, 3, 4).make_iterator(2, epochs=2, seed=1))
    assert [b.batch["x"].tolist() for b in again] == [b.batch["x"].tolist() for b in batches]
    with pytest.raises(ValueError, match="4 rows do not fill mini-batches of 3"):
        list(rows(1, 2, 3, 4).make_iterator(3, epochs=1))


def test_concat_repeat_pop_and_select() -> None:
    both = DataProto.concat([rows(1), rows(2, 3)])
    assert both.batch["x"].tolist() == [1, 2, 3]
    assert both.non_tensor_batch["name"].tolist() == ["1", "2", "3"]
    with pytest.raises(ValueError, match="batches differ in their fields: y"):
        DataProto.concat([rows(1), rows(2, y=[1])])
    assert both.repeat(2).batch["x"].tolist() == [1, 1, 2, 2, 3, 3]
    assert both.repeat(2, interleave=False).batch["name"].tolist() == ["1", "2", "3"] * 2
    popped = both.pop(batch_keys=["x"])
    assert popped.batch["x"].tolist() == [1, 2, 3]
    assert (list(both.batch), list(popped.non_tensor_batch)) == ([], [])
    assert both.select(non_tensor_batch_keys=["name"]).batch["name"][2] == "3"


def test_union_accepts_equal_fields_of_any_type() -> None:
    nan = float("nan")
    states = [np.array([1, 2]), torch.tensor([3.0]), [nan, {"a": 1}]]
    again = [np.array([1, 2]), torch.tensor([3.0]), states[2]]
    data = rows(1, 2, 3, state=states)
    assert data.union(rows(1, 2, 3, state=again, score=[nan, 1.0, 2.0])) is data
    assert data.union(rows(1, 2, 3, score=[float("nan"), 1.0, 2.0])).batch["score"][1] == 1.0
    with pytest.raises(ValueError, match="both batches have a field 'state'"):
        data.union(rows(1, 2, 3, state=[np.array([1, 3]), *states[1:]]))


def test_batch_fields_are_found_and_their_length_is_checked() -> None:
    data = rows(1, 2, state=["a", "b"])
    assert "state" in data.batch
    assert data.batch.get("state").tolist() == ["a", "b"]
    assert data.batch.get("other") is None
    assert "other" not in data.batch
    with pytest.raises(ValueError, match="'y' has 3 rows"):
        data.batch["y"] = torch.zeros(3)
    empty = DataProto()
    empty.batch["x"] = torch.zeros(3)
    assert len(empty) == 3
