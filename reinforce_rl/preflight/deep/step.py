"""Predict a step of the whole job from the cost of single ranks: seconds per phase and what bounds them."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight.deep.machine import Cost, Hardware, total
from reinforce_rl.preflight.memory import WEIGHT_BYTES, Decoding, stage_shapes
from reinforce_rl.preflight.plan import BatchPlan
from reinforce_rl.trainer.build import lora_settings

BF16 = 2
_SMALL_KERNELS = 4  # per layer, besides matrices and attention: two norms, RoPE with the cache write, SwiGLU
_POINTS, _DRAWS = 128, 64  # of the integral over t; of the ranks' lengths
BACKWARD = 2 / 3  # of a micro-batch's time, which can overlap with the gradient all-reduce


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
        scale, draw = self.scale, random.Random(0)
        if scale == math.inf:
            return self.longest, 1.0

        def steps() -> float:
            # The maximum of n exponentials has the CDF F^n; sample it by inversion.
            return min(self.longest, -scale * math.log1p(-(draw.random() ** (1 / together))))

        sums = [[sum(steps() for _ in range(calls)) for _ in range(ranks)] for _ in range(_DRAWS)]
        mean = statistics.fmean(map(statistics.fmean, sums))
        return mean / calls, statistics.fmean(map(max, sums)) / mean


@dataclass(frozen=True)
class Engine:
    """Model of an inference engine: weights and keys over bandwidth, one CUDA graph per step."""

    architecture: Architecture  # of the model, served in bf16
    machine: Hardware  # of its GPUs
    gpus: int  # tensor-parallel ranks
    slots: float  # sequences decoded together at most

    @property
    def weight_bytes(self) -> float:
        arch = self.architecture
        tables = (1 if arch.tied_embeddings else 2) * arch.vocab_size * arch.hidden_size
        return BF16 * (arch.num_layers * sum(map(math.prod, self._matrices())) + tables)

    @property
    def cache_bytes_of_token(self) -> float:
        arch = self.architecture
        return BF16 * 2 * arch.num_layers * arch.num_groups * arch.head_size

    def _matrices(self) -> list[tuple[int, int]]:
        arch = self.architecture
        h, d = arch.hidden_size, arch.head_size
        qkv = (arch.num_heads + 2 * arch.num_groups) * d
        return [(h, qkv), (arch.num_heads * d, h), (h, 2 * arch.ffn_size), (arch.ffn_size, h)]

    def pass_seconds(self, rows: float, tokens: float, context: float) -> float:
        """Time of one pass over `tokens` new tokens per row, with `context` cached tokens per row."""
        arch, machine, t, gpus = self.architecture, self.machine, rows * tokens, self.gpus
        layer = _SMALL_KERNELS * machine.kernel_seconds(0, 3 * BF16 * t * arch.hidden_size)
        for inner, outer in self._matrices():
            numbers = inner * outer / gpus
            layer += machine.kernel_seconds(2 * t * numbers, BF16 * (numbers + t * (inner + outer / gpus)))
        cache = rows * context * self.cache_bytes_of_token / arch.num_layers / gpus
        layer += machine.kernel_seconds(4 * t * context * arch.num_heads * arch.head_size / gpus, cache)
        nodes = -(-gpus // machine.gpus_per_node)
        layer += 2 * machine.collective_seconds("all_reduce", BF16 * t * arch.hidden_size, gpus, nodes)
        head = arch.vocab_size * arch.hidden_size / gpus
        # Softmax, noise and argmax pass over the fp32 logits a few times.
        last = machine.kernel_seconds(2 * rows * head, BF16 * head) + 4 * machine.kernel_seconds(
            0, 8 * rows * arch.vocab_size
        )
        return arch.num_layers * layer + last

    def call_seconds(self, sequences: int, prompts: int, prompt_tokens: float, lengths: Lengths) -> float:
        """Time of all responses of a call, with continuous batching beyond `slots` sequences."""
        rows, step = min(sequences, self.slots), lengths.longest / _POINTS
        waiting = (sequences - rows) * lengths.average / rows
        seconds = self.pass_seconds(prompts, prompt_tokens, prompt_tokens / 2)
        seconds += waiting * self.pass_seconds(rows, 1, prompt_tokens + lengths.average / 2)
        for i in range(_POINTS):
            tokens = (i + 0.5) * step
            share = math.exp(-tokens / lengths.scale)
            any_left = 1 - (1 - share) ** rows
            seconds += step * any_left * self.pass_seconds(max(rows * share, 1.0), 1, prompt_tokens + tokens)
        return seconds


@dataclass(frozen=True)
class Role:
    """A rank that stands for others like it, at full depth."""

    stage: int  # its pipeline stage
    stages: int  # number of stages like it
    costs: dict[str, Cost]  # by phase; passes have a fixed part and one per micro-batch
    # Peak bytes by phase with every sequence at full length; `resident`: held while an engine generates; `away`: moved
    # by `offload_adam_states`.
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
    def sequences(self) -> int:
        return self.batches.prompts * self.batches.samples

    @property
    def has_engine(self) -> bool:
        return self.cfg.generation == "tensorrt_llm"

    @property
    def prompts_of_call(self) -> int:
        most = min(self.batches.prompts_of_rank.most, self.cfg.model.reinforce.rollout_micro_batch_size)
        return most if self.has_engine else -(-most // self.layout.context)

    def rows(self, response: int) -> tuple[int, int]:
        """Return the sequences of a training and of a forward micro-batch at a response length."""
        plan, model = self.batches, self.cfg.model
        tokens, length = model.tokens_per_micro_batch, plan.longest_prompt + response
        return (
            self._rows(model.micro_batch_size, plan.prompts_of_update.most, tokens, length),
            self._rows(model.reinforce.forward_micro_batch_size, plan.prompts_of_rank.most, tokens, length),
        )

    def _rows(self, size: int, prompts: int, tokens: int | None, length: int) -> int:
        return min(prompts * self.batches.samples, size if tokens is None else max(tokens // length, 1))


def predict(job: PredictedJob, roles: Sequence[Role]) -> StepTime:
    cfg, machine, plan, model = job.cfg, job.machine, job.batches, job.cfg.model
    peaks = {name: max(role.peaks[name] for role in roles) for name in roles[0].peaks}
    resident, away = peaks.pop("resident"), peaks.pop("away")
    shapes = stage_shapes(job.architecture, job.layout, job.layers, lora_settings(cfg))
    weights = max(shape.parameters for shape in shapes) * WEIGHT_BYTES[cfg.trainer.precision]
    phases = []
    if job.has_engine:
        generation, peaks["generation"] = _engine(job, resident)
        phases.append(generation)
    else:
        phases.append(_native(job, roles))
    if away:
        phases.append(PhaseTime("offload and back", "PCIe", {"transfer": 2 * away / machine.pcie}))
    train_rows, forward_rows = job.rows(math.ceil(job.lengths.average))
    forward = math.ceil(plan.prompts_of_rank.most * plan.samples / forward_rows)
    if _reads_log_probs(cfg):
        phases.append(_passes(job, roles, "log-probs", forward))
    if cfg.trainer.reinforce.initial_policy_kl_penalty > 0:
        reference = _passes(job, roles, "reference log-probs", forward)
        if lora_settings(cfg) is None and model.reference_placement == "host":
            reference.parts["weights from the host"] = weights / machine.pcie
        phases.append(reference)
    phases.append(_passes(job, roles, "training", math.ceil(job.sequences_of_update / train_rows), plan.updates))
    optimizer = [role.costs["optimizer"] for role in roles]
    cost = total([(plan.updates, max(optimizer, key=lambda c: c.kernel_seconds(machine) + c.wire_seconds(machine)))])
    parts = {"kernels": cost.kernel_seconds(machine), "collectives": cost.wire_seconds(machine)}
    phases.append(PhaseTime("optimizer", cost.bound(machine), parts, cost))
    if job.has_engine:
        phases.append(_refit(job))
    tokens = job.sequences * (plan.longest_prompt + job.lengths.average)
    return StepTime(tuple(phases), peaks, tokens, max(peaks.values()) <= machine.memory - machine.reserved)


def _reads_log_probs(cfg: TrainConfig) -> bool:
    # Follows `RolloutMaker`.
    rl = cfg.trainer.reinforce
    if rl.reinforce_epochs > 1 or cfg.prompts_per_update is not None:
        return True
    known = cfg.generation == "native" and rl.generator_log_probs and cfg.trainer.precision != "bf16"
    return rl.initial_policy_kl_penalty > 0 and not known


def _passes(job: PredictedJob, roles: Sequence[Role], name: str, count: int, times: int = 1) -> PhaseTime:
    # Time `times` 1F1B pipeline runs: all micro-batches in the slowest stage, one in each other.
    machine, bubble, once, slowest = job.machine, 0.0, 0.0, (0.0, 0.0, Cost())
    for role in roles:
        fixed, each = role.costs[f"{name} once"], role.costs[f"{name} each"]
        kernels, wire = each.kernel_seconds(machine), each.wire_seconds(machine)
        bubble += role.stages * (kernels + wire)
        slowest = max(
            slowest, (kernels, wire, total([(times, fixed), (times * count, each)])), key=lambda c: c[0] + c[1]
        )
        sums = fixed.wire_seconds(machine)
        if name == "training" and job.cfg.model.optim.overlap_grad_sync:
            sums = max(0.0, sums - BACKWARD * (kernels + wire))
        once = max(once, max(0.0, fixed.kernel_seconds(machine)) + sums)
    kernels, wire, cost = slowest
    parts = {
        "kernels": times * count * kernels,
        "collectives": times * count * wire,
        "pipeline bubble": times * (bubble - kernels - wire),
        "once": times * once,
    }
    largest = max(parts, key=lambda part: parts[part])
    return PhaseTime(name, cost.bound(machine) if largest == "kernels" else largest, parts, cost)


def _native(job: PredictedJob, roles: Sequence[Role]) -> PhaseTime:
    machine, plan, arch = job.machine, job.batches, job.architecture
    limit = job.cfg.model.reinforce.generation_cache_tokens
    decoding = Decoding(job.prompts_of_call, plan.samples, plan.longest_prompt, job.lengths.longest, limit)
    rows, calls = decoding.schedule().rows, plan.generation_calls
    tokens, factor = job.lengths.of_slowest(job.layout.data, calls, rows)
    tokens *= -(-job.prompts_of_call * plan.samples // rows)
    # Decode was measured on the first tokens; on average half of the response is in the cache.
    kept = rows * tokens / 2 * 2 * arch.num_groups / job.layout.tensor * arch.head_size
    parts, costs = {"prefill": 0.0, "decode": 0.0, "collectives": 0.0}, []
    for role in roles:
        prefill, decode = role.costs["prefill"], role.costs["decode"]
        reading = job.layers[role.stage] * kept * WEIGHT_BYTES[job.cfg.trainer.precision] / machine.rates["bandwidth"]
        parts["prefill"] += calls * role.stages * prefill.kernel_seconds(machine)
        parts["decode"] += calls * role.stages * tokens * (decode.kernel_seconds(machine) + reading)
        wire = prefill.wire_seconds(machine) + tokens * decode.wire_seconds(machine)
        parts["collectives"] += calls * role.stages * wire
        costs.append(total([(calls, prefill), (calls * tokens, decode)]))
    cost = max(costs, key=lambda c: c.kernel_seconds(machine))
    bound = "collectives" if parts["collectives"] > parts["decode"] else cost.bound(machine)
    parts["waiting for the slowest rank"] = (factor - 1) * sum(parts.values())
    return PhaseTime("generation", bound, parts, cost)


def _engine(job: PredictedJob, resident: float) -> tuple[PhaseTime, float]:
    # Time one engine per block beside the training states; also return a GPU's bytes meanwhile.
    settings, machine, plan = job.cfg.tensorrt_llm, job.machine, job.batches
    gpus = settings.tensor_parallel_size or job.cfg.model.block_size
    engine = Engine(job.architecture, machine, gpus, settings.max_batch_size)
    resident += engine.weight_bytes / gpus
    room = max(0.0, machine.memory - machine.reserved - resident) * settings.free_gpu_memory_fraction
    of_sequence = engine.cache_bytes_of_token * (plan.longest_prompt + job.lengths.average)
    slots = max(1.0, min(settings.max_batch_size, room * gpus / of_sequence))
    together, calls = job.prompts_of_call * plan.samples, plan.generation_calls
    seconds = dataclasses.replace(engine, slots=slots).call_seconds(
        together, job.prompts_of_call, plan.longest_prompt, job.lengths
    )
    _, factor = job.lengths.of_slowest(job.layout.data, calls, together)
    parts = {"engine": calls * seconds, "waiting for the slowest rank": (factor - 1) * calls * seconds}
    return PhaseTime("generation", "memory bandwidth", parts), resident + room


def _refit(job: PredictedJob) -> PhaseTime:
    # Time the refit: weights are gathered in the block by buckets and copied to each of its GPUs.
    machine, block = job.machine, job.cfg.model.block_size
    weights = Engine(job.architecture, machine, 1, 1).weight_bytes
    bucket, nodes = job.cfg.tensorrt_llm.weight_bucket_megabytes * 2.0**20, -(-block // machine.gpus_per_node)
    wire = sum(machine.collective_seconds(kind, bucket, block, nodes) for kind in ("all_gather", "broadcast"))
    parts = {"collectives": weights / bucket * wire, "copies": 3 * weights / machine.rates["bandwidth"]}
    return PhaseTime("weights to the engine", max(parts, key=lambda part: parts[part]), parts)
