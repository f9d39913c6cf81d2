"""Builds everything that needs no model: tokenizer, task, prompts, demonstrations, rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.build.dataset import (
    all_prompts,
    data_seed,
    is_class,
    make_dataset,
    make_source,
    prompt_reader,
)
from slipstream.build.episodes import check_rows, has_episodes
from slipstream.build.policy import device_of
from slipstream.build.sandbox import make_sandbox
from slipstream.checkpoint.saved import Saved
from slipstream.config.schema import Config
from slipstream.data.data_buffer import DataBuffer, ListSource, MixtureSource, TaskSource
from slipstream.data.datasets import inspect_prompts
from slipstream.data.end_tokens import end_token_ids
from slipstream.data.registry import Task, get_task, task_tokenizer
from slipstream.data.response_text import response_decoder
from slipstream.data.sft import load_sft_samples, sft_samples
from slipstream.data.template_check import check_template_renders
from slipstream.data.template_date import set_template_date
from slipstream.data.tokenizer import load_tokenizer
from slipstream.errors import ConfigError, DataError
from slipstream.loops.sft import MixedSamples, SampleStream, ShuffledSamples
from slipstream.models.numerics import dtype_from_name
from slipstream.reading import shown_path
from slipstream.rewards.load import load_reward_manager
from slipstream.rewards.protocol import RewardManager
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.reward_model import RewardModel
from slipstream.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenParts:
    """Objects that a program passes instead of naming them in the configuration.

    They are data sets (`items`), a sampler for the training set, and a reward function or a
    `RewardManager`. Validation uses `reward_fn` too, unless it has its own.
    """

    train_dataset: Any = None
    val_dataset: Any = None
    train_sampler: Any = None
    collate_fn: Callable[[list[Any]], Mapping[str, Any]] | None = None
    reward_fn: Callable[..., Any] | RewardManager | None = None
    val_reward_fn: Callable[..., Any] | RewardManager | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


_LEARNED_AT_ONCE = 16
"""The number of responses in one call of a learned reward model."""


def make_task(config: Config, tokenizer: PreTrainedTokenizerBase) -> Task | None:
    """The built-in task named by `data.task`, if any. `tokenizer` renders its prompts."""
    data = config.data
    if data.task is None:
        return None
    task = get_task(
        data.task,
        data_seed(config),
        tokenizer=tokenizer,
        max_prompt_length=data.max_prompt_length,
        **data.task_kwargs,
    )
    if data.max_prompt_length < task.max_prompt_tokens():
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length} is below the longest prompt of "
            f"data.task={data.task}, {task.max_prompt_tokens()} tokens; set "
            f"data.max_prompt_length={task.max_prompt_tokens()}"
        )
    return task


def make_tokenizer(config: Config, model_folder: Path | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer from `data.tokenizer`, `model.tokenizer_path`, the model's folder, or the
    built-in task."""
    model = config.actor_rollout_ref.model
    path = config.data.tokenizer or model.tokenizer_path or model_folder
    if path is None:
        if config.data.task is None:
            raise ConfigError(
                "no tokenizer: set actor_rollout_ref.model.tokenizer_path=FOLDER (a model with "
                "random "
                "weights has no tokenizer)"
            )
        return task_tokenizer(config.data.task)
    tokenizer = load_tokenizer(path, custom_chat_template=model.custom_chat_template)
    use_template_date(config, tokenizer)
    if tokenizer.chat_template:
        source = f"tokenizer {shown_path(path)}"
        check_template_renders(tokenizer, source, config.data.apply_chat_template_kwargs)
    return tokenizer


def use_template_date(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the chat template write `data.chat_template_date`, or today's date if it is null."""
    set_template_date(tokenizer, template_date(config))


def template_date(config: Config) -> date | None:
    """The date of `data.chat_template_date`."""
    day = config.data.chat_template_date
    return None if day is None else date.fromisoformat(day)


def make_decode(
    config: Config, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int] = ()
) -> Callable[[list[int]], str]:
    """A function that turns response ids into text (`response_decoder`).

    `ends` are the policy's end tokens, if they are known; the tokenizer's are added.
    """
    own = end_token_ids(tokenizer, config.data.apply_chat_template_kwargs)
    return response_decoder(
        tokenizer,
        ends={*own, *ends},
        skip_special_tokens=config.reward_model.skip_special_tokens,
        config=config,
    )


