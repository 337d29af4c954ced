"""Schema and rules of `examples/serve_reward_model.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from reinforce_rl.config.base import NOT_SET, Precision, Section, Text, key
from reinforce_rl.config.load import read
from reinforce_rl.config.rewards import ServedFunctionConfig
from reinforce_rl.config.rules import layout_faults, model_values, tensor_faults
from reinforce_rl.errors import ConfigError


class ServedModelConfig(Section):
    restore_from_path: Text = key(
        NOT_SET, "Hugging Face folder of the trunk, or of a ...ForSequenceClassification model", kind="path"
    )
    head_path: Text | None = key(
        None, "safetensors file of the head, from examples/train_reward_model.py; null: the folder's own", kind="path"
    )
    attribute_weights: dict[str, float] | None = key(
        None, "{NAME: WEIGHT} of a head with several scores, others 0; null: their mean"
    )
    mean: float | None = key(
        None, "the reward is (merged score - mean) / deviation; null: the head file's own, else 0"
    )
    deviation: float | None = key(None, "null: the head file's own, else 1")
    tokenizer_path: Text | None = key(None, "Hugging Face folder of the tokenizer; null: the trunk's", kind="path")
    max_length: int | None = key(None, "longest sample; null: the trunk's context", unit="tokens")
    precision: Precision = key(
        "auto", "of the trunk: 32, bf16, or auto: bf16 on GPUs, else 32; pooling and head are fp32"
    )
    tensor_model_parallel_size: int = key(1, "ranks that share each weight matrix", unit="ranks", ge=1)
    pipeline_model_parallel_size: int = key(1, "stages that share the layers", unit="ranks", ge=1)
    sequence_parallel: bool = key(False, "tensor-parallel ranks share positions too, outside the matrices")


class InferenceConfig(Section):
    name: Text = key("reward_model", "the model's name in URLs; the actor's remote_rm.reward_model.name")
    host: Text = key("127.0.0.1", "0.0.0.0 lets other nodes in; then a token is needed")
    port: int = key(5555)
    token_file: Text | None = key(
        None, "file with the access token, mode 0600; null: REINFORCE_REWARD_TOKEN, if set", kind="path"
    )
    allow_no_token: bool = key(False, "serve other nodes without a token")
    micro_batch_size: int = key(8, "sequences in one forward pass", unit="sequences")
    tokens_per_micro_batch: int | None = key(
        None, "tokens in one, padding included, instead of a number of sequences", unit="tokens"
    )
    pad_to_multiple: int = key(1, "pad sequences to a multiple of this length: fewer different shapes", unit="tokens")
    max_batch_size: int = key(256, "samples in one request; clients split larger ones", unit="samples")
    max_request_bytes: int | None = key(
        None, "of one request; null: what a full batch of the widest rows takes", unit="bytes"
    )
    max_sequence_length: int | None = key(
        None,
        "tokens that a row may claim, padding included; null: four times the model's context",
        unit="tokens",
    )
    max_in_flight: int = key(64, "requests that Triton has at the same time", unit="requests")
    max_queue: int = key(256, "requests that wait for that; more are rejected with 503", unit="requests")
    request_seconds: float = key(600.0, "for the answer to one request", unit="s")
    stuck_seconds: float = key(
        300.0, "for one request's samples in the model; then health fails and the server ends", unit="s"
    )
    canary_seconds: float = key(10.0, "for health's own sample of one token", unit="s")
    warm_up_lengths: list[int] = key([64, 512], "lengths of the samples scored before the server opens", unit="tokens")
    max_queue_delay_ms: float = key(0.0, "a request may wait this long for others to be merged with", unit="ms")
    preferred_batch_sizes: list[int] = key(
        [], "numbers of samples that merged requests should come to, such as [32, 64]", unit="samples"
    )
    deterministic: bool = key(True, "each request in forward passes of its own: scores do not depend on other clients")
    add_special_tokens: bool = key(False, "to `sentences`; a text with the chat template applied holds them already")
    ready_file: Text | None = key(None, "JSON {host, port, pid}, written when the server is ready", kind="path")
    stop_timeout_seconds: float = key(30.0, "for calls in flight after SIGTERM or SIGINT", unit="s")
    rank_timeout_seconds: float = key(
        60.0, "with several ranks: the server ends if one gives no sign of life for this long", unit="s", ge=1
    )


class ServeRewardModelConfig(Section):
    reward_model: ServedModelConfig = ServedModelConfig()
    reward_function: ServedFunctionConfig = key(
        ServedFunctionConfig(), "served instead of reward_model where it has a name; see docs/reward-functions.md"
    )
    inference: InferenceConfig = InferenceConfig()
    devices: int = key(1, "ranks on each node; those beyond model parallelism are data parallel", unit="ranks", ge=1)
    num_nodes: int = key(1, ge=1)
    log_level: Text = key("info")

    @property
    def serves_function(self) -> bool:
        return self.reward_function.name is not None


def load_config(cfg: DictConfig) -> ServeRewardModelConfig:
    """Convert and check the composed config.

    Raises:
        ConfigError: unknown or missing keys, wrong types and invalid values, in one message.
    """
    config, faults = read_config(cfg)
    if faults:
        raise ConfigError(faults)
    return config


def read_config(cfg: DictConfig) -> tuple[ServeRewardModelConfig, list[str]]:
    """Like `load_config`, but return the errors with the configuration."""
    config, faults = read(ServeRewardModelConfig, cfg)
    if config.serves_function:
        return config, [fault for fault in faults if " is not set" not in fault]
    return config, [*faults, *_paths(config.reward_model), *_ranks(config)]


def _paths(model: ServedModelConfig) -> Iterator[str]:
    trunk, head = model.restore_from_path, model.head_path
    if trunk != NOT_SET and not Path(trunk).is_dir():
        yield f"reward_model.restore_from_path: {trunk} is no folder; expected a Hugging Face model folder"
    if head is not None and not Path(head).is_file():
        yield f"reward_model.head_path: {head} is no file; examples/train_reward_model.py makes one"


def _ranks(cfg: ServeRewardModelConfig) -> Iterator[str]:
    model, world_size = cfg.reward_model, cfg.num_nodes * cfg.devices
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size)
    if min(*sizes, cfg.num_nodes, cfg.devices) < 1:
        return
    ranks = f"num_nodes x devices = {cfg.num_nodes} x {cfg.devices}"
    yield from layout_faults(*sizes, 1, model.sequence_parallel, world_size, ranks, "reward_model")
    started = os.environ.get("WORLD_SIZE")
    if started is not None and int(started) != world_size:
        yield f"{started} ranks were started (WORLD_SIZE), but {ranks} = {world_size}"
    file, values = model_values(model.restore_from_path)
    yield from tensor_faults(values, file, model.tensor_model_parallel_size, "reward_model")
