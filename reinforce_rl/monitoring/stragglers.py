"""Ranks that are slower than others in a phase of a step. Torch-free."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Noise thresholds of stragglers: seconds, and share of the step.
LEAST_SECONDS = 0.1
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class RankSeconds:
    host: str
    seconds: Mapping[str, float]  # own work by phase, without known waits for other ranks


def of_this_rank(seconds: Mapping[str, float], *, asks_for_rewards: bool) -> RankSeconds:
    """Collect this rank's seconds, without `reward_wait` if other ranks request rewards."""
    taken = {
        name: value for name, value in seconds.items() if asks_for_rewards or name != "reward_wait"
    }
    return RankSeconds(socket.gethostname(), taken)


@dataclass(frozen=True)
class Slowest:
    """The slowest rank of one phase, and the slowest node."""

    phase: str
    rank: int
    host: str
    seconds: float
    median: float  # lower median over ranks: with two ranks, the faster one's
    node: str | None = None  # highest mean over its ranks; None if all ranks are on one host
    node_seconds: float = 0.0  # that mean

    def stands_out(self, factor: float, step_seconds: float) -> bool:
        """Return whether the rank took `factor` times the median, and its excess is above noise."""
        excess = self.seconds - self.median
        return self.seconds >= factor * self.median and excess >= max(
            LEAST_SECONDS, LEAST_SHARE * step_seconds
        )

    def __str__(self) -> str:
        times = f" ({self.seconds / self.median:.1f}x)" if self.median > 0 else ""
        node = (
            ""
            if self.node is None
            else f", slowest node {self.node}, {self.node_seconds:.1f} s a rank"
        )
        who = f"{self.phase} {self.seconds:.1f} s on rank {self.rank} ({self.host})"
        return f"{who}, median {self.median:.1f} s{times}{node}"


def slowest_of_phases(ranks: Sequence[RankSeconds]) -> list[Slowest]:
    """Find the slowest rank of each phase among its participants; `ranks` is in rank order."""
    of_phases = []
    for phase in dict.fromkeys(name for rank in ranks for name in rank.seconds):
        taken = {
            number: rank.seconds[phase]
            for number, rank in enumerate(ranks)
            if phase in rank.seconds
        }
        slowest = max(taken, key=lambda number: taken[number])
        of_hosts: dict[str, list[float]] = {}
        for number, seconds in taken.items():
            of_hosts.setdefault(ranks[number].host, []).append(seconds)
        means = {host: statistics.fmean(seconds) for host, seconds in of_hosts.items()}
        node = max(means, key=lambda host: means[host]) if len(means) > 1 else None
        median = statistics.median_low(taken.values())
        of_node = means[node] if node else 0.0
        of_phases.append(
            Slowest(phase, slowest, ranks[slowest].host, taken[slowest], median, node, of_node)
        )
    return of_phases


def timing_metrics(of_phases: Sequence[Slowest]) -> dict[str, float]:
    """Return each phase's slowest and median seconds, and the slowest rank."""
    return {
        f"{slowest.phase}/{name}": value
        for slowest in of_phases
        for name, value in (
            ("max", slowest.seconds),
            ("median", slowest.median),
            ("rank", slowest.rank),
        )
    }
