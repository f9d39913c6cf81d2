"""slime's `Sample`: what a custom generate function fills in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class Sample:
    """One attempt at a prompt. Functions may set further attributes.

    `tokens` are prompt and response; the last `response_length` of them are the response, to which
    `loss_mask` and `rollout_log_probs` belong. `label` is the ground truth, and `metadata` the
    row's `extra_info`.
    """

    class Status(Enum):
        """How far the attempt is."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    """Exclude all tokens of the sample from the loss."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        """The number of response tokens in the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens of the policy (`trainable`, with `log_probs`) or of a tool to the response.

        `meta_info` of the answer sets the status, unless `update_terminal_info` is false. Raises
        ValueError if the log-probs do not fit the tokens.
        """
        ids = [int(i) for i in tokens or ()]
        if trainable and ids and (log_probs is None or len(log_probs) != len(ids)):
            found = "none" if log_probs is None else len(log_probs)
            raise ValueError(f"{len(ids)} tokens of the policy need as many log_probs, got {found}")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that the policy did not sample have no log_probs")
        # The lists are extended in place, because functions keep references to them.
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens += ids
        self.response_length += len(ids)
        self.loss_mask += [int(trainable)] * len(ids)
        self.rollout_log_probs += [0.0] * len(ids) if log_probs is None else map(float, log_probs)
        self.response += text or ""
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take status and weight version from the `meta_info` of an answer."""
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        ends = {"length": "TRUNCATED", "abort": "ABORTED", "stop": "COMPLETED"}
        found = ends.get(meta_info.get("finish_reason", {}).get("type"))
        if found is not None:
            self.status = Sample.Status[found]

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or the part of it that `args.reward_key` names."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward
