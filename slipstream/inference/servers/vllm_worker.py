"""Loads weights inside vLLM's worker process, and repairs what vLLM leaves wrong there.

vLLM imports a copy of this file and adds the methods of the class to its worker
(`--worker-extension-cls slipstream_vllm_worker.SlipstreamWorker`). The file imports nothing of
Slipstream, because vLLM's environment need not have it. `/collective_rpc` calls the methods. They
return JSON values.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

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
    whole = len(words) // ROWS * ROWS
    columns = torch.zeros(ROWS, dtype=torch.int64, device=flat.device)
    rows = [columns[:0]]
    for start in range(0, whole, CHUNK):
        block = words[start : min(whole, start + CHUNK)].view(-1, ROWS)
        rows.append(block.sum(1))
        columns += block.sum(0)
    total = 0
    for sums in (torch.cat(rows), columns, words[whole:], rest):
        index = torch.arange(1, len(sums) + 1, dtype=torch.int64, device=flat.device)
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


Entry = Sequence[Any]
"""Where a tensor lies: [name, dtype, shape, number of its bucket, offset there in bytes]."""


def views(bucket: Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that lie in a bucket (bytes,), uint8, without copying them."""
    for name, dtype, shape, _, offset in entries:
        kind = getattr(torch, dtype)
        size = kind.itemsize
        for length in shape:
            size *= length
        yield name, bucket[offset : offset + size].view(kind).view(shape)


