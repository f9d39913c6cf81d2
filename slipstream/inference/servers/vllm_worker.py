"""Loads weights inside vLLM's worker process, and repairs what vLLM leaves wrong there.

vLLM imports a copy of this file and adds the methods of the class to its worker
(`--worker-extension-cls slipstream_vllm_worker.SlipstreamWorker`). The file imports nothing of
Slipstream, because vLLM's environment need not have it. `/collective_rpc` calls the methods. They
return JSON values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = 4096
"""Words per row of `checksum`."""

CHUNK = 1 << 17
"""Words of which `checksum` computes both sums before it goes on, so that they stay in the
processor's cache."""


def checksum(tensor: Tensor) -> int:
    """Return a 63-bit checksum of a tensor's bytes. It changes if values change or swap places.

    The words of 64 bits are added per row and per column, and each sum counts with its index.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 8:
        # A part of another tensor, whose bytes cannot be viewed as words.
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    words = raw[: len(raw) // 8 * 8].view(torch.int64)
    rest = raw[len(words) * 8 :].to(torch.int64)
    whole = words[: len(words) // ROWS * ROWS]
    columns = torch.zeros(ROWS, dtype=torch.int64, device=flat.device)
    rows = []
    for part in whole.split(CHUNK):
        block = part.view(-1, ROWS)
        rows.append(block.sum(1))
        columns += block.sum(0)
    tail = words[whole.numel() :]
    total = 0
    for sums in (torch.cat([*rows, columns[:0]]), columns, tail, rest):
        index = torch.arange(1, len(sums) + 1, dtype=torch.int64, device=flat.device)
        total = total * 1_000_003 + int((sums * (2 * index + 1)).sum())
    return total & (2**63 - 1)


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all safetensors files of a folder, or of one such file."""
    from safetensors import safe_open

    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no safetensors files")
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (a `safe_open` has no `__iter__`)
                yield name, opened.get_tensor(name)


class SlipstreamWorker:
    """Methods that vLLM adds to its worker."""

    vllm_config: Any
    model_runner: Any

    def slipstream_probe(self) -> dict[str, Any]:
        """Return what this process is: its id, device, and whether the LM head is tied."""
        model = self.model_runner.get_model()
        return {"pid": os.getpid(), "tied": _tied_head(model) is not None}

    def slipstream_load(self, path: str) -> dict[str, Any]:
        """Load policy weights from a safetensors file or folder.

        Returns the checksum of each tensor, by name, the parameters that got no weights, and the
        seconds of loading and of the repair.
        """
        started = time.perf_counter()
        sums: dict[str, int] = {}
        missing = self._load(self.model_runner.get_model(), _counted(tensors_of(Path(path)), sums))
        return {
            "checksums": sums,
            "missing": sorted(missing),
            "seconds": time.perf_counter() - started,
        }

    @torch.no_grad()
    def _load(self, model: Any, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        names = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(tensors)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_tied_head(model)
        return set() if loaded is None else names - set(loaded)


def _counted(
    tensors: Iterable[tuple[str, Tensor]], sums: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        sums[name] = checksum(tensor)
        yield name, tensor


def _tied_head(model: Any) -> Any | None:
    """The LM head of a model if it shares the embedding's weights."""
    head = getattr(model, "lm_head", None)
    config = getattr(model, "config", None)
    return head if head is not None and getattr(config, "tie_word_embeddings", False) else None


def _repack_tied_head(model: Any) -> None:
    """Pack the weights of a tied LM head again.

    On CPUs vLLM keeps a packed copy of each linear layer. A reload renews all of them but that of a
    tied LM head (vLLM 0.32), whose logits would be those of the old weights.
    """
    head = _tied_head(model)
    if head is None or not hasattr(head, "cpu_linear"):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
