"""Several reward sources as one: their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from reinforce_rl.errors import ConfigError
from reinforce_rl.rewards.base import STATUS_OK, RewardFuture, RewardRequest, Rewards, RewardSource


@dataclass(frozen=True)
class WeightedSource:
    """One of several sources.

    Attributes:
        name: in metrics and messages.
        source: scores.
        weight: of its scores in the sum; any sign.
    """

    name: str
    source: RewardSource
    weight: float


@dataclass(frozen=True)
class _CombinedFuture:
    sources: tuple[WeightedSource, ...]
    futures: tuple[RewardFuture, ...]

    def result(self) -> Rewards:
        """The weighted sum. A sample that one source could not score has failed, with that source's status."""
        answers = [future.result() for future in self.futures]
        values = torch.zeros_like(answers[0].values)
        status = torch.full_like(answers[0].status, STATUS_OK)
        for source, answer in zip(self.sources, answers, strict=True):
            values = values + source.weight * answer.values
            status = torch.where(status == STATUS_OK, answer.status, status)
        by_source, faults = {}, {}
        for source, answer in zip(self.sources, answers, strict=True):
            faults = {**answer.faults, **faults}
            by_source[source.name] = answer.values
            by_source |= {f"{source.name}/{name}": values for name, values in answer.by_source.items()}
        return Rewards(torch.where(status == STATUS_OK, values, torch.nan), status, by_source, faults)


class CombinedRewards:
    """A reward source that asks several at once and adds up what they say.

    Args:
        sources: at least one, of different names.

    Raises:
        ConfigError: two of one name.
    """

    def __init__(self, sources: Sequence[WeightedSource]):
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ConfigError([f"reward sources are named {', '.join(names)}; expected different names"])
        self._sources = tuple(sources)

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        """Ask all of them; they score at the same time."""
        return _CombinedFuture(self._sources, tuple(source.source.infer_rm(request) for source in self._sources))

    def close(self) -> None:
        """Close every source, also after one of them failed to; a failure is raised at the end."""
        with ExitStack() as stack:
            for source in reversed(self._sources):
                stack.callback(source.source.close)
