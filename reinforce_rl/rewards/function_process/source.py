"""Reward sources that call reward functions from the trainer, without a server, in one pool of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reinforce_rl.rewards.base import RewardRequest, Rewards, WeightedSource
from reinforce_rl.rewards.function_process.loading import FunctionSpec
from reinforce_rl.rewards.function_process.pool import OPTIONS, FunctionPool, PendingScores

if TYPE_CHECKING:
    from reinforce_rl.config.actor import TrainConfig
    from reinforce_rl.megatron.mesh import Mesh


@dataclass(frozen=True)
class FunctionFuture:
    pending: PendingScores

    def result(self) -> Rewards:
        """Wait for the scores; raise RewardServerError if the pool's processes ended or do not answer."""
        scores = self.pending.result()
        return Rewards(torch.from_numpy(scores.values), torch.from_numpy(scores.status), faults=scores.faults)


class FunctionRewards:
    """A reward source that calls one function of a started pool. Sources may share it; the first closes it."""

    def __init__(self, pool: FunctionPool, function: str):
        self._pool = pool
        self._function = function

    def infer_rm(self, request: RewardRequest) -> FunctionFuture:
        return FunctionFuture(self._pool.submit(self._function, request.samples))

    def close(self) -> None:
        """End the pool's processes, also for the other sources that share it."""
        self._pool.close()


def configured_functions(cfg: TrainConfig) -> dict[str, tuple[FunctionSpec, float]]:
    """Return the configured functions and their weights, by the name used in logs."""
    own = cfg.reward_function
    functions: dict[str, tuple[FunctionSpec, float]] = {}
    if cfg.reward == "function" and own.name is not None:
        functions[own.name.rpartition(".")[2]] = FunctionSpec("reward_function", own.name, own.kwargs), own.weight
    for name, more in own.more_functions.items():
        spec = FunctionSpec(f"reward_function.more_functions.{name}", more.name, more.kwargs)
        functions[name] = spec, more.weight
    return functions


def start_reward_functions(cfg: TrainConfig, mesh: Mesh) -> list[WeightedSource]:
    """Start the configured functions, in one pool on each rank that asks for rewards.

    Raises:
        ConfigError: a function cannot be loaded or its kwargs do not fit.
        RewardServerError: the processes did not start.
    """
    own, functions = cfg.reward_function, configured_functions(cfg)
    if not functions:
        return []
    pool = FunctionPool(
        {name: spec for name, (spec, _) in functions.items()},
        **{name: getattr(own, name) for name in OPTIONS},
    )
    failure: Exception | None = None
    if mesh.is_block_leader:
        try:
            pool.start()
        except Exception as error:  # any kind: all ranks must raise together
            failure = error
    try:
        mesh.check_together(failure)
    except Exception:
        pool.close()
        raise
    return [WeightedSource(name, FunctionRewards(pool, name), weight) for name, (_, weight) in functions.items()]
