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
from reinforce_rl.reward_model.server.scoring import FunctionScorer
from reinforce_rl.reward_model.server.server import RewardServer, token_of
from reinforce_rl.rewards.base import Scorer
from reinforce_rl.rewards.function_pool import FunctionPool, named_functions
from reinforce_rl.utils.job_rank import is_first_rank
from reinforce_rl.utils.net import check_port


def serve(cfg: ServeRewardModelConfig) -> None:
    """Serve until a signal.

    Raises ConfigError if a required access token is missing, or the port is busy.
    """
    logging.basicConfig(
        level=cfg.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    if is_first_rank():
        # Check both before the model loads for minutes.
        token_of(cfg.inference)
        check_port(cfg.inference.host, cfg.inference.port)
    if not cfg.serves_function:
        start_ranks(cfg.devices, cfg.num_nodes, "num_nodes")
    with _started_functions(cfg) as functions:
        if cfg.serves_function:
            assert functions is not None  # this is the only rank
            RewardServer(
                functions, None, cfg.inference, details=_functions_identity(cfg, functions)
            ).serve()
        else:
            _serve_model(cfg, functions)


def _serve_model(cfg: ServeRewardModelConfig, functions: FunctionScorer | None) -> None:
    """Load the model on all ranks and serve it, together with functions if there are any."""
    # megatron-core imports wandb if installed. wandb creates folders in /tmp, which a killed server
    # leaves behind.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    # Imported late: torch and megatron take seconds, and a wrong path or busy port should fail
    # first.
    import torch

    from reinforce_rl.config.load import precision_here
    from reinforce_rl.megatron.mesh import parallel_mesh
    from reinforce_rl.megatron.model.stored_head import unused_moments
    from reinforce_rl.policy.build import DTYPES
    from reinforce_rl.reward_model.scorer import Batching, Merging, load_head, load_reward_model
    from reinforce_rl.reward_model.server.ranks import end_process, follow_rank_0, lead_ranks
    from reinforce_rl.utils.console import warn_once

    settings = cfg.reward_model
    inference = cfg.inference
    head = load_head(
        settings.restore_from_path, settings.head_path, settings.head_name, settings.head_activation
    )
    moments = unused_moments(settings.restore_from_path)
    if moments is not None and settings.head_path is None and settings.mean is None:
        warn_once(moments)
    mean = head.mean if settings.mean is None else settings.mean
    std = head.std if settings.std is None else settings.std
    merging = Merging.from_names(head.attributes, settings.attribute_weights or None, mean, std)
    batching = Batching(
        inference.micro_batch_size, inference.tokens_per_micro_batch, inference.pad_to_multiple
    )
    dtype = getattr(torch, DTYPES[precision_here(settings.precision)])
    options = {
        "batching": batching,
        "max_length": settings.max_length,
        "merging": merging,
        "dtype": dtype,
    }
    options |= {"head_name": settings.head_name, "head_activation": settings.head_activation}
    tensor = settings.tensor_model_parallel_size
    pipeline = settings.pipeline_model_parallel_size
    with parallel_mesh(tensor, pipeline, sequence_parallel=settings.sequence_parallel) as mesh:
        load = partial(
            load_reward_model, settings.restore_from_path, settings.head_path, mesh, **options
        )
        rank_timeout = inference.rank_timeout_seconds
        call_timeout = inference.model_timeout_seconds
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
    """Build the server for a scorer from the configuration; `model` is this rank's part."""
    from reinforce_rl.reward_model.scorer import reward_model_identity

    settings = cfg.reward_model
    folder = settings.tokenizer_path or settings.restore_from_path
    tokenizer = load_tokenizer(folder)
    settings.freeze_date(folder)
    template = settings.template_options("reward_model.")
    details = reward_model_identity(settings.restore_from_path, settings.head_path, model)
    details |= template.identity
    options["template"] = template
    if functions is None:
        return RewardServer(scorer, tokenizer, cfg.inference, details=details, **options)
    if not tokenizer.chat_template:
        raise ConfigError(
            [
                Fault(
                    "reward functions beside a reward model read texts, but the tokenizer in "
                    f"{folder} has no chat template to turn texts into tokens; give it one, or "
                    "serve the functions by themselves",
                    key="serve.tokenizer.no_chat_template",
                )
            ]
        )
    both = replace(
        functions, model=scorer, model_name=cfg.inference.name, model_weight=settings.weight
    )
    details |= {"weight": settings.weight, **_functions_identity(cfg, functions)}
    return RewardServer(both, tokenizer, cfg.inference, details=details, **options)


@contextlib.contextmanager
def _started_functions(cfg: ServeRewardModelConfig) -> Iterator[FunctionScorer | None]:
    """Yield the configured functions in a started pool.

    Yields None without functions, or on a rank that serves nothing.
    """
    functions = named_functions(cfg.reward_function.functions())
    if not functions or not is_first_rank():
        yield None
        return
    specs = {name: spec for name, (spec, _) in functions.items()}
    with contextlib.closing(FunctionPool(specs, cfg.reward_function)) as pool:
        pool.start()
        yield FunctionScorer(pool, {name: weight for name, (_, weight) in functions.items()})


def _functions_identity(cfg: ServeRewardModelConfig, functions: FunctionScorer) -> dict[str, Any]:
    """Return the functions' identity for clients; source hashes reveal a changed function."""
    sources = functions.pool.sources
    identities = [
        {
            "function": spec.name,
            "kwargs": dict(spec.kwargs),
            "weight": weight,
            "source_sha256": sources[name],
        }
        for name, (spec, weight) in named_functions(cfg.reward_function.functions()).items()
    ]
    return (
        identities[0] if len(identities) == 1 and cfg.serves_function else {"functions": identities}
    )
