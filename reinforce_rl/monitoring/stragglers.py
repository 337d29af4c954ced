"""Straggler detection: the slowest rank and node of each phase."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Noise thresholds: seconds, and share of the step.
LEAST_SECONDS, LEAST_SHARE = 0.1, 0.05
REPEAT_STEPS = 10  # an unchanged line is repeated after this many steps


@dataclass(frozen=True)
class RankSeconds:
    host: str
    seconds: Mapping[str, float]  # own work by phase, without known waits for other ranks


def of_this_rank(seconds: Mapping[str, float], *, asks_for_rewards: bool) -> RankSeconds:
    """Collect this rank's seconds; drop `reward_wait` if other ranks ask for rewards."""
    taken = {name: value for name, value in seconds.items() if asks_for_rewards or name != "reward_wait"}
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
        """Return True if it took at least `factor` times the median and the excess is above noise."""
        more = self.seconds - self.median
        return self.seconds >= factor * self.median and more >= max(LEAST_SECONDS, LEAST_SHARE * step_seconds)

    def __str__(self) -> str:
        times = f" ({self.seconds / self.median:.1f}x)" if self.median > 0 else ""
        node = "" if self.node is None else f", slowest node {self.node}, {self.node_seconds:.1f} s a rank"
        who = f"{self.phase} {self.seconds:.1f} s on rank {self.rank} ({self.host})"
        return f"{who}, median {self.median:.1f} s{times}{node}"


def slowest_of_phases(ranks: Sequence[RankSeconds]) -> list[Slowest]:
    """Find the slowest rank of each phase among its participants; `ranks` is in rank order."""
    found = []
    for phase in dict.fromkeys(name for rank in ranks for name in rank.seconds):
        taken = {number: rank.seconds[phase] for number, rank in enumerate(ranks) if phase in rank.seconds}
        slowest = max(taken, key=lambda number: taken[number])
        by_host: dict[str, list[float]] = {}
        for number, seconds in taken.items():
            by_host.setdefault(ranks[number].host, []).append(seconds)
        means = {host: statistics.fmean(seconds) for host, seconds in by_host.items()}
        node = max(means, key=lambda host: means[host])
        several = len(means) > 1
        found.append(
            Slowest(
                phase,
                slowest,
                ranks[slowest].host,
                taken[slowest],
                statistics.median_low(taken.values()),
                node if several else None,
                means[node] if several else 0.0,
            )
        )
    return found


def timing_metrics(found: Sequence[Slowest]) -> dict[str, float]:
    """Return each phase's slowest and median seconds, and the slowest rank."""
    metrics: dict[str, float] = {}
    for slowest in found:
        values = {"max": slowest.seconds, "median": slowest.median, "rank": slowest.rank}
        metrics.update({f"{slowest.phase}/{name}": value for name, value in values.items()})
    return metrics


class StragglerLines:
    """Messages on ranks slower than `factor` times the median; repeated only every `REPEAT_STEPS` if unchanged."""

    def __init__(self, factor: float):
        self._factor = factor
        self._named: list[tuple[str, int]] = []
        self._last_step = 0

    def line(self, step: int, found: Sequence[Slowest], step_seconds: float) -> str | None:
        """Return this step's message; None if nothing stands out or it was reported recently."""
        slow = [slowest for slowest in found if slowest.stands_out(self._factor, step_seconds)]
        named = [(slowest.phase, slowest.rank) for slowest in slow]
        repeated = named == self._named and step < self._last_step + REPEAT_STEPS
        self._named = named
        if not slow or repeated:
            return None
        self._last_step = step
        return "straggler: " + "; ".join(map(str, slow))
