"""Policies for the lossless check, each with a draft head.

Random weights are scaled until the next token is predictable enough for drafts. The policy of a
folder is not changed; if it has no head, one is trained briefly on the policy's own text. Used by
`command`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
from slipstream.types import (
    GenerateRequest,
    NoiseKey,
    SamplingParams,
    UpdateKind,
    WeightUpdate,
)

POSITIONS = 1280
"""Positions of policies with random weights: enough for contexts over 1,024 tokens."""

VOCABULARY = {"d512x12": 32_000}
"""Vocabulary sizes that replace those of `SHAPES`, because the check must cover a large one."""

ENTROPY_NATS = 1.6
"""Mean entropy of the next token with random weights."""

EMBEDDING_SCALE = 25.0
"""Scale of random embeddings. It makes the next token depend mostly, but not only, on the last."""

TEXT_LENGTH = 96
NUM_TEXTS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A policy, its draft head, and texts that the policy wrote, which serve as prompts."""

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
    """The policy of a run folder or a Hugging Face folder, with a draft head.

    The head comes from `head`, else from the run's folder `draft`, else it is trained here for
    `head_steps` steps. Raises CheckpointError for files that cannot be read, ConfigError for a
    policy with too few positions.
    """
    decoder = load_checkpoint(policy_folder(folder))
    limit = decoder.config.context_limit
    if limit.tokens < 2 * TEXT_LENGTH:
        raise ConfigError(
            f"{folder}: the check needs texts of {2 * TEXT_LENGTH} tokens, but {limit.reason}; "
            "give another folder to --policy"
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
    """Scale the last norm until the mean entropy of the next token is `nats`, over random text."""
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
    """Texts that the policy writes, each after one random token, which is part of the text."""
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
    """A head that outputs the last token's embedding, scaled like the policy's last norm.

    Without training, it drafts well for a policy with random weights and large embeddings.
    """
    head = DraftHead(decoder.config)
    head.init_weights(0)
    embedding = decoder.model.embed_tokens.weight
    gain = decoder.model.norm.weight.mean() / embedding.square().mean().sqrt()
    width = decoder.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, :width] = torch.eye(width) * gain
    return head


def with_vocabulary(target: Target) -> tuple[DraftHead, list[WeightUpdate]]:
    """An EAGLE head that drafts half of the tokens, and updates that renew its draft vocabulary.

    The weights are those of the target's head, or of an untrained one if the target's head is of
    another kind. Every vocabulary has half of the tokens of the target's texts and the end tokens.
    The updates use the other half in turns.
    """
    config, own = target.decoder.config, target.head
    weights: DraftModel = own if isinstance(own, DraftHead) else embedding_head(target.decoder)
    texts = sorted({token for text in target.texts for token in text})
    parts = [sorted({*texts[first::2], *config.eos_token_ids}) for first in (0, 1)]
    size = max(map(len, parts), default=0)
    heads = []
    for tokens in parts:
        used = set(tokens)
        unused = (token for token in range(config.vocab_size) if token not in used)
        head = DraftHead(config, sorted([*tokens, *islice(unused, size - len(tokens))]))
        named = dict(weights.named_parameters())
        for name, parameter in head.named_parameters():
            parameter.data.copy_(named[name].data)
        heads.append(head)
    updates = [
        WeightUpdate(
            version=version,
            kind=UpdateKind.DRAFT,
            buckets=[
                [(name, tensor.detach().clone()) for name, tensor in head.state_dict().items()]
            ],
        )
        for version, head in enumerate(heads)
    ]
    return heads[-1], updates


def eagle3_head(target: Target) -> Eagle3Head:
    """The target's EAGLE-3 head; an untrained one if the target's head is of another kind."""
    if isinstance(target.head, Eagle3Head):
        return target.head
    last = target.decoder.config.num_layers - 1
    head = Eagle3Head(target.decoder.config, (0, (last + 1) // 2, last))
    head.init_weights(0, target.decoder)
    return head


def brief_head(
    decoder: Decoder, texts: Sequence[Sequence[int]], *, steps: int, rows: int = 4, lr: float = 1e-3
) -> DraftHead:
    """A draft head after `steps` steps of AdamW on `rows` texts each, all of the same length."""
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
