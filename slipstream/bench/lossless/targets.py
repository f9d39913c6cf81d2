"""Policies that speculation is checked on, each with a draft head.

Random weights are made sharp enough to be drafted for; those of a folder are taken as they are. The
head is trained briefly on what its policy writes. Called by `lossless`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slipstream.bench.shapes import SHAPES
from slipstream.checkpoint.layout import head_folder, policy_folder
from slipstream.drafter.losses import DraftSamples, draft_loss
from slipstream.errors import ConfigError
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.models.decoder import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.models.hf_io import load_checkpoint
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

POSITIONS = 1280
"""Of policies with random weights: enough for contexts past 1,024."""

VOCABULARY = {"d512x12": 32_000}
"""Where it is not the one of `SHAPES`: checks are to meet a large one."""

ENTROPY_NATS = 1.6
"""Of the next token under random weights, on average."""

EMBEDDING_SCALE = 25.0
"""Of random embeddings, so that the last token alone says much of the next one, but not all."""

TEXT_LENGTH = 96
NUM_TEXTS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A policy, a head that drafts for it, and tokens that the policy wrote, as prompts."""

    name: str
    decoder: Decoder
    head: DraftModel
    texts: Sequence[Sequence[int]]


def random_target(shape: str) -> Target:
    """Random weights of a named shape. Raises ConfigError for an unknown name."""
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    config = replace(
        SHAPES[shape],
        vocab_size=VOCABULARY.get(shape, SHAPES[shape].vocab_size),
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    decoder = Decoder(config)
    decoder.init_weights(0)
    with torch.no_grad():
        decoder.model.embed_tokens.weight.mul_(EMBEDDING_SCALE)
    sharpen(decoder, ENTROPY_NATS)
    texts = own_texts(decoder, count=NUM_TEXTS, length=TEXT_LENGTH)
    name, head = f"random {shape}", embedding_head(decoder)
    return Target(name=name, decoder=decoder, head=head, texts=texts)


def trained_target(folder: Path, head: Path | None = None, *, head_steps: int = 300) -> Target:
    """The policy of a run, or of a Hugging Face folder, with the draft head of `head`, else of the
    run's folder `draft`, else one that is trained here for `head_steps`.

    Raises CheckpointError for what cannot be read, ConfigError for too few positions.
    """
    decoder = load_checkpoint(policy_folder(folder))
    limit = decoder.config.context_limit
    if limit.tokens < 2 * TEXT_LENGTH:
        raise ConfigError(
            f"{folder}: the check takes texts of {2 * TEXT_LENGTH} tokens, but {limit.reason}; "
            "give another folder"
        )
    texts = own_texts(decoder, count=NUM_TEXTS, length=TEXT_LENGTH)
    if head is None and (folder / "draft").is_dir():
        head = folder / "draft"
    drafter: DraftModel
    if head is None:
        drafter = brief_head(decoder, texts, steps=head_steps)
    else:
        drafter = load_draft_head(head_folder(head), decoder.config)
    return Target(name=folder.name, decoder=decoder, head=drafter, texts=texts)


@torch.no_grad()
def sharpen(decoder: Decoder, nats: float) -> None:
    """Scale the last norm until the next token's entropy is `nats` on average over random text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(decoder.config.vocab_size, (4, 32), generator=generator)
    packed = decoder.pack(torch.float32)
    hidden = packed.forward(ids, torch.arange(32).expand(4, -1)).final.flatten(0, 1)
    logits = packed.lm_head(hidden)
    low, high = 0.0, 1024.0
    for _ in range(30):
        middle = (low + high) / 2
        log_p = torch.log_softmax(logits * middle, -1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        low, high = (middle, high) if entropy > nats else (low, middle)
    decoder.model.norm.weight.mul_(low)


def own_texts(decoder: Decoder, *, count: int, length: int) -> list[list[int]]:
    """What the policy writes after one random token, that token included."""
    rng = random.Random(0)
    engine = Engine(decoder, EngineSettings(max_model_len=length, dtype=torch.float32))
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=(rng.randrange(decoder.config.vocab_size),),
            params=SamplingParams(max_tokens=length - 1, ignore_eos=True),
            key=NoiseKey(seed=0, namespace="draft", uid=str(i)),
        )
        for i in range(count)
    ]
    done = engine.run(requests)
    return [[*r.prompt_ids, *g.token_ids] for r, g in zip(requests, done, strict=True)]


@torch.no_grad()
def embedding_head(decoder: Decoder) -> DraftHead:
    """A head that hands on the last token's embedding, as large as the policy's last norm makes it:
    what a policy with random weights and large embeddings can be drafted by without training."""
    head = DraftHead(decoder.config)
    head.init_weights(0)
    embedding = decoder.model.embed_tokens.weight
    gain = decoder.model.norm.weight.mean() / embedding.square().mean().sqrt()
    width = decoder.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, :width] = torch.eye(width) * gain
    return head


def eagle3_head(target: Target) -> Eagle3Head:
    """The target's, if it has one of this kind, else one as it is before training."""
    if isinstance(target.head, Eagle3Head):
        return target.head
    last = target.decoder.config.num_layers - 1
    head = Eagle3Head(target.decoder.config, (0, (last + 1) // 2, last))
    head.init_weights(0, target.decoder)
    return head


def brief_head(
    decoder: Decoder, texts: Sequence[Sequence[int]], *, steps: int, rows: int = 4, lr: float = 1e-3
) -> DraftHead:
    """A draft head after `steps` of AdamW on `rows` texts each, which have one length."""
    head = DraftHead(decoder.config)
    head.init_weights(0)
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr)
    tokens = torch.tensor(texts)
    with torch.no_grad():
        policy = decoder.pack(torch.float32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = tokens[torch.randint(len(tokens), (rows,), generator=generator)]
        with torch.no_grad():
            positions = torch.arange(ids.shape[1]).expand(rows, -1)
            features = policy.forward(ids, positions).final
        loss = draft_loss(
            head.pack(torch.float32),
            DraftSamples(
                tokens_BT=ids,
                features_BTF=features,
                loss_mask_BT=torch.ones(ids.shape),
                embedding_VD=policy.embedding,
                lm_head=policy.lm_head,
            ),
            soft_weight=1.0,
        )
        optimizer.zero_grad()
        loss.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return head
