"""Train a reward model: a head on a frozen trunk, or all weights. Settings: conf/train_reward_model.yaml.

python examples/train_reward_model.py model.restore_from_path=TRUNK data.pairs_path=PAIRS.jsonl
python examples/train_reward_model.py mode=full model.restore_from_path=SFT data.pairs_path=PAIRS.jsonl \
    trainer.devices=2
"""

from __future__ import annotations

import os
import shlex
import sys

from omegaconf import DictConfig

from reinforce_rl.launch.cli import start_ranks, with_config

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it: no hub


@with_config("train_reward_model")
def main(cfg: DictConfig) -> None:
    from reinforce_rl.config.load import load_config
    from reinforce_rl.config.reward_model import TrainRewardModelConfig

    config, command = load_config(cfg, TrainRewardModelConfig), shlex.join(["python", *sys.argv])
    if config.mode == "full":
        start_ranks(config.trainer.devices, config.trainer.num_nodes)
    from reinforce_rl.reward_model.job import train_reward_model

    train_reward_model(config, command=command)


if __name__ == "__main__":
    main()
