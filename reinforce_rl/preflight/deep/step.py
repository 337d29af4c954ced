"""From what single ranks cost to a step of the whole job: its phases' seconds, and what binds them.

Notation: m micro-batches of a pass, p pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from reinforce_rl.build_actor import lora_settings
from reinforce_rl.config import TrainConfig
from reinforce_rl.layout import Layout
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight.deep.cost import Cost, total
from reinforce_rl.preflight.deep.engine import Engine, Lengths
from reinforce_rl.preflight.deep.machine import Machine
from reinforce_rl.preflight.memory import WEIGHT_BYTES, Decoding
from reinforce_rl.preflight.plan import BatchPlan
from reinforce_rl.preflight.shapes import stage_shapes

BACKWARD = 2 / 3  # of a micro-batch's time, in which gradients can be summed over the ranks meanwhile


@dataclass(frozen=True)
class Measured:
    """A phase of one rank.

    Attributes:
        cost: of it.
        start, peak: bytes of tensors at its start, and at most.
    """

    cost: Cost
    start: float
    peak: float


@dataclass(frozen=True)
class RoleCosts:
    """A rank that stands for others like it, at full depth.

    Attributes:
        stage: its pipeline stage.
        stages: that are like it.
        in_flight: micro-batches that its training was measured with.
        phases: by name, from times' lengths.
        peaks: bytes at most by phase, every sequence at full length.
    """

    stage: int
    stages: int
    in_flight: int
    phases: dict[str, Measured]
    peaks: dict[str, float]

    def passes(self, name: str, first: int = 1) -> tuple[Cost, Cost]:
        """What a phase costs once, and with each micro-batch."""
        low, high = self.phases[f"{name} {first}"].cost, self.phases[f"{name} {first + 1}"].cost
        each = total([(1, high), (-1, low)])
        return total([(1, low), (-first, each)]), each


@dataclass(frozen=True)
class PhaseTime:
    """A phase of a step.

    Attributes:
        seconds: of it.
        bound: what takes most of that.
        parts: seconds of what it is made of, by name.
        cost: of the rank of the slowest stage.
    """

    name: str
    seconds: float
    bound: str
    parts: dict[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True)
class StepTime:
    """A predicted step.

    Attributes:
        phases: in their order.
        peaks: bytes of a rank at most, by phase, of the stage with most; without `Machine.reserved`.
        tokens: prompts and responses of a step, over all ranks.
        flops: of a step's phases, on the rank with most.
    """

    phases: tuple[PhaseTime, ...]
    peaks: dict[str, float]
    tokens: float

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def peak(self) -> float:
        return max(self.peaks.values())

    @property
    def slowest(self) -> PhaseTime:
        return max(self.phases, key=lambda phase: phase.seconds)


@dataclass(frozen=True)
class Job:
    """What is predicted.

    Attributes:
        layers: of each stage.
        lengths: of responses.
    """

    cfg: TrainConfig
    architecture: Architecture
    layout: Layout
    layers: tuple[int, ...]
    batches: BatchPlan
    machine: Machine
    lengths: Lengths

    @property
    def sequences(self) -> int:
        """Of a step, over all ranks."""
        return self.batches.prompts * self.batches.samples

    @property
    def prompts_of_call(self) -> int:
        """Prompts that a rank generates together."""
        most = min(self.batches.prompts_of_rank.most, self.cfg.model.reinforce.rollout_micro_batch_size)
        return most if self.cfg.generation != "native" else -(-most // self.layout.context)


def predict(job: Job, roles: Sequence[RoleCosts]) -> StepTime:
    """The step of the rank with most to do."""
    cfg, machine, plan = job.cfg, job.machine, job.batches
    has_engine = cfg.generation != "native"
    peaks: dict[str, float] = {}
    for role in roles:
        for name, peak in role.peaks.items():
            peaks[name] = max(peaks.get(name, 0.0), peak)
    weights = _weight_bytes(job)
    if has_engine:
        generating, room = _engine(job, peaks)
        peaks["generation"] = room
    else:
        generating = _native(job, roles)
    phases = [generating]
    away = max(
        (r.phases["offload"].start - r.phases["offload"].peak for r in roles if "offload" in r.phases), default=0
    )
    if away:
        seconds = 2 * machine.host_seconds(away)
        phases.append(PhaseTime("offload and back", seconds, "PCIe", {"transfer": seconds}))
    for name, title in (("logprobs", "log-probs"), ("init_logprobs", "reference log-probs")):
        skipped = name == "logprobs" and not _reads_log_probs(cfg)
        if f"{name} 1" in roles[0].phases and not skipped:
            found = _passes(job, roles, name, plan.forward_micro_batches, 1)
            if name == "init_logprobs" and lora_settings(cfg) is None and cfg.model.reference_placement == "host":
                found["weights from the host"] = machine.host_seconds(weights)
            phases.append(_phase(title, found, job, roles, name))
    times = plan.updates
    found = _passes(job, roles, "training", plan.micro_batches, None)
    phases.append(_phase("training", {part: times * s for part, s in found.items()}, job, roles, "training", times))
    costs = [role.phases["optimizer"].cost for role in roles]
    slowest = max(costs, key=lambda c: c.kernel_seconds(machine) + c.wire_seconds(machine))
    kernels, wire = times * slowest.kernel_seconds(machine), times * slowest.wire_seconds(machine)
    parts = {"kernels": kernels, "collectives": wire}
    phases.append(PhaseTime("optimizer", kernels + wire, slowest.bound(machine), parts, slowest * times))
    if has_engine:
        phases.append(_refit(job))
    tokens = job.sequences * (plan.longest_prompt + job.lengths.average)
    return StepTime(tuple(phases), peaks, tokens)


def _reads_log_probs(cfg: TrainConfig) -> bool:
    """As `StepRolloutMaker` decides."""
    rl = cfg.trainer.reinforce
    several = rl.reinforce_epochs > 1 or cfg.prompts_per_update is not None
    exact = cfg.generation == "native" and rl.generator_log_probs and cfg.trainer.precision != "bf16"
    return several or (rl.initial_policy_kl_penalty > 0 and not exact)


def _weight_bytes(job: Job) -> float:
    shapes = stage_shapes(job.architecture, job.layout, job.layers, lora_settings(job.cfg))
    return max(shape.parameters for shape in shapes) * WEIGHT_BYTES[job.cfg.trainer.precision]


def _passes(job: Job, roles: Sequence[RoleCosts], name: str, count: int, first: int | None) -> dict[str, float]:
    """Seconds of m micro-batches through all stages, in 1F1B: m of the slowest, and the others' once."""
    machine, cfg = job.machine, job.cfg
    once = kernels = wire = 0.0
    fill = 0.0  # the bubble
    slowest = 0.0
    for role in roles:
        fixed, each = role.passes(name, first or role.in_flight)
        seconds = each.kernel_seconds(machine) + each.wire_seconds(machine)
        fill += role.stages * seconds
        if seconds >= slowest:
            slowest, kernels, wire = seconds, each.kernel_seconds(machine), each.wire_seconds(machine)
        sums = fixed.wire_seconds(machine)
        if name == "training" and cfg.model.optim.overlap_grad_sync:
            sums = max(0.0, sums - BACKWARD * seconds)
        once = max(once, max(0.0, fixed.kernel_seconds(machine)) + sums)
    return {"kernels": count * kernels, "collectives": count * wire, "pipeline bubble": fill - slowest, "once": once}


