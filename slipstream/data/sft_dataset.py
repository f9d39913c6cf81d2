"""verl's data set of conversations for supervised fine-tuning, to use or to subclass.

Its rows come from `sft.load_sft_samples`, which the SFT loop calls directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.data.sft import load_sft_samples
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PADDINGS = ("right", "no_padding")


class MultiTurnSFTDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Conversations of parquet, JSONL or JSON files, as token ids with a loss mask.

    Items have `input_ids`, `attention_mask`, `position_ids` and `loss_mask` (1 on assistant turns
    including their end token), each (max_length,), padded on the right. With `pad_mode` =
    `no_padding` the length is that of the conversation. `config` has `max_length` (1024),
    `truncation` (error, left, right), `pad_mode`, `ignore_input_ids_mismatch`,
    `apply_chat_template_kwargs`, and `multiturn` with the column names `messages_key`, `tools_key`
    and `enable_thinking_key`.
    """

    def __init__(
        self,
        parquet_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """`processor` must be None: models read only text here.

        Raises DataError that names file and row, and ConfigError for an unknown `pad_mode` and for
        a processor. Before verl 0.7 the fourth argument was `max_samples`: pass it by name.
        """
        if processor is not None:
            raise ConfigError(
                f"MultiTurnSFTDataset(processor={processor!r}): models read only text here; leave "
                "the processor out, and pass max_samples=... by name"
            )
        config = {} if config is None else config
        columns = config.get("multiturn") or {}
        self.pad_mode = str(config.get("pad_mode", "right"))
        if self.pad_mode not in _PADDINGS:
            raise ConfigError(f"pad_mode {self.pad_mode!r} is unknown; use {', '.join(_PADDINGS)}")
        self.max_length = int(config.get("max_length", 1024))
        pad = tokenizer.pad_token_id
        self._pad = tokenizer.eos_token_id if pad is None else pad
        self.samples = load_sft_samples(
            parquet_files,
            tokenizer,
            messages_key=str(columns.get("messages_key", "messages")),
            tools_key=str(columns.get("tools_key", "tools")),
            enable_thinking_key=str(columns.get("enable_thinking_key", "enable_thinking")),
            max_length=self.max_length,
            truncation=config.get("truncation", "error"),
            max_samples=max_samples,
            seed=config.get("seed") if config.get("shuffle") else None,
            template_kwargs=dict(config.get("apply_chat_template_kwargs") or {}),
            ignore_input_ids_mismatch=bool(config.get("ignore_input_ids_mismatch", False)),
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.samples[index]
        tokens = sample.tokens
        length = len(tokens) if self.pad_mode == "no_padding" else self.max_length
        ids = torch.full((length,), int(self._pad), dtype=torch.long)
        attention, loss = torch.zeros_like(ids), torch.zeros_like(ids)
        ids[: len(tokens)] = torch.tensor(tokens)
        attention[: len(tokens)] = 1
        loss[: len(tokens)] = torch.tensor(sample.loss_mask).long()
        return {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(0) - 1).clamp(min=0) * attention,
            "loss_mask": loss,
        }

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self[i] for i in range(len(self)))
