"""Options of servers: with an engine that has servers, and with one that has none."""

from __future__ import annotations

import pytest

from slipstream.config import Config, Hardware, load_config
from slipstream.config.servers import SERVER_OPTIONS
from slipstream.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
URLS = f"{ROLLOUT}.server.urls=[http://localhost:8000]"


def load(*overrides: str, gpus: int = 0, verl: bool = False) -> tuple[Config, list[str]]:
    notices: list[str] = []
    config = load_config(
        ["trainer.device=auto", *overrides],
        recipe="tiny",
        hardware=Hardware(gpus=gpus),
        notify=notices.append,
        verl=verl,
    )
    return config, notices


def vllm(*overrides: str, gpus: int = 0) -> tuple[Config, list[str]]:
    return load(f"{ROLLOUT}.name=vllm", *overrides, gpus=gpus)


GIVEN = (
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.load_format=safetensors",
    f"{ROLLOUT}.enable_chunked_prefill=false",
)


@pytest.mark.parametrize("verl", [False, True])
def test_options_of_servers_have_no_effect_without_servers(verl: bool) -> None:
    config, notices = load(*GIVEN, verl=verl)
    assert config == load()[0]
    assert [notice.partition(" ")[0] for notice in notices] == [*SERVER_OPTIONS]
    assert {given.partition("=")[0] for given in GIVEN} == {*SERVER_OPTIONS}


def test_servers_keep_their_options() -> None:
    config, notices = vllm(*GIVEN)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.tensor_model_parallel_size == 4
    assert (rollout.load_format, rollout.enable_chunked_prefill) == ("safetensors", False)
    assert notices == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("dummy_dtensor", "dummy"), ("dummy_megatron", "dummy"), ("hf", "auto")],
)
def test_older_load_formats_of_verl_are_aliases(old: str, new: str) -> None:
    config, _ = vllm(f"{ROLLOUT}.load_format={old}")
    assert config.actor_rollout_ref.rollout.load_format == new


@pytest.mark.parametrize(
    ("override", "gpus", "key"),
    [
        (f"{ROLLOUT}.gpu_memory_utilization=0.6", 0, "gpu_memory_utilization"),
        (f"{ROLLOUT}.gpu_memory_utilization=0.6", 1, None),
        (f"{ROLLOUT}.enforce_eager=false", 0, "enforce_eager"),
        (f"{ROLLOUT}.enforce_eager=true", 0, None),
        (f"{ROLLOUT}.enforce_eager=false", 1, None),
        (f"{ROLLOUT}.free_cache_engine=false", 1, "free_cache_engine"),
        (f"{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3", 1, "engine_kwargs.sglang"),
        (f"{ROLLOUT}.engine_kwargs.vllm.block_size=32", 1, None),
        (f"{ROLLOUT}.max_num_seqs=8", 1, None),
    ],
)
def test_an_option_without_effect_on_servers_gives_a_notice(
    override: str, gpus: int, key: str | None
) -> None:
    _, notices = vllm(override, gpus=gpus)
    expected = [] if key is None else [f"{ROLLOUT}.{key}"]
    assert [notice.partition(" has no effect: ")[0] for notice in notices] == expected


@pytest.mark.parametrize(
    "override",
    [
        "tensor_model_parallel_size=4",
        "load_format=safetensors",
        "enable_chunked_prefill=false",
        "enable_prefix_caching=false",
        "enforce_eager=true",
        "gpu_memory_utilization=0.6",
        "kv_cache_bytes=1000000",
        "max_num_batched_tokens=512",
        "max_num_seqs=8",
        "engine_kwargs.vllm.block_size=32",
    ],
)
def test_options_of_the_start_have_no_effect_on_running_servers(override: str) -> None:
    _, notices = vllm(URLS, f"{ROLLOUT}.{override}", gpus=1)
    (notice,) = notices
    assert notice.startswith(f"{ROLLOUT}.{override.partition('=')[0].partition('.block')[0]} ")
    assert f"{ROLLOUT}.server.urls" in notice


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host:1", "http://", "http://host:x"])
def test_an_address_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"{ROLLOUT}\.server\.urls=.*http://host:8000") as error:
        vllm(f"{ROLLOUT}.server.urls=['{url}']")
    assert url in str(error.value)
    vllm(f"{ROLLOUT}.server.urls=[https://host, http://127.0.0.1:8000]")


def test_a_server_needs_its_gpus() -> None:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    with pytest.raises(ConfigError, match=rf"{key}=4: .* 2 usable GPUs .*; set {key}=2"):
        vllm(f"{key}=4", gpus=2)
    vllm(f"{key}=2", gpus=2)
    vllm(f"{key}=4", URLS, gpus=2)
    vllm(f"{key}=4", "trainer.device=cpu", gpus=2)
