"""Draft heads in the layouts that serving engines load, out and in again.

Both engines take tensors named as in `draft_io`, without what they take from the policy. For
EAGLE-1 heads they differ in `config.json` and in the bias of `fc`, as their loaders are written
(vLLM 0.32 `llama_eagle.py`; SGLang 0.5.23 `llama_eagle.py`, `qwen2_eagle.py`); for EAGLE-3 heads
see `draft_files3`. Writes plainly into a folder: that nobody sees half of it is the caller's
matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.models.draft import eagle3_files
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.model import DraftModel
from slipstream.models.hf_io import write_tensors

FC_BIAS = "fc.bias"
"""Of no head that is trained here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What an engine's loader wants beyond the head's own tensors.

    `architectures` are its classes by family. With `fc_bias` the class has a bias that a folder
    without one leaves at random numbers. `untied`: where `config.json` ties embedding and LM head,
    the class has one module for both and cannot take the policy's two.
    """

    engine: str
    architectures: Mapping[str, str]
    fc_bias: bool
    untied: bool
    by_outputs: bool
    """How the auxiliary layers of an EAGLE-3 head are counted: see `draft_files3`."""
    usage: str
    """Command line that loads `{head}`, one of an `{algorithm}` as the engine writes it, for
    `{policy}`: `command`."""

    def command(self, head: DraftModel, *, policy: str, folder: object) -> str:
        """How the engine is started with a head in `folder`."""
        algorithm = head.algorithm.lower() if self.engine == "vLLM" else head.algorithm
        return self.usage.format(policy=policy, head=folder, algorithm=algorithm)


LAYOUTS: Mapping[str, Layout] = {
    "vllm": Layout(
        engine="vLLM",
        architectures={"llama": "EagleLlamaForCausalLM"},
        fc_bias=False,
        untied=False,
        by_outputs=False,
        usage="vllm serve {policy} --speculative-config "
        '\'{{"method": "{algorithm}", "model": "{head}", "num_speculative_tokens": 3}}\'',
    ),
    "sglang": Layout(
        engine="SGLang",
        architectures={"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"},
        fc_bias=True,
        untied=True,
        by_outputs=True,
        usage="python -m sglang.launch_server --model-path {policy} "
        "--speculative-algorithm {algorithm} --speculative-draft-model-path {head} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    ),
}


def export_draft_head(
    head: DraftModel, folder: Path, layout: str, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write `head` into `folder` as the engine `layout` (a key of `LAYOUTS`) loads it, over what it
    holds. `load_draft_head` reads it back.

    Raises ConfigError where the engine has no class for heads of this family.
    """
    wanted, family = LAYOUTS[layout], head.config.family
    if isinstance(head, Eagle3Head):
        config = eagle3_files.config_of(head, dtype, by_outputs=wanted.by_outputs)
        write_tensors(folder, config, eagle3_files.tensors_of(head), dtype=dtype)
        return
    if family not in wanted.architectures:
        elsewhere = [name for name, other in LAYOUTS.items() if family in other.architectures]
        remedy = f"export for {' or '.join(elsewhere)}" if elsewhere else "serve it with Slipstream"
        raise ConfigError(
            f"{wanted.engine} has no class for EAGLE heads of the family {family}, only for "
            f"{' and '.join(wanted.architectures)}; {remedy}, or train a policy with "
            f"actor_rollout_ref.model.init.family={next(iter(wanted.architectures))}"
        )
    config = head.config.one_layer().to_hf(dtype=str(dtype).removeprefix("torch."))
    config |= {"architectures": [wanted.architectures[family]]}
    tensors = {name: p.detach() for name, p in head.named_parameters()}
    if wanted.untied:
        config["tie_word_embeddings"] = False
    if wanted.fc_bias:
        tensors[FC_BIAS] = torch.zeros(head.config.hidden_size)
    write_tensors(folder, config, tensors, dtype=dtype)


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of a folder in any of the layouts as a head here has them: without a bias that adds
    nothing. One that adds something stays, for the caller to refuse."""
    bias = tensors.get(FC_BIAS)
    silent = bias is not None and not bias.any()
    return {name: t for name, t in tensors.items() if not (silent and name == FC_BIAS)}
