"""Workloads of a trained policy: its own responses to its own task, with their real lengths.

The acceptance rate depends on the head and on how predictable the text is. So drafts are measured
with trained policies and the text that they really write. Used by `rollout`, `grid` and `heads`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, median

import torch

from slipstream.bench.printing import progress
from slipstream.build.data import make_task, make_tokenizer, validation_prompts
from slipstream.build.policy import max_model_len
from slipstream.build.process import import_external
from slipstream.checkpoint.files import read_json
from slipstream.checkpoint.layout import head_folder, policy_folder
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.saved import Saved, restoring
from slipstream.checkpoint.state import data_file, draft_folder
from slipstream.config.load import CONFIG_FILE, load_config
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.models.decoder import Decoder
from slipstream.models.digest import weights_digest
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.models.hf_io import load_checkpoint
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

CANDIDATES = 2048
"""Default number of responses from which a workload is chosen."""

CPU = torch.device("cpu")

LONG_TAIL = 8.0
"""The smallest ratio of longest to median length that counts as a long tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A policy, its draft head, and prompts of its task as token ids.

    Responses have at most `max_response_length` tokens; None: `max_model_len` is the only limit.
    """

    decoder: Decoder
    head: DraftModel
    prompts: Sequence[Sequence[int]]
    max_model_len: int
    max_response_length: int | None = None


def load_trained(run: Path, device: torch.device = CPU, most: int = CANDIDATES) -> Trained:
    """Load a run folder with a policy and a draft head, such as `make bench-model` makes.

    The head is that of the folder `draft` of the run, if `slipstream draft` trained it for the
    newest policy; else that of the newest RL checkpoint, if it co-trains; else that of `draft`.
    `most` is the largest number of prompts.

    Raises ConfigError if the folder is not such a run, CheckpointError for files that cannot be
    used.
    """
    if not (run / CONFIG_FILE).is_file() or not _place_of_head(run).is_dir():
        raise ConfigError(
            f"{run} is not the folder of a run with a draft head; `make bench-model` makes "
            "runs/bench-model, and --policy DIR names another"
        )
    config: Config = load_config(file=run / CONFIG_FILE, notify=lambda _: None)
    import_external(config)
    policy = policy_folder(run)
    decoder = load_checkpoint(policy, device=device)
    place = _place_of_head(run, decoder)
    progress(f"draft head of {place}")
    tokenizer = make_tokenizer(config, policy)
    task = make_task(config, tokenizer)
    prompts = validation_prompts(config, tokenizer, task, count=most)
    return Trained(
        decoder=decoder,
        head=load_draft_head(head_folder(place), decoder.config).to(device),
        prompts=[tuple(prompt.ids) for prompt in prompts],
        max_model_len=max_model_len(config),
        max_response_length=config.data.max_response_length,
    )


def _place_of_head(run: Path, policy: Decoder | None = None) -> Path:
    """The folder `draft`, if its head was trained for `policy` or the newest RL checkpoint has no
    head; else that checkpoint."""
    newest = CheckpointManager(run, keep=None).latest() if run.is_dir() else None
    if newest is None or not draft_folder(newest).is_dir():
        return run / "draft"
    if policy is not None and _trained_for(run / "draft") == weights_digest(policy):
        return run / "draft"
    return newest


def _trained_for(run: Path) -> str | None:
    """The digest of the policy of a run of `slipstream draft`; None if it is unknown."""
    newest = CheckpointManager(run, keep=None).latest() if run.is_dir() else None
    if newest is None or not data_file(newest).is_file():
        return None
    with restoring(data_file(newest)):
        return Saved(read_json(data_file(newest))).field("policy").text()


@dataclass(frozen=True, slots=True)
class Responses:
    """Requests, and the tokens that plain decoding wrote for them, all in one batch.

    Chosen requests get a fixed length, because on a GPU other batches can round to other tokens.
    """

    requests: Sequence[GenerateRequest]
    tokens: Sequence[Sequence[int]]

    @property
    def lengths(self) -> list[int]:
        """Tokens per response."""
        return [len(tokens) for tokens in self.tokens]


def natural_responses(
    trained: Trained, temperature: float, dtype: torch.dtype, samples: int = 1
) -> Responses:
    """Complete responses to every prompt: `samples` of each."""
    longest = trained.max_model_len - max(map(len, trained.prompts))
    longest = min(longest, trained.max_response_length or longest)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_ids=tuple(trained.prompts[number // samples]),
            params=SamplingParams(max_tokens=longest, temperature=temperature),
            key=NoiseKey(seed=0, uid=str(number // samples), index=number % samples),
        )
        for number in range(samples * len(trained.prompts))
    ]
    engine = make_engine(trained, dtype)
    return Responses(requests, [g.token_ids for g in engine.run(requests)])


def make_engine(trained: Trained, dtype: torch.dtype, **more: object) -> Engine:
    """An engine for the policy, as rollouts use it. `more` are arguments of `Engine`."""
    settings = EngineSettings(
        max_model_len=trained.max_model_len, dtype=dtype, free_cache_engine=False
    )
    return Engine(trained.decoder, settings, **more)  # type: ignore[arg-type]


def long_tailed(responses: Responses, count: int, spread: float) -> Responses:
    """`count` responses whose lengths are closest to the quantiles of a log-normal distribution.
    Its maximum is the longest response, and `spread` times its median.

    Raises ConfigError if the chosen responses have a longest length below `LONG_TAIL` medians.
    """
    lengths = responses.lengths
    normal, longest = NormalDist(), max(lengths)
    last = normal.inv_cdf((count - 0.5) / count)
    sigma = math.log(spread) / last
    left = sorted(range(len(lengths)), key=lengths.__getitem__)
    chosen = []
    for i in reversed(range(count)):
        wanted = longest / spread * math.exp(sigma * normal.inv_cdf((i + 0.5) / count))
        nearest = min(left, key=lambda j: abs(lengths[j] - wanted))
        left.remove(nearest)
        chosen.append(nearest)
    # In the order of the prompts, which does not depend on the lengths.
    chosen.sort()
    picked = Responses(
        [_of_length(responses.requests[i], lengths[i]) for i in chosen],
        [responses.tokens[i] for i in chosen],
    )
    if max(picked.lengths) < LONG_TAIL * median(picked.lengths):
        raise ConfigError(
            f"the longest of {count} responses has {max(picked.lengths)} tokens and their median "
            f"is {median(picked.lengths):g}: no long tail; give another --policy"
        )
    return picked


def as_written(responses: Responses) -> Responses:
    """The same responses, with fixed lengths."""
    pairs = zip(responses.requests, responses.lengths, strict=True)
    return Responses([_of_length(*pair) for pair in pairs], responses.tokens)


def cut_to(responses: Responses, count: int, length: int) -> Responses:
    """`count` responses of exactly `length` tokens, cut from longer ones.

    Raises ConfigError if there are too few of them.
    """
    pairs = zip(responses.requests, responses.tokens, strict=True)
    fitting = [(request, tokens) for request, tokens in pairs if len(tokens) >= length]
    if len(fitting) < count:
        raise ConfigError(
            f"only {len(fitting)} of {len(responses.requests)} responses have {length} tokens, and "
            f"{count} are needed; lower --new-tokens or --batch"
        )
    return Responses(
        [_of_length(request, length) for request, _ in fitting[:count]],
        [tokens[:length] for _, tokens in fitting[:count]],
    )


def _of_length(request: GenerateRequest, length: int) -> GenerateRequest:
    return replace(request, params=replace(request.params, max_tokens=length, ignore_eos=True))
