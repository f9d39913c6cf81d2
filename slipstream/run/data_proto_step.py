"""What was scored in a step, as VERL's `DataProto`, for samplers and data sets that listen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from slipstream.data.samplers import DATASET_INDEX
from slipstream.rewards.data_proto import DataProto, proto_of
from slipstream.types import Group, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def proto_of_step(
    groups: Sequence[Group],
    rejected: Sequence[Group],
    tokenizer: PreTrainedTokenizerBase,
    place_of: Callable[[str], int],
) -> DataProto:
    """The samples of a step with their rewards: those of the groups that were trained on, and of
    those that a filter rejected. Failed ones, which have no reward, are not among them.

    Beside what `proto_of` has: `token_level_scores` (B, R), each reward at the last token of its
    response; `acc` where scores tell it, else None; `trained`; and `dataset_index`, the place of
    each prompt in its data set.
    """
    marked = [
        (sample, trained)
        for some, trained in ((groups, True), (rejected, False))
        for group in some
        for sample in group.samples
        if sample.status is not Status.FAILED
    ]
    samples = [sample for sample, _ in marked]
    texts = [tokenizer.decode(s.response_ids, skip_special_tokens=True) for s in samples]
    batch = proto_of(samples, texts)
    scores = torch.zeros_like(batch.batch["responses"], dtype=torch.float32)
    for row, sample in enumerate(samples):
        if sample.response_length:
            scores[row, sample.response_length - 1] = sample.reward
    return DataProto(
        {**batch.batch, "token_level_scores": scores},
        {
            **batch.non_tensor_batch,
            "trained": [trained for _, trained in marked],
            "acc": [s.reward_parts.get("acc") for s in samples],
            DATASET_INDEX: [place_of(s.uid) for s in samples],
        },
        batch.meta_info,
    )
