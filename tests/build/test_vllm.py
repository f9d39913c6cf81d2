"""Settings and environments that vLLM cannot use are refused before a server starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slipstream.build.servers import vllm_settings
from slipstream.build.vllm import FIXED, check_python, check_vllm_settings
from slipstream.errors import ConfigError
from tests.build.test_servers import ROLLOUT, SERVER, load, python
from tests.inference.helpers import make_decoder

__all__ = ["python"]


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (["tensor_model_parallel_size=3"], "tensor_model_parallel_size=3", "set it to 1, 2"),
        (["load_format=gguf"], "load_format=gguf", "set it to auto, safetensors, dummy"),
        (
            ["max_num_batched_tokens=8", "max_num_seqs=9"],
            "max_num_batched_tokens=8",
            f"set {ROLLOUT}.max_num_seqs=8",
        ),
        (
            ["max_num_batched_tokens=95", "max_num_seqs=9", "enable_chunked_prefill=false"],
            "max_num_batched_tokens=95",
            f"set {ROLLOUT}.max_num_batched_tokens=96",
        ),
        *(
            ([f"engine_kwargs.vllm.{name}=1"], f"engine_kwargs.vllm.{name}", "remove it")
            for name in FIXED
        ),
        (
            ["engine_kwargs.vllm.speculative_config={method: ngram}"],
            "engine_kwargs.vllm.speculative_config",
            "remove it",
        ),
        (["engine_kwargs.vllm={logprobs-mode: a}"], "engine_kwargs.vllm.logprobs-mode", "remove"),
        (["engine_kwargs.vllm=[3]"], "engine_kwargs.vllm", "{option: 32}"),
    ],
)
def test_settings_that_vllm_would_refuse_are_refused_before_the_start(
    tmp_path: Path, overrides: list[str], key: str, remedy: str
) -> None:
    config = load(tmp_path, *(f"{ROLLOUT}.{override}" for override in overrides))
    model = make_decoder(0).config
    with pytest.raises(ConfigError) as error:
        check_vllm_settings(config, vllm_settings(config, model), model)
    assert str(error.value).startswith(f"{ROLLOUT}.{key}")
    assert remedy in str(error.value)


def test_a_python_without_vllm_is_refused(tmp_path: Path, python: Path) -> None:
    check_python(python)
    with pytest.raises(ConfigError, match=rf"{SERVER}\.python=.* has no vLLM; .*pip install"):
        check_python(Path(sys.executable))
    with pytest.raises(ConfigError, match=rf"{SERVER}\.python: /bin/true does not run"):
        check_python(Path("/bin/true"))
    # A Python that finds an older vLLM.
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm-0.27.1.dist-info").mkdir()
    (tmp_path / "vllm-0.27.1.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.27.1\n")
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    old.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"{SERVER}\.python=.* vLLM 0\.27\.1, .*0\.28"):
        check_python(old)
