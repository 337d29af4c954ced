"""Schemas of the reward sources, servers and functions, and of `reinforce-rl serve`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reinforce_rl.config.base import (
    HOST,
    NOT_SET,
    Count,
    Fields,
    Host,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Precision,
    Section,
    Text,
    Weight,
    key,
)
from reinforce_rl.config.model_folder import no_model
from reinforce_rl.config.parallelism import model_faults, ranks_faults
from reinforce_rl.config.template import TemplateConfig
from reinforce_rl.errors import Fault, key_of
from reinforce_rl.utils.job_rank import ranks_started
from reinforce_rl.utils.net import Address

_NOT_ZERO = "a number other than 0"
MODEL_NAME = re.compile(r"[\w.-]+", re.ASCII)  # it names folders and sockets of Triton


class RewardServerConfig(Section):
    name: Text = key("reward_model", "the model's name at the server, its `inference.name`")
    ip: Host = key("localhost", "host name or address of the server", expected=HOST)
    port: int = key(5555, ge=1, le=65535)
    replicas: list[Text] = key(
        [],
        "HOST:PORT of each further server of the same model; requests are spread over all",
        details="; see [reward-models.md](reward-models.md#several-servers-of-one-reward-model)",
    )
    ready_files: list[Text] = key(
        [],
        "`inference.ready_file` of each server of the model, instead of ip, port and replicas",
    )
    token_file: PathText | None = key(
        None,
        "file with the server's access token, mode 0600; null: REINFORCE_REWARD_TOKEN, if set",
        kind="path",
    )
    weight: Weight = key(
        1.0, "of its scores in the sum, where there are several rewards", expected=_NOT_ZERO
    )
    input: Literal["auto", "tokens", "text"] = key(
        "auto",
        "input of the model: tokens, text, or auto: conversations as text, for the reward model's "
        "own template, and plain prompts as tokens where both tokenizers are the same, else as "
        "text",
        details="; see [reward-models.md](reward-models.md#tokens-or-text)",
    )

    @property
    def addresses(self) -> list[Address]:
        """Addresses of all servers, which the rules validate; none if `ready_files` name them."""
        if self.ready_files:
            return []
        return [Address(self.ip, self.port), *map(Address.parse, self.replicas)]


class RemoteRMConfig(Section):
    reward_model: RewardServerConfig = RewardServerConfig()
    more_reward_models: dict[str, RewardServerConfig] = key(
        {},
        "further servers, NAME: {name, ip, port, ...} each, as "
        "+remote_rm.more_reward_models.NAME.port=5556; rewards are the weighted sum",
        kind="groups",
    )
    pad_to_length: Count | None = key(
        None,
        "pad each request to this length, truncating none; null: to the longest row of a request",
        "tokens",
    )
    ready_timeout_seconds: Positive = key(60.0, "wait for the server at the start", "s")
    deadline_seconds: Positive = key(
        600.0, "of one scoring call with its retries; then the run saves and ends", "s"
    )
    attempt_timeout_seconds: Positive = key(
        60.0,
        "of one attempt, up to the answer's last byte; doubled after each one that took longer",
        "s",
    )

    def servers(self, *, with_reward_model: bool = True) -> dict[str, RewardServerConfig]:
        """Return the sections of all servers, by their dotted names."""
        servers: dict[str, RewardServerConfig] = {}
        if with_reward_model:
            servers["remote_rm.reward_model"] = self.reward_model
        for name, server in self.more_reward_models.items():
            servers[f"remote_rm.more_reward_models.{name}"] = server
        return servers


class MoreFunctionConfig(Section):
    name: Text = key(NOT_SET, "dotted name of the function")
    kwargs: Fields = key({}, "its keyword arguments")
    weight: float = key(1.0, "of its scores; 0: they are logged only")


class RewardFunctionConfig(Section):
    """Reward functions and their worker processes."""

    name: Text | None = key(None, "dotted name, such as reinforce_rl.rewards.functions.gsm8k")
    kwargs: Fields = key({}, "its keyword arguments, as +reward_function.kwargs.NAME=VALUE")
    num_workers: Count = key(
        2,
        "samples scored at a time, each in its own process",
        "processes",
        details=", on each rank that asks for rewards (one a data-parallel group)",
    )
    sample_timeout_seconds: Positive | None = key(
        None,
        "a sample that takes longer fails, and its process is killed; null: as the function "
        "declares by @takes_up_to, else 5",
        "s",
    )
    sample_memory_mb: Count = key(
        2048, "address space of a sample's process beyond what its module takes", "MiB"
    )
    environment: list[Text] = key(
        [], "variables that functions may read besides PATH, HOME, LANG and the like"
    )
    sandbox: bool = key(
        False,
        "run functions in bubblewrap: no network, no other processes, no files but Python's",
        details=" ([details](rewards.md#a-sandbox))",
    )
    weight: Weight = key(
        1.0, "of its scores in the sum, where there are several rewards", expected=_NOT_ZERO
    )
    more_functions: dict[str, MoreFunctionConfig] = key(
        {},
        "further functions, NAME: {name, kwargs, weight} each; rewards are the weighted sum, "
        "servers' included",
        kind="groups",
    )

    def functions(
        self, *, with_own: bool = True
    ) -> dict[str, RewardFunctionConfig | MoreFunctionConfig]:
        """Return the sections of all functions, by their dotted names; this one's if it is
        asked.
        """
        functions: dict[str, RewardFunctionConfig | MoreFunctionConfig] = {}
        if with_own:
            functions["reward_function"] = self
        for name, function in self.more_functions.items():
            functions[f"reward_function.more_functions.{name}"] = function
        return functions


def name_in_metrics(
    setting: str,
    section: RewardServerConfig | RewardFunctionConfig | MoreFunctionConfig,
) -> str:
    """Return the name under which a reward source's scores are logged.

    Args:
        setting: the dotted name of its section.
    """
    if setting == "remote_rm.reward_model":
        return section.name or ""
    if setting == "reward_function":
        return (section.name or "").rpartition(".")[2]
    return setting.rpartition(".")[2]


@dataclass(frozen=True)
class RewardTerm:
    """A source that is asked for rewards, as a term of their weighted sum."""

    setting: str  # dotted name of its section, or of the key that names a class
    name: str  # under which its scores are logged
    weight: float


class ServedModelConfig(TemplateConfig):
    restore_from_path: PathText = key(
        NOT_SET,
        "Hugging Face folder of the trunk, or of a ...ForSequenceClassification model",
        kind="path",
    )
    head_path: PathText | None = key(
        None,
        "safetensors file of the head, from `reinforce-rl train-rm`, or another with head_name; "
        "null: the folder's",
        kind="path",
    )
    head_name: Text | None = key(
        None,
        "tensor or module of the head, such as value_head.weight, in the folder or in head_path; "
        "null: score.weight, or the module that config.json names",
        details=" ([details](reward-models.md#heads-of-other-frameworks))",
    )
    head_activation: Literal["relu", "gelu", "silu", "tanh"] | None = key(
        None, "between the layers of a head that has two; null: what the model's class says"
    )
    attribute_weights: dict[str, float] | None = key(
        None,
        "{NAME: WEIGHT} of a head with several scores, others 0; null: their mean, if they have "
        "names",
    )
    mean: float | None = key(
        None, "the reward is (merged score - mean) / std; null: the head's own, else 0"
    )
    std: Positive | None = key(None, "null: the head file's own, else 1")
    tokenizer_path: PathText | None = key(
        None, "Hugging Face folder of the tokenizer; null: the trunk's", kind="path"
    )
    max_length: int | None = key(None, "longest sample; null: the trunk's context", "tokens")
    weight: Weight = key(
        1.0, "of its rewards in the sum, where there are functions beside it", expected=_NOT_ZERO
    )
    precision: Precision = key(
        "auto", "of the trunk: 32, bf16, or auto: bf16 on GPUs, else 32; the rest is fp32"
    )
    tensor_model_parallel_size: Count = key(1, "ranks that share each weight matrix", "ranks")
    pipeline_model_parallel_size: Count = key(1, "stages that share the layers", "ranks")
    sequence_parallel: bool = key(
        False, "tensor-parallel ranks share positions too, outside the matrices"
    )


class InferenceConfig(Section):
    name: Text = key(
        "reward_model", "the model's name in URLs; the actor's remote_rm.reward_model.name"
    )
    host: Host = key(
        "127.0.0.1", "0.0.0.0 or :: lets other nodes in; then a token is needed", expected=HOST
    )
    port: int = key(5555, "0: a free one, which ready_file names", ge=0, le=65535)
    token_file: PathText | None = key(
        None,
        "file with the access token, mode 0600; null: REINFORCE_REWARD_TOKEN, if set",
        kind="path",
    )
    allow_no_token: bool = key(False, "serve other nodes without a token")
    micro_batch_size: Count = key(8, "sequences in one forward pass", "sequences")
    tokens_per_micro_batch: Count | None = key(
        None, "tokens in one, padding included, instead of a number of sequences", "tokens"
    )
    pad_to_multiple: Count = key(
        1, "pad sequences to a multiple of this length: fewer different shapes", "tokens"
    )
    max_batch_size: Count = key(256, "samples in one request; clients split larger ones", "samples")
    max_request_bytes: int | None = key(
        None, "of one request; null: what a full batch of the widest rows takes", "bytes", ge=1024
    )
    max_sequence_length: Count | None = key(
        None,
        "longest row of a request in tokens, padding included; null: four times the model's "
        "context",
        "tokens",
    )
    max_in_flight: Count = key(64, "requests in Triton at the same time", "requests")
    max_queue: Natural = key(256, "queued requests; further ones are rejected with 503", "requests")
    request_timeout_seconds: Positive = key(600.0, "for the answer to one request", "s")
    model_timeout_seconds: Positive = key(
        300.0, "for a request's samples in the model; then the server ends", "s"
    )
    health_timeout_seconds: Positive = key(
        10.0, "for the sample of one token that a health check scores", "s"
    )
    warm_up_lengths: list[int] = key(
        [64, 512], "lengths of the samples scored before the server opens", "tokens"
    )
    max_queue_delay_ms: NonNegative = key(
        0.0, "a request may wait this long for others to be merged with", "ms"
    )
    preferred_batch_sizes: list[int] = key(
        [], "preferred numbers of samples of merged requests, such as [32, 64]", "samples"
    )
    deterministic: bool = key(
        True, "each request in forward passes of its own: scores do not depend on other clients"
    )
    add_special_tokens: bool = key(
        False, "to `sentences`; a text with the chat template applied holds them already"
    )
    ready_file: PathText | None = key(
        None,
        "JSON {host, port, pid}, written when the server is ready: where other machines reach it",
        kind="path",
    )
    stop_timeout_seconds: float = key(30.0, "for calls in flight after SIGTERM or SIGINT", "s")
    rank_timeout_seconds: float = key(
        60.0,
        "with several ranks: the server ends if one sends no heartbeat for this long",
        "s",
        ge=1,
    )


class ServeRewardModelConfig(Section):
    reward_model: ServedModelConfig = ServedModelConfig()
    reward_function: RewardFunctionConfig = key(
        RewardFunctionConfig(),
        "served instead of reward_model where it has a name, more_functions beside it; see "
        "docs/rewards.md",
    )
    inference: InferenceConfig = InferenceConfig()
    devices: Count = key(
        1, "ranks on each node; those beyond model parallelism are data parallel", "ranks"
    )
    num_nodes: Count = key(1)
    log_level: Text = key("info")

    @property
    def serves_function(self) -> bool:
        return self.reward_function.name is not None

    def all_faults(self, faults_of_keys: list[str]) -> Iterable[str]:
        faults = [*faults_of_keys, *self._inference_faults()]
        if self.serves_function:
            faults += self._function_faults()
            return [fault for fault in faults if not _says_that_the_model_is_not_set(fault)]
        return [*faults, *self._model_faults()]

    def _inference_faults(self) -> Iterator[str]:
        name = self.inference.name
        most = self.inference.max_batch_size
        sizes = self.inference.preferred_batch_sizes
        functions = [
            *self.reward_function.more_functions,
            (self.reward_function.name or name).rpartition(".")[2],
        ]
        if len(set(functions)) < len(functions):
            yield Fault(
                f"rewards are named {', '.join(functions)}; each is logged by its name, so give "
                "each in reward_function.more_functions a name of its own",
                key="config.more_functions.same_name",
            )
        if not MODEL_NAME.fullmatch(name):
            yield Fault(
                f"inference.name is '{name}'; expected letters, digits, '.', '_' and '-'",
                key="config.inference.name.invalid",
            )
        if not all(1 <= size <= most for size in sizes):
            expected = f"numbers from 1 to inference.max_batch_size, which is {most}"
            yield Fault(
                f"inference.preferred_batch_sizes is {sizes}; expected {expected}",
                key="config.preferred_batch_sizes.out_of_range",
            )

    def _function_faults(self) -> Iterator[str]:
        nodes = self.num_nodes
        devices = self.devices
        started = ranks_started() or "1"
        one_process = "one process serves a reward function"
        if nodes * devices > 1:
            yield Fault(
                f"num_nodes x devices is {nodes} x {devices}, but {one_process}",
                key="config.devices.several_for_reward_function",
            )
        elif started != "1":
            yield Fault(
                f"{started} ranks were started (WORLD_SIZE), but {one_process}",
                key="config.reward_function.several_ranks_started",
            )

    def _model_faults(self) -> Iterator[str]:
        model = self.reward_model
        section = "reward_model"
        if model.restore_from_path != NOT_SET and not Path(model.restore_from_path).is_dir():
            folder = model.restore_from_path
            yield Fault(
                f"{section}.restore_from_path is {folder}, which {no_model(folder)}",
                key="config.restore_from_path.no_model",
            )
        head = model.head_path
        if head is not None and not Path(head).is_file():
            yield Fault(
                f"{section}.head_path: {head} is not a file; `reinforce-rl train-rm` makes one",
                key="config.head_path.no_file",
            )
        yield from ranks_faults(model, self.num_nodes, self.devices, "", section)
        yield from model_faults(model.restore_from_path, model.tensor_model_parallel_size, section)


def _says_that_the_model_is_not_set(fault: str) -> bool:
    is_not_set = key_of(fault) == "config.value.not_set"
    return is_not_set and fault.startswith("reward_model.restore_from_path ")
