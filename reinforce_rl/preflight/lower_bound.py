"""Lower bound of a step's time on a named machine, by FLOPs and bytes.

A phase takes at least as long as the busiest rank's matrix products at the GPU's peak rate, as the
bytes that it must read from memory at the full bandwidth, and as its collectives at the links'
bandwidth. The largest of these counts, as if the others ran beside it; phases follow one another.
Single ranks are run on fake GPUs at the mean lengths to count FLOPs and collectives. Both grow at
least linearly with a length, so sequences of different lengths take no less than the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.engines import ENGINES
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.size import ADAM_MOMENTS, FP32, WEIGHT_BYTES, ModelSize
from reinforce_rl.policy.build import lora_settings
from reinforce_rl.preflight.hardware import Hardware
from reinforce_rl.preflight.memory import StageShape, stage_shapes
from reinforce_rl.preflight.plan import BatchPlan
from reinforce_rl.preflight.rank import Cost, total

BF16 = 2  # bytes of an engine's weights, keys and values
PRODUCTS = "matrix products"
MEMORY = "memory bandwidth"
COLLECTIVES = "collectives"
PCIE = "PCIe"


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence."""

    prompt: int
    response: int

    @property
    def whole(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Role:
    """A rank that represents all ranks of its stage, at full depth."""

    stage: int  # its pipeline stage
    # By phase, at the mean lengths. Passes have a fixed part ("once") and one per micro-batch
    # ("each"); "prefill" is of a prompt, "decode" of a token.
    costs: Mapping[str, Cost]
    # Peak bytes by phase at full length. "resident": while an engine generates; "away": what
    # `offload_adam_states` moves.
    peaks: Mapping[str, float]


@dataclass(frozen=True)
class PhaseBound:
    name: str
    parts: Mapping[str, float]  # least seconds by resource
    cost: Cost = field(default_factory=Cost)  # of the rank with most FLOPs

    @property
    def seconds(self) -> float:
        return max(self.parts.values())

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self.parts, key=lambda resource: self.parts[resource])


@dataclass(frozen=True)
class StepBound:
    phases: tuple[PhaseBound, ...]
    # peak bytes of a rank by phase, worst stage; without `Hardware.reserved`
    peaks: Mapping[str, float]
    tokens: float  # prompts and responses, over all ranks
    fits: bool  # a GPU's memory holds the worst phase

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def worst(self) -> str:
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def longest(self) -> PhaseBound:
        return max(self.phases, key=lambda phase: phase.seconds)


