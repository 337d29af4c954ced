"""Which rank, and which node, is slowest in each phase of a step, and whether that is worth a line."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Less than this is noise: seconds, and a share of the step.
LEAST_SECONDS, LEAST_SHARE = 0.1, 0.05
REPEAT_STEPS = 10  # after so many a line that has not changed is said again


@dataclass(frozen=True)
class RankSeconds:
    """What a rank did in a step.

    Attributes:
        host: it is on.
        seconds: of its own work by phase, less what it was seen to wait for other ranks.
    """

    host: str
    seconds: Mapping[str, float]


def of_this_rank(seconds: Mapping[str, float], *, asks_for_rewards: bool) -> RankSeconds:
    """Of a rank's own seconds. Where others ask for rewards, it takes no part in the wait for them."""
    taken = {name: value for name, value in seconds.items() if asks_for_rewards or name != "reward_wait"}
    return RankSeconds(socket.gethostname(), taken)


@dataclass(frozen=True)
class Slowest:
    """Of one phase.

    Attributes:
        phase: its name.
        rank, host, seconds: the rank that took longest.
        median: seconds over the ranks; of an even number of them the lower of the two in the middle, so that of two
            ranks it is the faster one's.
        node, node_seconds: the host whose ranks took longest on average, and that average; None where all ranks are
            on one host.
    """

    phase: str
    rank: int
    host: str
    seconds: float
    median: float
    node: str | None = None
    node_seconds: float = 0.0

    def stands_out(self, factor: float, step_seconds: float) -> bool:
        """Whether it took `factor` times the median, and what it took more is more than noise."""
        more = self.seconds - self.median
        return self.seconds >= factor * self.median and more >= max(LEAST_SECONDS, LEAST_SHARE * step_seconds)

    def __str__(self) -> str:
        times = f" ({self.seconds / self.median:.1f}x)" if self.median > 0 else ""
        node = "" if self.node is None else f", slowest node {self.node}, {self.node_seconds:.1f} s a rank"
        who = f"{self.phase} {self.seconds:.1f} s on rank {self.rank} ({self.host})"
        return f"{who}, median {self.median:.1f} s{times}{node}"


def slowest_of_phases(ranks: Sequence[RankSeconds]) -> list[Slowest]:
    """Of each phase, over the ranks that took part in it.

    Args:
        ranks: of all, in rank order.
    """
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
    """The seconds of the slowest rank, the median, and which rank it was, of each phase."""
    metrics: dict[str, float] = {}
    for slowest in found:
        values = {"max": slowest.seconds, "median": slowest.median, "rank": slowest.rank}
        metrics.update({f"{slowest.phase}/{name}": value for name, value in values.items()})
    return metrics


class StragglerLines:
    """Says which ranks are slow, at most every few steps where it stays the same.

    Args:
        factor: a rank that takes so many times the median is named.
    """

    def __init__(self, factor: float):
        self._factor = factor
        self._named: list[tuple[str, int]] = []
        self._last_step = 0

    def line(self, step: int, found: Sequence[Slowest], step_seconds: float) -> str | None:
        """Of this step; None where nothing stands out, or it was said not long ago.

        Args:
            step: its number.
            found: of each phase.
            step_seconds: of the whole step.
        """
        slow = [slowest for slowest in found if slowest.stands_out(self._factor, step_seconds)]
        named = [(slowest.phase, slowest.rank) for slowest in slow]
        repeated = named == self._named and step < self._last_step + REPEAT_STEPS
        self._named = named
        if not slow or repeated:
            return None
        self._last_step = step
        return "straggler: " + "; ".join(map(str, slow))
