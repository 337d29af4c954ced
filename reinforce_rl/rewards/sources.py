"""Builds the configured reward sources, servers and functions, and their weighted sum."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.rewards import RewardServerConfig
from reinforce_rl.data.tokenizer import TokenizerInfo, pad_id_of
from reinforce_rl.errors import RewardServerError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.rewards import base
from reinforce_rl.rewards.base import (
    CompletedRewards,
    RewardFuture,
    RewardRequest,
    Rewards,
    RewardSource,
    WeightedSource,
)
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.function_pool import FunctionPool, named_functions
from reinforce_rl.rewards.source_class import make_source
from reinforce_rl.rewards.wire import TEXT_FORM, read_token
from reinforce_rl.utils.net import Address
from reinforce_rl.utils.untrusted_files import read_published

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READY_FILE_SECONDS = 0.5


@dataclass(frozen=True)
class _Later:
    """A future that computes its result when it is asked for it."""

    result: Callable[[], Rewards]


@dataclass(frozen=True)
class CombinedRewards:
    """A reward source that returns the weighted sum of others, whose names differ by the
    configuration's rules.
    """

    sources: Sequence[WeightedSource]

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        return _Later(
            partial(self._sum, [source.source.infer_rm(request) for source in self.sources])
        )

    def _sum(self, futures: Sequence[RewardFuture]) -> Rewards:
        """Return the weighted sum; a failed sample has the status of the first source that failed
        it.
        """
        answers = [future.result() for future in futures]
        values = torch.zeros_like(answers[0].values)
        status = torch.full_like(answers[0].status, base.STATUS_OK)
        by_source = {}
        faults = {}
        for source, answer in zip(self.sources, answers, strict=True):
            values = values + source.weight * answer.values
            status = torch.where(status == base.STATUS_OK, answer.status, status)
            faults = {**answer.faults, **faults}
            by_source[source.name] = answer.values
            by_source |= {
                f"{source.name}/{name}": scores for name, scores in answer.by_source.items()
            }
        return Rewards(
            torch.where(status == base.STATUS_OK, values, torch.nan), status, by_source, faults
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What each source says of itself, by name."""
        return {source.name: getattr(source.source, "identity", None) for source in self.sources}

    def close(self) -> None:
        """Close every source, even if one raises; its exception is raised at the end."""
        with ExitStack() as stack:
            for source in reversed(self.sources):
                stack.callback(source.source.close)


@dataclass(frozen=True)
class FunctionRewards:
    """A reward source that calls one function of a started pool.

    Sources may share it; the first closes it.
    """

    pool: FunctionPool
    function: str

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        pending = self.pool.submit(self.function, request.samples)

        def result() -> Rewards:
            scores = pending.result()
            # With the errors' own texts, which only a server must keep to itself.
            texts = {row: f": {' '.join(text.split())}" for row, text in scores.texts.items()}
            faults = {row: fault + texts.get(row, "") for row, fault in scores.faults.items()}
            return Rewards(
                torch.from_numpy(scores.values), torch.from_numpy(scores.status), faults=faults
            )

        return _Later(result)

    @property
    def identity(self) -> dict[str, Any]:
        """The function's name as in logs, and the SHA-256 of its file."""
        return {"function": self.function, "sha256": self.pool.sources.get(self.function)}

    def close(self) -> None:
        """End the pool's processes, also for the other sources that share it."""
        self.pool.close()


@dataclass(frozen=True)
class EnvironmentRewards:
    """A reward source that returns what the environment gave each episode."""

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        values = request.environment_rewards
        if values is None:  # of `chat` or `rescore`, which play no episodes
            values = torch.full((len(request.responses),), torch.nan)
            status = torch.full((len(values),), base.STATUS_INTERNAL, dtype=torch.int32)
            faults = dict.fromkeys(range(len(values)), "no environment answered this response")
            return CompletedRewards(Rewards(values, status, faults=faults))
        status = torch.where(values.isfinite(), base.STATUS_OK, base.STATUS_INTERNAL).int()
        return CompletedRewards(Rewards(values, status))

    def close(self) -> None:
        """Do nothing: the episodes' player closes the environment."""


@dataclass(frozen=True)
class EpisodeRewards:
    """Leaves out episodes whose environment failed, whatever the source says of them."""

    source: RewardSource

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        return _Later(partial(self._without_failed, self.source.infer_rm(request), request))

    def _without_failed(self, future: RewardFuture, request: RewardRequest) -> Rewards:
        answer = future.result()
        failed = {
            row: fault for row, fault in enumerate(request.environment_faults) if fault is not None
        }
        if not failed:
            return answer
        values = answer.values.clone()
        status = answer.status.clone()
        values[list(failed)] = torch.nan
        status[list(failed)] = base.STATUS_INTERNAL
        return replace(answer, values=values, status=status, faults={**answer.faults, **failed})

    @property
    def identity(self) -> Any:
        return getattr(self.source, "identity", None)

    def close(self) -> None:
        self.source.close()


