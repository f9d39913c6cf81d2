"""What the policy acts on: tasks, datasets, the data buffer and SFT samples."""
