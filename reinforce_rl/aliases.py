"""Aliases from old import paths, which users' code and configurations still contain, to today's modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD = {
    "reinforce_rl.algorithms": "reinforce_rl.algorithm",
    "reinforce_rl.algorithms.advantages": "reinforce_rl.algorithm.advantages",
    "reinforce_rl.algorithms.reinforce": "reinforce_rl.trainer.reinforce",
    "reinforce_rl.actor.model": "reinforce_rl.actor.policy",
    "reinforce_rl.build": "reinforce_rl.run",
    "reinforce_rl.monitoring.summary": "reinforce_rl.monitoring.report",
    "reinforce_rl.reward": "reinforce_rl.rewards",
    "reinforce_rl.reward.base": "reinforce_rl.rewards.base",
    "reinforce_rl.reward.client": "reinforce_rl.rewards.client",
    "reinforce_rl.reward.functions": "reinforce_rl.rewards.functions",
    "reinforce_rl.reward.server": "reinforce_rl.reward_server.server",
    "reinforce_rl.reward_model.full": "reinforce_rl.reward_model",
    "reinforce_rl.rewards.function_process": "reinforce_rl.rewards",
    "reinforce_rl.rewards.function_process.loading": "reinforce_rl.rewards.base",
    "reinforce_rl.rollout": "reinforce_rl.data.batches",
}


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in OLD else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(OLD[module.__name__])


def install() -> None:
    """Make the old paths importable. Nothing is loaded until one is imported."""
    sys.meta_path.insert(0, _Finder())  # first, or the path finder would load a second copy of a submodule