def connect_to_reward_servers(
    cfg: TrainConfig, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, monitor: RunMonitor
) -> RewardSource:
    """Start the reward functions, wait for every server and check compatibility, before a model is
    loaded.

    Raises RewardServerError if one is not ready within `remote_rm.ready_timeout_seconds`,
    ConfigError if tokenizer or vocabulary differ and the server reads no texts, or a function
    cannot be used.
    """
    functions = named_functions(cfg.reward_functions)
    pool = FunctionPool({name: spec for name, (spec, _) in functions.items()}, cfg.reward_function)
    sources: list[WeightedSource] = []
    with ExitStack() as on_failure:
        on_failure.callback(CombinedRewards(sources).close)
        if functions:
            on_failure.callback(pool.close)
            with mesh.raise_on_all_ranks():
                if mesh.is_model_parallel_rank_0:  # only these ranks ask for rewards
                    pool.start()
        for term in cfg.reward_terms:
            with mesh.raise_on_all_ranks():
                source: RewardSource
                if term.setting in cfg.reward_servers:
                    server = cfg.reward_servers[term.setting]
                    source = _connect_to_reward_server(cfg, server, mesh, tokenizer, monitor)
                elif term.setting in cfg.reward_functions:
                    source = FunctionRewards(pool, term.name)
                elif term.setting == "environment":
                    source = EnvironmentRewards()
                else:
                    source = make_source(cfg.reward, cfg, tokenizer)
                sources.append(WeightedSource(term.name, source, term.weight))
        on_failure.pop_all()
        source = CombinedRewards(sources) if cfg.logs_reward_terms else sources[0].source
        return EpisodeRewards(source) if cfg.has_environment else source


def names_of_scores(cfg: TrainConfig) -> tuple[str, ...] | None:
    """Return the names in `Rewards.by_source`, without the attributes of servers.

    None for a server or a class alone, whose attributes, by their names, are all that there is.
    """
    if cfg.logs_reward_terms:
        return tuple(term.name for term in cfg.reward_terms)
    return () if cfg.reward_functions or cfg.takes_environment_rewards else None


def published_addresses(files: Sequence[str], deadline: float) -> list[Address]:
    """Wait until reward servers have written their ready files, and return the addresses in them.

    Raises RewardServerError if a file is missing at the deadline (`time.monotonic`), or names no
    address.
    """
    addresses: list[Address] = []
    for file in files:
        while (content := read_published(Path(file))) is None:
            if time.monotonic() > deadline:
                raise RewardServerError(
                    f"no reward server has written {file} within remote_rm.ready_timeout_seconds; "
                    "look at its log, and check that both machines share the folder",
                    key="reward_server.ready_file.missing",
                )
            time.sleep(READY_FILE_SECONDS)
        try:
            address = Address.parse(str(Address(content["host"], content["port"])))
        except (KeyError, TypeError, ValueError) as error:
            raise RewardServerError(
                f"{file} holds {content!r}; expected a reward server's inference.ready_file, "
                "a JSON object with host and port",
                key="reward_server.ready_file.no_address",
            ) from error
        addresses.append(address)
    return addresses


def _connect_to_reward_server(
    cfg: TrainConfig,
    server: RewardServerConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    monitor: RunMonitor,
) -> RewardSource:
    remote = cfg.remote_rm
    deadline = time.monotonic() + remote.ready_timeout_seconds
    first, *others = server.addresses or published_addresses(server.ready_files, deadline)
    run = re.sub(r"[^\w.-]", "_", Path(cfg.exp_manager.explicit_log_dir).name, flags=re.ASCII)[-40:]
    client = RemoteGPTRMClient(
        first.host,
        first.port,
        server.name,
        replicas=others,
        token=read_token(server.token_file, f"remote_rm: token_file of '{server.name}'"),
        caller=f"{run}-rank{mesh.rank}",
        deadline_seconds=remote.deadline_seconds,
        attempt_timeout_seconds=remote.attempt_timeout_seconds,
        pad_to_length=remote.pad_to_length,
        pad_id=pad_id_of(tokenizer),
        on_wait=partial(monitor.note, transient=True),
    )
    with ExitStack() as on_failure:
        on_failure.callback(client.close)
        client.wait_until_ready(max(deadline - time.monotonic(), 1.0))
        for sentence in client.missing():
            monitor.note(
                f"{sentence} The run continues with the others; this one is retried from time to "
                "time."
            )
        vocab_size = Architecture.from_folder(
            cfg.pretrained_checkpoint.restore_from_path
        ).vocab_size
        form = client.check_compatible(
            TokenizerInfo.from_tokenizer(tokenizer), vocab_size, server.input
        )
        if form == TEXT_FORM:
            monitor.note(f"The reward model '{server.name}' is sent texts.")
        least = cfg.model.reinforce.length_params.min_length + 1  # a token of the prompt
        warning = client.check_lengths(shortest=least, longest=cfg.model.encoder_seq_length)
        if warning is not None:
            monitor.note(f"warning: {warning}")
        on_failure.pop_all()
    return client
