"""A learned reward model: a sequence-classification checkpoint that scores conversations.

Transformers computes it, on the compute thread. `rewards.batched` calls it with batches in verl's
format; `build` connects the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.data.messages import continues_message
from slipstream.data.template_date import set_template_date
from slipstream.errors import CheckpointError
from slipstream.rewards.data_proto import DataProto
from slipstream.rewards.protocol import Score
from slipstream.threads import arrival
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardModel:
    """Scores responses with a Hugging Face checkpoint that has one label.

    `tokenizer` is the policy's. If the checkpoint has the same vocabulary and chat template, or no
    tokenizer, it gets the tokens of the rollout. Otherwise its own tokenizer renders and tokenizes
    prompt and response. With `batch_size` above 1 the last bits of a score can depend on the other
    responses of the batch. A response fails if its conversation is longer than `max_length` tokens
    (None: the model's maximum). `template_date` is the date that its own chat template writes
    (None: today's). Raises CheckpointError if the checkpoint cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        compute: ComputeThread,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        batch_size: int = 1,
        max_length: int | None = None,
        template_date: date | None = None,
    ) -> None:
        folder = Path(path).expanduser()
        self._compute, self._batch_size = compute, batch_size
        self._model = compute.run(lambda: _load(folder, dtype, device or torch.device("cpu")))
        positions = getattr(self._model.config, "max_position_embeddings", None)
        if max_length is not None and positions is not None and max_length > positions:
            raise CheckpointError(
                f"reward_model.max_length={max_length} is more than the {positions} positions of "
                f"{folder}; set at most {positions}"
            )
        self._max_length = max_length or positions
        self._own = _own_tokenizer(folder, tokenizer)
        if self._own is not None:
            set_template_date(self._own, template_date)
        words = len(tokenizer) if self._own is None else 0
        if words > self._model.config.vocab_size:
            raise CheckpointError(
                f"the reward model {folder} has a vocabulary of {self._model.config.vocab_size} "
                f"tokens, but the policy's tokenizer has {words}; put the reward model's own "
                "tokenizer files into its folder"
            )

    async def __call__(self, data: DataProto) -> list[float | Score]:
        """Return one score per row. Cancelling does not stop a forward pass that is running."""
        sequences = [self._tokens(data, row) for row in range(len(data))]
        limit = self._max_length
        fits = [limit is None or len(s) <= limit for s in sequences]
        scores: list[float | Score] = [
            Score(
                0.0,
                ok=False,
                failure=f"{len(s)} tokens are more than the reward model's maximum of {limit}",
            )
            for s in sequences
        ]
        rows = [row for row, fit in enumerate(fits) if fit]
        for start in range(0, len(rows), self._batch_size):
            batch = rows[start : start + self._batch_size]
            values = self._compute.executor.submit(self._forward, [sequences[row] for row in batch])
            await arrival(values)
            for row, value in zip(batch, values.result(), strict=True):
                scores[row] = value
        return scores

    @torch.no_grad()
    def _forward(self, sequences: Sequence[list[int]]) -> list[float]:
        width = max(map(len, sequences))
        # The model scores at the last token that is not padding, so the padding token must be one
        # that no sequence ends with.
        last = {sequence[-1] for sequence in sequences}
        pad = next(token for token in range(len(last) + 1) if token not in last)
        ids = torch.full((len(sequences), width), pad)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        self._model.config.pad_token_id = pad
        device = self._model.device
        logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores

    def _tokens(self, data: DataProto, row: int) -> list[int]:
        if self._own is None:
            mask = data.batch["attention_mask"][row].bool()
            tokens: list[int] = data.batch["input_ids"][row][mask].tolist()
            return tokens
        prompt = data.non_tensor_batch["raw_prompt"][row]
        response = data.non_tensor_batch["response_text"][row]
        if isinstance(prompt, str):
            return list(self._own(prompt + response)["input_ids"])
        messages: list[Message] = [*prompt, {"role": "assistant", "content": response}]
        if continues_message(prompt):
            content = prompt[-1]["content"] + response
            messages = [*prompt[:-1], {**prompt[-1], "content": content}]
        return list(self._own.apply_chat_template(messages, tokenize=True, return_dict=False))


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        architectures = config.architectures or []
        if not any(name.endswith("ForSequenceClassification") for name in architectures):
            raise CheckpointError(
                f"reward_model.model.path={folder} is {', '.join(architectures) or 'no model'}, "
                "not a model for sequence classification"
            )
        if config.num_labels != 1:
            raise CheckpointError(
                f"reward_model.model.path={folder} has {config.num_labels} labels; a reward model "
                "must have 1"
            )
        model, info = AutoModelForSequenceClassification.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"reward_model.model.path={folder} cannot be loaded ({type(error).__name__}: {reason})"
            "; give a folder with config.json and model.safetensors"
        ) from error
    if info["missing_keys"]:
        raise CheckpointError(
            f"reward_model.model.path={folder} lacks the weights "
            f"{', '.join(sorted(info['missing_keys'])[:3])}, which would be random; give a "
            "complete checkpoint"
        )
    return model.to(device).eval()


def _own_tokenizer(
    folder: Path, policy_tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None if it can read the policy's tokens."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").exists():
        return None
    own: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    same = own.get_vocab() == policy_tokenizer.get_vocab()
    if same and own.chat_template in (None, policy_tokenizer.chat_template):
        return None
    if own.chat_template is None and policy_tokenizer.chat_template is not None:
        raise CheckpointError(
            f"the tokenizer of the reward model {folder} has another vocabulary than the policy's "
            "and no chat template, so conversations cannot be rendered; add its "
            "chat_template.jinja to the folder"
        )
    return own
