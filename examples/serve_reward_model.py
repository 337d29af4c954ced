"""Serve a reward model over HTTP. Settings: conf/serve_reward_model.yaml; documentation: docs/reward-server.md.

python examples/serve_reward_model.py reward_model.restore_from_path=TRUNK reward_model.head_path=HEAD.safetensors
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from reinforce_rl.cli import start_ranks, with_config
from reinforce_rl.errors import ConfigError
from reinforce_rl.layout import layout_faults
from reinforce_rl.reward.base import Scorer
from reinforce_rl.reward.server import RewardServer, check_port
from reinforce_rl.tokenizer import load_tokenizer


def serve(cfg: DictConfig) -> None:
    """Load the model on all ranks and serve it until a signal."""
    # megatron-core imports wandb where it is installed. That makes folders in /tmp, and a killed server leaves them.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    # Only now: torch and megatron take seconds to import, and a wrong path or a busy port should not cost them.
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.megatron.reward_model import load_reward_model
    from reinforce_rl.reward.batching import Batching
    from reinforce_rl.reward.ranks import follow_rank_0, lead_ranks

    batching = Batching(
        cfg.inference.micro_batch_size, cfg.inference.tokens_per_micro_batch, cfg.inference.pad_to_multiple
    )
    if faults := batching.faults():
        raise ConfigError(faults)
    with parallel_mesh(
        cfg.reward_model.tensor_model_parallel_size,
        cfg.reward_model.pipeline_model_parallel_size,
        sequence_parallel=cfg.reward_model.sequence_parallel,
    ) as mesh:
        load = partial(
            load_reward_model,
            cfg.reward_model.restore_from_path,
            cfg.reward_model.head_path,
            mesh,
            batching=batching,
            max_length=cfg.reward_model.max_length,
        )
        rank_timeout, call_timeout = cfg.inference.rank_timeout_seconds, cfg.inference.call_timeout_seconds
        if mesh.world_size == 1:
            server_of(cfg, load()).serve()
        elif mesh.is_main:
            logging.getLogger(__name__).info("event=ranks %s", mesh.grid())
            with lead_ranks(mesh, load, rank_timeout=rank_timeout, call_timeout=call_timeout) as scorer:
                server_of(cfg, scorer, check=scorer.check).serve()
        else:
            follow_rank_0(mesh, load, rank_timeout=rank_timeout)


def server_of(cfg: DictConfig, scorer: Scorer, **options: Any) -> RewardServer:
    """The server for a scorer, as configured."""
    from reinforce_rl.megatron.reward_model import RewardHead

    return RewardServer(
        scorer,
        load_tokenizer(cfg.reward_model.tokenizer_path or cfg.reward_model.restore_from_path),
        name=cfg.inference.name,
        host=cfg.inference.host,
        port=cfg.inference.port,
        max_batch_size=cfg.inference.max_batch_size,
        max_queue_delay=cfg.inference.max_queue_delay_ms / 1000,
        preferred_batch_sizes=cfg.inference.preferred_batch_sizes,
        deterministic=cfg.inference.deterministic,
        add_special_tokens=cfg.inference.add_special_tokens,
        # By content, so that a restart from another path, node or layout is the same server to its clients.
        details={
            "trunk": Path(cfg.reward_model.restore_from_path).resolve().name,
            "head_sha256": hashlib.sha256(Path(cfg.reward_model.head_path).read_bytes()).hexdigest(),
            "pooling": RewardHead.load(cfg.reward_model.head_path).pooling,
        },
        ready_file=cfg.inference.ready_file,
        stop_timeout=cfg.inference.stop_timeout_seconds,
        **options,
    )


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


def check_ranks(cfg: DictConfig) -> None:
    """Raises ConfigError naming what cannot work of the number of ranks and of how they share the model."""
    rm = cfg.reward_model
    counts = {
        "devices": cfg.devices,
        "num_nodes": cfg.num_nodes,
        "reward_model.tensor_model_parallel_size": rm.tensor_model_parallel_size,
        "reward_model.pipeline_model_parallel_size": rm.pipeline_model_parallel_size,
        "inference.rank_timeout_seconds": cfg.inference.rank_timeout_seconds,
        "inference.call_timeout_seconds": cfg.inference.call_timeout_seconds,
    }
    faults = [f"{key} is {value}; expected at least 1" for key, value in counts.items() if value < 1]
    if not faults:
        ranks, world_size = f"num_nodes x devices = {cfg.num_nodes} x {cfg.devices}", cfg.num_nodes * cfg.devices
        faults += layout_faults(
            rm.tensor_model_parallel_size,
            rm.pipeline_model_parallel_size,
            1,
            rm.sequence_parallel,
            world_size,
            ranks,
            "reward_model",
        )
        started = os.environ.get("WORLD_SIZE")
        if started is not None and int(started) != world_size:
            faults.append(f"{started} ranks were started (WORLD_SIZE), but {ranks} = {world_size}")
    if faults:
        raise ConfigError(faults)


@with_config("serve_reward_model")
def main(cfg: DictConfig) -> None:
    logging.basicConfig(level=cfg.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    check_paths(cfg)
    check_ranks(cfg)
    if os.environ.get("RANK", "0") == "0":
        check_port(cfg.inference.host, cfg.inference.port)  # before minutes of loading
    start_ranks(cfg.devices, cfg.num_nodes, "num_nodes")
    serve(cfg)


if __name__ == "__main__":
    main()
