"""Builds the critic. Called by the RL phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.build.algorithm import critic_budget, critic_updates
from slipstream.build.policy import device_of, optim_settings, rollout_too_long
from slipstream.checkpoint.layout import policy_folder
from slipstream.checkpoint.saved import check_finite, restoring
from slipstream.checkpoint.state import critic_folder, critic_optimizer_file, huggingface_folder
from slipstream.checkpoint.tree import load_tree
from slipstream.config.schema import Config
from slipstream.data.tokenizer import vocabulary_in
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.critic_io import load_critic
from slipstream.models.decoder import Decoder
from slipstream.models.numerics import dtype_from_name
from slipstream.models.policy import Policy, PolicyConfig
from slipstream.models.value_model import ValueModel
from slipstream.models.vocabulary import check_vocabulary
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.critic import Critic, ValueLossSettings
from slipstream.training.optim import OptimSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_critic(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    policy: Policy,
    compute: ComputeThread,
    *,
    rl_steps: int,
    resume: Path | None = None,
) -> Critic:
    """Build the critic of an RL run of `rl_steps`. Call it on `compute`, on which the critic works.

    It starts from `critic.model.path`, or from `policy` if that is null, or resumes from the
    checkpoint `resume` (`critic_folder`, `critic_optimizer_file`).

    Raises:
        CheckpointError: the folder has no critic, its vocabulary differs from the policy's, or the
            checkpoint has no critic.
        ConfigError: its context is too short for the sequences of this run.
    """
    critic, actor = config.critic, config.actor_rollout_ref.actor
    device = device_of(config)
    if resume is not None and not critic_folder(resume).is_dir():
        raise CheckpointError(
            f"{resume} has no critic, because the run trained none, so an estimator with a critic "
            f"cannot resume from it; keep the run's algorithm.adv_estimator, or start a new run "
            f"from "
            f"its weights with actor_rollout_ref.model.path={huggingface_folder(resume)}"
        )
    if resume is not None:
        with restoring(critic_folder(resume)):
            model = load_critic(critic_folder(resume), device=device)
            check_finite(model.named_parameters())
    elif critic.model.path is not None:
        model = load_critic(
            policy_folder(Path(critic.model.path)),
            device=device,
            positions=critic.model.override_config.max_position_embeddings,
        )
        check_critic(config, model.config, tokenizer, policy.config)
    else:
        assert isinstance(policy, Decoder), "`build.check_foreign` comes first"
        model = ValueModel.of(policy)
    rows = critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    tokens = critic_budget(config)
    made = Critic(
        model,
        optim=critic_optim(config, rl_steps),
        loss=ValueLossSettings(
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        ),
        dtype=dtype_from_name(actor.dtype, device),
        device=device,
        max_tokens_per_micro_batch=tokens,
        max_rows_per_micro_batch=rows if tokens is None else None,
        grad_clip=critic.grad_clip,
        gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        max_nonfinite_steps=actor.max_nonfinite_steps,
        compute=compute,
    )
    if resume is not None:
        with restoring(critic_optimizer_file(resume)):
            made.load_state_dict(load_tree(critic_optimizer_file(resume)))
    return made


def critic_optim(config: Config, rl_steps: int) -> OptimSettings:
    """The critic's optimizer and schedule for `rl_steps` RL steps. Raises ConfigError."""
    steps = rl_steps
    if config.critic.optim.lr_schedule_unit == "optimizer_step":
        epochs, mini = critic_updates(config)
        steps *= epochs * (config.data.train_batch_size // mini)
    return optim_settings(config.critic.optim, steps, key="critic.optim", shift_decay=True)


def check_critic(
    config: Config, critic: ModelConfig, tokenizer: PreTrainedTokenizerBase, policy: PolicyConfig
) -> None:
    """Check that the critic of `critic.model.path` has the policy's vocabulary and a long enough
    context. Raises CheckpointError and ConfigError."""
    own = config.critic.model
    assert own.path is not None
    folder = policy_folder(Path(own.path))
    if own.tokenizer_path is not None:
        folder = Path(own.tokenizer_path)
    source = f"critic.model.path={own.path}"
    check_vocabulary(
        critic,
        policy,
        role="critic",
        source=source,
        remedy="start from a critic with the policy's tokenizer, or set critic.model.path=null",
        other_vocab=vocabulary_in(
            folder,
            source=source,
            needed=own.tokenizer_path is not None,
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        ),
        policy_vocab=tokenizer.get_vocab(),
    )
    # Only the decoder computes critics.
    limit = replace(critic.context_limit, of_decoder=False)
    if problem := rollout_too_long(config, limit, "critic.model"):
        raise ConfigError(f"critic.model.path={own.path}: {problem}, or start from another")
