"""What a phase costs one rank, as a vector that grows linearly with layers and micro-batches. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from reinforce_rl.preflight.deep.machine import Hardware


class Traffic(NamedTuple):
    """A kind of collective that a rank takes part in: its group (tensor, data, ...), its kind, the group's ranks, and
    the nodes that these lie on."""

    group: str
    kind: str
    ranks: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.ranks} ranks ({self.group}) on {self.nodes} node{'s' if self.nodes > 1 else ''}"


@dataclass(frozen=True)
class Cost:
    """The cost of a phase on one rank.

    Attributes:
        counts: seconds (the kernels' roofline), kernels, launches, flops, bytes, syncs.
        calls, sent: how often each collective is called, and the bytes of its tensors.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[Traffic, float] = field(default_factory=dict)
    sent: Mapping[Traffic, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.counts.get(name, 0.0)

    def kernel_seconds(self, machine: Hardware) -> float:
        """The GPU's kernels, or their launches where these take longer, and the waits for the host."""
        return max(self["seconds"], self["launches"] * machine.launch) + self["syncs"] * machine.sync

    def wire_seconds(self, machine: Hardware) -> float:
        """All collectives, none hidden; those of objects cost their latency."""
        return sum(self.seconds_of(of, machine) for of in self.calls)

    def seconds_of(self, of: Traffic, machine: Hardware) -> float:
        """A kind of collective."""
        calls = max(self.calls[of], 1e-9)
        return calls * machine.collective_seconds(of.kind, self.sent[of] / calls, of.ranks, of.nodes)

    def bound(self, machine: Hardware) -> str:
        """What takes most of the time."""
        host = self["launches"] * machine.launch
        if self.wire_seconds(machine) > self.kernel_seconds(machine):
            return "collectives"
        if self["syncs"] * machine.sync > max(self["seconds"], host):
            return "host syncs"
        if host > self["seconds"]:
            return "launches"
        computing = self["flops"] / machine.rates["bf16"]
        return "matrix products" if computing > self["seconds"] / 2 else "memory bandwidth"


def total(parts: Iterable[tuple[float, Cost]]) -> Cost:
    """The weighted sum."""
    counts: dict[str, float] = {}
    calls: dict[Traffic, float] = {}
    sent: dict[Traffic, float] = {}
    for weight, cost in parts:
        for key, value in cost.counts.items():
            counts[key] = counts.get(key, 0.0) + weight * value
        for of in cost.calls:
            calls[of] = calls.get(of, 0.0) + weight * cost.calls[of]
            sent[of] = sent.get(of, 0.0) + weight * cost.sent[of]
    return Cost(counts, calls, sent)
