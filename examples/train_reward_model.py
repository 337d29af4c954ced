"""Train a linear reward head on a frozen trunk. Settings: conf/train_reward_model.yaml.

python examples/train_reward_model.py model.restore_from_path=TRUNK data.pairs_path=PAIRS.jsonl
"""

from __future__ import annotations

import os
import shlex
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: no hub

import hydra
from omegaconf import DictConfig

from reinforce_rl.errors import ReinforceError
from reinforce_rl.reward.training_config import TrainRewardModelConfig
from reinforce_rl.reward.training_job import train_reward_model


@hydra.main(version_base="1.3", config_path="../conf", config_name="train_reward_model")
def main(cfg: DictConfig) -> None:
    try:
        train_reward_model(TrainRewardModelConfig.from_hydra(cfg), command=shlex.join(["python", *sys.argv]))
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
