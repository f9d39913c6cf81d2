"""A mapped checkpoint has the file's own tensors and computes what a loaded one computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError
from slipstream.models import load_checkpoint, save_checkpoint
from slipstream.models.hf_io import WEIGHTS, map_checkpoint
from slipstream.models.policy import load_policy
from tests.models.helpers import FAMILIES, make_decoder, random_ids


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_mapped_weights_compute_the_same_bits(
    family: str, stored: torch.dtype, compute: torch.dtype, tmp_path: Path
) -> None:
    save_checkpoint(make_decoder(family), tmp_path, dtype=stored)
    mapped, loaded = map_checkpoint(tmp_path), load_checkpoint(tmp_path)
    kept = torch.float32 if stored == torch.float64 else stored
    assert {parameter.dtype for parameter in mapped.parameters()} == {kept}
    assert mapped.config == loaded.config
    ids = random_ids(2, 40)
    positions = torch.arange(40).expand(2, -1)
    with torch.no_grad():
        ours, theirs = (
            decoder.pack(compute).forward(ids, positions).flat().final
            for decoder in (mapped, loaded)
        )
    assert torch.equal(ours, theirs)


def test_wide_numbers_round_as_in_a_loaded_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(make_decoder("llama"), tmp_path)
    tensors = {name: tensor.double() for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    # Just above the middle of two bf16 numbers. Rounded to fp32 first, it is the middle, and
    # then the even one, which is below it.
    tensors["model.norm.weight"].fill_(1 + 2.0**-8 + 2.0**-40)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    for decoder in (map_checkpoint(tmp_path), load_checkpoint(tmp_path)):
        weight = decoder.model.norm.weight
        assert weight.dtype == torch.float32
        assert set(weight.tolist()) == {1 + 2.0**-8}


def test_bad_weights_are_refused(tmp_path: Path) -> None:
    save_checkpoint(make_decoder("llama"), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has NaN"):
        map_checkpoint(tmp_path)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        map_checkpoint(tmp_path)


def test_only_untrained_policies_are_mapped(tmp_path: Path) -> None:
    save_checkpoint(make_decoder("llama"), tmp_path, dtype=torch.bfloat16)
    for trained, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        policy = load_policy(tmp_path, trained=trained)
        assert {parameter.dtype for _, parameter in policy.named_parameters()} == {dtype}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_parameters_lie_in_the_mapped_file(tmp_path: Path) -> None:
    save_checkpoint(make_decoder("llama"), tmp_path, dtype=torch.bfloat16)
    decoder = map_checkpoint(tmp_path)
    mapped = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / WEIGHTS))
    ]
    for parameter in decoder.parameters():
        at = parameter.data_ptr()
        assert any(begin <= at < end for begin, end in mapped)
