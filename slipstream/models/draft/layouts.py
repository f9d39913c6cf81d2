"""Read and write draft heads in the file layouts of vLLM and SGLang.

Both engines use the tensor names of `models.draft.files`, without the tensors of the policy. For
EAGLE-1 heads their loaders differ in `config.json` and in the bias of `fc` (vLLM 0.32
`llama_eagle.py`; SGLang 0.5.23 `llama_eagle.py`, `qwen2_eagle.py`). `eagle3_files` covers EAGLE-3
heads. Saving is not atomic. The caller must ensure that no reader sees a half-written folder.
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
from slipstream.models.draft.token_map import TOKEN_MAP
from slipstream.models.hf_io import write_tensors

FC_BIAS = "fc.bias"
"""The name of a bias that heads trained here do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The requirements of an engine's loader beyond the head's own tensors.

    `architectures` are its classes by family. With `fc_bias`, the class has a bias for `fc`, which
    stays uninitialized if the folder has none. With `untied`, `config.json` must not tie embedding
    and LM head: the class would use one module for both and could not load the policy's two.
    """

    engine: str
    architectures: Mapping[str, str]
    fc_bias: bool
    untied: bool
    by_outputs: bool
    """Whether the engine numbers an EAGLE-3 head's auxiliary layers by their outputs
    (`eagle3_files`)."""
    token_map: bool
    """Whether the engine reads the draft vocabulary of an EAGLE-1 head from a file of its own. If
    not, it drafts all tokens."""
    usage: str
    """The command line that serves `{policy}` with `{head}`; `{algorithm}` is the engine's name of
    the head's algorithm."""

    def command(self, head: DraftModel, *, policy: str, folder: object) -> str:
        """Return the command line that starts the engine with the head in `folder`."""
        algorithm = head.algorithm.lower() if self.engine == "vLLM" else head.algorithm
        line = self.usage.format(policy=policy, head=folder, algorithm=algorithm)
        if self.token_map and head.draft_tokens is not None and head.algorithm == "EAGLE":
            line += f" --speculative-token-map {folder}/{TOKEN_MAP}"
        return line


LAYOUTS: Mapping[str, Layout] = {
    "vllm": Layout(
        engine="vLLM",
        architectures={"llama": "EagleLlamaForCausalLM"},
        fc_bias=False,
        untied=False,
        by_outputs=False,
        token_map=False,
        usage="vllm serve {policy} --speculative-config "
        '\'{{"method": "{algorithm}", "model": "{head}", "num_speculative_tokens": 3}}\'',
    ),
    "sglang": Layout(
        engine="SGLang",
        architectures={"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"},
        fc_bias=True,
        untied=True,
        by_outputs=True,
        token_map=True,
        usage="python -m sglang.launch_server --model-path {policy} "
        "--speculative-algorithm {algorithm} --speculative-draft-model-path {head} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    ),
}


def export_draft_head(
    head: DraftModel, folder: Path, layout: str, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write `head` into `folder` in the layout of an engine (a key of `LAYOUTS`).

    Existing files are overwritten. `load_draft_head` reads the folder back. Raises ConfigError if
    the engine has no class for heads of this family.
    """
    target, family = LAYOUTS[layout], head.config.family
    if isinstance(head, Eagle3Head):
        config = eagle3_files.config_of(head, dtype, by_outputs=target.by_outputs)
        write_tensors(folder, config, eagle3_files.tensors_of(head), dtype=dtype)
        return
    if family not in target.architectures:
        elsewhere = [name for name, other in LAYOUTS.items() if family in other.architectures]
        remedy = f"export for {' or '.join(elsewhere)}" if elsewhere else "serve it with Slipstream"
        raise ConfigError(
            f"{target.engine} has no class for EAGLE heads of the family {family}, only for "
            f"{' and '.join(target.architectures)}; {remedy}, or train a policy with "
            f"actor_rollout_ref.model.init.family={next(iter(target.architectures))}"
        )
    config = head.config.one_layer().to_hf(dtype=str(dtype).removeprefix("torch."))
    config |= {"architectures": [target.architectures[family]]}
    tensors = {name: p.detach() for name, p in head.named_parameters()}
    if target.untied:
        config["tie_word_embeddings"] = False
    if target.fc_bias:
        tensors[FC_BIAS] = torch.zeros(head.config.hidden_size)
    write_tensors(folder, config, tensors, dtype=dtype)
    if target.token_map and head.tokens is not None:
        torch.save(list(head.tokens), folder / TOKEN_MAP)


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a folder in any layout, without a bias of `fc` whose values are all 0.

    A bias with other values stays, so that the caller raises an error for it.
    """
    bias = tensors.get(FC_BIAS)
    drops_bias = bias is not None and not bias.any()
    return {name: t for name, t in tensors.items() if not (drops_bias and name == FC_BIAS)}
