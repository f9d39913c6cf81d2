"""SGLang's options for a run. Settings that it cannot have are refused before a server starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from slipstream.build.servers import check_sglang, sglang_settings
from slipstream.build.sglang import FIXED, check_python, check_sglang_settings
from slipstream.errors import ConfigError
from tests.build.test_servers import ROLLOUT, SERVER, load
from tests.inference.helpers import make_decoder


def test_options_of_the_run_become_options_of_sglang(tmp_path: Path) -> None:
    line = [
        f"{ROLLOUT}.max_num_seqs=7",
        f"{ROLLOUT}.max_num_batched_tokens=512",
        f"{ROLLOUT}.enable_prefix_caching=false",
        f"{ROLLOUT}.enforce_eager=true",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.load_format=dummy",
        "trainer.seed=5",
        f"{ROLLOUT}.engine_kwargs.sglang={{attention-backend: fa3}}",
    ]
    settings = sglang_settings(load(tmp_path, *line, name="sglang"), make_decoder(0).config, 1)
    assert settings == {
        # A sequence of 96 tokens needs 6 more of SGLang's context.
        "context_length": 104,
        "dtype": "float32",
        "max_running_requests": 7,
        "max_prefill_tokens": 512,
        "chunked_prefill_size": 512,
        "random_seed": 6,
        "disable_radix_cache": True,
        "tp_size": 2,
        "load_format": "dummy",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "device": "cpu",
        # 64 MiB, the least, in tokens of 2 layers, one of 2 heads of 16, keys and values, 4 bytes.
        "max_total_tokens": (64 << 20) // 256,
        "attention_backend": "fa3",
    }


def test_on_a_gpu_sglang_gets_a_share_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.build.servers.device_of", lambda _: torch.device("cuda"))
    model = make_decoder(0).config
    config = load(tmp_path, name="sglang")
    settings = sglang_settings(config, model)
    assert (
        settings["mem_fraction_static"] == config.actor_rollout_ref.rollout.gpu_memory_utilization
    )
    assert not settings.keys() & {"max_total_tokens", "device", "tp_size", "load_format"}
    config = load(tmp_path, f"{ROLLOUT}.kv_cache_bytes=1000000", name="sglang")
    assert sglang_settings(config, model)["max_total_tokens"] == 1000000 // 512


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["top_k=5000"], r"rollout\.top_k=5000.*at most 4096"),
        (["top_k=1", "temperature=0.7"], r"rollout\.top_k=1 .*set temperature=0"),
        (["top_p=0.9", "min_p=0.1"], r"rollout\.min_p=0.1 .*set top_k"),
        (["temperature=1e-7"], r"rollout\.temperature=1e-07"),
        (
            ["min_p=0.1", "engine_kwargs.sglang={enable-deterministic-inference: true}"],
            r"rollout\.min_p=0.1.*remove enable_deterministic_inference",
        ),
        (
            ["val_kwargs.do_sample=true", "val_kwargs.temperature=1", "val_kwargs.top_k=5000"],
            r"rollout\.val_kwargs\.top_k=5000",
        ),
        (["engine_kwargs.sglang=3"], r"engine_kwargs\.sglang must be a mapping"),
        (["load_format=gguf"], r"load_format=gguf.*set it to auto, safetensors, dummy"),
        (["tensor_model_parallel_size=3"], r"tensor_model_parallel_size=3.*set it to 1, 2"),
        (
            ["enable_chunked_prefill=false", "max_num_batched_tokens=103"],
            r"max_num_batched_tokens=103.*set .*max_num_batched_tokens=104",
        ),
        *(([f"engine_kwargs.sglang.{name}=1"], rf"sglang\.{name} .*remove it") for name in FIXED),
        (["top_p=0.9"], None),
        (["top_p=0.9", "min_p=0.1", "top_k=40"], None),
        (["enable_chunked_prefill=false", "max_num_batched_tokens=104"], None),
    ],
)
def test_settings_that_sglang_cannot_have_are_refused(
    tmp_path: Path, overrides: list[str], key: str | None
) -> None:
    config = load(tmp_path, *(f"{ROLLOUT}.{text}" for text in overrides), name="sglang")
    model = make_decoder(0).config
    if key is None:
        check_sglang_settings(config, sglang_settings(config, model), model)
    else:
        with pytest.raises(ConfigError, match=key):
            check_sglang(config, model)


def test_a_larger_limit_of_the_server_allows_a_larger_top_k(tmp_path: Path) -> None:
    line = [
        f"{SERVER}.urls=[http://localhost:1]",
        f"{ROLLOUT}.top_k=5000",
        f"{ROLLOUT}.engine_kwargs.sglang.sampling_mask_max_tokens=6000",
    ]
    check_sglang(load(tmp_path, *line, name="sglang"), make_decoder(0).config)


def test_an_environment_without_sglang_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"{SERVER}\.python=.*has no SGLang.*install sglang"):
        check_python(Path(sys.executable))
