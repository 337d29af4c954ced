"""Build and run the reward server: a model on its ranks, or a reward function."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Any

from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ModelStuckError
from reinforce_rl.launch.cli import start_ranks
from reinforce_rl.reward_server.scoring import FunctionScorer
from reinforce_rl.reward_server.server import RewardServer, token_of
from reinforce_rl.rewards.base import FunctionSpec, Scorer
from reinforce_rl.rewards.function_pool import FunctionPool
from reinforce_rl.utils.net import check_port


def serve_model(cfg: ServeRewardModelConfig) -> None:
    """Load the model on all ranks and serve it until a signal."""
    # megatron-core imports wandb if installed, which creates folders in /tmp that a killed server leaves behind.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    # Imported late: torch and megatron take seconds, and a wrong path or busy port should fail before.
    import torch

    from reinforce_rl.config.load import precision_here
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.reward_model.scorer import Batching, Merging, load_head, load_reward_model
    from reinforce_rl.reward_server.ranks import end_process, follow_rank_0, lead_ranks
    from reinforce_rl.trainer.build import DTYPES

    own, inference = cfg.reward_model, cfg.inference
    head = load_head(own.restore_from_path, own.head_path)
    mean = head.mean if own.mean is None else own.mean
    deviation = head.deviation if own.deviation is None else own.deviation
    merging = Merging.from_names(head.attributes, own.attribute_weights or None, mean, deviation)
    batching = Batching(inference.micro_batch_size, inference.tokens_per_micro_batch, inference.pad_to_multiple)
    dtype = getattr(torch, DTYPES[precision_here(own.precision)])
    options = {"batching": batching, "max_length": own.max_length, "merging": merging, "dtype": dtype}
    tensor, pipeline = own.tensor_model_parallel_size, own.pipeline_model_parallel_size
    with parallel_mesh(tensor, pipeline, sequence_parallel=own.sequence_parallel) as mesh:
        load = partial(load_reward_model, own.restore_from_path, own.head_path, mesh, **options)
        rank_timeout, call_timeout = inference.rank_timeout_seconds, inference.stuck_seconds
        if mesh.world_size == 1:
            model = load()
            try:
                server_of(cfg, model, model).serve()
            except ModelStuckError as error:
                end_process(str(error), error.exit_code)
        elif mesh.is_main:
            logging.getLogger(__name__).info("event=ranks %s", mesh.layout.grid())
            with lead_ranks(mesh, load, rank_timeout=rank_timeout, call_timeout=call_timeout) as scorer:
                server_of(cfg, scorer, scorer.model, check=scorer.check).serve()
        else:
            follow_rank_0(mesh, load, rank_timeout=rank_timeout)


def server_of(cfg: ServeRewardModelConfig, scorer: Scorer, model: Any, **options: Any) -> RewardServer:
    """Build the server for a scorer from the configuration; `model` is this rank's part of it."""
    from reinforce_rl.reward_model.scorer import reward_model_identity

    own = cfg.reward_model
    tokenizer = load_tokenizer(own.tokenizer_path or own.restore_from_path)
    details = reward_model_identity(own.restore_from_path, own.head_path, model)
    return RewardServer(scorer, tokenizer, cfg.inference, details=details, **options)


def serve_function(cfg: ServeRewardModelConfig) -> None:
    own = cfg.reward_function
    assert own.name is not None
    pool = FunctionPool({own.name: FunctionSpec("reward_function", own.name, own.kwargs)}, own)
    try:
        pool.start()
        # Hash the source, so that clients notice a changed function.
        details = {"function": own.name, "kwargs": own.kwargs, "source_sha256": pool.sources[own.name]}
        RewardServer(FunctionScorer(pool, own.name), None, cfg.inference, details=details).serve()
    finally:
        pool.close()


def serve(cfg: ServeRewardModelConfig) -> None:
    """Serve until a signal; ConfigError if a required access token is missing, or the port is busy."""
    logging.basicConfig(level=cfg.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if os.environ.get("RANK", "0") == "0":
        token_of(cfg.inference)  # both before minutes of loading
        check_port(cfg.inference.host, cfg.inference.port)
    if cfg.serves_function:
        serve_function(cfg)
        return
    start_ranks(cfg.devices, cfg.num_nodes, "num_nodes")
    serve_model(cfg)