def _phase(
    title: str, parts: dict[str, float], job: Job, roles: Sequence[RoleCosts], name: str, times: int = 1
) -> PhaseTime:
    plan = job.batches
    count = plan.micro_batches if name == "training" else plan.forward_micro_batches
    costs = []
    for role in roles:
        fixed, each = role.passes(name, role.in_flight if name == "training" else 1)
        costs.append(total([(times, fixed), (times * count, each)]))
    cost = max(costs, key=lambda c: c.kernel_seconds(job.machine))
    largest = max(parts, key=lambda part: parts[part])
    bound = cost.bound(job.machine) if largest == "kernels" else largest
    return PhaseTime(title, sum(parts.values()), bound, parts, cost)


def _native(job: Job, roles: Sequence[RoleCosts]) -> PhaseTime:
    """Prefill and a decode step a token, through all stages in turn."""
    machine, plan, rollout = job.machine, job.batches, job.cfg.model.reinforce
    decoding = Decoding(
        job.prompts_of_call, plan.samples, plan.longest_prompt, job.lengths.longest, rollout.generation_cache_tokens
    )
    rows = decoding.schedule().rows
    waves = -(-job.prompts_of_call * plan.samples // rows)
    tokens = job.lengths.expected_longest(rows)
    arch, layout = job.architecture, job.layout
    # Steps were measured at the response's first tokens; on average half of it is in the cache.
    kept = rows * tokens / 2 * 2 * arch.num_groups / layout.tensor * arch.head_size
    parts = {"prefill": 0.0, "decode": 0.0, "collectives": 0.0}
    costs = []
    for role in roles:
        prefill, decode = role.phases["prefill"].cost, role.phases["decode"].cost
        layers = job.layers[role.stage]
        reading = layers * kept * WEIGHT_BYTES[job.cfg.trainer.precision] / (machine.hbm * machine.hbm_share)
        parts["prefill"] += role.stages * prefill.kernel_seconds(machine)
        parts["decode"] += role.stages * tokens * waves * (decode.kernel_seconds(machine) + reading)
        wire = prefill.wire_seconds(machine) + waves * tokens * decode.wire_seconds(machine)
        parts["collectives"] += role.stages * wire
        costs.append(total([(1, prefill), (waves * tokens, decode)]))
    calls = plan.generation_calls
    parts = {name: calls * seconds for name, seconds in parts.items()}
    cost = max(costs, key=lambda c: c.kernel_seconds(machine)) * calls
    bound = "collectives" if parts["collectives"] > parts["decode"] else cost.bound(machine)
    return PhaseTime("generation", sum(parts.values()), bound, parts, cost)


def _engine(job: Job, peaks: dict[str, float]) -> tuple[PhaseTime, float]:
    """By one engine a block beside the training states; its seconds, and the bytes of a GPU meanwhile."""
    settings, machine = job.cfg.tensorrt_llm, job.machine
    gpus = settings.tensor_parallel_size or job.cfg.model.block_size
    engine = Engine(job.architecture, machine, gpus, settings.max_batch_size)
    resident = peaks["resident"] + engine.weight_bytes / gpus
    room = max(0.0, machine.memory - machine.reserved - resident) * settings.free_gpu_memory_fraction
    tokens = job.batches.longest_prompt + job.lengths.average
    slots = max(1.0, min(settings.max_batch_size, room * gpus / (engine.cache_bytes_of_token * tokens)))
    engine = Engine(job.architecture, machine, gpus, slots)
    prompts = job.prompts_of_call
    seconds = job.batches.generation_calls * engine.call_seconds(
        prompts * job.batches.samples, prompts, job.batches.longest_prompt, job.lengths
    )
    return PhaseTime("generation", seconds, "memory bandwidth", {"engine": seconds}), resident + room


def _refit(job: Job) -> PhaseTime:
    """Weights are gathered in the block, bucket by bucket, and copied to each of its GPUs."""
    machine, block = job.machine, job.cfg.model.block_size
    weights = Engine(job.architecture, machine, 1, 1).weight_bytes
    nodes = -(-block // machine.gpus_per_node)
    buckets = weights / (job.cfg.tensorrt_llm.weight_bucket_megabytes * 2**20)
    of_bucket = sum(
        machine.collective_seconds(k, weights / buckets, block, nodes) for k in ("all_gather", "broadcast")
    )
    copies = 3 * weights / (machine.hbm * machine.hbm_share)
    seconds = buckets * of_bucket + copies
    return PhaseTime("weights to the engine", seconds, "collectives", {"transfer": seconds})
