"""Train a policy in the environment, as VERL's guides do.

python main.py --config-path=config --config-name=test_config
"""

from __future__ import annotations

import hydra
from custom.env_dataset import CustomEnvDataset
from custom.reward_manager import CustomRewardManager
from omegaconf import DictConfig
from your_environment import YourEnvironment

from slipstream.compat.verl import RayPPOTrainer
from slipstream.data.tokenizer import build_tokenizer


@hydra.main(config_path="config", config_name="config", version_base=None)
def main(config: DictConfig) -> None:
    # Setup your environment
    env = YourEnvironment()

    # Create custom dataset
    tokenizer = build_tokenizer()
    dataset = CustomEnvDataset(env, tokenizer=tokenizer)

    # Create custom reward manager
    reward_fn = CustomRewardManager(env)

    # Initialize trainer with custom components
    trainer = RayPPOTrainer(
        config=config,
        train_dataset=dataset,
        reward_fn=reward_fn,
        val_dataset=CustomEnvDataset(YourEnvironment(size=64, seed=2), tokenizer=tokenizer),
    )

    # Start training
    trainer.fit()


if __name__ == "__main__":
    main()
