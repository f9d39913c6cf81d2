"""Training: the backend protocol, losses, optimizers, and backends for one or several processes.

It knows models and algorithms, but no engines, rollouts or data sets.
"""

from slipstream.training.compute_thread import ComputeThread
from slipstream.training.factory import (
    create_adamw_optimizer,
    create_cross_entropy_loss,
    create_pytorch_backend,
    create_warmup_cosine_scheduler,
    load_hf_model,
)
from slipstream.training.losses import (
    LossFn,
    LossInputs,
    LossOutputs,
    policy_loss_fn,
    sft_loss,
)
from slipstream.training.optim import OptimSettings, PolicyOptimizer, lr_factor
from slipstream.training.protocol import (
    ImmediateTrainFuture,
    StateTree,
    TrainFuture,
    TrainingBackend,
)
from slipstream.training.single import SingleProcessBackend

__all__ = [
    "ComputeThread",
    "ImmediateTrainFuture",
    "LossFn",
    "LossInputs",
    "LossOutputs",
    "OptimSettings",
    "PolicyOptimizer",
    "SingleProcessBackend",
    "StateTree",
    "TrainFuture",
    "TrainingBackend",
    "create_adamw_optimizer",
    "create_cross_entropy_loss",
    "create_pytorch_backend",
    "create_warmup_cosine_scheduler",
    "load_hf_model",
    "lr_factor",
    "policy_loss_fn",
    "sft_loss",
]
