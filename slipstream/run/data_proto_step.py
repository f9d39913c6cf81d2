"""The scored samples of a step as verl's `DataProto`, for samplers and data sets that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slipstream.data.samplers import DATASET_INDEX
from slipstream.rewards.data_proto import DataProto, proto_of
from slipstream.rewards.protocol import Decode, response_text
from slipstream.types import Group, Status


def proto_of_step(
    groups: Sequence[Group],
    rejected: Sequence[Group],
    decode: Decode,
    place_of: Callable[[str], int],
) -> DataProto:
    """The samples of a step with their rewards, from groups that were trained on and from groups
    that a filter rejected. Failed samples, which have no reward, are left out.

    In addition to the columns of `proto_of` it has: `token_level_scores` (B, R), the reward at the
    last token of each response; `acc`, None if unknown; `trained`; and `dataset_index`, the index
    of each prompt in its data set.
    """
    marked = [
        (sample, trained)
        for some, trained in ((groups, True), (rejected, False))
        for group in some
        for sample in group.samples
        if sample.status is not Status.FAILED
    ]
    samples = [sample for sample, _ in marked]
    texts = [response_text(sample, decode) for sample in samples]
    batch = proto_of(samples, texts)
    scores = torch.zeros_like(batch.batch["responses"], dtype=torch.float32)
    for row, sample in enumerate(samples):
        length = len(sample.all_response_ids)
        if length:
            scores[row, length - 1] = sample.reward
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
