"""The Hydra programs. They import torch and megatron late, so that a wrong configuration does not wait for them."""

from __future__ import annotations

from omegaconf import DictConfig

from reinforce_rl.launch.cli import start_ranks, with_config
from reinforce_rl.launch.terminal import typed


@with_config("train_reinforce_actor")
def train(cfg: DictConfig) -> None:
    from reinforce_rl.config.load import load_config
    from reinforce_rl.runtime.settings import may_start
    from reinforce_rl.runtime.stop import StopRequest

    if cfg.preflight in (True, "deep"):
        from reinforce_rl.preflight.run import preflight

        preflight(cfg)
        return
    config = load_config(cfg)
    if not may_start(config):
        return
    start_ranks(config.trainer.devices, config.trainer.num_nodes)
    stop = StopRequest.on_signals()
    from reinforce_rl.run import train

    train(config, stop)


@with_config("serve_reward_model")
def serve(cfg: DictConfig) -> None:
    from reinforce_rl.config.load import load_config
    from reinforce_rl.config.rewards import ServeRewardModelConfig

    config = load_config(cfg, ServeRewardModelConfig)
    from reinforce_rl.launch.serve import serve

    serve(config)


@with_config("train_reward_model")
def train_rm(cfg: DictConfig) -> None:
    from reinforce_rl.config.load import load_config
    from reinforce_rl.config.reward_model import TrainRewardModelConfig

    config = load_config(cfg, TrainRewardModelConfig)
    if config.mode == "full":
        start_ranks(config.trainer.devices, config.trainer.num_nodes)
    from reinforce_rl.reward_model.job import train_reward_model

    train_reward_model(config, command=typed())
