"""GPU clusters as a few rates, and the cost of a phase on one rank. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from reinforce_rl.config.base import NOT_SET, Positive, Section, Text
from reinforce_rl.config.base import key as setting
from reinforce_rl.config.load import read
from reinforce_rl.errors import ConfigError

KEY = "preflight_machine"


class Hardware(Section):
    """A GPU, its node and its network. Bandwidths are in bytes/s, one direction, per GPU."""

    name: Text = setting(NOT_SET)  # of the GPU
    memory: Positive = setting(NOT_SET)  # bytes
    # bf16, fp32: dense FLOP/s of the data sheet; fp32 without TF32, which is off.
    bf16: Positive = setting(NOT_SET)
    fp32: Positive = setting(NOT_SET)
    hbm: Positive = setting(NOT_SET)  # memory bandwidth of the data sheet, times `hbm_share`
    # nvlink, network: bandwidth inside a node and between nodes, times `nvlink_share` and `network_share`.
    nvlink: Positive = setting(NOT_SET)
    network: Positive = setting(NOT_SET)
    pcie: Positive = setting(NOT_SET)  # bandwidth to pinned host memory, as reached
    matmul_share: Positive = setting(NOT_SET)  # share of `bf16` and `fp32` that large matrix products reach
    gpus_per_node: int = setting(8, gt=0)  # GPUs joined by NVLink
    # Bytes besides tensors.
    reserved: Positive = 3e9  # CUDA context 0.5 GB, NCCL's buffers, cuBLAS workspaces
    hbm_share: Positive = 0.8  # of mixed elementwise kernels; plain copies reach 0.9
    # NIM 1.8, one request (docs.nvidia.com/nim/benchmarking/llm): Llama 3.3 70B in fp8 on two H100 takes 18.91 ms a
    # token; 3.1 8B 4.63 ms, taken to be fp8 on one: 0.56 and 0.52 with all kernels. 0.6 gives these.
    decode_share: Positive = 0.6  # of `hbm`, in an engine's decode step
    kernel_floor: Positive = 2e-6  # seconds of an empty kernel, back to back
    # Host seconds per kernel launch in eager PyTorch.
    launch: Positive = 5e-6  # PyTorch's dispatcher, autograd and cudaLaunchKernel on one core
    # Seconds that the GPU idles at a host sync.
    sync: Positive = 2e-5  # cudaStreamSynchronize, and refilling the launch queue
    nvlink_share: Positive = 0.8  # nccl-tests' bus bandwidth of an all-reduce in a node, without NVLS
    network_share: Positive = 0.9  # the same between nodes, one rail a GPU
    # nvlink_latency, network_latency: seconds of one hop of a collective.
    nvlink_latency: Positive = 2.5e-6  # a small all-reduce over 8 GPUs takes about 15 us: 6 hops of a tree
    network_latency: Positive = 6e-6

    @property
    def rates(self) -> dict[str, float]:
        share = self.matmul_share
        return {
            "bf16": self.bf16 * share,
            "fp32": self.fp32 * share,
            "bandwidth": self.hbm * self.hbm_share,
            "floor": self.kernel_floor,
        }

    def kernel_seconds(self, flops: float, moved: float) -> float:
        """Roofline time of an engine's bf16 kernel, at least the floor."""
        return max(flops / (self.bf16 * self.matmul_share), moved / (self.hbm * self.decode_share), self.kernel_floor)

    def collective_seconds(self, kind: str, moved: float, ranks: int, nodes: int) -> float:
        """Time of a collective: bandwidth of a ring, latency of a tree.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, gather, broadcast, send or recv.
            moved: bytes of the whole tensor: an all-gather's output, a reduce-scatter's input.
            nodes: nodes that the ranks span; each rank has its own network card.
        """
        if ranks <= 1:
            return 0.0
        bandwidth, hop = self.nvlink * self.nvlink_share, self.nvlink_latency
        if nodes > 1:
            a_node = max(ranks // nodes, 1)
            bandwidth, hop = min(bandwidth, self.network * self.network_share * a_node), self.network_latency
        if kind in ("send", "recv"):
            return hop + moved / bandwidth
        volume = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)
        hops = math.ceil(math.log2(ranks)) * (2 if kind == "all_reduce" else 1)
        return hops * hop + volume * moved / bandwidth

    def host_seconds(self, moved: float) -> float:
        return moved / self.pcie


