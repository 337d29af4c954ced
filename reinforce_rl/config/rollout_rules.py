"""Cross-field rules on how rollouts are generated and rewarded, without torch. Each yields one message per error."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.rewards import RewardServerConfig
from reinforce_rl.utils.addresses import Address
from reinforce_rl.utils.choices import PROVIDED, PROVIDED_NAMES

GENERATIONS = ("native", "tensorrt_llm")
REWARD_METRICS = ("rewards_with_kl",)  # metrics whose names a reward source's own could be


def sampling_faults(cfg: TrainConfig) -> Iterator[str]:
    rollout = cfg.model.reinforce
    own = rollout.sampling_params
    if own.use_greedy:
        yield (
            "model.reinforce.sampling_params.use_greedy is true; greedy samples of one prompt are all alike, so there "
            "is nothing to learn from: set it to false (validation has its own val_sampling_params)"
        )
    narrowed = [
        f"sampling_params.{name}={getattr(own, name)}"
        for name, full in (("top_k", 0), ("top_p", 1.0), ("repetition_penalty", 1.0))
        if getattr(own, name) != full
    ]
    if rollout.length_params.min_length:
        narrowed.append(f"length_params.min_length={rollout.length_params.min_length}")
    if narrowed and not rollout.allow_biased_sampling:
        yield (
            f"model.reinforce has {', '.join(narrowed)}: samples would not come from the policy whose "
            "log-probs are trained, which biases the gradient; use the full distribution (top_k=0, top_p=1.0, "
            "repetition_penalty=1.0, min_length=0) or set model.reinforce.allow_biased_sampling=true"
        )


def generation_faults(cfg: TrainConfig) -> Iterator[str]:
    if cfg.generation not in GENERATIONS and not _is_importable(cfg.generation):
        yield (
            f"generation is {cfg.generation!r}; expected one of {', '.join(GENERATIONS)}, or the dotted name of a "
            "generator's class in a module that can be imported"
        )
    if cfg.generation == "tensorrt_llm":
        yield from _tensorrt_llm(cfg)
    if cfg.model.reinforce.generation_cache_tokens is not None:
        yield from _cache(cfg)
    if cfg.model.reinforce.static_decoding:
        yield from _static_decoding(cfg)
    if cfg.model.reinforce.cuda_graphs:
        yield from _cuda_graphs(cfg)
    if cfg.trainer.reinforce.generation_work_queue:
        yield from _work_queue(cfg)


def _is_importable(name: str) -> bool:
    module = name.rpartition(".")[0]
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _tensorrt_llm(cfg: TrainConfig) -> Iterator[str]:
    engine, block, rollout = cfg.tensorrt_llm, cfg.model.block_size, cfg.model.reinforce
    if engine.tensor_parallel_size is not None and not 1 <= engine.tensor_parallel_size <= block:
        yield (
            f"tensorrt_llm.tensor_parallel_size is {engine.tensor_parallel_size}; expected 1 to {block}, the ranks "
            "that share a copy of the model, or null for all of them"
        )
    limit = cfg.trainer.collective_timeout_seconds
    longest = engine.start_timeout_seconds + engine.update_timeout_seconds + 2 * engine.request_timeout_seconds
    if not longest < limit:
        yield (
            f"tensorrt_llm's start_, update_ and twice request_timeout_seconds are {longest:g} together; expected "
            f"below trainer.collective_timeout_seconds, which is {limit:g}: the other ranks may wait this long "
            "for an engine that is started anew"
        )
    if rollout.length_params.min_length:
        yield (
            f"model.reinforce.length_params.min_length is {rollout.length_params.min_length}, but TensorRT-LLM holds "
            "back one end token only; set it to 0, or generation=native"
        )
    if cfg.trainer.reinforce.generator_correction != "none" and rollout.sampling_params.temperature != 1.0:
        yield (
            f"trainer.reinforce.generator_correction is {cfg.trainer.reinforce.generator_correction!r} and "
            f"model.reinforce.sampling_params.temperature is {rollout.sampling_params.temperature}; whether "
            "TensorRT-LLM's log-probs are those at the temperature has not been established, so expected 1.0"
        )


def _cache(cfg: TrainConfig) -> Iterator[str]:
    tokens, longest = cfg.model.reinforce.generation_cache_tokens, cfg.model.encoder_seq_length
    what = f"model.reinforce.generation_cache_tokens is {tokens}"
    if cfg.generation != "native":
        yield f"{what}, but generation is {cfg.generation!r}, whose engine has a cache of its own; expected null"
    elif tokens is not None and tokens < longest:
        yield f"{what}, below model.encoder_seq_length, which is {longest}; the longest sequence must fit"


def _static_decoding(cfg: TrainConfig) -> Iterator[str]:
    what = "model.reinforce.static_decoding is true, but"
    if cfg.generation != "native":
        yield f"{what} generation is {cfg.generation!r}; only the native engine has such steps; expected false"
    if not cfg.model.reinforce.lean_decoding:
        yield f"{what} model.reinforce.lean_decoding is false, which asks for megatron's own layers; expected true"


def _cuda_graphs(cfg: TrainConfig) -> Iterator[str]:
    what = "model.reinforce.cuda_graphs is true, but"
    if not cfg.model.reinforce.static_decoding:
        yield f"{what} model.reinforce.static_decoding is false, whose steps change their shape; expected true"
    if cfg.model.pipeline_model_parallel_size > 1:
        yield (
            f"{what} model.pipeline_model_parallel_size is {cfg.model.pipeline_model_parallel_size}: stages hand over "
            "between the kernels of a step, which a graph does not hold; expected 1, or cuda_graphs=false"
        )


def _work_queue(cfg: TrainConfig) -> Iterator[str]:
    rollout, ranks = cfg.model.reinforce, cfg.trainer.world_size // max(cfg.model.block_size, 1)
    if ranks > 1 and (most := -(-rollout.num_rollout_samples // ranks)) <= rollout.rollout_micro_batch_size:
        yield (
            f"trainer.reinforce.generation_work_queue is true, but each of {ranks} data-parallel ranks has at most "
            f"{most} of a step's prompts and model.reinforce.rollout_micro_batch_size is "
            f"{rollout.rollout_micro_batch_size}: one micro-batch each, so none is left to others; expected a size "
            f"below {most}, or generation_work_queue=false"
        )


def reward_faults(cfg: TrainConfig) -> Iterator[str]:
    """Check reward sources, servers, functions and the names their scores are logged under."""
    yield from _servers(cfg)
    yield from _reward_functions(cfg)


def _servers(cfg: TrainConfig) -> Iterator[str]:
    servers = {"remote_rm.reward_model": cfg.remote_rm.reward_model}
    servers |= {
        f"remote_rm.more_reward_models.{name}": more for name, more in cfg.remote_rm.more_reward_models.items()
    }
    for key, server in servers.items():
        yield from _replicas(key, server)
    for key, name in _reward_names(cfg):
        if f"rewards_{name}" in REWARD_METRICS:
            yield (
                f"{key} is named {name!r}, and its scores are logged as rewards_{name}, which is a metric already; "
                "give it another name"
            )
    if cfg.remote_rm.reward_model.name in cfg.remote_rm.more_reward_models:
        yield (
            f"remote_rm.more_reward_models.{cfg.remote_rm.reward_model.name} is named as remote_rm.reward_model is; "
            "both are logged as rewards_NAME, so give it another name"
        )


def _replicas(key: str, server: RewardServerConfig) -> Iterator[str]:
    known = {Address(server.ip.lower(), server.port): f"{key}.ip and port"}
    for number, text in enumerate(server.replicas):
        place = f"{key}.replicas[{number}]"
        try:
            address = Address.parse(text)
        except ValueError:
            yield f"{place} is {text!r}; expected HOST:PORT with a port of 1 to 65535"
            continue
        if address in known:
            yield f"{place} is {text}, the same server as {known[address]}; name each server once"
        known[address] = place


def _reward_names(cfg: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, logged name) of each source; nothing for a single source."""
    remote, own = cfg.remote_rm, cfg.reward_function
    several = bool(remote.more_reward_models or own.more_functions)
    if cfg.reward == "server" and (several or remote.reward_model.weight != 1.0):
        yield "remote_rm.reward_model", remote.reward_model.name
    if cfg.reward == "function" and own.name is not None and (several or own.weight != 1.0):
        yield "reward_function", own.name.rpartition(".")[2]
    for name in remote.more_reward_models:
        yield f"remote_rm.more_reward_models.{name}", name
    for name in own.more_functions:
        yield f"reward_function.more_functions.{name}", name


def _reward_functions(cfg: TrainConfig) -> Iterator[str]:
    own = cfg.reward_function
    if cfg.reward == "function" and own.name is None:
        names = ", ".join(f"{PROVIDED}.{name}" for name in PROVIDED_NAMES)
        yield (
            "reward is 'function', but reward_function.name is not set; expected the dotted name of a function: one "
            f"of your own, or {names}"
        )
    if cfg.reward == "server" and own.name is not None:
        yield (
            f"reward_function.name is {own.name!r}, but reward is 'server', which asks remote_rm.reward_model; set "
            "reward=function, or name it under reward_function.more_functions to add it to the server's rewards"
        )
    first = (own.name or "").rpartition(".")[2] if cfg.reward == "function" else cfg.remote_rm.reward_model.name
    others = [*cfg.remote_rm.more_reward_models, *own.more_functions]
    clash = first in (others if cfg.reward == "function" else own.more_functions)
    if clash or len(set(others)) < len(others):
        yield (
            f"reward sources are named {', '.join([first, *others])}; each is logged as rewards_NAME, so give each a "
            "name of its own in reward_function.more_functions and remote_rm.more_reward_models"
        )
