"""Train a linear reward head on a frozen trunk. Settings: conf/train_reward_model.yaml.

python examples/train_reward_model.py model.restore_from_path=TRUNK data.pairs_path=PAIRS.jsonl
"""

from __future__ import annotations

import os
import shlex
import sys

from omegaconf import DictConfig

from reinforce_rl.cli import with_config

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: no hub


@with_config("train_reward_model")
def main(cfg: DictConfig) -> None:
    from reinforce_rl.reward.training_config import TrainRewardModelConfig
    from reinforce_rl.reward.training_job import train_reward_model

    train_reward_model(TrainRewardModelConfig.from_hydra(cfg), command=shlex.join(["python", *sys.argv]))


if __name__ == "__main__":
    main()
