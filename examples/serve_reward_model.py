"""Serve a reward model over HTTP. Settings: conf/serve_reward_model.yaml; documentation: docs/reward-server.md.

python examples/serve_reward_model.py reward_model.restore_from_path=TRUNK reward_model.head_path=HEAD.safetensors
"""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from reinforce_rl.cli import with_config
from reinforce_rl.errors import ConfigError
from reinforce_rl.reward.access import read_token
from reinforce_rl.reward.ports import check_port
from reinforce_rl.reward.server import FrontOptions, RewardServer, access_faults
from reinforce_rl.tokenizer import load_tokenizer


def serve(cfg: DictConfig) -> None:
    """Load the model and serve it until a signal."""
    check_paths(cfg)
    inference = cfg.inference
    token = read_token(inference.token_file, "inference.token_file")
    if faults := access_faults(inference.host, token, inference.allow_no_token):
        raise ConfigError(faults)
    check_port(cfg.inference.host, cfg.inference.port)  # before minutes of loading
    tokenizer = load_tokenizer(cfg.reward_model.tokenizer_path or cfg.reward_model.restore_from_path)

    # megatron-core imports wandb where it is installed. That makes folders in /tmp, and a killed server leaves them.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    # Only now: torch and megatron take seconds to import, and a wrong path or a busy port should not cost them.
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.megatron.reward_model import load_reward_model

    with parallel_mesh() as mesh:
        scorer = load_reward_model(
            cfg.reward_model.restore_from_path,
            cfg.reward_model.head_path,
            mesh,
            micro_batch_size=cfg.inference.micro_batch_size,
            max_length=cfg.reward_model.max_length,
        )
        RewardServer(
            scorer,
            tokenizer,
            name=cfg.inference.name,
            host=cfg.inference.host,
            port=cfg.inference.port,
            front=FrontOptions(
                token=token,
                allow_no_token=inference.allow_no_token,
                max_request_bytes=inference.max_request_bytes,
                max_sequence_length=inference.max_sequence_length,
                max_in_flight=inference.max_in_flight,
                max_queue=inference.max_queue,
                request_seconds=inference.request_seconds,
                stuck_seconds=inference.stuck_seconds,
                canary_seconds=inference.canary_seconds,
            ),
            max_batch_size=cfg.inference.max_batch_size,
            max_queue_delay=cfg.inference.max_queue_delay_ms / 1000,
            deterministic=cfg.inference.deterministic,
            add_special_tokens=cfg.inference.add_special_tokens,
            # By content, so that a restart from another path or node is the same server to its clients.
            warm_up_lengths=list(inference.warm_up_lengths),
            details={
                "trunk": Path(cfg.reward_model.restore_from_path).resolve().name,
                "head_sha256": hashlib.sha256(Path(cfg.reward_model.head_path).read_bytes()).hexdigest(),
                "pooling": scorer.pooling,
            },
            ready_file=cfg.inference.ready_file,
            stop_timeout=cfg.inference.stop_timeout_seconds,
        ).serve()


def check_paths(cfg: DictConfig) -> None:
    """Raises ConfigError naming each key that is not set, or whose file or folder is not there."""
    faults = [f"{key} is not set; expected a path" for key in sorted(OmegaConf.missing_keys(cfg))]
    if not faults:
        trunk, head = Path(cfg.reward_model.restore_from_path), Path(cfg.reward_model.head_path)
        if not trunk.is_dir():
            faults.append(
                f"reward_model.restore_from_path: {trunk} is no folder; expected a Hugging Face model folder"
            )
        if not head.is_file():
            faults.append(f"reward_model.head_path: {head} is no file; examples/train_reward_model.py makes one")
    if faults:
        raise ConfigError(faults)


@with_config("serve_reward_model")
def main(cfg: DictConfig) -> None:
    logging.basicConfig(level=cfg.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    serve(cfg)


if __name__ == "__main__":
    main()
