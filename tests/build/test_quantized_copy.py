"""Building of drafts by a quantized copy of the policy, and their refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.build import speculation
from slipstream.build.engine import check_engine
from slipstream.build.speculation import check_copy, copy_bytes, make_speculation
from slipstream.config import Config, Hardware, load_config
from slipstream.errors import ConfigError
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.quantized import QuantizedProposer
from slipstream.inference.speculation.union import UnionProposer
from tests.inference.helpers import make_engine, make_request, shared_decoder

CPU = torch.device("cpu")


def load(*overrides: str, strategy: str = "quantized") -> Config:
    return load_config(
        ["speculative.enable=true", f"speculative.spec_strategy={strategy}", *overrides],
        recipe="tiny",
        hardware=Hardware(gpus=0),
        notify=lambda _: None,
    )


def build(config: Config, told: list[str] | None = None) -> object:
    made = make_speculation(
        config,
        shared_decoder(),
        dtype=torch.float32,
        device=CPU,
        kv_budget_bytes=1 << 20,
        free_cache=False,
        notify=(told if told is not None else []).append,
    )
    assert made is not None
    return made.proposer


def test_the_copy_has_the_bits_and_the_bytes_of_the_settings() -> None:
    sizes = []
    for bits, lm_head_bits in ((4, 4), (4, 8), (8, 8)):
        config = load(
            f"speculative.quantized.bits={bits}",
            f"speculative.quantized.lm_head_bits={lm_head_bits}",
        )
        told: list[str] = []
        proposer = build(config, told)
        assert isinstance(proposer, QuantizedProposer)
        assert f"a copy of the policy with {bits}-bit weights" in told[0]
        make_engine(proposer=proposer, plan=DraftPlan.chain(2)).run([make_request("a")])
        assert proposer.nbytes == copy_bytes(config, shared_decoder().config)
        sizes.append(proposer.nbytes)
    # Scales take 2 bytes for each 32 weights: 4.5 and 8.5 bits a weight. An LM head has 64 x 32
    # weights, each of two layers 128 x 32 + 32 x 64 + 128 x 32 + 32 x 64.
    head, layers = 2048, 2 * 12288
    assert sizes == [
        (head + layers) * 9 // 16,
        head * 17 // 16 + layers * 9 // 16,
        (head + layers) * 17 // 16,
    ]


def test_the_copy_is_merged_with_history() -> None:
    told: list[str] = []
    assert isinstance(build(load(strategy="quantized_union"), told), UnionProposer)
    assert "8-bit weights and history" in told[0]


def test_a_copy_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load()
    needed = copy_bytes(config, shared_decoder().config)
    monkeypatch.setattr(speculation, "free_bytes", lambda _: (1 << 20) + needed)
    build(config)
    monkeypatch.setattr(speculation, "free_bytes", lambda _: (1 << 20) + needed - 1)
    with pytest.raises(ConfigError) as caught:
        build(config)
    message = str(caught.value)
    assert f"the policy needs {needed} bytes, but beside the KV cache {needed - 1}" in message
    assert "set speculative.spec_strategy=history" in message


def test_policies_without_a_copy_are_refused() -> None:
    policy = shared_decoder().config
    check_copy(load(), policy, torch.float32, CPU)
    wide = replace(policy, intermediate_size=80)
    check_copy(load(strategy="history"), wide, torch.float32, CPU)
    with pytest.raises(ConfigError, match="multiples of 32, but intermediate_size=80; set spec"):
        check_copy(load(), wide, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"strategy=quantized: .* multiples of 32"):
        check_engine(load(), wide)
    with pytest.raises(ConfigError, match="compiled CPU kernels, which do not run on cuda; set"):
        check_copy(load(), policy, torch.bfloat16, torch.device("cuda"))
