"""llama.cpp as a peer: the calls of its process, with a fake library; and, where `make peers` has
installed it, its log-probs and tokens against ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.bench.contenders import LLAMA, Workload, llama_command, llama_of
from slipstream.bench.gguf import write_gguf
from slipstream.bench.peer_process import ROOT, PeerProcess
from slipstream.errors import ConfigError
from slipstream.models.decoder import Decoder
from tests.models.helpers import logits, make_decoder

SCRIPT = ROOT / "bench" / "peers" / "llama_peer.py"


def peer_module() -> Any:
    """`bench/peers/llama_peer.py` as a module."""
    spec = importlib.util.spec_from_file_location("llama_peer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeLibrary:
    """Has the functions of llama_cpp that the peer calls, and notes the forward passes.

    The token chosen for a sequence is its sampler's seed plus 10 times the token it follows.
    """

    LLAMA_FTYPE_MOSTLY_Q8_0 = 7

    def __init__(self) -> None:
        self.passes: list[list[tuple[int, int, int, bool]]] = []
        self.contexts: list[SimpleNamespace] = []
        self.cleared = 0
        self.freed: list[int] = []
        self.quantized: list[tuple[bytes, bytes, int]] = []
        self.loaded = b""

    def llama_backend_init(self) -> None:
        pass

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_model_load_from_file(self, file: bytes, params: object) -> int:
        self.loaded = file
        return 1

    def llama_model_get_vocab(self, model: int) -> int:
        return 2

    def llama_vocab_n_tokens(self, vocab: int) -> int:
        return 1000

    def llama_context_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_init_from_model(self, model: int, params: SimpleNamespace) -> int:
        self.contexts.append(params)
        return len(self.contexts)

    def llama_free(self, context: int) -> None:
        self.freed.append(context)

    def llama_get_memory(self, context: int) -> int:
        return context

    def llama_memory_clear(self, memory: int, data: bool) -> None:
        self.cleared += 1

    def llama_batch_init(self, tokens: int, embd: int, sequences: int) -> SimpleNamespace:
        return SimpleNamespace(
            n_tokens=0,
            token=[0] * tokens,
            pos=[0] * tokens,
            n_seq_id=[0] * tokens,
            seq_id=[[0] for _ in range(tokens)],
            logits=[False] * tokens,
        )

    def llama_decode(self, context: int, batch: SimpleNamespace) -> int:
        n = batch.n_tokens
        assert batch.n_seq_id[:n] == [1] * n
        ids = [row[0] for row in batch.seq_id[:n]]
        self.passes.append(
            list(zip(batch.token[:n], batch.pos[:n], ids, batch.logits[:n], strict=True))
        )
        return 0

    def llama_synchronize(self, context: int) -> None:
        pass

    def llama_sampler_chain_default_params(self) -> None:
        pass

    def llama_sampler_chain_init(self, params: None) -> list[object]:
        return []

    def llama_sampler_chain_add(self, chain: list[object], sampler: object) -> None:
        chain.append(sampler)

    def llama_sampler_init_temp(self, temperature: float) -> object:
        return "temperature", temperature

    def llama_sampler_init_dist(self, seed: int) -> object:
        return "sample", seed

    def llama_sampler_init_greedy(self) -> object:
        return "greedy"

    def llama_sampler_sample(self, chain: list[object], context: int, row: int) -> int:
        token, _, sequence, has_logits = self.passes[-1][row]
        assert has_logits
        if chain != ["greedy"]:
            assert chain == [("temperature", 0.5), ("sample", sequence)]
        return 10 * token + sequence

    def llama_sampler_free(self, chain: list[object]) -> None:
        chain.clear()

    def llama_model_quantize_default_params(self) -> Any:
        import ctypes

        class Params(ctypes.Structure):
            _fields_ = (("nthread", ctypes.c_int), ("ftype", ctypes.c_int))

        return Params()

    def llama_model_quantize(self, source: bytes, target: bytes, params: Any) -> int:
        self.quantized.append((source, target, params._obj.ftype))
        return 0


def load(
    monkeypatch: pytest.MonkeyPatch, quantize: str | None = None
) -> tuple[Any, FakeLibrary, Any]:
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    module = peer_module()
    peer = module.Peer(model="/f/model.gguf", quantize=quantize, max_model_len=64, threads=2)
    return module, library, peer


def test_sequences_are_decoded_together_until_each_has_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, library, peer = load(monkeypatch)
    answer = peer.generate(
        prompts=[[1, 2], [3, 4, 5]], lengths=[3, 2], temperature=0.5, sample=True
    )
    assert answer["token_ids"] == [[20, 200, 2000], [51, 511]]
    assert library.passes == [
        [(1, 0, 0, False), (2, 1, 0, True), (3, 0, 1, False), (4, 1, 1, False), (5, 2, 1, True)],
        [(20, 2, 0, True), (51, 3, 1, True)],
        [(200, 3, 0, True)],
    ]
    (context,) = library.contexts
    assert (context.n_ctx, context.n_seq_max) == (128, 2)
    assert (context.n_threads, context.n_threads_batch) == (2, 2)
    # The same number of sequences: the same context, emptied. Another one: a new context.
    peer.generate(prompts=[[1], [2]], lengths=[1, 1], temperature=0.0, sample=True)
    assert (library.cleared, len(library.contexts), library.freed) == (1, 1, [])
    peer.generate(prompts=[[1]], lengths=[1], temperature=0.0, sample=True)
    assert (library.cleared, len(library.contexts), library.freed) == (1, 2, [1])


def test_without_sampling_tokens_do_not_depend_on_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, library, peer = load(monkeypatch)
    monkeypatch.setattr(library, "llama_sampler_sample", None)
    answer = peer.generate(prompts=[[1], [2]], lengths=[4, 4], temperature=1.0, sample=False)
    assert [len(ids) for ids in answer["token_ids"]] == [4, 4]
    assert all(0 <= token < 1000 for ids in answer["token_ids"] for token in ids)
    # All logits are computed nevertheless.
    assert [[row[3] for row in rows] for rows in library.passes] == [[True, True]] * 4


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module, library, peer = load(monkeypatch)
    monkeypatch.setattr(module, "PREFILL_TOKENS", 3)
    answer = peer.generate(
        prompts=[[1, 2], [3, 4, 5]], lengths=[1, 1], temperature=0.0, sample=True
    )
    assert [[row[:3] for row in rows] for rows in library.passes] == [
        [(1, 0, 0), (2, 1, 0), (3, 0, 1)],
        [(4, 1, 1), (5, 2, 1)],
    ]
    assert answer["token_ids"] == [[20], [51]]


def test_another_format_is_written_by_llama_cpp_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, library, _ = load(monkeypatch, "q8_0")
    assert library.quantized == [(b"/f/model.gguf", b"/f/model.q8_0.gguf", 7)]
    assert library.loaded == b"/f/model.q8_0.gguf"
    _, library, _ = load(monkeypatch)
    assert (library.quantized, library.loaded) == ([], b"/f/model.gguf")


def test_the_process_answers_commands_and_refuses_others() -> None:
    lines = ['{"op": "generate"}', '{"op": "quit"}']
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert not answer["ok"]
    assert "'generate' is not possible now; the commands are load, generate" in answer["error"]


def installed() -> bool:
    try:
        return bool(llama_command())
    except ConfigError:
        return False


needs_llama = pytest.mark.skipif(not installed(), reason="run `make peer-llama`")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
"""Multiples of 32, the block of Q8_0."""

PROMPTS = ((5, 17, 80, 3), (9, 9, 41, 62), (1, 2, 3, 4))


@contextmanager
def loaded(decoder: Decoder, folder: Path, quantize: str | None) -> Iterator[PeerProcess]:
    with PeerProcess("llamacpp", llama_command()) as process:
        write_gguf(folder / "m.gguf", decoder)
        process.ask(
            "load", model=str(folder / "m.gguf"), quantize=quantize, max_model_len=64, threads=2
        )
        yield process


@needs_llama
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(("quantize", "most"), [(None, 0.03), ("q8_0", 0.25)])
def test_llama_cpp_computes_our_log_probs(
    family: str, quantize: str | None, most: float, tmp_path: Path
) -> None:
    decoder = make_decoder(family, **SIZES)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.bfloat16())
    ids = [(7 * i + i * i) % 96 for i in range(40)]
    ours = torch.log_softmax(logits(decoder, torch.tensor([ids]))[0], -1)
    with loaded(decoder, tmp_path, quantize) as process:
        theirs = torch.tensor(process.ask("log_probs", token_ids=ids)["log_probs"])
    assert theirs.shape == (40, 96)
    assert float((ours - theirs).abs().max()) < most
    assert float(ours.std()) > 0.5


@needs_llama
def test_a_sequence_gets_the_same_greedy_tokens_alone_and_in_a_batch(tmp_path: Path) -> None:
    decoder = make_decoder("llama", **SIZES)
    with llama_of("llamacpp-bfloat16", partial(write_gguf, decoder=decoder), 64, 0.0) as peer:
        together = peer.generate(Workload(name="all", prompts=PROMPTS, lengths=(12, 7, 9)))
        alone = [
            peer.generate(Workload(name="one", prompts=(prompt,), lengths=(length,)))[0]
            for prompt, length in zip(PROMPTS, (12, 7, 9), strict=True)
        ]
    assert together == alone
    assert peer.dtype == "bfloat16"
    assert peer.versions is not None
    assert peer.versions["llama-cpp-python"].startswith("0.")


@needs_llama
@pytest.mark.parametrize("name", LLAMA)
def test_all_settings_write_as_many_tokens_as_asked_for(name: str) -> None:
    decoder = make_decoder("llama", **SIZES)
    with llama_of(name, partial(write_gguf, decoder=decoder), 64, 1.0) as peer:
        written = peer.generate(Workload(name="all", prompts=PROMPTS, lengths=(5, 1, 3)))
    assert [len(ids) for ids in written] == [5, 1, 3]
    assert peer.cpu_clock() > 0