def mapped(path: Path, size: int) -> Tensor:
    """Return the bytes (size,) of a file, uint8, as memory that shows what other processes write.

    Writing to it changes a copy of the page. Raises FileNotFoundError if there is no such file, and
    ValueError if it has another size.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise ValueError(f"{path} has {found} bytes, not {size}")
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Segments:
    """Shared memory that this process has mapped. It stays mapped between updates, because the
    first access to each page takes long."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], Tensor]] = {}

    def tensors(self, source: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the tensors in the segments of `source`.

        All segments are mapped before this returns. Raises as `mapped` does, with a remedy.
        """
        wanted = {}
        for path, size in source["segments"]:
            try:
                state = os.stat(path)
            except OSError as error:
                raise FileNotFoundError(
                    f"the run's shared memory {path} is not here; if this server is on another "
                    "machine or in a container, set "
                    "actor_rollout_ref.rollout.server.transport=collective"
                ) from error
            known = self._known.get(path)
            key = (state.st_dev, state.st_ino)
            if known is None or known[0] != key or len(known[1]) != size:
                known = key, mapped(Path(path), size)
            wanted[path] = known
        self._known = wanted
        buckets = [tensor for _, tensor in wanted.values()]
        return (pair for entry in source["tensors"] for pair in views(buckets[entry[3]], [entry]))


class Group:
    """A process group of the trainer, which is rank 0, and the workers of one server."""

    def __init__(self, spec: Mapping[str, Any], rank: int) -> None:
        """`spec` has: the group's `name`, `host` and `port` of the trainer's store, `backend`
        (gloo or nccl), the `size` of the group, and `seconds`, the time limit."""
        self.name = str(spec["name"])
        limit = timedelta(seconds=spec["seconds"])
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            spec["host"], spec["port"], is_master=False, timeout=limit, wait_for_workers=False
        )
        store.set(f"{self.name}/{rank}", "here")
        address = facing(spec["host"], spec["port"])
        self._store, self._rank = store, rank
        self._group = make_group(store, spec, rank, address, limit)

    def close(self) -> None:
        """Leave the group. If the trainer is sending, it gets an error."""
        self._group = None

    def tensors(
        self, source: Mapping[str, Any], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `source` as their buckets arrive."""
        # The trainer sends only when all workers are here: a send cannot be taken back.
        self._store.set(f"{self.name}/{self._rank}/{source['number']}", "here")
        for number, size in enumerate(source["buckets"]):
            bucket = torch.empty(size, dtype=torch.uint8, device=device)
            broadcast(self._group, bucket)
            yield from views(bucket, [e for e in source["tensors"] if e[3] == number])


def make_group(store: Any, spec: Mapping[str, Any], rank: int, address: str, limit: Any) -> Any:
    """Make one rank of the process group of `spec`. Blocks until all ranks do. `address` is the one
    of this machine that the other ranks can reach."""
    store, size = distributed_c10d.PrefixStore(spec["name"], store), int(spec["size"])
    if spec["backend"] == "nccl":
        nccl = distributed_c10d.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return distributed_c10d.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = distributed_c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._threads = limit, 2
    options._devices = [gloo.create_device(hostname=address)]
    return distributed_c10d.ProcessGroupGloo(store, rank, size, options)


def broadcast(group: Any, tensor: Tensor) -> None:
    """Send a tensor from rank 0 to all ranks. Returns when it has arrived here."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def facing(host: str, port: int) -> str:
    """The address of this machine in the network through which it reaches `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as found:
        found.connect(address)  # sends nothing
        return str(found.getsockname()[0])


class Process:
    """A process that may run on this machine or on another one."""

    @staticmethod
    def here() -> dict[str, Any]:
        """Describe this process: its id, its start, and the machine or container."""
        pid = os.getpid()
        return {"pid": pid, "start": _start(pid), "machine": _machine()}

    @staticmethod
    def ended(process: Mapping[str, Any]) -> bool:
        """Whether a process has ended; False if that cannot be told from here."""
        if process["machine"] is None or process["machine"] != _machine():
            return False
        start = _start(process["pid"])
        if start is not None:
            return bool(start != process["start"])
        try:
            os.kill(process["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # It is another user's, and hidden.
        return False


def _start(pid: int) -> str | None:
    """When a process was started, in a unit of the system; None if there is none to be seen."""
    try:
        # The name of the program, in brackets, can have any characters.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]


def _machine() -> str | None:
    """What processes have in common that see each other's ids; None if the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


class SlipstreamWorker:
    """Methods that vLLM adds to its worker."""

    vllm_config: Any
    model_runner: Any
    _slipstream_owner: dict[str, Any] | None
    _slipstream_group: Group | None

    def slipstream_probe(self) -> dict[str, Any]:
        """Return what this process is: its id, whether the LM head is tied, what the model's
        configuration says of its shapes (`SHAPES`), longest sequence and dtype, and the `methods`
        that can be called."""
        model = self.model_runner.get_model()
        settings = self.vllm_config.model_config
        found = {name: getattr(settings.hf_text_config, name, None) for name in SHAPES}
        found["max_model_len"] = settings.max_model_len
        found["dtype"] = str(settings.dtype).removeprefix("torch.")
        return {
            "pid": os.getpid(),
            "tied": _tied_head(model) is not None,
            "model": found,
            "methods": sorted(name for name in dir(self) if name.startswith("slipstream_")),
        }

    def slipstream_claim(self, owner: Mapping[str, Any]) -> dict[str, Any]:
        """Make a run the owner of this server's weights, unless another one is and has not ended.

        `owner` is `Process.here()` of the run, with more keys for messages. Returns the owner.
        """
        known = getattr(self, "_slipstream_owner", None)
        if known is None or Process.ended(known):
            known = dict(owner)
            self._slipstream_owner = known
        return known

    def slipstream_release(self, owner: Mapping[str, Any]) -> None:
        """The run does not use the server any more."""
        if getattr(self, "_slipstream_owner", None) == dict(owner):
            self._slipstream_owner = None

    def slipstream_load(self, path: str) -> dict[str, Any]:
        """Load policy weights from a safetensors file or folder. Returns what `_received` does."""
        return self._received(tensors_of(Path(path)))

    def slipstream_map(self, source: dict[str, Any]) -> dict[str, Any]:
        """Load policy weights from shared memory. `source` has the `segments` (path and bytes of
        each) and the `tensors` in them. Returns what `_received` does.

        If a segment is missing, the weights in use stay.
        """
        segments = self.__dict__.setdefault("_slipstream_segments", Segments())
        return self._received(segments.tensors(source))

    def slipstream_join(self, spec: dict[str, Any]) -> int:
        """Join the process group of the trainer. Returns the rank."""
        config = getattr(self.vllm_config, "parallel_config", None)
        earlier = 0 if config is None else config.data_parallel_index * config.world_size
        rank = 1 + earlier + int(getattr(self, "rank", 0))
        self._slipstream_group = Group(spec, rank)
        return rank

    def slipstream_receive(self, source: dict[str, Any]) -> dict[str, Any]:
        """Load policy weights that the trainer sends to the group. `source` has the `group`, the
        `number` of the update there, the sizes of the `buckets` in bytes, and the `tensors` in
        them. Returns what `_received` does."""
        group = getattr(self, "_slipstream_group", None)
        if group is None or group.name != source["group"]:
            raise RuntimeError(f"this worker is not in the process group {source['group']}")
        device = torch.device("cpu")
        if source["backend"] == "nccl":
            device = self.model_runner.device
        try:
            return self._received(group.tensors(source, device))
        except BaseException:
            group.close()
            self._slipstream_group = None
            raise

    def _received(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Load policy weights.

        Returns the checksum of each tensor, by name, the parameters that got no weights, and the
        seconds of loading and of the repair.
        """
        started = time.perf_counter()
        sums: dict[str, int] = {}
        missing = self._load(self.model_runner.get_model(), _counted(tensors, sums))
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


def _mend_discarded_draws(runner: Any) -> None:
    """Let a class of model runners take back draws from a generator on a CPU.

    A request with a seed draws a token for each piece of its prompt, and vLLM takes these draws
    back. vLLM 0.32 moves the offset of the generator, which a generator on a CPU does not have, so
    prefill in pieces ends the server.
    """
    sample, finish = runner._sample, runner._bookkeeping_sync

    def sampled(self: Any, *args: Any, **more: Any) -> Any:
        discarded = self.discard_request_mask.np
        self._slipstream_undrawn = {
            index: generator.get_state()
            for index, generator in self.input_batch.generators.items()
            if discarded[index] and generator.device.type == "cpu"
        }
        return sample(self, *args, **more)

    def finished(self: Any, *args: Any, **more: Any) -> Any:
        generators, held = self.input_batch.generators, {}
        for index, state in self.__dict__.pop("_slipstream_undrawn", {}).items():
            generator = held[index] = generators.pop(index)
            generator.set_state(state)
        try:
            return finish(self, *args, **more)
        finally:
            generators.update(held)

    runner._sample, runner._bookkeeping_sync = sampled, finished


if __name__ == "slipstream_vllm_worker":
    # Only in vLLM's processes. Slipstream imports this module under its own name.
    with contextlib.suppress(ImportError, AttributeError):  # Without these, vLLM draws otherwise.
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        _mend_discarded_draws(GPUModelRunner)
    try:
        _mend_speculation()
    except (ImportError, AttributeError) as error:
        # Servers without a draft head can do without.
        UNMENDED = f"{type(error).__name__}: {error}"
