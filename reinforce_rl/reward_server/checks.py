"""What cannot work of the reward server's configuration, found before heavy imports. One sentence a fault."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from reinforce_rl.config.base import PRECISIONS
from reinforce_rl.config.rules import layout_faults, model_values, tensor_faults


def serves_function(cfg: DictConfig) -> bool:
    """Whether a reward function is served and no model."""
    return cfg.reward_function.name is not None


def model_faults(cfg: DictConfig) -> list[str]:
    """Of paths and ranks of a server of a reward model.

    Args:
        cfg: what Hydra composed of conf/serve_reward_model.yaml.
    """
    precision = str(cfg.reward_model.precision)
    faults = [f"reward_model.precision is {precision!r}; expected one of {', '.join(PRECISIONS)}"]
    return [*_path_faults(cfg), *_rank_faults(cfg), *(faults if precision not in PRECISIONS else [])]


def _path_faults(cfg: DictConfig) -> list[str]:
    faults = [f"{key} is not set; expected a path" for key in sorted(OmegaConf.missing_keys(cfg))]
    if faults:
        return faults
    trunk, head = Path(cfg.reward_model.restore_from_path), cfg.reward_model.head_path
    if not trunk.is_dir():
        faults.append(f"reward_model.restore_from_path: {trunk} is no folder; expected a Hugging Face model folder")
    if head is not None and not Path(head).is_file():
        faults.append(f"reward_model.head_path: {head} is no file; examples/train_reward_model.py makes one")
    return faults


def _rank_faults(cfg: DictConfig) -> list[str]:
    rm = cfg.reward_model
    counts = {
        "devices": cfg.devices,
        "num_nodes": cfg.num_nodes,
        "reward_model.tensor_model_parallel_size": rm.tensor_model_parallel_size,
        "reward_model.pipeline_model_parallel_size": rm.pipeline_model_parallel_size,
    }
    faults = [
        f"{key} is {value}; expected at least 1"
        for key, value in counts.items()
        if not isinstance(value, int) or value < 1
    ]
    timeout = cfg.inference.rank_timeout_seconds
    if not isinstance(timeout, int | float) or timeout < 1:
        faults.append(f"inference.rank_timeout_seconds is {timeout}; expected at least 1")
    if faults:
        return faults
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
    file, values = model_values(str(rm.restore_from_path))
    return [*faults, *tensor_faults(values, file, rm.tensor_model_parallel_size, "reward_model")]
