"""The settings of drafts in servers, and a run's engine with a draft head."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.build.engine import EngineSetup
from slipstream.build.served_drafts import check_served_drafts, draft_settings, make_served_drafts
from slipstream.build.servers import make_vllm, vllm_settings
from slipstream.config import Config, Hardware, load_config
from slipstream.errors import ConfigError
from slipstream.models import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import load_draft_head, save_draft_head
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import UpdateKind, WeightUpdate
from tests.docs.pages import ROOT
from tests.inference.contract import endless
from tests.inference.helpers import EOS, decode, make_decoder, make_engine
from tests.inference.servers.local import PROGRAM

ROLLOUT = "actor_rollout_ref.rollout"
LLAMA = partial(make_decoder, family="llama")


def load(folder: Path, *overrides: str) -> Config:
    return load_config(
        [
            f"{ROLLOUT}.name=vllm",
            f"trainer.default_local_dir={folder}",
            f"{ROLLOUT}.dtype=float32",
            f"{ROLLOUT}.max_model_len=96",
            "speculative.enable=true",
            "speculative.train.enable_drafter_training=true",
            "speculative.eagle.spec_steps=3",
            *overrides,
        ],
        recipe="tiny",
        hardware=Hardware(gpus=0),
        notify=lambda _: None,
    )


def saved_head(policy: Decoder, folder: Path) -> DraftHead:
    head = DraftHead(policy.config)
    head.init_weights(3, policy)
    save_draft_head(head, folder)
    return head


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("speculative.spec_strategy=union", "speculative.spec_strategy=eagle"),
        ("speculative.eagle.spec_topk=2", "speculative.eagle.spec_topk=1"),
        ("speculative.eagle.tune_algorithm=EG", "speculative.eagle.tune_algorithm=PREDEFINED"),
        ("speculative.eagle.spec_steps=200", "speculative.eagle.spec_steps=4"),
        (f"{ROLLOUT}.min_p=0.1", f"{ROLLOUT}.min_p=0"),
    ],
)
def test_settings_that_vllm_does_not_have_are_refused(
    tmp_path: Path, override: str, remedy: str
) -> None:
    more = ["speculative.eagle.spec_verify_tokens=4"] if "topk" in override else []
    config = load(tmp_path, override, *more)
    with pytest.raises(ConfigError) as error:
        check_served_drafts(config, LLAMA(0).config)
    assert override.partition("=")[0] in str(error.value)
    assert remedy in str(error.value)
    check_served_drafts(load(tmp_path), LLAMA(0).config)
    off = ("speculative.enable=false", "speculative.train.enable_drafter_training=false")
    check_served_drafts(load(tmp_path, *off), make_decoder(0).config)


def test_a_head_without_a_class_in_vllm_is_refused(tmp_path: Path) -> None:
    policy = make_decoder(0)
    with pytest.raises(ConfigError, match=r"qwen3.*set speculative\.eagle\.spec_algorithm=EAGLE3"):
        check_served_drafts(load(tmp_path), policy.config)
    saved_head(policy, tmp_path / "head")
    config = load(tmp_path, f"speculative.eagle.spec_model_path={tmp_path / 'head'}")
    with pytest.raises(ConfigError, match=r"slipstream draft speculative\.eagle\.spec_algorithm"):
        check_served_drafts(config, policy.config)
    eagle3 = (
        "speculative.eagle.spec_algorithm=EAGLE3",
        "speculative.eagle.aux_hidden_state_layer_ids=[0,1,2]",
    )
    check_served_drafts(load(tmp_path, *eagle3), make_decoder(0, num_layers=3).config)


@pytest.mark.parametrize(
    ("threshold", "plan"),
    [
        (None, None),
        (2, [[1, 2, 3], [3, 8, 0]]),
        (8, [[1, 8, 3]]),
        (9, [[1, 8, 3]]),
        (0, [[1, 8, 0]]),
    ],
)
def test_options_of_vllm(tmp_path: Path, threshold: int | None, plan: Any) -> None:
    bound = "null" if threshold is None else threshold
    config = load(tmp_path, f"speculative.bs_threshold={bound}", f"{ROLLOUT}.max_num_seqs=8")
    policy, notes = LLAMA(0), list[str]()
    drafts = make_served_drafts(
        config, policy, tmp_path / "draft", dtype=torch.float32, notify=notes.append
    )
    assert drafts is not None
    options = draft_settings(config, drafts)
    expected = {"method": "eagle", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    if plan is not None:
        expected["num_speculative_tokens_per_batch_size"] = plan
    assert options == {
        "speculative_config": expected,
        "per_request_spec_decode_metrics": "detailed",
    }
    assert len(notes) == 1
    assert "no drafts before its first training" in notes[0]
    whole = vllm_settings(config, policy.config, drafts=options)
    plain = vllm_settings(config, policy.config)
    assert whole["speculative_config"] == expected
    assert whole["kv_cache_memory_bytes"] >= plain["kv_cache_memory_bytes"]
    assert "speculative_config" not in plain


def test_an_evaluation_without_speculation_has_no_head(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    config = load(tmp_path)
    assert make_served_drafts(config, LLAMA(0), folder, dtype=torch.float32, notify=None) is None
    assert not folder.exists()
    assert draft_settings(config, None) == {}


def test_a_run_drafts_with_a_known_head_and_with_its_next_version(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{PROGRAM}:{ROOT}" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    policy = LLAMA(0, eos=EOS)
    head = saved_head(policy, tmp_path / "head")
    config = load(
        tmp_path,
        f"{ROLLOUT}.server.python={python}",
        f"{ROLLOUT}.server.transfer_dir={tmp_path / 'transfer'}",
        f"speculative.eagle.spec_model_path={tmp_path / 'head'}",
    )
    notes: list[str] = []
    compute = ComputeThread()
    made = EngineSetup(
        config=config,
        policy=policy,
        trained=True,
        decode=decode,
        compute=compute,
        notify=notes.append,
    )
    engine = make_vllm(made)
    (transfer,) = (tmp_path / "transfer").iterdir()

    async def work() -> list[Any]:
        found = []
        for version in (0, 1):
            if version:
                head.init_weights(5, policy)
                named = list(head.state_dict().items())
                update = WeightUpdate(version=1, kind=UpdateKind.DRAFT, buckets=[named])
                await engine.update_drafter(update)
            found.append((await engine.generate(endless("a", 40, temperature=0.0)), engine.stats()))
        return found

    try:
        (first, before), (second, after) = anyio.run(work)
        read = load_draft_head(transfer / "draft", policy.config)
    finally:
        engine.close()
        compute.close()
    expected = make_engine(LLAMA(0, eos=EOS)).run([endless("a", 40, temperature=0.0)])[0]
    for result in (first, second):
        assert result.error is None
        assert result.token_ids == expected.token_ids
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    assert 0 < before.draft_tokens < after.draft_tokens
    assert torch.equal(read.get_parameter("fc.weight"), head.fc.weight)
    assert [note.startswith("Speculative decoding enabled") for note in notes] == [True]
    assert not transfer.exists()