# Every number is from a data sheet, or a commonly reached share of one; none is fitted to a run of this project.
# Data sheets: NVIDIA H100 Tensor Core GPU (SXM), NVIDIA H200 Tensor Core GPU (SXM), NVIDIA A100 80GB (SXM), without
# sparsity; DGX H100/H200 and DGX A100: one ConnectX-7 of 400 Gb/s, one ConnectX-6 of 200 Gb/s a GPU.
# Share of matrix products: cuBLAS at 8192^3 gives about 700 TFLOP/s on an H100 under its power limit, 250 on an A100.
_H100 = Hardware(
    name="H100 SXM 80 GB",
    memory=80e9,
    bf16=989.4e12,
    fp32=66.9e12,
    hbm=3.35e12,
    nvlink=450e9,
    network=50e9,
    pcie=50e9,  # PCIe 5 x16: 64 GB/s, about 50 reached
    matmul_share=0.71,
)
MACHINES = {
    "h100": _H100,
    "h200": _H100.model_copy(update={"name": "H200 SXM 141 GB", "memory": 141e9, "hbm": 4.8e12}),
    "a100": Hardware(
        name="A100 SXM 80 GB",
        memory=80e9,
        bf16=312e12,
        fp32=19.5e12,
        hbm=2.039e12,
        nvlink=300e9,
        network=25e9,
        pcie=25e9,  # PCIe 4 x16: 32 GB/s, about 25 reached
        matmul_share=0.8,
    ),
}


def load_machine(value: str) -> Hardware:
    """Return a known machine by name, or load a YAML file with `Hardware`'s fields.

    The file may name a known machine as `base` and override some fields.

    Raises:
        ConfigError: unknown name, or all faults of the file together.
    """
    if value in MACHINES:
        return MACHINES[value]
    if not Path(value).is_file():
        raise ConfigError([f"{KEY} is {value!r}; expected {', '.join(MACHINES)} or a YAML file that exists"])
    where = f"{KEY}={value}"
    try:
        given = OmegaConf.load(value)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"{where} cannot be read as YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(given, DictConfig):
        raise ConfigError([f"{where} holds no keys; expected those of a machine, such as `base: h100`"])
    base = given.pop("base", None)
    if base is not None and base not in MACHINES:
        raise ConfigError([f"{where}: base is {base!r}; expected {', '.join(MACHINES)}"])
    whole = given if base is None else OmegaConf.merge(MACHINES[base].model_dump(), given)
    machine, faults = read(Hardware, whole, f"{where}: ")  # type: ignore[arg-type]
    if faults:
        raise ConfigError(faults)
    return machine


class Traffic(NamedTuple):
    """A kind of collective; `group` is its parallelism (tensor, data, ...)."""

    group: str
    kind: str
    ranks: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.ranks} ranks ({self.group}) on {self.nodes} node{'s' if self.nodes > 1 else ''}"


@dataclass(frozen=True)
class Cost:
    # Seconds (the kernels' roofline), kernels, launches, flops, bytes, syncs.
    counts: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[Traffic, float] = field(default_factory=dict)  # calls of each collective
    sent: Mapping[Traffic, float] = field(default_factory=dict)  # bytes of its tensors

    def __getitem__(self, name: str) -> float:
        return self.counts.get(name, 0.0)

    def kernel_seconds(self, machine: Hardware) -> float:
        """Time of kernels or of their launches, whichever is longer, plus host syncs."""
        return max(self["seconds"], self["launches"] * machine.launch) + self["syncs"] * machine.sync

    def wire_seconds(self, machine: Hardware) -> float:
        """Time of all collectives without overlap; those of objects cost only latency."""
        return sum(self.seconds_of(of, machine) for of in self.calls)

    def seconds_of(self, of: Traffic, machine: Hardware) -> float:
        calls = max(self.calls[of], 1e-9)
        return calls * machine.collective_seconds(of.kind, self.sent[of] / calls, of.ranks, of.nodes)

    def bound(self, machine: Hardware) -> str:
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
