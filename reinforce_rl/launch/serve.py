"""Build and run the reward server: a model on its ranks, or a reward function."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, Fault, ModelStuckError
from reinforce_rl.launch.terminal import start_ranks
from reinforce_rl.reward_server.scoring import FunctionScorer
from reinforce_rl.reward_server.server import RewardServer, token_of
from reinforce_rl.rewards.base import Scorer
from reinforce_rl.rewards.function_pool import FunctionPool, named_functions
from reinforce_rl.utils.job_rank import is_first_rank
from reinforce_rl.utils.net import check_port


def serve(cfg: ServeRewardModelConfig) -> None:
    """Serve until a signal; ConfigError if a required access token is missing, or the port is busy."""
    logging.basicConfig(
        level=cfg.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    if is_first_rank():
        token_of(cfg.inference)  # both before minutes of loading
        check_port(cfg.inference.host, cfg.inference.port)
    if not cfg.serves_function:
        start_ranks(cfg.devices, cfg.num_nodes, "num_nodes")
    with _started_functions(cfg) as functions:
        if cfg.serves_function:
            assert functions is not None  # there is but this rank
            RewardServer(
                functions, None, cfg.inference, details=_functions_identity(cfg, functions)
            ).serve()
        else:
            _serve_model(cfg, functions)


def _serve_model(cfg: ServeRewardModelConfig, functions: FunctionScorer | None) -> None:
    """Load the model on all ranks and serve it, with any functions beside it."""
    # megatron-core imports wandb if installed, which creates folders in /tmp that a killed server
    # leaves behind.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    # Imported late: torch and megatron take seconds, and a wrong path or busy port should fail
    # before.
    import torch

    from reinforce_rl.actor.build import DTYPES
    from reinforce_rl.config.load import precision_here
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.megatron.model.stored_head import unused_moments
    from reinforce_rl.reward_model.scorer import Batching, Merging, load_head, load_reward_model
    from reinforce_rl.reward_server.ranks import end_process, follow_rank_0, lead_ranks
    from reinforce_rl.utils.console import warn_once

    own = cfg.reward_model
    inference = cfg.inference
    head = load_head(own.restore_from_path, own.head_path, own.head_name, own.head_activation)
    moments = unused_moments(own.restore_from_path)
    if moments is not None and own.head_path is None and own.mean is None:
        warn_once(moments)
    mean = head.mean if own.mean is None else own.mean
    deviation = head.deviation if own.deviation is None else own.deviation
    merging = Merging.from_names(head.attributes, own.attribute_weights or None, mean, deviation)
    batching = Batching(
        inference.micro_batch_size, inference.tokens_per_micro_batch, inference.pad_to_multiple
    )
    dtype = getattr(torch, DTYPES[precision_here(own.precision)])
    options = {
        "batching": batching,
        "max_length": own.max_length,
        "merging": merging,
        "dtype": dtype,
    }
    options |= {"head_name": own.head_name, "head_activation": own.head_activation}
    tensor = own.tensor_model_parallel_size
    pipeline = own.pipeline_model_parallel_size
    with parallel_mesh(tensor, pipeline, sequence_parallel=own.sequence_parallel) as mesh:
        load = partial(load_reward_model, own.restore_from_path, own.head_path, mesh, **options)
        rank_timeout = inference.rank_timeout_seconds
        call_timeout = inference.stuck_seconds
        if mesh.world_size == 1:
            model = load()
            try:
                _server_of(cfg, model, model, functions).serve()
            except ModelStuckError as error:
                end_process(error.with_keys(), error.exit_code)
        elif mesh.is_main:
            logging.getLogger(__name__).info("event=ranks %s", mesh.layout.grid())
            with lead_ranks(
                mesh, load, rank_timeout=rank_timeout, call_timeout=call_timeout
            ) as scorer:
                _server_of(cfg, scorer, scorer.model, functions, check=scorer.check).serve()
        else:
            follow_rank_0(mesh, load, rank_timeout=rank_timeout)


def _server_of(
    cfg: ServeRewardModelConfig,
    scorer: Scorer,
    model: Any,
    functions: FunctionScorer | None,
    **options: Any,
) -> RewardServer:
    """Build the server for a scorer from the configuration; `model` is this rank's part of it."""
    from reinforce_rl.reward_model.scorer import reward_model_identity

    own = cfg.reward_model
    folder = own.tokenizer_path or own.restore_from_path
    tokenizer = load_tokenizer(folder)
    own.freeze_date(folder)
    template = own.template_options("reward_model.")
    details = reward_model_identity(own.restore_from_path, own.head_path, model)
    details |= template.identity
    options["template"] = template
    if functions is None:
        return RewardServer(scorer, tokenizer, cfg.inference, details=details, **options)
    if not tokenizer.chat_template:
        raise ConfigError(
            [
                Fault(
                    "functions beside a reward model read texts, but the tokenizer in "
                    f"{folder} has no chat template, which makes tokens of texts; give it one, or "
                    "serve the functions by themselves",
                    key="serve.tokenizer.no_chat_template",
                )
            ]
        )
    both = replace(functions, model=scorer, model_name=cfg.inference.name, model_weight=own.weight)
    details |= {"weight": own.weight, **_functions_identity(cfg, functions)}
    return RewardServer(both, tokenizer, cfg.inference, details=details, **options)


@contextlib.contextmanager
def _started_functions(cfg: ServeRewardModelConfig) -> Iterator[FunctionScorer | None]:
    """Yield the configured functions in a started pool; None if there are none, or on a rank that serves nothing."""
    functions = named_functions(cfg.reward_function.functions())
    if not functions or not is_first_rank():
        yield None
        return
    specs = {name: spec for name, (spec, _) in functions.items()}
    with contextlib.closing(FunctionPool(specs, cfg.reward_function)) as pool:
        pool.start()
        yield FunctionScorer(pool, {name: weight for name, (_, weight) in functions.items()})


def _functions_identity(cfg: ServeRewardModelConfig, functions: FunctionScorer) -> dict[str, Any]:
    """Return what clients compare: with the source's hash, so that they notice a changed function."""
    sources = functions.pool.sources
    found = [
        {
            "function": spec.name,
            "kwargs": dict(spec.kwargs),
            "weight": weight,
            "source_sha256": sources[name],
        }
        for name, (spec, weight) in named_functions(cfg.reward_function.functions()).items()
    ]
    return found[0] if len(found) == 1 and cfg.serves_function else {"functions": found}
