"""Serve a reward model over HTTP. Settings: conf/serve_reward_model.yaml; documentation: docs/reward-server.md.

python examples/serve_reward_model.py reward_model.restore_from_path=TRUNK reward_model.head_path=HEAD.safetensors
python examples/serve_reward_model.py reward_function.name=reinforce_rl.rewards.functions.gsm8k
python examples/serve_reward_model.py reward_model.restore_from_path=CLASSIFIER
"""

from __future__ import annotations

from omegaconf import DictConfig

from reinforce_rl.config.load import load_config
from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.launch.cli import with_config


@with_config("serve_reward_model")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg, ServeRewardModelConfig)
    from reinforce_rl.launch.serve import serve

    serve(config)


if __name__ == "__main__":
    main()