@dataclass(frozen=True)
class Job:
    cfg: TrainConfig
    architecture: Architecture
    layout: Layout
    layers: tuple[int, ...]  # per stage
    batches: BatchPlan
    machine: Hardware
    full: Lengths  # the longest prompt and `max_length`, for the memory
    mean: Lengths  # for the time

    @property
    def has_engine(self) -> bool:
        return self.cfg.generation in ENGINES

    @property
    def weight_bytes(self) -> int:
        return WEIGHT_BYTES[self.cfg.trainer.precision]

    @property
    def shapes(self) -> list[StageShape]:
        """The base model's shapes, without LoRA's updates."""
        return stage_shapes(self.architecture, self.layout.tensor, self.layers, None)

    @property
    def prompts_of_call(self) -> int:
        size = self.cfg.model.reinforce.rollout_micro_batch_size
        prompts = min(self.batches.prompts_of_rank.most, size)
        if self.has_engine:
            return prompts
        return -(-prompts // self.layout.context)

    @property
    def sequences(self) -> float:
        """Mean sequences of a data-parallel rank in a step; at least one rank has as many."""
        return self.batches.prompts * self.batches.samples / self.layout.data

    def rows(self, lengths: Lengths) -> tuple[int, int]:
        """Return the sequences of a training and of a forward micro-batch at these lengths."""
        plan = self.batches
        model = self.cfg.model
        train = model.micro_batch_size
        forward = model.reinforce.forward_micro_batch_size
        if model.tokens_per_micro_batch is not None:
            train = max(model.tokens_per_micro_batch // lengths.whole, 1)
            forward = train
        of_update = plan.prompts_of_update.most * plan.samples
        of_rank = plan.prompts_of_rank.most * plan.samples
        return min(of_update, train), min(of_rank, forward)

    def fewest_micro_batches(self, sequences: float, size: int) -> float:
        """Return the micro-batches of `sequences`, `size` in each unless tokens bound them."""
        tokens = self.cfg.model.tokens_per_micro_batch
        if tokens is None:
            return sequences / size
        return sequences * min(self.mean.whole / tokens, 1.0)

    def read_by_pass(self, shape: StageShape) -> int:
        """Return the bytes of weights that a pass reads: all but an embedding's, of few rows."""
        is_output_layer = shape.last and self.architecture.tied_embeddings
        embedding = 0
        if shape.first and not is_output_layer:
            embedding = shape.slices.vocab_size * shape.slices.hidden_size
        return (shape.parameters - embedding) * self.weight_bytes


def lower_bound(job: Job, roles: Sequence[Role]) -> StepBound:
    """Return the least time of a step that trains on every sequence, and the peaks of memory."""
    cfg = job.cfg
    machine = job.machine
    rl = cfg.trainer.reinforce
    peaks = {name: max(role.peaks[name] for role in roles) for name in roles[0].peaks}
    resident = peaks.pop("resident")
    away = peaks.pop("away")
    if job.has_engine:
        phases = [_engine_generation(job)]
        peaks["generation"] = _memory_beside_engine(job, resident)
    else:
        phases = [_native_generation(job, roles)]
    if away:
        # On a separate stream the way back may be hidden entirely.
        ways = 1 if cfg.model.reinforce.overlap_offload else 2
        phases.append(PhaseBound("offload and back", {PCIE: ways * away / machine.pcie}))
    several_updates = cfg.takes_several_updates
    # As in `RolloutScorer`, no pass computes log-probs that the generator returns.
    is_exact = cfg.generation == "native" and cfg.trainer.precision != "bf16"
    is_known = is_exact and rl.generator_log_probs
    if several_updates or (cfg.uses_reference and not is_known):
        phases.append(_forward(job, roles, "log-probs"))
    if cfg.uses_reference:
        phases.append(_reference(job, roles))
    phases.append(_training(job, roles))
    phases.append(_optimizer(job, roles))
    if job.has_engine:
        phases.append(_weights_to_engine(job))
    tokens = job.sequences * job.layout.data * job.mean.whole
    fits = max(peaks.values()) <= machine.memory - machine.reserved
    return StepBound(tuple(phases), peaks, tokens, fits)


def _phase(
    job: Job,
    name: str,
    costs: Sequence[Cost],
    memory: Sequence[float],
    pcie: float = 0.0,
) -> PhaseBound:
    """Bound a phase by its busiest rank, resource by resource.

    Args:
        costs: cost of each rank.
        memory: least seconds of each rank for its reads and writes of memory.
        pcie: least seconds of transfers over PCIe.
    """
    machine = job.machine
    parts = {
        PRODUCTS: max(machine.flop_seconds(cost) for cost in costs),
        MEMORY: max(memory),
        COLLECTIVES: max(machine.wire_seconds(cost) for cost in costs),
    }
    if pcie:
        parts[PCIE] = pcie
    return PhaseBound(name, parts, max(costs, key=lambda cost: cost["flops"]))


def _passes(
    job: Job,
    roles: Sequence[Role],
    name: str,
    sequences: float,
    calls: int,
    rows: int,
    size: int,
    pcie: float = 0.0,
) -> PhaseBound:
    """Bound passes over micro-batches. Each pass reads the weights at least once.

    Args:
        sequences: sequences of a rank in all calls.
        calls: calls of a rank. Each has the fixed cost of its passes.
        rows: sequences of a measured micro-batch.
        size: most sequences of a micro-batch.
    """
    passes = job.fewest_micro_batches(sequences, size)
    costs = []
    memory = []
    for role in roles:
        once = role.costs[f"{name} once"]
        each = role.costs[f"{name} each"]
        costs.append(total([(calls, once), (sequences / rows, each)]))
        weights = job.read_by_pass(job.shapes[role.stage])
        memory.append(job.machine.memory_seconds(passes * weights, passes))
    return _phase(job, name, costs, memory, pcie)


def _forward(job: Job, roles: Sequence[Role], name: str, pcie: float = 0.0) -> PhaseBound:
    rows = job.rows(job.mean)[1]
    size = job.cfg.model.reinforce.forward_micro_batch_size
    return _passes(job, roles, name, job.sequences, 1, rows, size, pcie)


def _reference(job: Job, roles: Sequence[Role]) -> PhaseBound:
    model = job.cfg.model
    pcie = 0.0
    if lora_settings(job.cfg) is None and model.reference_placement == "host":
        weights = max(shape.parameters for shape in job.shapes) * job.weight_bytes
        pcie = weights / job.machine.pcie
    return _forward(job, roles, "reference log-probs", pcie)


def _training(job: Job, roles: Sequence[Role]) -> PhaseBound:
    sequences = job.cfg.trainer.reinforce.reinforce_epochs * job.sequences
    rows = job.rows(job.mean)[0]
    size = job.cfg.model.micro_batch_size
    return _passes(job, roles, "training", sequences, job.batches.updates, rows, size)


def _optimizer(job: Job, roles: Sequence[Role]) -> PhaseBound:
    cfg = job.cfg
    updates = job.batches.updates
    shards = 1
    if cfg.model.optim.distributed:
        shards = job.layout.data * job.layout.context
    shapes = stage_shapes(job.architecture, job.layout.tensor, job.layers, lora_settings(cfg))
    costs = []
    memory = []
    for role in roles:
        costs.append(total([(updates, role.costs["optimizer"])]))
        # In fp32: master weights and moments are read and written, gradients are read.
        states = FP32 + ADAM_MOMENTS
        moved = updates * shapes[role.stage].trained / shards * (FP32 + 2 * states)
        memory.append(job.machine.memory_seconds(moved, 2 * updates))
    return _phase(job, "optimizer", costs, memory)


def _native_generation(job: Job, roles: Sequence[Role]) -> PhaseBound:
    arch = job.architecture
    # Context-parallel ranks share the prompts.
    sequences = job.sequences / job.layout.context
    prompts = sequences / job.batches.samples
    steps = job.mean.response - 1  # of a response: the prefill gives its first token
    tokens = sequences * steps
    costs = []
    memory = []
    for role in roles:
        shape = job.shapes[role.stage]
        decode = role.costs["decode"]
        costs.append(total([(prompts, role.costs["prefill"]), (tokens, decode)]))
        passes = tokens * decode["passes"]
        moved = passes * job.read_by_pass(shape)
        if arch.window is None:
            heads = shape.slices.num_groups * shape.slices.head_size
            cached = 2 * shape.layers * heads * job.weight_bytes
            moved += cached * _cached_reads(job.mean.prompt, steps, prompts, sequences)
        memory.append(job.machine.memory_seconds(moved, passes))
    return _phase(job, "generation", costs, memory)


def _cached_reads(prompt: int, steps: int, prompts: float, sequences: float) -> float:
    """Return the number of reads of a token's keys and values.

    Samples that decode together may read their prompt's once.
    """
    return prompts * steps * prompt + sequences * steps**2 / 2


def _engine_generation(job: Job) -> PhaseBound:
    """Bound an engine from the model's size; its ranks share one copy in bf16."""
    arch = job.architecture
    machine = job.machine
    gpus = _gpus_of_engine(job)
    share = gpus / job.layout.ranks
    prompts = job.batches.prompts * share
    sequences = prompts * job.batches.samples
    steps = job.mean.response - 1
    table = arch.vocab_size * arch.hidden_size
    heads = arch.num_heads * arch.head_size
    keys = 2 * arch.num_groups * arch.head_size  # and values
    layers = arch.num_layers * arch.hidden_size * (2 * heads + keys + 3 * arch.ffn_size)
    flops = 2 * layers * (prompts * job.mean.prompt + sequences * steps)
    flops += 2 * table * sequences * job.mean.response
    cached = 0
    if arch.window is None:
        # Queries times keys, and weights times values, of all earlier positions.
        pairs = prompts * job.mean.prompt**2 / 2 + sequences * steps * job.mean.prompt
        pairs += sequences * steps**2 / 2
        flops += 4 * arch.num_layers * heads * pairs
        cached = BF16 * arch.num_layers * keys
    passes = max(steps, sequences * steps / job.cfg.engine.max_batch_size)
    moved = passes * BF16 * (layers + table)
    moved += cached * _cached_reads(job.mean.prompt, steps, prompts, sequences)
    parts = {
        PRODUCTS: flops / gpus / machine.bf16,
        MEMORY: machine.memory_seconds(moved / gpus, passes),
    }
    return PhaseBound("generation", parts)


def _gpus_of_engine(job: Job) -> int:
    return job.cfg.engine.tensor_parallel_size or job.cfg.model.block_size


def _engine_weights(job: Job) -> float:
    """Return the bytes of an engine's weights on one of its GPUs."""
    parameters = ModelSize.from_architecture(job.architecture, None).parameters
    return BF16 * parameters / _gpus_of_engine(job)


def _memory_beside_engine(job: Job, resident: float) -> float:
    """Return a GPU's bytes while its engine generates beside the resident training states."""
    cfg = job.cfg
    machine = job.machine
    weights = _engine_weights(job)
    # vLLM's share is of the whole GPU, weights included.
    if cfg.generation == "vllm":
        room = machine.memory * cfg.vllm.gpu_memory_utilization - weights
    else:
        free = max(0.0, machine.memory - machine.reserved - resident - weights)
        room = free * cfg.tensorrt_llm.free_gpu_memory_fraction
    return resident + weights + max(0.0, room)


def _weights_to_engine(job: Job) -> PhaseBound:
    """Bound the refit: each of the engine's GPUs reads and writes its share of the weights."""
    seconds = job.machine.memory_seconds(2 * _engine_weights(job), 2)
    return PhaseBound("weights to the engine", {MEMORY: seconds})
