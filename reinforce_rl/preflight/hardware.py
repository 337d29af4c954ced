"""GPUs, their nodes and their network by their data sheets, and the least time for a cost."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from reinforce_rl.config.base import NOT_SET, Positive, Section, Text, key
from reinforce_rl.config.load import read
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.preflight.rank import Cost, Traffic
from reinforce_rl.utils.untrusted_files import MAX_CONFIG_BYTES, parse_yaml, read_bounded

# In each of these every rank of a group receives the whole tensor, or the sum of it.
WHOLE_TENSOR = ("all_reduce", "broadcast", "send", "recv")


class Hardware(Section):
    """A GPU, its node and its network. Bandwidths are in bytes/s, one direction, per GPU.

    Rates are from the data sheets. Software reaches only a share of them.
    """

    name: Text = key(NOT_SET)  # of the GPU
    memory: Positive = key(NOT_SET)  # bytes
    bf16: Positive = key(NOT_SET)  # FLOP/s of dense matrix products
    fp32: Positive = key(NOT_SET)  # the same, without TF32, which is off
    hbm: Positive = key(NOT_SET)  # memory bandwidth
    cache: Positive = key(NOT_SET)  # bytes of the last level of the GPU's cache
    nvlink: Positive = key(NOT_SET)  # bandwidth inside a node
    network: Positive = key(NOT_SET)  # bandwidth between nodes
    pcie: Positive = key(NOT_SET)  # bandwidth to host memory
    gpus_per_node: int = key(8, gt=0)  # GPUs joined by NVLink
    # Bytes besides tensors: CUDA context 0.5 GB, NCCL's buffers, cuBLAS workspaces. No time depends
    # on it.
    reserved: Positive = 3e9

    def flop_seconds(self, cost: Cost) -> float:
        """Least time of the matrix products."""
        return (cost["flops"] - cost["fp32_flops"]) / self.bf16 + cost["fp32_flops"] / self.fp32

    def memory_seconds(self, moved: float, passes: float) -> float:
        """Least time to read or write `moved` bytes in `passes` passes over them.

        The cache may hold its size of each pass's bytes.
        """
        return max(0.0, moved - passes * self.cache) / self.hbm

    def collective_seconds(self, kind: str, moved: float, ranks: int, nodes: int) -> float:
        """Least time of a `torch.distributed` collective by any algorithm.

        The switches may add, as NVLink's do.

        Args:
            kind: such as "all_reduce".
            moved: bytes of the whole tensor, such as an all-gather's output.
            ranks: ranks of the group.
            nodes: nodes of these ranks. Each rank has a network card.
        """
        if ranks <= 1:
            return 0.0
        bandwidth = self.nvlink
        parts = ranks
        if nodes > 1:
            # Only bytes of other nodes cross the network, by the cards of the group's ranks.
            bandwidth = self.network * ranks / nodes
            parts = nodes
        volume = 1.0 if kind in WHOLE_TENSOR else (parts - 1) / parts
        return volume * moved / bandwidth

    def wire_seconds(self, cost: Cost) -> float:
        """Least time of all collectives. Collectives of objects have no bytes."""
        return sum(self.traffic_seconds(cost, traffic) for traffic in cost.sent)

    def traffic_seconds(self, cost: Cost, traffic: Traffic) -> float:
        return self.collective_seconds(
            traffic.kind,
            cost.sent[traffic],
            traffic.ranks,
            traffic.nodes,
        )


# NVIDIA's data sheets of the H100, H200 and A100 80GB Tensor Core GPUs (SXM), without sparsity;
# caches by its architecture papers. DGX: one ConnectX-7 of 400 Gb/s (A100: -6 of 200 Gb/s) a GPU.
# PCIe 5 x16 has 64 GB/s, PCIe 4 x16 32 GB/s.
MACHINES = {
    "h100": Hardware(
        name="H100 SXM 80 GB",
        memory=80e9,
        bf16=989.4e12,
        fp32=66.9e12,
        hbm=3.35e12,
        cache=50e6,
        nvlink=450e9,
        network=50e9,
        pcie=64e9,
    ),
    "h200": Hardware(
        name="H200 SXM 141 GB",
        memory=141e9,
        bf16=989.4e12,
        fp32=66.9e12,
        hbm=4.8e12,
        cache=50e6,
        nvlink=450e9,
        network=50e9,
        pcie=64e9,
    ),
    "a100": Hardware(
        name="A100 SXM 80 GB",
        memory=80e9,
        bf16=312e12,
        fp32=19.5e12,
        hbm=2.039e12,
        cache=40e6,
        nvlink=300e9,
        network=25e9,
        pcie=32e9,
    ),
}


def load_machine(value: str) -> Hardware:
    """Return a known machine, or one that a YAML file describes.

    The file has `Hardware`'s fields, or some of them with a known `base`.

    Raises:
        ConfigError: unknown name, or faults of the file, all in one message.
    """
    where = f"preflight_machine={value}"
    known = ", ".join(MACHINES)
    if value in MACHINES:
        return MACHINES[value]
    if not Path(value).is_file():
        sentence = f"preflight_machine is {value!r}; expected {known}, or a YAML file that exists"
        raise ConfigError([Fault(sentence, key="preflight.machine.unknown")])
    try:
        data = read_bounded(Path(value), max_bytes=MAX_CONFIG_BYTES)
        tree = parse_yaml(data.decode("utf-8"))
    except (OSError, ValueError) as error:
        sentence = f"{where} cannot be read as YAML: {error}"
        raise ConfigError([Fault(sentence, key="preflight.machine.not_yaml")]) from error
    if not isinstance(tree, dict):
        sentence = f"{where} has no keys; expected those of a machine, such as `base: h100`"
        raise ConfigError([Fault(sentence, key="preflight.machine.no_keys")])
    given = OmegaConf.create(tree)
    base = given.pop("base", None)
    if base is not None and base not in MACHINES:
        sentence = f"{where}: base is {base!r}; expected {known}"
        raise ConfigError([Fault(sentence, key="preflight.machine.unknown_base")])
    whole = given if base is None else OmegaConf.merge(MACHINES[base].model_dump(), given)
    machine, faults = read(Hardware, whole, f"{where}: ")  # type: ignore[arg-type]
    if faults:
        raise ConfigError(faults)
    return machine