def make_reward_model(
    config: Config, tokenizer: PreTrainedTokenizerBase, compute: ComputeThread
) -> RewardModel:
    """The learned reward model."""
    rewards, device = config.reward_model, device_of(config)
    assert rewards.model.path is not None, "checked by the configuration"
    dtype = rewards.model.dtype
    return RewardModel(
        rewards.model.path,
        tokenizer,
        compute,
        dtype=dtype_from_name(
            config.actor_rollout_ref.actor.dtype if dtype == "auto" else dtype, device
        ),
        device=device,
        batch_size=rewards.micro_batch_size_per_gpu,
        max_length=rewards.max_length,
        template_date=template_date(config),
    )


def make_reward_manager(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    function: Callable[..., Any] | RewardManager | None = None,
    more_kwargs: Mapping[str, Any] | None = None,
    compute: ComputeThread | None = None,
) -> RewardManager:
    """Build the reward manager, which scores responses.

    `function` replaces the function that the configuration names; a manager replaces everything.
    A learned reward model works on `compute`, by default on a new thread. `more_kwargs` are added
    to `reward_model.reward_kwargs`.
    """
    if isinstance(function, RewardManager):
        return function
    if function is not None and not callable(function):
        raise ConfigError(f"reward_fn must be a function or a manager, got {function!r}")
    r, custom = config.reward_model, config.custom_reward_function
    name, kwargs = r.reward_manager, {**r.reward_kwargs, **(more_kwargs or {})}
    if function is None and r.enable:
        name, function = "batch", make_reward_model(config, tokenizer, compute or ComputeThread())
        # The deadline is per call, so the number of responses per call is limited.
        kwargs.setdefault("max_batch", max(_LEARNED_AT_ONCE, r.micro_batch_size_per_gpu))
    return load_reward_manager(
        name,
        decode=make_decode(config, tokenizer),
        timeout_s=r.timeout_s,
        on_failure=r.on_failure,
        num_workers=r.num_workers,
        sandbox=make_sandbox(config),
        custom_path=custom.path,
        custom_name=custom.name,
        custom_kwargs=custom.reward_kwargs or None,
        function=function,
        compute_score_kwargs=r.compute_score_kwargs or None,
        reward_kwargs=kwargs or None,
        terms=r.terms or None,
        total_steps=config.trainer.total_training_steps,
    )


def _file_prompts(
    config: Config,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int,
) -> list[Prompt]:
    reader = prompt_reader(config, tokenizer)
    seed = data_seed(config) if config.data.shuffle else None
    loaded = inspect_prompts(list(files), reader, max_samples=max_samples, seed=seed)
    loaded.warn(reader.max_prompt_length, tools=has_episodes(config))
    check_rows(config, loaded.prompts)
    return loaded.prompts


def make_data_buffer(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | None,
    parts: GivenParts | None = None,
) -> DataBuffer:
    """Build the source of training prompts."""
    d, seed = config.data, data_seed(config)
    dataset = None if parts is None else parts.train_dataset
    if dataset is None and is_class(config):
        dataset = make_dataset(config, tokenizer, d.train_files, d.train_max_samples, train=True)
    if dataset is not None:
        sampler, collate = (
            (None, None) if parts is None else (parts.train_sampler, parts.collate_fn)
        )
        return DataBuffer(make_source(config, tokenizer, dataset, sampler, collate))
    if d.train_files is None:
        assert task is not None, "checked by resolve_mode"
        return DataBuffer(TaskSource(task, "train"))
    if d.mixture_weights is None:
        prompts = _file_prompts(config, d.train_files, tokenizer, d.train_max_samples)
        return DataBuffer(prompts, seed=seed, shuffle=d.shuffle)
    sources = []
    for file, weight in zip(d.train_files, d.mixture_weights, strict=True):
        prompts = _file_prompts(config, [file], tokenizer, d.train_max_samples)
        sources.append((ListSource(prompts, seed=f"{seed}/{file}", shuffle=d.shuffle), weight))
    return DataBuffer(MixtureSource(sources, seed=seed))


