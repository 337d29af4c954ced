"""Builds the configured reward sources, servers and functions, and their weighted sum."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.rewards import RewardServerConfig
from reinforce_rl.data.tokenizer import TokenizerInfo, pad_id_of
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.rewards.base import STATUS_OK, RewardFuture, RewardRequest, Rewards, RewardSource, WeightedSource
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.function_process.source import start_reward_functions
from reinforce_rl.rewards.wire import read_token
from reinforce_rl.utils.choices import TEXT_FORM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _CombinedFuture:
    sources: tuple[WeightedSource, ...]
    futures: tuple[RewardFuture, ...]

    def result(self) -> Rewards:
        """Return the weighted sum; a failed sample has the status of the first source that failed it."""
        answers = [future.result() for future in self.futures]
        values = torch.zeros_like(answers[0].values)
        status = torch.full_like(answers[0].status, STATUS_OK)
        by_source, faults = {}, {}
        for source, answer in zip(self.sources, answers, strict=True):
            values = values + source.weight * answer.values
            status = torch.where(status == STATUS_OK, answer.status, status)
            faults = {**answer.faults, **faults}
            by_source[source.name] = answer.values
            by_source |= {f"{source.name}/{name}": scores for name, scores in answer.by_source.items()}
        return Rewards(torch.where(status == STATUS_OK, values, torch.nan), status, by_source, faults)


class CombinedRewards:
    """A reward source that returns the weighted sum of one or more; raises ConfigError if two share a name."""

    def __init__(self, sources: Sequence[WeightedSource]):
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ConfigError([f"reward sources are named {', '.join(names)}; expected different names"])
        self._sources = tuple(sources)

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        return _CombinedFuture(self._sources, tuple(source.source.infer_rm(request) for source in self._sources))

    def close(self) -> None:
        """Close every source, even if one raises; its exception is raised at the end."""
        with ExitStack() as stack:
            for source in reversed(self._sources):
                stack.callback(source.source.close)


def connect_to_reward_servers(
    cfg: TrainConfig, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, monitor: RunMonitor
) -> RewardSource:
    """Start the reward functions, wait for every server and check compatibility, before a model is loaded.

    Raises:
        RewardServerError: not ready within `remote_rm.ready_timeout_seconds`.
        ConfigError: tokenizer or vocabulary differ and the server reads no texts, or a function cannot be used.
    """
    remote = cfg.remote_rm
    servers = dict(remote.more_reward_models)
    if cfg.reward == "server":
        servers = {remote.reward_model.name: remote.reward_model, **servers}
    sources = start_reward_functions(cfg, mesh)
    try:
        for name, server in servers.items():
            source = connect_to_reward_server(cfg, server, mesh, tokenizer, monitor)
            sources.append(WeightedSource(name, source, server.weight))
        if len(sources) == 1 and sources[0].weight == 1.0:
            return sources[0].source
        return CombinedRewards(sources)
    except Exception:
        for weighted in sources:
            weighted.source.close()
        raise


def connect_to_reward_server(
    cfg: TrainConfig, server: RewardServerConfig, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, monitor: RunMonitor
) -> RemoteGPTRMClient:
    """Connect to one server and its replicas; see `connect_to_reward_servers`."""
    token: str | None = None
    failure: Exception | None = None
    try:
        token = read_token(server.token_file, f"remote_rm: token_file of '{server.name}'")
    except ConfigError as error:  # perhaps on this node only, so raise below on all ranks
        failure = error
    mesh.check_together(failure)
    run = re.sub(r"[^\w.-]", "_", Path(cfg.exp_manager.explicit_log_dir).name, flags=re.ASCII)[-40:]
    client = RemoteGPTRMClient(
        server.ip,
        server.port,
        server.name,
        replicas=server.addresses[1:],
        token=token,
        caller=f"{run}-rank{mesh.rank}",
        deadline_seconds=cfg.remote_rm.deadline_seconds,
        attempt_timeout_seconds=cfg.remote_rm.attempt_timeout_seconds,
        pad_to_length=cfg.remote_rm.pad_to_length,
        pad_id=pad_id_of(tokenizer),
        on_wait=partial(monitor.note, transient=True),
    )
    try:
        client.wait_until_ready(cfg.remote_rm.ready_timeout_seconds)
        for sentence in client.missing():
            monitor.note(f"{sentence} The run goes on with the others; this one is asked again now and then.")
        vocab_size = Architecture.from_folder(cfg.pretrained_checkpoint.restore_from_path).vocab_size
        form = client.check_compatible(TokenizerInfo.from_tokenizer(tokenizer), vocab_size, server.input)
        if form == TEXT_FORM:
            monitor.note(f"The reward model '{server.name}' is sent texts.")
    except Exception as error:  # any kind: all ranks must raise together
        client.close()
        failure = error
    mesh.check_together(failure)
    return client
