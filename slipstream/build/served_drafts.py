"""Builds draft heads that servers draft with, by the section `speculative`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.build.speculation import first_head, head_to_be
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.inference.servers.drafts import DraftFolder, ServedDrafts
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.draft.layouts import LAYOUTS

MOST_STEPS = 128
"""The most tokens of a draft in vLLM."""


def check_served_drafts(config: Config, model: ModelConfig) -> None:
    """Raise ConfigError for speculation that vLLM does not have."""
    speculative, eagle = config.speculative, config.speculative.eagle
    if not speculative.enable:
        return
    rollout = config.actor_rollout_ref.rollout
    if speculative.spec_strategy != "eagle":
        raise ConfigError(
            f"speculative.spec_strategy={speculative.spec_strategy}: with vLLM, only a draft head "
            "drafts; set speculative.spec_strategy=eagle"
        )
    if eagle.spec_topk > 1:
        raise ConfigError(
            f"speculative.eagle.spec_topk={eagle.spec_topk} drafts trees, but vLLM drafts chains; "
            "set speculative.eagle.spec_topk=1 and speculative.eagle.spec_verify_tokens=null"
        )
    if eagle.tune_algorithm not in ("COST", "PREDEFINED"):
        raise ConfigError(
            f"speculative.eagle.tune_algorithm={eagle.tune_algorithm}: vLLM drafts the same number "
            "of tokens at all times; set speculative.eagle.tune_algorithm=PREDEFINED"
        )
    if eagle.spec_steps > MOST_STEPS:
        raise ConfigError(
            f"speculative.eagle.spec_steps={eagle.spec_steps}: vLLM drafts at most {MOST_STEPS} "
            "tokens; set speculative.eagle.spec_steps=4 or so"
        )
    if rollout.min_p:
        raise ConfigError(
            f"actor_rollout_ref.rollout.min_p={rollout.min_p:g}: vLLM has no min_p for requests "
            "with drafts; set actor_rollout_ref.rollout.min_p=0, or speculative.enable=false"
        )
    head = head_to_be(config, model)
    families = LAYOUTS["vllm"].architectures
    if head.algorithm == "EAGLE" and model.family not in families:
        remedy = "set speculative.eagle.spec_algorithm=EAGLE3"
        if eagle.spec_model_path is not None:
            remedy = (
                "train one with `slipstream draft speculative.eagle.spec_algorithm=EAGLE3` and set "
                "speculative.eagle.spec_model_path to its folder"
            )
        raise ConfigError(
            f"vLLM has no class for EAGLE heads of the family {model.family}, only for "
            f"{' and '.join(families)}; {remedy}"
        )


def make_served_drafts(
    config: Config,
    policy: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype,
    notify: Callable[[str], None] | None,
) -> ServedDrafts | None:
    """Write the initial draft head into the new folder `folder`; None without speculation, or if
    `notify` is None, which takes messages for the user."""
    speculative = config.speculative
    if not speculative.enable or notify is None:
        return None
    head, source = first_head(config, policy)
    steps, most = speculative.eagle.spec_steps, speculative.bs_threshold
    what = f"draft head {source}" if source is not None else "a new draft head"
    what += f" in vLLM, {steps} tokens per draft"
    if most is not None:
        what += f" while at most {most} requests run"
    if source is None:
        what += ", and no drafts before its first training"
    notify(f"Speculative decoding enabled: {what}")
    return ServedDrafts(
        DraftFolder(head, folder, dtype),
        steps=steps,
        dtype=dtype,
        notify=notify,
        waits=source is None,
    )


def draft_settings(config: Config, drafts: ServedDrafts | None) -> dict[str, Any]:
    """vLLM's options for a draft head; none without one."""
    if drafts is None:
        return {}
    steps, most = config.speculative.eagle.spec_steps, config.speculative.bs_threshold
    speculation: dict[str, Any] = {
        "method": drafts.folder.method,
        "model": str(drafts.folder.path),
        "num_speculative_tokens": steps,
    }
    if most is not None:
        requests = config.actor_rollout_ref.rollout.max_num_seqs
        plan = [[1, min(most, requests), steps], [most + 1, requests, 0]]
        speculation["num_speculative_tokens_per_batch_size"] = [
            part for part in plan if part[0] <= part[1]
        ]
    return {"speculative_config": speculation, "per_request_spec_decode_metrics": "detailed"}
