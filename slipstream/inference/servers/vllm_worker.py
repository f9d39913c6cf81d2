"""Loads weights inside vLLM's worker process, and repairs what vLLM leaves wrong there.

vLLM imports a copy of this file and adds the methods of the class to its worker
(`--worker-extension-cls slipstream_vllm_worker.SlipstreamWorker`). The file imports nothing of
Slipstream, because vLLM's environment need not have it. `/collective_rpc` calls the methods. They
return JSON values.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Keys of `config.json` in which the models of server and run must not differ."""

ROWS = 4096
"""Words per row of `checksum`."""


def checksum(tensor: Tensor) -> int:
    """Return a 63-bit checksum of a tensor's bytes. It changes if values change or swap places.

    The words are added per row and per column, and each sum counts with its index.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 4:
        # A part of another tensor, whose bytes cannot be viewed as words.
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    words = raw[: len(raw) // 4 * 4].view(torch.int32)
    rest = raw[len(words) * 4 :].to(torch.int64)
    whole = words[: len(words) // ROWS * ROWS].view(-1, ROWS)
    rows = whole.sum(1, dtype=torch.int64)
    columns = whole.sum(0, dtype=torch.int64)
    tail = words[whole.numel() :].to(torch.int64)
    total = 0
    for sums in (rows, columns, tail, rest):
        index = torch.arange(1, len(sums) + 1, dtype=torch.int64)
        total = total * 1_000_003 + int((sums * (2 * index + 1)).sum())
    return total & (2**63 - 1)


UNMENDED: str | None = None
"""Why speculation in this version of vLLM could not be repaired; None: it was."""

PROBES = 16
"""Values per layer that `probed` returns."""


def probed(outputs: Tensor, probes: int = PROBES) -> list[float]:
    """Return the products of a vector (N,) with fixed vectors of length 1, in float64."""
    wide = outputs.detach().double().cpu()
    row = torch.arange(len(wide), dtype=torch.float64)
    return [
        float(
            (wide * torch.sin(row * (0.37 + 0.11 * k) + k)).sum() * (2 / max(1, len(wide))) ** 0.5
        )
        for k in range(probes)
    ]


def probe_input(size: int) -> Tensor:
    """Return the vector (size,) that layers are applied to, float32 with values from -1 to 1."""
    return torch.cos(torch.arange(size, dtype=torch.float64) * 0.61 + 1).float()


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
        """Return what this process is: its id, whether the LM head is tied, and what the model's
        configuration says of its shapes (`SHAPES`), longest sequence and dtype."""
        model = self.model_runner.get_model()
        settings = self.vllm_config.model_config
        found = {name: getattr(settings.hf_text_config, name, None) for name in SHAPES}
        found["max_model_len"] = settings.max_model_len
        found["dtype"] = str(settings.dtype).removeprefix("torch.")
        return {"pid": os.getpid(), "tied": _tied_head(model) is not None, "model": found}

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

    def slipstream_load_draft(self, path: str, version: int) -> dict[str, Any]:
        """Load a draft head from a safetensors file or folder, as this version, and draft with it.

        Requests go on. Returns the checksum of each tensor, by name, the parameters that got no
        weights, the version, and the seconds of loading. Raises RuntimeError without a draft head.
        """
        started = time.perf_counter()
        sums: dict[str, int] = {}
        missing = self._load_draft(_counted(tensors_of(Path(path)), sums))
        self._slipstream_draft_version = version
        return {
            "checksums": sums,
            "missing": sorted(missing),
            "version": version,
            "seconds": time.perf_counter() - started,
        }

    def slipstream_draft(self, on: bool | None = None) -> dict[str, Any]:
        """Switch drafting on or off, unless `on` is None. Returns whether there is a draft head,
        its version (None: that of the start), whether it drafts, whether drafting can be switched
        off here, and why vLLM's speculation could not be repaired (None: it was)."""
        drafter = getattr(self.model_runner, "drafter", None)
        can_stop = not self.vllm_config.scheduler_config.async_scheduling
        if on is not None and (on or can_stop) and drafter is not None:
            _switch(drafter, on)
        return {
            "head": self._draft_model() is not None,
            "version": getattr(self, "_slipstream_draft_version", None),
            "on": getattr(drafter, "slipstream_on", True),
            "can_stop": can_stop,
            "unmended": UNMENDED,
        }

    @torch.no_grad()
    def slipstream_probe_draft(self) -> dict[str, Any]:
        """Apply each layer of the draft head that is not the policy's to a fixed vector, as
        drafting does, and return `probed` of the results, by the name of the weight in the file.

        Returns null for `outputs` if the head is divided over several workers.
        """
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            return {"outputs": None}
        outputs: dict[str, list[float]] = {}
        for name, module in self._own_draft_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor):
                continue
            stem = name.removeprefix("model.")
            if hasattr(module, "quant_method"):
                size = getattr(module, "input_size", None) or module.embedding_dim
                x = probe_input(size).to(weight.device, self.vllm_config.model_config.dtype)
                result = module.quant_method.apply(module, x[None])[0]
                for part, values in _parts(stem, module, result):
                    outputs[f"{part}.weight"] = probed(values)
            else:
                x = probe_input(len(weight)).to(weight.device)
                outputs[f"{stem}.weight"] = probed(weight.float() * x)
        return {"outputs": outputs}

    def _draft_model(self) -> Any | None:
        get = getattr(self.model_runner, "get_draft_model", None)
        return None if get is None else get()

    def _own_draft_modules(self) -> list[tuple[str, Any]]:
        """The modules of the draft head that the policy does not share with it."""
        model = self._draft_model()
        if model is None:
            raise RuntimeError("this server has no draft head")
        policys = set(map(id, self.model_runner.get_model().modules()))
        return [(name, m) for name, m in model.named_modules() if id(m) not in policys]

    @torch.no_grad()
    def _load_draft(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        own = dict(self._own_draft_modules())
        model = self._draft_model()
        assert model is not None
        speculative = self.vllm_config.speculative_config
        wanted = {
            f"{name}.weight"
            for name, module in own.items()
            if isinstance(getattr(module, "weight", None), Tensor)
        }
        loaded = set[str]()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                loaded.add(name)
                yield name, tensor

        with set_current_vllm_config(self.vllm_config), _without_shared(model, own):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(noted())
            finally:
                finalize_layerwise_reload(model, speculative.draft_model_config)
        have = {_own_name(name) for name in loaded}
        return {name for name in wanted if not _fed(name.removeprefix("model."), have)}

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


_STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's names of layers that are several in a file."""


def _own_name(name: str) -> str:
    """The name of a head's tensor with vLLM's name of the layer."""
    return name.replace("midlayer.", "layers.0.", 1)


def _fed(name: str, have: set[str]) -> bool:
    """Whether all tensors of a file that make up the parameter `name` are among `have`."""
    for whole, parts in _STACKED.items():
        if whole in name:
            return all(name.replace(whole, part) in have for part in parts)
    return name in have


def _parts(stem: str, module: Any, outputs: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The outputs of the layers that vLLM has merged into `module`, by their names in a file."""
    layer = stem.rpartition(".")[2]
    if layer in _STACKED:
        sizes = list(module.output_sizes)
        parts = torch.split(outputs, sizes)
        for part, values in zip(_STACKED[layer], parts, strict=True):
            yield stem.removesuffix(layer) + part, values
    else:
        yield stem, outputs


@contextlib.contextmanager
def _without_shared(model: Any, own: dict[str, Any]) -> Iterator[None]:
    """Take the policy's modules out of a draft head while it is loaded, so that loading cannot
    change them."""
    taken = []
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            full = f"{name}.{child_name}" if name else child_name
            if full not in own:
                taken.append((module, child_name, child))
                delattr(module, child_name)
    try:
        yield
    finally:
        for module, child_name, child in taken:
            setattr(module, child_name, child)


def _switch(drafter: Any, on: bool) -> None:
    """Switch a proposer on or off. While it is off, it still reads each token, so that its keys and
    values are complete when it is switched on again."""
    if not hasattr(drafter, "slipstream_on"):
        propose = drafter.propose

        def switched(num_speculative_tokens: int, *args: Any, **more: Any) -> Any:
            count = num_speculative_tokens if drafter.slipstream_on else 0
            return propose(count, *args, **more)

        drafter.propose = switched
    drafter.slipstream_on = on


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


def _mend_speculation() -> None:
    """Repair what speculation does wrong in vLLM 0.32. Raises ImportError or AttributeError if
    vLLM's modules are others."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import llm_base_proposer

    _keep_own_layers(llm_base_proposer.SpecDecodeBaseProposer)
    _answer_wanted_log_probs(rejection_sampler.RejectionSampler)
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.apply_top_k_top_p = _unless_empty(rejection_sampler.apply_top_k_top_p)


def expand_batch_to_tokens(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> Tensor:
    """Repeat each request's value (N,) for each of its draft tokens.

    `cu_num_tokens` (N,) are cumulative counts, and `num_tokens` is the last one. On CPUs vLLM 0.32
    writes the result into a copy, so temperature, top_k and top_p of drafts are arbitrary.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)


def _unless_empty(apply: Any) -> Any:
    """`apply_top_k_top_p` for any number of rows. On CPUs vLLM 0.32 takes the largest top_k of the
    rows, which ends the server if there are none."""

    def applied(logits: Tensor, k: Tensor | None, p: Tensor | None, *more: Any) -> Tensor:
        return logits if not len(logits) else apply(logits, k, p, *more)

    return applied


def _keep_own_layers(proposer: Any) -> None:
    """Let a draft head keep the LM head and embedding that its files have.

    vLLM 0.32 drops them for the policy's if they are equal at the start, as those of a new EAGLE-3
    head are. The next update of the draft head would then change the policy.
    """
    share_embeddings, share_lm_head = (
        proposer._maybe_share_embeddings,
        proposer._maybe_share_lm_head,
    )

    def embeddings(self: Any, target: Any) -> None:
        if not getattr(self.model, "has_own_embed_tokens", False):
            share_embeddings(self, target)

    def lm_head(self: Any, target: Any) -> None:
        if not getattr(self.model, "has_own_lm_head", False):
            share_lm_head(self, target)

    proposer._maybe_share_embeddings = embeddings
    proposer._maybe_share_lm_head = lm_head


def _answer_wanted_log_probs(sampler: Any) -> None:
    """Let requests with `logprob_token_ids` run beside requests with drafts.

    In such a step vLLM 0.32 mixes up the shapes, which ends the server. Their values are added to
    the first token of the step; it has no drafts before it. They are those after the temperature.
    """
    forward = sampler.forward

    def mended(
        self: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        wanted = sampling_metadata.logprob_token_ids
        if not wanted:
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        starts = [0]
        for count in metadata.num_draft_tokens:
            starts.append(starts[-1] + count + 1)
        rows = logits[torch.tensor(starts[:-1], device=logits.device)].float()
        temperature = sampling_metadata.temperature
        if temperature is not None and self.is_processed_logprobs_mode:
            rows = rows / torch.where(temperature < 1e-5, 1.0, temperature)[:, None]
        rows = rows.log_softmax(-1)
        output = forward(
            self,
            metadata,
            draft_probs,
            logits,
            replace(sampling_metadata, logprob_token_ids=None),
        )
        found = output.logprobs_tensors
        width = output.sampled_token_ids.shape[1]
        for request, ids in wanted.items():
            count = min(len(ids), found.logprobs.shape[1] - 1)
            index = torch.tensor(ids[:count], device=logits.device)
            row = request * width
            found.logprob_token_ids[row, 1 : count + 1] = index.to(found.logprob_token_ids.dtype)
            found.logprobs[row, 1 : count + 1] = rows[request, index]
        return output

    sampler.forward = mended


if __name__ == "slipstream_vllm_worker":
    # Only in vLLM's processes. Slipstream imports this module under its own name.
    try:
        _mend_speculation()
    except (ImportError, AttributeError) as error:
        # Servers without a draft head can do without.
        UNMENDED = f"{type(error).__name__}: {error}"
