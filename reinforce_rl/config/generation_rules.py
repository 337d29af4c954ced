"""Rules of sampling, placement, generators and engines, across the keys of the actor's configuration."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import partial

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import DEEP, key_fault
from reinforce_rl.config.engines import ENGINES
from reinforce_rl.config.model_folder import model_values

GENERATIONS = ("native", *ENGINES)


def generation_faults(cfg: TrainConfig) -> Iterator[str]:
    for check in (_placement, _sampling, _generation):
        yield from check(cfg)


def _placement(cfg: TrainConfig) -> Iterator[str]:
    told, rl = partial(key_fault, cfg, "model"), cfg.trainer.reinforce
    if cfg.inflight_updates and cfg.rollout_order != "finished":
        yield told("inflight_updates rollout_order", "rollouts in the prompts' order are of one version: set finished")
    if cfg.inflight_cache != "recompute" and not cfg.inflight_updates:
        yield told(
            "inflight_cache inflight_updates", "without inflight_updates=true no cache is kept: expected recompute"
        )
    if cfg.placement == "colocated":
        of_others = {"generation_ranks": 0, "generation_tensor_parallel_size": 1, "rollout_order": "prompts"}
        of_others |= {"generators": "joined"}
        for key, unused in of_others.items():
            if getattr(cfg, key) != unused:
                yield told(f"{key} placement", f"only disaggregated reads the former: expected {unused}")
        if cfg.staleness:
            yield told(
                "max_staleness placement", "ranks that train and generate in turn draw with the newest weights: 0"
            )
        return
    tensor, ranks = cfg.generation_tensor_parallel_size, cfg.trainer.world_size
    if cfg.generators == "separate":
        if cfg.generation_ranks:
            advice = "no rank of this job generates then: expected 0; start programs by `reinforce-rl generate`"
            yield told("generation_ranks generators", advice)
    elif not 1 <= cfg.generation_ranks < ranks or cfg.generation_ranks % tensor:
        expected = f"a multiple of {tensor} (generation_tensor_parallel_size), at least {tensor} and " * (tensor > 1)
        least = "" if expected else "at least 1 and "
        yield told("generation_ranks", f"expected {expected}{least}fewer than the {ranks} ranks of this job")
    size = model_values(cfg.pretrained_checkpoint.restore_from_path).get("intermediate_size")
    if isinstance(size, int) and size % tensor:
        yield told("generation_tensor_parallel_size", f"it must divide the model's feed-forward size, {size}")
    if cfg.preflight == DEEP:
        yield told("preflight placement", "the deep preflight predicts colocated runs: expected true")
    if cfg.generation == "tensorrt_llm":
        yield told("generation placement", "its weights go within one GPU: expected generation=native or vllm")
    if rl.dynamic_filtering and cfg.staleness:
        advice = "prompts cannot be drawn ahead of a step that may draw more: set one of them to false or 0"
        yield told("trainer.reinforce.dynamic_filtering max_staleness", advice)
    if cfg.rollout_order == "finished" and not cfg.staleness:
        advice = "without older weights a step waits for all of its prompts: set the latter to 1 or more"
        yield told("rollout_order max_staleness", advice)
    if cfg.staleness and rl.generator_correction == "none" and not cfg.model.reinforce.allow_biased_sampling:
        advice = "rollouts of older weights bias the gradient: set the latter to sequence or another, or 0 steps"
        yield told("max_staleness trainer.reinforce.generator_correction", advice)


def _sampling(cfg: TrainConfig) -> Iterator[str]:
    rollout, own = cfg.model.reinforce, cfg.model.reinforce.sampling_params
    if own.use_greedy:
        yield (
            "model.reinforce.sampling_params.use_greedy is true; greedy samples of one prompt are all alike, so there "
            "is nothing to learn from: set it to false (validation has its own val_sampling_params)"
        )
    full = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    narrowed = [f"sampling_params.{name}={getattr(own, name)}" for name in full if getattr(own, name) != full[name]]
    if rollout.length_params.min_length:
        narrowed.append(f"length_params.min_length={rollout.length_params.min_length}")
    if narrowed and not rollout.allow_biased_sampling:
        yield (
            f"model.reinforce has {', '.join(narrowed)}: samples would not come from the policy whose "
            "log-probs are trained, which biases the gradient; use the full distribution (top_k=0, top_p=1.0, "
            "repetition_penalty=1.0, min_length=0) or set model.reinforce.allow_biased_sampling=true"
        )


def _generation(cfg: TrainConfig) -> Iterator[str]:
    rollout, told, is_native = (
        cfg.model.reinforce,
        partial(key_fault, cfg, "model.reinforce"),
        cfg.generation == "native",
    )
    if cfg.generation not in GENERATIONS and not is_importable(cfg.generation):
        expected = f"expected one of {', '.join(GENERATIONS)}, or the dotted name of a generator's class in a module"
        yield told("generation", f"{expected} that can be imported")
    if cfg.generation in ENGINES:
        yield from _engine(cfg)
    if rollout.generation_cache_tokens is not None:
        if not is_native:
            yield told(".generation_cache_tokens generation", "this engine has a cache of its own: expected null")
        elif rollout.generation_cache_tokens < cfg.model.encoder_seq_length:
            yield told(".generation_cache_tokens model.encoder_seq_length", "the longest sequence must fit")
    if rollout.static_decoding and not is_native:
        yield told(".static_decoding generation", "only native has such steps: expected null or false")
    if rollout.static_decoding and not rollout.lean_decoding:
        yield told(".static_decoding .lean_decoding", "the latter asks for megatron's own layers: expected true")
    if rollout.cuda_graphs and not is_native:
        yield told(".cuda_graphs generation", "only native takes this key: expected null or false")
    if rollout.cuda_graphs and not rollout.lean_decoding:
        yield told(".cuda_graphs .lean_decoding", "the latter asks for megatron's own layers: expected true")
    if rollout.cuda_graphs and rollout.static_decoding is False:
        yield told(".cuda_graphs .static_decoding", "without the latter, steps change their shape: expected true")
    if rollout.cuda_graphs and cfg.model.pipeline_model_parallel_size > 1:
        advice = "a graph cannot hold what stages hand over: expected 1, or cuda_graphs=false"
        yield told(".cuda_graphs model.pipeline_model_parallel_size", advice)
    ranks = cfg.training_ranks // max(cfg.model.block_size, 1)
    most = -(-rollout.num_rollout_samples // max(ranks, 1))
    if cfg.trainer.reinforce.generation_work_queue and ranks > 1 and most <= rollout.rollout_micro_batch_size:
        yield (
            f"trainer.reinforce.generation_work_queue is true, but each of {ranks} data-parallel ranks has at most "
            f"{most} of a step's prompts and model.reinforce.rollout_micro_batch_size is "
            f"{rollout.rollout_micro_batch_size}, so none is left to others; expected a size below {most}, or "
            "generation_work_queue=false"
        )


def _engine(cfg: TrainConfig) -> Iterator[str]:
    engine, told = cfg.engine, partial(key_fault, cfg, "model.reinforce")
    apart = cfg.placement == "disaggregated"
    block = cfg.generation_tensor_parallel_size if apart else cfg.model.block_size
    if engine.python is not None and not (os.path.isfile(engine.python) and os.access(engine.python, os.X_OK)):
        yield told("engine.python", "expected an interpreter, such as .venv-engine/bin/python (docs/engines.md)")
    if engine.tensor_parallel_size is not None and not 1 <= engine.tensor_parallel_size <= block:
        advice = f"expected 1 to {block}, the ranks that share a copy of the model, or null for all of them"
        yield told("engine.tensor_parallel_size", advice)
    limit = cfg.trainer.collective_timeout_seconds
    longest = engine.start_timeout_seconds + engine.update_timeout_seconds + 2 * (engine.request_timeout_seconds + 65)
    if not longest < limit:
        yield (
            f"engine's start_, update_ and twice request_timeout_seconds + 65 are {longest:g} together; expected "
            f"below trainer.collective_timeout_seconds, which is {limit:g}: the other ranks may wait this long "
            "for an engine that is started anew"
        )
    if cfg.generation != "tensorrt_llm":
        return
    if cfg.model.reinforce.length_params.min_length:
        advice = "TensorRT-LLM holds back one end token only: set it to 0, or generation=native or vllm"
        yield told(".length_params.min_length", advice)
    if (
        cfg.trainer.reinforce.generator_correction not in (None, "none")
        and cfg.model.reinforce.sampling_params.temperature != 1.0
    ):
        advice = (
            "whether TensorRT-LLM's log-probs are those at the temperature was not seen on a GPU yet: expected 1.0; "
            "the check tensorrt-llm of tools/gpu_check.py shows it"
        )
        keys = "trainer.reinforce.generator_correction model.reinforce.sampling_params.temperature"
        yield told(keys, advice)


def is_importable(name: str) -> bool:
    module = name.rpartition(".")[0]
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