def validation_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | None,
    *,
    count: int | None = None,
    parts: GivenParts | None = None,
) -> list[Prompt]:
    """The fixed held-out prompts: from `data.val_files`, or the task's held-out split."""
    d = config.data
    limit = d.val_max_samples if count is None else count
    if parts is not None and parts.val_dataset is not None:
        return all_prompts(config, tokenizer, parts.val_dataset, count=limit)
    if d.val_files is not None and d.custom_cls.name is not None:
        dataset = make_dataset(config, tokenizer, d.val_files, d.val_max_samples, train=False)
        return all_prompts(config, tokenizer, dataset, count=limit)
    if d.val_files is not None:
        return _file_prompts(config, d.val_files, tokenizer, limit)
    if task is None:
        return []
    prompts = [task.prompt("held_out", index) for index in range(count or d.val_size)]
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    if len(longest.ids) > d.max_prompt_length:
        raise DataError(
            f"the prompt {longest.uid} has {len(longest.ids)} tokens of this tokenizer, more than "
            f"data.max_prompt_length={d.max_prompt_length}; raise it"
        )
    return prompts


def make_demonstrations(
    config: Config, tokenizer: PreTrainedTokenizerBase, task: Task | None
) -> SampleStream:
    """The SFT samples: from `sft.train_files`, or the built-in task's demonstrations."""
    sft = config.sft
    if sft.train_files is None:
        if task is None:
            raise ConfigError("no SFT data: set sft.train_files=FILE or data.task=countdown")
        return TaskDemonstrations(task, tokenizer, sft.max_length)
    seed, files = data_seed(config), sft.train_files

    def stream(chosen: Sequence[str], place: str) -> SampleStream:
        samples = load_sft_samples(
            list(chosen),
            tokenizer,
            messages_key=sft.messages_key,
            prompt_key=sft.prompt_key,
            response_key=sft.response_key,
            wrap_prompts=sft.wrap_prompts,
            max_length=sft.max_length,
            truncation=sft.truncation,
            max_samples=sft.train_max_samples,
            seed=seed,
            template_kwargs=config.data.apply_chat_template_kwargs,
            ignore_input_ids_mismatch=sft.ignore_input_ids_mismatch,
        )
        return ShuffledSamples(samples, seed=f"{seed}{place}")

    if sft.mixture_weights is None:
        return stream(files, "")
    weights = zip(files, sft.mixture_weights, strict=True)
    parts = [(stream([file], f"/{place}"), w) for place, (file, w) in enumerate(weights)]
    return MixedSamples(parts, seed=seed)


def rl_steps(config: Config, data_buffer: DataBuffer) -> int:
    """The number of RL steps: `trainer.total_training_steps`, or whole epochs over the prompts."""
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if data_buffer.endless:
        raise ConfigError(
            "data.mixture_weights draws prompts endlessly, so the number of RL steps must be "
            "set: set "
            "trainer.total_training_steps=100"
        )
    steps = trainer.total_epochs * len(data_buffer) // batch
    if steps == 0:
        raise DataError(
            f"{len(data_buffer)} training prompts in {trainer.total_epochs} epochs do not fill "
            f"one batch of data.train_batch_size={batch}; lower it, or set "
            "trainer.total_training_steps"
        )
    return steps


class TaskDemonstrations:
    """An endless `SampleStream` of a task's demonstrations, starting at `start`."""

    def __init__(
        self, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int, start: int = 0
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._start = self._index = start

    @property
    def drawn(self) -> int:
        return self._index - self._start

    def next_sample(self) -> Sample:
        (sample,) = sft_samples(
            self._task, self._tokenizer, self._index, 1, max_length=self._max_length
        )
        self._index += 1
        return sample

    def state_dict(self) -> dict[str, Any]:
        return {"index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, error=DataError).fields("index")
        self._index = saved["index"].count(least=self._start)
