"""Predict a step of the whole job on a named machine from the cost of single ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import NOT_SET, Positive, Section, Text, key
from reinforce_rl.config.engines import ENGINES
from reinforce_rl.config.load import read
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight.memory import WEIGHT_BYTES, Decoding, ModelSize, stage_shapes
from reinforce_rl.preflight.plan import BatchPlan
from reinforce_rl.preflight.rank import Cost, Traffic, total
from reinforce_rl.runtime.stored_config import MAX_CONFIG_BYTES
from reinforce_rl.trainer.build import lora_settings
from reinforce_rl.utils.untrusted_files import parse_yaml, read_bounded

BF16 = 2
_SMALL_KERNELS = 4  # per layer, besides matrices and attention: two norms, RoPE with the cache write, SwiGLU
_POINTS, _DRAWS = 128, 64  # of the integral over t; of the ranks' lengths


class Hardware(Section):
    """A GPU, its node and its network. Bandwidths are in bytes/s, one direction, per GPU."""

    name: Text = key(NOT_SET)  # of the GPU
    memory: Positive = key(NOT_SET)  # bytes
    bf16: Positive = key(NOT_SET)  # dense FLOP/s of the data sheet
    fp32: Positive = key(NOT_SET)  # the same, without TF32, which is off
    hbm: Positive = key(NOT_SET)  # memory bandwidth of the data sheet, times `hbm_share`
    nvlink: Positive = key(NOT_SET)  # bandwidth inside a node, times `nvlink_share`
    network: Positive = key(NOT_SET)  # and between nodes, times `network_share`
    pcie: Positive = key(NOT_SET)  # bandwidth to pinned host memory, as reached
    matmul_share: Positive = key(NOT_SET)  # share of `bf16` and `fp32` that large matrix products reach
    gpus_per_node: int = key(8, gt=0)  # GPUs joined by NVLink
    reserved: Positive = 3e9  # bytes besides tensors: CUDA context 0.5 GB, NCCL's buffers, cuBLAS workspaces
    hbm_share: Positive = 0.8  # of mixed elementwise kernels; plain copies reach 0.9
    # NIM 1.8, one request (docs.nvidia.com/nim/benchmarking/llm): Llama 3.3 70B in fp8 on two H100 takes 18.91 ms a
    # token; 3.1 8B 4.63 ms, taken to be fp8 on one: 0.56 and 0.52 with all kernels. 0.6 gives these.
    decode_share: Positive = 0.6  # of `hbm`, in an engine's decode step
    kernel_floor: Positive = 2e-6  # seconds of an empty kernel, back to back
    launch: Positive = 5e-6  # host seconds of eager PyTorch's dispatcher, autograd and cudaLaunchKernel on one core
    sync: Positive = 2e-5  # seconds that the GPU idles: cudaStreamSynchronize, and refilling the launch queue
    nvlink_share: Positive = 0.8  # nccl-tests' bus bandwidth of an all-reduce in a node, without NVLS
    network_share: Positive = 0.9  # the same between nodes, one rail a GPU
    nvlink_latency: Positive = 2.5e-6  # of a hop: a small all-reduce over 8 GPUs takes about 15 us, 6 hops of a tree
    network_latency: Positive = 6e-6

    @property
    def rates(self) -> dict[str, float]:
        products = {"bf16": self.bf16 * self.matmul_share, "fp32": self.fp32 * self.matmul_share}
        return {**products, "bandwidth": self.hbm * self.hbm_share, "floor": self.kernel_floor}

    def kernel_seconds(self, flops: float, moved: float) -> float:
        """Roofline time of an engine's bf16 kernel, at least the floor."""
        return max(flops / (self.bf16 * self.matmul_share), moved / (self.hbm * self.decode_share), self.kernel_floor)

    def collective_seconds(self, kind: str, moved: float, ranks: int, nodes: int | None = None) -> float:
        """Time of a `torch.distributed` collective: bandwidth of a ring, latency of a tree, a network card per rank.

        `moved` are the bytes of the whole tensor, as an all-gather's output; by default the ranks fill nodes.
        """
        if ranks <= 1:
            return 0.0
        nodes = nodes or -(-ranks // self.gpus_per_node)
        bandwidth, hop = self.nvlink * self.nvlink_share, self.nvlink_latency
        if nodes > 1:
            between = self.network * self.network_share * max(ranks // nodes, 1)
            bandwidth, hop = min(bandwidth, between), self.network_latency
        if kind in ("send", "recv"):
            return hop + moved / bandwidth
        volume = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)
        hops = math.ceil(math.log2(ranks)) * (2 if kind == "all_reduce" else 1)
        return hops * hop + volume * moved / bandwidth

    def seconds(self, cost: Cost) -> float:
        """Time of kernels or of their launches, whichever is longer, plus host syncs."""
        return max(cost["seconds"], cost["launches"] * self.launch) + cost["syncs"] * self.sync

    def wire_seconds(self, cost: Cost) -> float:
        """Time of all collectives without overlap; those of objects cost only latency."""
        return sum(self.traffic_seconds(cost, of) for of in cost.calls)

    def traffic_seconds(self, cost: Cost, of: Traffic) -> float:
        calls = max(cost.calls[of], 1e-9)
        return calls * self.collective_seconds(of.kind, cost.sent[of] / calls, of.ranks, of.nodes)

    def bound(self, cost: Cost) -> str:
        host = cost["launches"] * self.launch
        if self.wire_seconds(cost) > self.seconds(cost):
            return "collectives"
        if cost["syncs"] * self.sync > max(cost["seconds"], host):
            return "host syncs"
        if host > cost["seconds"]:
            return "launches"
        return "matrix products" if cost["flops"] / self.rates["bf16"] > cost["seconds"] / 2 else "memory bandwidth"


# From data sheets, or a commonly reached share of one; none is fitted to a run of this project. NVIDIA H100, H200 and
# A100 80GB Tensor Core GPU (SXM), without sparsity; DGX: one ConnectX-7 of 400 Gb/s (A100: -6 of 200 Gb/s) a GPU.
# Share of matrix products: cuBLAS at 8192^3 gives about 700 TFLOP/s on an H100 under its power limit, 250 on an A100.
# PCIe 5 x16: 64 GB/s, about 50 reached; PCIe 4 x16: 32 GB/s, about 25 reached.
_FIELDS = ("name", "memory", "bf16", "fp32", "hbm", "nvlink", "network", "pcie", "matmul_share")
_ROWS = {
    "h100": ("H100 SXM 80 GB", 80e9, 989.4e12, 66.9e12, 3.35e12, 450e9, 50e9, 50e9, 0.71),
    "h200": ("H200 SXM 141 GB", 141e9, 989.4e12, 66.9e12, 4.8e12, 450e9, 50e9, 50e9, 0.71),
    "a100": ("A100 SXM 80 GB", 80e9, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 25e9, 0.8),
}
MACHINES = {name: Hardware.model_validate(dict(zip(_FIELDS, row, strict=True))) for name, row in _ROWS.items()}


def load_machine(value: str) -> Hardware:
    """Return a known machine by name, or of a YAML file with `Hardware`'s fields, or some with a known `base`.

    Raises ConfigError: unknown name, or all faults of the file together.
    """
    where, known = f"preflight_machine={value}", ", ".join(MACHINES)
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


@dataclass(frozen=True)
class Lengths:
    """Response lengths: exponential, cut at `longest`, if the mean is known; else all are `longest`."""

    longest: int
    mean: float | None = None

    @property
    def average(self) -> float:
        return self.longest if self.mean is None else min(self.mean, self.longest)

    @property
    def scale(self) -> float:
        """Mean of the exponential distribution before the cut, such that its mean after it is `mean`."""
        if self.average >= 0.99 * self.longest:
            return math.inf
        low, high = self.average / 2, 100.0 * self.longest
        for _ in range(60):
            scale = (low + high) / 2
            low, high = (scale, high) if scale * -math.expm1(-self.longest / scale) < self.average else (low, scale)
        return low

    def of_slowest(self, ranks: int, calls: int, together: int) -> tuple[float, float]:
        """Return the average steps per call, and the slowest of `ranks` parallel ranks over the average one.

        Each makes `calls` consecutive calls of `together` sequences, which last as long as their longest.
        """
        if self.scale == math.inf:
            return self.longest, 1.0
        # The maximum of n exponentials has the CDF F^n; sample it by inversion.
        drawn = np.random.default_rng(0).random((_DRAWS, ranks, calls)) ** (1 / together)
        sums = np.minimum(self.longest, -self.scale * np.log1p(-drawn)).sum(axis=2)
        return float(sums.mean()) / calls, float(sums.max(axis=1).mean() / sums.mean())


@dataclass(frozen=True)
class Engine:
    """Model of an inference engine: weights and keys over bandwidth, one CUDA graph per step."""

    architecture: Architecture  # of the model, served in bf16
    machine: Hardware  # of its GPUs
    gpus: int  # tensor-parallel ranks
    slots: float  # sequences decoded together at most

    @property
    def weight_bytes(self) -> float:
        return BF16 * ModelSize.from_architecture(self.architecture, None).parameters

    @property
    def cache_bytes_of_token(self) -> float:
        return BF16 * 2 * self.architecture.num_layers * self.architecture.num_groups * self.architecture.head_size

    def pass_seconds(self, rows: float, tokens: float, context: float) -> float:
        """Time of one pass over `tokens` new tokens per row, with `context` cached tokens per row."""
        arch, machine, t, gpus = self.architecture, self.machine, rows * tokens, self.gpus
        layer = _SMALL_KERNELS * machine.kernel_seconds(0, 3 * BF16 * t * arch.hidden_size)
        h, d, qkv = arch.hidden_size, arch.head_size, (arch.num_heads + 2 * arch.num_groups) * arch.head_size
        for inner, outer in ((h, qkv), (arch.num_heads * d, h), (h, 2 * arch.ffn_size), (arch.ffn_size, h)):
            numbers = inner * outer / gpus
            layer += machine.kernel_seconds(2 * t * numbers, BF16 * (numbers + t * (inner + outer / gpus)))
        cache = rows * context * self.cache_bytes_of_token / arch.num_layers / gpus
        layer += machine.kernel_seconds(4 * t * context * arch.num_heads * arch.head_size / gpus, cache)
        layer += 2 * machine.collective_seconds("all_reduce", BF16 * t * arch.hidden_size, gpus)
        head = arch.vocab_size * arch.hidden_size / gpus
        last = machine.kernel_seconds(2 * rows * head, BF16 * head)
        # Softmax, noise and argmax pass over the fp32 logits a few times.
        return arch.num_layers * layer + (last + 4 * machine.kernel_seconds(0, 8 * rows * arch.vocab_size))

    def call_seconds(self, sequences: int, prompts: int, prompt_tokens: float, lengths: Lengths) -> float:
        """Time of all responses of a call, with continuous batching beyond `slots` sequences."""
        rows, step = min(sequences, self.slots), lengths.longest / _POINTS
        waiting = (sequences - rows) * lengths.average / rows
        of_waiting = waiting * self.pass_seconds(rows, 1, prompt_tokens + lengths.average / 2)
        seconds = self.pass_seconds(prompts, prompt_tokens, prompt_tokens / 2) + of_waiting
        for tokens in np.arange(0.5, _POINTS) * step:
            share = math.exp(-tokens / lengths.scale)
            any_left = step * (1 - (1 - share) ** rows)
            seconds += any_left * self.pass_seconds(max(rows * share, 1.0), 1, prompt_tokens + tokens)
        return seconds


@dataclass(frozen=True)
class Role:
    """A rank that stands for others like it, at full depth."""

    stage: int  # its pipeline stage
    stages: int  # number of stages like it
    costs: dict[str, Cost]  # by phase; passes have a fixed part and one per micro-batch
    # Peak bytes by phase at full length; `resident`: while an engine generates; `away`: `offload_adam_states` moves.
    peaks: dict[str, float]


@dataclass(frozen=True)
class PhaseTime:
    name: str
    bound: str  # what takes most of its time
    parts: dict[str, float]  # seconds by part
    cost: Cost = field(default_factory=Cost)  # of the rank

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class StepTime:
    phases: tuple[PhaseTime, ...]
    peaks: dict[str, float]  # peak bytes of a rank by phase, worst stage; without `Hardware.reserved`
    tokens: float  # prompts and responses, over all ranks
    fits: bool  # a GPU's memory holds the worst phase

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def worst(self) -> str:
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def slowest(self) -> PhaseTime:
        return max(self.phases, key=lambda phase: phase.seconds)


@dataclass(frozen=True)
class PredictedJob:
    cfg: TrainConfig
    architecture: Architecture
    layout: Layout
    layers: tuple[int, ...]  # per stage
    batches: BatchPlan
    machine: Hardware
    lengths: Lengths  # of responses
    sequences_of_update: float  # per optimizer step on its busiest rank, on average

    @property
    def has_engine(self) -> bool:
        return self.cfg.generation in ENGINES

    @property
    def prompts_of_call(self) -> int:
        most = min(self.batches.prompts_of_rank.most, self.cfg.model.reinforce.rollout_micro_batch_size)
        return most if self.has_engine else -(-most // self.layout.context)

    def rows(self, response: int) -> tuple[int, int]:
        """Return the sequences of a training and of a forward micro-batch at a response length."""
        plan, model, tokens = self.batches, self.cfg.model, self.cfg.model.tokens_per_micro_batch
        train, forward = model.micro_batch_size, model.reinforce.forward_micro_batch_size
        if tokens is not None:
            train = forward = max(tokens // (plan.longest_prompt + response), 1)
        of_update, of_rank = plan.prompts_of_update.most * plan.samples, plan.prompts_of_rank.most * plan.samples
        return min(of_update, train), min(of_rank, forward)


def predict(job: PredictedJob, roles: Sequence[Role]) -> StepTime:
    cfg, machine, plan, model, rl = job.cfg, job.machine, job.batches, job.cfg.model, job.cfg.trainer.reinforce
    peaks = {name: max(role.peaks[name] for role in roles) for name in roles[0].peaks}
    resident, away = peaks.pop("resident"), peaks.pop("away")
    if job.has_engine:
        generation, peaks["generation"] = _engine(job, resident)
    else:
        generation = _native(job, roles)
    phases = [generation] + [PhaseTime("offload and back", "PCIe", {"transfer": 2 * away / machine.pcie})] * bool(away)
    train_rows, forward_rows = job.rows(math.ceil(job.lengths.average))
    forward = math.ceil(plan.prompts_of_rank.most * plan.samples / forward_rows)
    several = rl.reinforce_epochs > 1 or cfg.prompts_per_update is not None
    known = cfg.generation == "native" and rl.generator_log_probs and cfg.trainer.precision != "bf16"
    if several or (cfg.uses_reference and not known):  # follows `RolloutMaker`
        phases.append(_passes(job, roles, "log-probs", forward))
    if cfg.uses_reference:
        reference = _passes(job, roles, "reference log-probs", forward)
        if lora_settings(cfg) is None and model.reference_placement == "host":
            shapes = stage_shapes(job.architecture, job.layout.tensor, job.layers, None)
            weights = max(shape.parameters for shape in shapes) * WEIGHT_BYTES[cfg.trainer.precision]
            reference.parts["weights from the host"] = weights / machine.pcie
        phases.append(reference)
    phases.append(_passes(job, roles, "training", math.ceil(job.sequences_of_update / train_rows), plan.updates))
    optimizer = [role.costs["optimizer"] for role in roles]
    cost = total([(plan.updates, max(optimizer, key=lambda c: machine.seconds(c) + machine.wire_seconds(c)))])
    parts = {"kernels": machine.seconds(cost), "collectives": machine.wire_seconds(cost)}
    phases.append(PhaseTime("optimizer", machine.bound(cost), parts, cost))
    if job.has_engine:
        phases.append(_refit(job))
    tokens = plan.prompts * plan.samples * (plan.longest_prompt + job.lengths.average)
    return StepTime(tuple(phases), peaks, tokens, max(peaks.values()) <= machine.memory - machine.reserved)


def _passes(job: PredictedJob, roles: Sequence[Role], name: str, count: int, times: int = 1) -> PhaseTime:
    # Time `times` 1F1B pipeline runs: all micro-batches in the slowest stage, one in each other.
    machine, bubble, once, slowest = job.machine, 0.0, 0.0, (0.0, 0.0, Cost())
    for role in roles:
        fixed, each = role.costs[f"{name} once"], role.costs[f"{name} each"]
        kernels, wire = machine.seconds(each), machine.wire_seconds(each)
        bubble += role.stages * (kernels + wire)
        if kernels + wire > slowest[0] + slowest[1]:
            slowest = kernels, wire, total([(times, fixed), (times * count, each)])
        sums = machine.wire_seconds(fixed)
        if name == "training" and job.cfg.model.optim.overlap_grad_sync:
            sums = max(0.0, sums - 2 / 3 * (kernels + wire))  # the backward pass, during which they can run
        once = max(once, max(0.0, machine.seconds(fixed)) + sums)
    kernels, wire, cost = slowest
    parts = {"kernels": times * count * kernels, "collectives": times * count * wire}
    parts |= {"pipeline bubble": times * (bubble - kernels - wire), "once": times * once}
    largest = max(parts, key=lambda part: parts[part])
    return PhaseTime(name, machine.bound(cost) if largest == "kernels" else largest, parts, cost)


def _native(job: PredictedJob, roles: Sequence[Role]) -> PhaseTime:
    machine, plan, arch, calls = job.machine, job.batches, job.architecture, job.batches.generation_calls
    limits = job.lengths.longest, job.cfg.model.reinforce.generation_cache_tokens
    rows = Decoding(job.prompts_of_call, plan.samples, plan.longest_prompt, *limits).schedule().rows
    tokens, factor = job.lengths.of_slowest(job.layout.data, calls, rows)
    tokens *= -(-job.prompts_of_call * plan.samples // rows)
    # Decode was measured on the first tokens; on average half of the response is in the cache.
    kept = rows * tokens / 2 * 2 * arch.num_groups / job.layout.tensor * arch.head_size
    parts, costs = {"prefill": 0.0, "decode": 0.0, "collectives": 0.0}, []
    for role in roles:
        prefill, decode, times = role.costs["prefill"], role.costs["decode"], calls * role.stages
        reading = job.layers[role.stage] * kept * WEIGHT_BYTES[job.cfg.trainer.precision] / machine.rates["bandwidth"]
        parts["prefill"] += times * machine.seconds(prefill)
        parts["decode"] += times * tokens * (machine.seconds(decode) + reading)
        parts["collectives"] += times * (machine.wire_seconds(prefill) + tokens * machine.wire_seconds(decode))
        costs.append(total([(calls, prefill), (calls * tokens, decode)]))
    cost = max(costs, key=machine.seconds)
    bound = "collectives" if parts["collectives"] > parts["decode"] else machine.bound(cost)
    parts["waiting for the slowest rank"] = (factor - 1) * sum(parts.values())
    return PhaseTime("generation", bound, parts, cost)


def _engine(job: PredictedJob, resident: float) -> tuple[PhaseTime, float]:
    # Time one engine per block beside the training states; also return a GPU's bytes meanwhile.
    settings, machine, plan = job.cfg.engine, job.machine, job.batches
    gpus = settings.tensor_parallel_size or job.cfg.model.block_size
    engine = Engine(job.architecture, machine, gpus, settings.max_batch_size)
    resident += engine.weight_bytes / gpus
    room = max(0.0, machine.memory - machine.reserved - resident) * job.cfg.tensorrt_llm.free_gpu_memory_fraction
    if job.cfg.generation == "vllm":  # its share is of the whole GPU, and has the weights in it
        room = max(0.0, machine.memory * job.cfg.vllm.gpu_memory_utilization - engine.weight_bytes / gpus)
    of_sequence = engine.cache_bytes_of_token * (plan.longest_prompt + job.lengths.average)
    engine = replace(engine, slots=max(1.0, min(settings.max_batch_size, room * gpus / of_sequence)))
    together, calls = job.prompts_of_call * plan.samples, plan.generation_calls
    seconds = calls * engine.call_seconds(together, job.prompts_of_call, plan.longest_prompt, job.lengths)
    _, factor = job.lengths.of_slowest(job.layout.data, calls, together)
    parts = {"engine": seconds, "waiting for the slowest rank": (factor - 1) * seconds}
    return PhaseTime("generation", "memory bandwidth", parts), resident + room


def _refit(job: PredictedJob) -> PhaseTime:
    # Time the refit: weights are gathered in the block by buckets and copied to each of its GPUs.
    machine, block = job.machine, job.cfg.model.block_size
    weights = Engine(job.architecture, machine, 1, 1).weight_bytes
    bucket = job.cfg.engine.weight_bucket_megabytes * 2.0**20
    wire = sum(machine.collective_seconds(kind, bucket, block) for kind in ("all_gather", "broadcast"))
    parts = {"collectives": weights / bucket * wire, "copies": 3 * weights / machine.rates["bandwidth"]}
    return PhaseTime("weights to the engine", max(parts, key=lambda part: parts[part]), parts)
