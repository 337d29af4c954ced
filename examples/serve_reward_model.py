"""Serve a reward model over HTTP. Settings: conf/serve_reward_model.yaml; documentation: docs/reward-server.md.

python examples/serve_reward_model.py reward_model.restore_from_path=TRUNK reward_model.head_path=HEAD.safetensors
"""

from __future__ import annotations

import logging
import sys

import hydra
from omegaconf import DictConfig

from reinforce_rl.errors import ReinforceError
from reinforce_rl.reward.server import RewardServer, check_port
from reinforce_rl.tokenizer import load_tokenizer


def serve(cfg: DictConfig) -> None:
    """Load the model and serve it until a signal."""
    check_port(cfg.inference.host, cfg.inference.port)  # before minutes of loading
    tokenizer = load_tokenizer(cfg.reward_model.tokenizer_path or cfg.reward_model.restore_from_path)

    from reinforce_rl.reward.model import load_reward_model

    scorer = load_reward_model(
        cfg.reward_model.restore_from_path,
        cfg.reward_model.head_path,
        micro_batch_size=cfg.inference.micro_batch_size,
        max_length=cfg.reward_model.max_length,
    )
    RewardServer(
        scorer,
        tokenizer,
        name=cfg.inference.name,
        host=cfg.inference.host,
        port=cfg.inference.port,
        max_batch_size=cfg.inference.max_batch_size,
        max_queue_delay=cfg.inference.max_queue_delay_ms / 1000,
        deterministic=cfg.inference.deterministic,
        add_special_tokens=cfg.inference.add_special_tokens,
        details={
            "restore_from_path": str(cfg.reward_model.restore_from_path),
            "head_path": str(cfg.reward_model.head_path),
            "pooling": getattr(scorer, "pooling", None),
        },
        ready_file=cfg.inference.ready_file,
        stop_timeout=cfg.inference.stop_timeout_seconds,
    ).serve()


@hydra.main(version_base="1.3", config_path="../conf", config_name="serve_reward_model")
def main(cfg: DictConfig) -> None:
    logging.basicConfig(level=cfg.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        serve(cfg)
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
