"""What a phase costs, as a vector that grows linearly with layers and micro-batches. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reinforce_rl.preflight.deep.machine import Machine

COUNTS = ("seconds", "kernels", "flops", "bytes", "syncs")  # of kernels: their roofline time, and what they do


@dataclass(frozen=True)
class Traffic:
    """A kind of collective that a rank takes part in.

    Attributes:
        group: tensor, context, data, pipeline, block or all.
        kind: all_reduce, all_gather and so on; with _object where Python objects travel.
        ranks, nodes: of the group.
    """

    group: str
    kind: str
    ranks: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.ranks} ranks ({self.group}) on {self.nodes} node{'s' if self.nodes > 1 else ''}"


@dataclass(frozen=True)
class Cost:
    """Of one rank.

    Attributes:
        counts: by `COUNTS`.
        calls, sent: how often each collective is called, and the bytes of its tensors.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[Traffic, float] = field(default_factory=dict)
    sent: Mapping[Traffic, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.counts.get(name, 0.0)

    def __add__(self, other: Cost) -> Cost:
        return total([(1, self), (1, other)])

    def __mul__(self, factor: float) -> Cost:
        return total([(factor, self)])

    def kernel_seconds(self, machine: Machine) -> float:
        """The GPU's kernels, or their launches where these take longer, and the waits for the host."""
        return max(self["seconds"], self["kernels"] * machine.launch) + self["syncs"] * machine.sync

    def wire_seconds(self, machine: Machine, *groups: str) -> float:
        """Collectives of these groups, of all where none is named. Those of objects cost their latency."""
        return sum(
            calls * machine.collective_seconds(of.kind, self.sent[of] / calls, of.ranks, of.nodes)
            for of, calls in self.calls.items()
            if calls > 0 and (not groups or of.group in groups)
        )

    def bound(self, machine: Machine) -> str:
        """What takes most of the time."""
        wire, host = self.wire_seconds(machine), self["kernels"] * machine.launch
        computing = self["flops"] / (machine.bf16 * machine.matmul_share)
        if wire > self.kernel_seconds(machine):
            return "collectives"
        if self["syncs"] * machine.sync > max(self["seconds"], host):
            return "host syncs"
        if host > self["seconds"]:
            return "launches"
        return "matrix products" if computing > self["seconds"] / 2 else "memory bandwidth"


def total(parts: Iterable[tuple[float, Cost]]) -> Cost:
    """The weighted sum."""
    counts: dict[str, float] = {}
    calls: dict[Traffic, float] = {}
    sent: dict[Traffic, float] = {}
    for weight, cost in parts:
        for to, values in ((counts, cost.counts), (calls, cost.calls), (sent, cost.sent)):
            for key, value in values.items():
                to[key] = to.get(key, 0.0) + weight * value  # type: ignore[index,arg-type]
    return Cost(counts, calls, sent)


def line(at: float, first: float, second: float, low: Cost, high: Cost) -> Cost:
    """The cost at `at` of what costs `low` at `first` and `high` at `second`."""
    if first == second:
        return low
    share = (at - first) / (second - first)
    return total([(1 - share, low), (share, high)])
