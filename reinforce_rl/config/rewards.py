"""Schema of the reward sources: reward servers and reward functions."""

from __future__ import annotations

from typing import Literal

from reinforce_rl.config.base import NOT_SET, Fields, Positive, Section, Text, Weight, key
from reinforce_rl.utils.addresses import Address

_NOT_ZERO = "a number other than 0"


class RewardServerConfig(Section):
    name: Text = key("reward_model", "the model's name at the server, its `inference.name`", origin="NeMo")
    ip: Text = key("localhost", "host name or address of the server", origin="NeMo")
    port: int = key(5555, origin="NeMo", ge=1, le=65535)
    replicas: list[Text] = key(
        [],
        "HOST:PORT of each further server of the same model; requests are spread over all",
        more="; see [reward-server.md](reward-server.md#several-servers-of-one-reward-model)",
    )
    token_file: Text | None = key(
        None, "file with the server's access token, mode 0600; null: REINFORCE_REWARD_TOKEN, if set", kind="path"
    )
    weight: Weight = key(1.0, "of its scores in the sum, where there are several rewards", expected=_NOT_ZERO)
    input: Literal["auto", "tokens", "text"] = key(
        "auto",
        "what it is sent: tokens, text, or auto: tokens where both tokenizers are the same, else text",
        more="; see [reward-server.md](reward-server.md#a-reward-model-with-another-tokenizer)",
    )

    @property
    def addresses(self) -> list[Address]:
        """Addresses of all servers of this model; the configuration's rules validate them."""
        return [Address(self.ip, self.port), *map(Address.parse, self.replicas)]


class RemoteRMConfig(Section):
    reward_model: RewardServerConfig = RewardServerConfig()
    more_reward_models: dict[str, RewardServerConfig] = key(
        {},
        "further servers, NAME: {name, ip, port, ...} each, as +remote_rm.more_reward_models.NAME.port=5556; "
        "rewards are the weighted sum",
        kind="groups",
    )
    pad_to_length: int | None = key(
        None,
        "pad each request to this length, cutting none; null: to the longest row of a request",
        unit="tokens",
        origin="NeMo*",
        ge=1,
    )
    ready_timeout_seconds: Positive = key(60.0, "wait for the server at the start", unit="s")
    deadline_seconds: Positive = key(
        600.0, "of one scoring call, retries included; after it the run saves and ends", unit="s"
    )
    attempt_timeout_seconds: Positive = key(
        60.0, "of one attempt, up to the answer's last byte; doubled after each one that took longer", unit="s"
    )


class MoreFunctionConfig(Section):
    name: Text = key(NOT_SET, "dotted name of the function")
    kwargs: Fields = key({}, "its keyword arguments")
    weight: Weight = key(1.0, "of its scores", expected=_NOT_ZERO)


class ServedFunctionConfig(Section):
    """A reward function and its worker processes."""

    name: Text | None = key(None, "dotted name, such as reinforce_rl.rewards.functions.gsm8k")
    kwargs: Fields = key({}, "its keyword arguments, as +reward_function.kwargs.NAME=VALUE")
    num_workers: int = key(
        2,
        "samples scored at a time, each in its own process",
        unit="processes",
        ge=1,
        more=", on each rank that asks for rewards (one a data-parallel group)",
    )
    sample_timeout_seconds: Positive = key(
        5.0, "a sample that takes longer fails, and its process is killed", unit="s"
    )
    sample_memory_mb: int = key(
        2048, "address space of a sample's process, besides what the function's module takes", unit="MiB", ge=1
    )
    environment: list[Text] = key([], "variables that functions may read besides PATH, HOME, LANG and the like")
    sandbox: bool = key(
        False,
        "run functions in bubblewrap: no network, no other processes, no files but Python's",
        more=" ([details](reward-functions.md#a-sandbox))",
    )


class RewardFunctionConfig(ServedFunctionConfig):
    weight: Weight = key(1.0, "of its scores in the sum, where there are several rewards", expected=_NOT_ZERO)
    more_functions: dict[str, MoreFunctionConfig] = key(
        {},
        "further functions, NAME: {name, kwargs, weight} each; rewards are the weighted sum, servers' included",
        kind="groups",
    )
