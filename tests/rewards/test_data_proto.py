"""`DataProto` has the fields and methods that reward functions for verl use."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.rewards.data_proto import DataProto, DataProtoConfig, DataProtoItem, proto_of
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


def rows(*values: int, meta_info: Mapping[str, Any] | None = None, **fields: object) -> DataProto:
    names = [str(v) for v in values]
    return DataProto({"x": torch.tensor(values)}, {"name": names, **fields}, meta_info)


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


def test_mini_batches_are_in_order_unless_the_loader_shuffles() -> None:
    data = rows(1, 2, 3, 4, meta_info={"step": 1})
    batches = list(data.make_iterator(2, epochs=2, seed=1))
    assert [b.batch["x"].tolist() for b in batches] == [[1, 2], [3, 4]] * 2
    assert [b.non_tensor_batch["name"].tolist() for b in batches] == [["1", "2"], ["3", "4"]] * 2
    assert [b.meta_info for b in batches] == [{"step": 1}] * 4
    with pytest.raises(ValueError, match="4 rows do not fill mini-batches of 3"):
        data.make_iterator(3, epochs=1)


def test_shuffled_mini_batches_have_the_order_of_torchs_loader() -> None:
    numbers = list(range(8))
    shuffled = rows(*numbers).make_iterator(4, 2, seed=3, dataloader_kwargs={"shuffle": True})
    drawn = [batch.batch["x"].tolist() for batch in shuffled]
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        numbers,  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )
    assert drawn == [batch.tolist() for _ in range(2) for batch in loader]
    assert sorted(drawn[0] + drawn[1]) == sorted(drawn[2] + drawn[3]) == numbers
    assert drawn[:2] != drawn[2:]


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


@pytest.mark.parametrize("method", ["update", "setdefault", "__setitem__"])
def test_each_way_to_add_tensors_checks_their_length(method: str) -> None:
    def add(data: DataProto, key: str, value: torch.Tensor) -> None:
        getattr(data.batch, method)(*([{key: value}] if method == "update" else [key, value]))

    data = DataProto()
    add(data, "x", torch.zeros(3))
    assert (len(data), data.batch["x"].shape) == (3, (3,))
    for filled in (data, DataProto({"none": torch.zeros(0, 2)})):
        with pytest.raises(ValueError, match=f"'y' has 2 rows, but the batch has {len(filled)}"):
            add(filled, "y", torch.zeros(2))
        assert "y" not in filled.batch
    row = data[0]
    add(row, "y", torch.zeros(2))
    add(row, "z", torch.tensor(1.5))
    assert (row.batch["y"].tolist(), row.batch["z"].item()) == ([0.0, 0.0], 1.5)


def test_default_is_set_only_for_missing_fields() -> None:
    data = rows(1, 2, state=["a", "b"])
    assert data.batch.setdefault("x", torch.zeros(2)).tolist() == [1, 2]
    assert data.batch.setdefault("state", torch.zeros(2)).tolist() == ["a", "b"]
    assert data.batch.setdefault("new", torch.ones(2)) is data.batch["new"]


def test_a_row_of_tensors_is_indexed_by_name() -> None:
    data = rows(1, 2)
    for row in (data[0].batch, data.batch[0]):
        assert row.batch_size == torch.Size([])
        with pytest.raises(IndexError, match="a field's name, got 0"):
            row[0]


def meta(*infos: dict[str, Any]) -> dict[str, Any]:
    return DataProto.concat([rows(i, meta_info=info) for i, info in enumerate(infos)]).meta_info


def test_concat_merges_meta_info() -> None:
    assert meta({"step": 1}, {"seed": 2}, {"step": 1}) == {"step": 1, "seed": 2}
    assert meta({"t": torch.ones(2)}, {"t": torch.ones(2)})["t"].tolist() == [1.0, 1.0]
    nested = {"a": [np.array([1.0, float("nan")]), {"b": (1, 2)}]}
    assert meta({"n": nested}, {"n": {"a": [np.array([1.0, float("nan")]), {"b": (1, 2)}]}})
    assert meta({"step": None}, {}) == {"step": None}


@pytest.mark.parametrize(
    ("one", "two"),
    [(1, 2), (None, 1), (torch.ones(2), torch.zeros(2)), ([1], [1, 2]), ({"a": 1}, {"b": 1})],
)
def test_concat_and_union_refuse_different_values_in_meta_info(one: Any, two: Any) -> None:
    first, second = rows(1, meta_info={"key": one}), rows(1, meta_info={"key": two})
    with pytest.raises(ValueError, match="different values for meta_info\\['key'\\]"):
        DataProto.concat([first, second])
    with pytest.raises(ValueError, match="have meta_info 'key', but its values differ"):
        first.union(second)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([{"loss": 1.0}, {"loss": 2.0}], {"loss": [1.0, 2.0]}),
        ([[{"loss": 1.0}, {"loss": 2.0}], [{"loss": 3.0}]], {"loss": [1.0, 2.0, 3.0]}),
        ([{"loss": 1.0, "kl": 5}, {"loss": 2.0}], {"loss": [1.0, 2.0], "kl": [5]}),
        ([{"loss": [1.0]}, {"loss": [2.0]}], {"loss": [[1.0], [2.0]]}),
        ([None, {"loss": 2.0}], {"loss": [2.0]}),
        ([{"loss": 1.0}], {"loss": [1.0]}),
    ],
)
def test_concat_collects_metrics_in_lists(metrics: list[Any], expected: dict[str, Any]) -> None:
    assert meta(*({"metrics": one} for one in metrics)) == {"metrics": expected}


def test_concat_refuses_metrics_that_the_first_part_lacks() -> None:
    with pytest.raises(ValueError, match="'kl' is not in the first of 2 mappings"):
        meta({"metrics": {"loss": 1.0}}, {"metrics": {"loss": 2.0, "kl": 5}})
    with pytest.raises(ValueError, match="metrics must be mappings, got float"):
        meta({"metrics": [1.0]})


def test_pop_and_select_take_none_and_strings_of_tensors() -> None:
    data = rows(1, 2, meta_info={"step": 3, "seed": 4})
    nothing = data.pop()
    assert (list(nothing.batch), list(nothing.non_tensor_batch), nothing.meta_info) == ([], [], {})
    popped = data.pop(None, ["name"], ["step"])
    assert popped.non_tensor_batch["name"].tolist() == ["1", "2"]
    assert (popped.meta_info, data.meta_info) == ({"step": 3}, {"seed": 4})
    assert (list(data.batch), list(data.non_tensor_batch)) == (["x"], [])
    with pytest.raises(KeyError, match="name"):
        data.pop(["x"], ["name"])
    assert list(data.batch) == ["x"]


def test_select_leaves_out_missing_non_tensors_and_copies_on_demand() -> None:
    data = rows(1, state=[{"a": [1]}], meta_info={"seen": [1]})
    some = data.select(["x"], ["state", "absent"], ["absent"])
    assert (list(some.non_tensor_batch), some.meta_info) == (["state"], {})
    with pytest.raises(KeyError, match="'state' is not a tensor of the batch"):
        data.select(["state"])
    copied, shared = data.select(deepcopy=True), data.select()
    data.non_tensor_batch["state"][0]["a"].append(2)
    data.meta_info["seen"].append(2)
    assert (copied.batch["state"][0], copied.meta_info) == ({"a": [1]}, {"seen": [1]})
    assert (shared.batch["state"][0], shared.meta_info) == ({"a": [1, 2]}, {"seen": [1, 2]})


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (slice(1, None), [1, 2, 3, 4]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(None, None, -2), [4, 2, 0]),
        (slice(-2, None), [3, 4]),
        (slice(7, 9), []),
        ([3, 0, 3], [3, 0, 3]),
        ([-1], [4]),
        ([], []),
        ([True, False, False, True, False], [0, 3]),
        (np.array([2, 1]), [2, 1]),
        (np.array([False] * 5), []),
        (torch.tensor([4, 0]), [4, 0]),
        (torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool), [1, 4]),
        (torch.tensor([1], dtype=torch.int32), [1]),
    ],
    ids=str,
)
def test_all_forms_of_an_index_select_rows_of_tensors_and_others(
    place: Any, expected: list[int]
) -> None:
    data = rows(0, 1, 2, 3, 4, meta_info={"step": 1})
    chosen = data[place]
    assert chosen.batch["x"].tolist() == expected
    assert chosen.non_tensor_batch["name"].tolist() == [str(i) for i in expected]
    assert (len(chosen), chosen.meta_info) == (len(expected), {"step": 1})
    assert data.batch[place]["x"].tolist() == expected
    assert len(data.batch[place]) == len(expected)


def test_invalid_indices_are_refused() -> None:
    data = rows(0, 1, 2)
    for place in ("x", None, 1.0, (0, 1)):
        with pytest.raises(TypeError, match="a batch is indexed by a row number"):
            data[place]
    with pytest.raises(TypeError, match=r"shape \(1, 2\)"):
        data[[[0, 1]]]
    with pytest.raises(IndexError, match="mask of 2 entries for a batch of 3 rows"):
        data[[True, False]]
    with pytest.raises(IndexError, match="5 is out of bounds"):
        data[[5]]


def test_rows_are_items_with_all_parts() -> None:
    row = rows(4, 5, meta_info={"step": 1})[np.int64(1)]
    assert isinstance(row, DataProtoItem)
    assert (row.batch["x"].item(), row.non_tensor_batch, row.meta_info) == (
        5,
        {"name": "5"},
        {"step": 1},
    )
    empty = DataProtoItem()
    assert (dict(empty.batch), empty.non_tensor_batch, empty.meta_info) == ({}, {}, {})


def test_number_arrays_keep_type_and_dimensions() -> None:
    scores = np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32)
    data = DataProto.from_dict(non_tensors={"score": scores})
    assert data.non_tensor_batch["score"].dtype == np.float32
    assert data[1:].non_tensor_batch["score"].tolist() == [[3.0, 4.0]]
    assert data.repeat(2).non_tensor_batch["score"].shape == (4, 2)
    nan = np.array([[1.0, float("nan")]], dtype=np.float32)
    assert DataProto.from_dict(non_tensors={"s": nan}).union(
        DataProto.from_dict(non_tensors={"s": nan.copy()})
    )


def test_padding_settings() -> None:
    plain = DataProto.from_dict({"x": torch.arange(5)}, num_batch_dims=1)
    padded = DataProto.from_single_dict({"x": torch.arange(5)}, auto_padding=True)
    assert (plain.is_padding_enabled(), padded.is_padding_enabled()) == (False, True)
    assert [p.batch["x"].tolist() for p in padded.chunk(3)] == [[0, 1], [2, 3], [4]]
    assert all(part.is_padding_enabled() for part in padded.chunk(3))
    with pytest.raises(ValueError, match="5 rows make 3 parts of 2, not 4; pad them"):
        padded.chunk(4)
    with pytest.raises(ValueError, match="5 rows cannot be divided into 3 equal parts; pad them"):
        plain.chunk(3)
    with pytest.raises(ValueError, match="num_batch_dims=2 is not supported"):
        DataProto.from_dict({"x": torch.zeros(2, 2)}, num_batch_dims=2)
    assert [len(part) for part in DataProto().chunk(2)] == [0, 0]


def test_auto_padding_of_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(1, 2, 3)
    monkeypatch.setenv("VERL_AUTO_PADDING", "true")
    assert data.is_padding_enabled()
    monkeypatch.delenv("VERL_AUTO_PADDING")
    assert not data.is_padding_enabled()
    DataProtoConfig.auto_padding = True
    try:
        assert data.is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False


def test_padding_appends_the_first_or_the_last_row() -> None:
    data = rows(1, 2, 3, meta_info={"step": 1})
    data.padding(2, "first")
    assert data.batch["x"].tolist() == [1, 2, 3, 1, 1]
    data.padding(0)
    data.padding(1, "last")
    data.padding(1)
    assert data.batch["name"].tolist() == ["1", "2", "3", "1", "1", "1", "1"]
    assert data.meta_info == {"step": 1}


@pytest.mark.parametrize(
    "times", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])], ids=repr
)
def test_sample_level_repeat(times: Any) -> None:
    repeated = rows(4, 5, 6).sample_level_repeat(times)
    assert repeated.batch["x"].tolist() == [4, 4, 6]
    assert repeated.batch["name"].tolist() == ["4", "4", "6"]


def test_sample_level_repeat_needs_a_number_per_row() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\), but the batch has 3 rows"):
        rows(4, 5, 6).sample_level_repeat([1, 2])
    with pytest.raises(TypeError, match="must be a list or a tensor"):
        rows(4, 5, 6).sample_level_repeat(2)


def test_unfold_column_chunks() -> None:
    names = np.array([["a", "b"], ["c", "d"]], dtype=object)
    data = DataProto(
        {"pair": torch.arange(8).reshape(2, 4), "x": torch.tensor([7, 8])},
        {"names": names, "uid": ["u", "v"]},
        {"step": 1},
    )
    unfolded = data.unfold_column_chunks(2, split_keys=["pair", "names"])
    assert unfolded.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["x"].tolist() == [7, 7, 8, 8]
    assert unfolded.non_tensor_batch["names"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    assert unfolded.non_tensor_batch["uid"].tolist() == ["u", "u", "v", "v"]
    assert unfolded.meta_info == {"step": 1}
    assert data.unfold_column_chunks(2).batch["pair"].shape == (4, 4)
    with pytest.raises(ValueError, match=r"'pair' has the shape \(2, 4\)"):
        data.unfold_column_chunks(3, ["pair"])
    with pytest.raises(ValueError, match=r"'x' has the shape \(2,\)"):
        data.unfold_column_chunks(2, ["x"])


def test_batches_are_saved_to_disk(tmp_path: Path) -> None:
    file = tmp_path / "batch.pkl"
    rows(1, 2, state=[{"a": 1}, None], meta_info={"step": 1}).save_to_disk(file)
    loaded = DataProto.load_from_disk(str(file))
    assert loaded.batch["x"].tolist() == [1, 2]
    assert loaded.batch["state"].tolist() == [{"a": 1}, None]
    assert loaded.meta_info == {"step": 1}
    file.write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="has a list, not a DataProto"):
        DataProto.load_from_disk(file)


def test_fields_can_be_replaced_as_a_whole() -> None:
    data = rows(1, 2, 3)
    data.batch = data.batch[torch.tensor([2, 0])]
    data.non_tensor_batch = {"tag": ["p", "q"]}
    assert (len(data), data.batch["tag"].tolist()) == (2, ["p", "q"])
    data.check_consistency()
    data.batch = {"x": torch.tensor([1, 2, 3])}
    with pytest.raises(ValueError, match="differ in length"):
        data.check_consistency()
    data.non_tensor_batch["tag"] = ["p", "q", "r"]
    with pytest.raises(ValueError, match=r"non_tensor_batch\['tag'\] is list, not an array"):
        data.check_consistency()


def test_descriptions_list_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(1, 2, meta_info={"seen": [1], "pair": (1, "a"), "by": {"a": 1.0}})
    assert data.get_data_info().split("\n") == [
        "batch",
        "  x: (2,) (torch.int64) cpu",
        "non_tensor_batch",
        "  name: ndarray(2,) (object)",
        "meta_info",
        "  seen: list[int]",
        "  pair: tuple(int, str)",
        "  by: dict[str: float]",
    ]
    data.print_summary("after filtering")
    data.print_size("after filtering")
    printed = capsys.readouterr().out
    assert data.get_data_info() in printed
    assert f"after filtering, batch: {16 / 1024**3} GB" in printed


class FakeTensorDict(dict[str, Any]):
    def __init__(self, source: dict[str, Any], batch_size: torch.Size) -> None:
        super().__init__(source)
        self.batch_size = batch_size


class FakeNonTensorData:
    def __init__(self, data: Any, batch_size: Any = None) -> None:
        self.data = data


class FakeNonTensorStack(list[FakeNonTensorData]):
    @classmethod
    def from_list(cls, entries: list[FakeNonTensorData]) -> FakeNonTensorStack:
        return cls(entries)


def test_tensordicts_have_stacks_for_fields_and_single_data_for_meta_info(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake: Any = ModuleType("tensordict")
    fake.TensorDict, fake.NonTensorData = FakeTensorDict, FakeNonTensorData
    fake.NonTensorStack = FakeNonTensorStack
    monkeypatch.setitem(sys.modules, "tensordict", fake)
    data = rows(1, 2, state=[{"a": 1}, [2]], meta_info={"step": 3})
    result = data.to_tensordict()
    assert result.batch_size == (2,)
    assert [entry.data for entry in result["state"]] == [{"a": 1}, [2]]
    assert result["step"].data == 3
    back = DataProto.from_tensordict(result, {"seed": 4})
    assert back.batch["x"].tolist() == [1, 2]
    assert back.non_tensor_batch["state"].tolist() == [{"a": 1}, [2]]
    assert back.meta_info == {"seed": 4, "step": 3}
    with pytest.raises(ValueError, match="'inner' is a FakeTensorDict, which cannot be a field"):
        DataProto.from_tensordict({**result, "inner": result})
    data.meta_info["x"] = 5
    with pytest.raises(ValueError, match="several named x"):
        data.to_tensordict()


def test_tensordicts_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    for call in (rows(1).to_tensordict, lambda: DataProto.from_tensordict({})):
        with pytest.raises(ImportError, match="pip install tensordict"):
            call()
