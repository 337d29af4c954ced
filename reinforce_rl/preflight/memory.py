"""Estimate a rank's part of a model and its bytes, by arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reinforce_rl.config.parallelism import Layout
from reinforce_rl.generation.native.schedule import Schedule
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.lora import LoraSettings, lora_map
from reinforce_rl.megatron.size import ADAM_MOMENTS, FP32
from reinforce_rl.megatron.weight_map import EMBEDDING, Row, weight_map

# Activation sizes were read off torch's saved tensors, temporaries off its allocator
# (tests/preflight/test_memory.py). With fused GPU kernels less is saved. Notation: t positions of a
# micro-batch on this rank, n its response tokens, h hidden, f feed-forward, d head size, V
# vocabulary.

LORA_QKV = {"q_proj", "k_proj", "v_proj"}
LORA_FC1 = {"gate_proj", "up_proj"}


@dataclass(frozen=True)
class StageShape:
    """A rank's part of the model: its stage's layers and tensor-parallel slices, padded."""

    layers: int  # of the stage
    first: bool  # has the embedding
    last: bool  # has the output layer
    # heads, groups, feed-forward size and vocabulary on the rank, with padding
    slices: Architecture
    parameters: int  # on the rank, with a tied embedding's copy
    trained: int  # all of them without LoRA
    largest: int  # elements of the largest trained parameter


@dataclass(frozen=True)
class Pass:
    rows: int  # sequences
    positions: int  # per sequence, on this context-parallel rank
    scored: int  # response tokens on this rank, for which logits are computed
    in_flight: int = 1  # micro-batches in flight on this stage

    @property
    def tokens(self) -> int:
        return self.rows * self.positions


@dataclass(frozen=True)
class Decoding:
    prompts: int
    samples: int  # per prompt
    prompt_tokens: int  # of the longest prompt
    response_tokens: int
    cache_tokens: int | None  # capacity of the KV cache; None for no bound

    def schedule(self) -> Schedule:
        return Schedule(
            [self.prompt_tokens] * self.prompts,
            self.samples,
            self.response_tokens,
            self.cache_tokens,
        )


@dataclass(frozen=True)
class Policy:
    weight_bytes: int  # per weight or activation: 4 in fp32, 2 in bf16
    layout: Layout
    optimizer_shards: int  # ranks that the optimizer states are sharded over
    reference: str  # "host", "device" or "none"
    lora: LoraSettings | None
    recompute: int  # layers of a stage that are recomputed, at most
    recompute_group: int  # recomputed layers per saved input
    chunk_tokens: int  # response tokens with logits in memory at a time
    # during generation, optimizer states are moved to the host and gradients are freed
    offload_optimizer: bool
    fused_adam: bool  # one kernel without temporaries
    gpu: bool  # device and host memory are separate; on a CPU nothing is moved
    engine_copies: bool = False  # an engine that sleeps keeps its weights in host memory


@dataclass(frozen=True)
class Phase:
    """Peak bytes of a phase, without the bytes held throughout."""

    name: str
    activations: int = 0  # of layers, and temporaries of backward and optimizer step
    logits: int = 0  # and tensors computed from them
    cache: int = 0  # keys and values
    moved: int = 0  # above 0: weights copied to the device; below 0: states offloaded or freed

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.cache + self.moved


@dataclass(frozen=True)
class RankMemory:
    """Bytes held throughout, with the reference on the device or the host, and by phase."""

    stage: int
    shape: StageShape
    weights: int
    gradients: int
    optimizer: int
    reference_on_device: int
    reference_on_host: int
    phases: tuple[Phase, ...]
    engine_on_host: int = 0  # this rank's share

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference_on_device

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        return self.held + self.peak_phase.total

    @property
    def on_host(self) -> int:
        """Peak bytes in host memory, if it is separate from the device's."""
        is_offloaded = any(phase.moved < 0 for phase in self.phases)
        # The engine falls asleep before the optimizer's states come back.
        return (
            self.reference_on_host + self.engine_on_host + (self.optimizer if is_offloaded else 0)
        )


def rank_memory(
    stage: int,
    shape: StageShape,
    policy: Policy,
    train: Pass,
    forward: Pass,
    generations: Mapping[str, Decoding],
) -> RankMemory:
    weights = shape.parameters * policy.weight_bytes
    gradients = shape.trained * FP32
    # In fp32 the weights are their own main weights.
    main = 0 if policy.weight_bytes == FP32 else FP32
    optimizer = -(-shape.trained // policy.optimizer_shards) * (main + ADAM_MOMENTS)
    on_device, on_host = (
        weights if policy.reference == place else 0 for place in ("device", "host")
    )
    offloaded = -(optimizer + gradients) if policy.offload_optimizer and policy.gpu else 0
    phases = [
        _generation(name, shape, policy, calls, offloaded) for name, calls in generations.items()
    ]
    phases.append(_log_probs("log-probs", shape, policy, forward, moved=0))
    if policy.reference != "none":  # the actor's weights stay on the device meanwhile
        phases.append(
            _log_probs("reference log-probs", shape, policy, forward, on_host if policy.gpu else 0)
        )
    phases += [_training(shape, policy, train), _optimizer_step(shape, policy)]
    # Context-parallel ranks hold the same weights, and an engine holds them once.
    engine = weights // policy.layout.context if policy.engine_copies and policy.gpu else 0
    return RankMemory(
        stage, shape, weights, gradients, optimizer, on_device, on_host, tuple(phases), engine
    )


def _kept_by_layer(shape: StageShape, policy: Policy, micro: Pass) -> int:
    """Return the bytes that a layer saves for backward of a micro-batch, its input included."""
    kept = policy.weight_bytes
    lora = policy.lora
    arch = shape.slices
    d = shape.slices.head_size
    # A norm saves its input; the next matrix saves the norm's output if it is trained.
    outputs = sum(
        kept
        for projections in (LORA_QKV, LORA_FC1)
        if lora is None or projections & {*lora.targets}
    )
    norms = arch.hidden_size * (2 * kept + outputs)
    if policy.layout.sequence_parallel:
        norms //= policy.layout.tensor
    # Fused QKV (the values are a view of it), rotated queries and keys, the kernel's output and
    # log-sum-exp.
    attention = kept * (3 * arch.num_heads + 3 * arch.num_groups) * d + FP32 * arch.num_heads
    # Gate and up, and their product if the down projection is trained.
    ffn = kept * arch.ffn_size * (3 if lora is None or "down_proj" in lora.targets else 2)
    low_rank = 0 if lora is None else kept * lora.rank * len(lora.targets)
    rotary = 4 * kept * d * micro.positions
    return (
        micro.tokens * (norms + attention + ffn + low_rank)
        + rotary
        + _gathered_keys(shape, policy, micro)
    )


def _gathered_keys(shape: StageShape, policy: Policy, micro: Pass) -> int:
    # Of all context-parallel ranks; the masks of this rank's two chunks have the weights' dtype.
    if policy.layout.context == 1:
        return 0
    whole = micro.positions * policy.layout.context
    keys = (
        2
        * micro.rows
        * whole
        * shape.slices.num_groups
        * shape.slices.head_size
        * policy.weight_bytes
    )
    return keys + micro.positions * whole * policy.weight_bytes


def _training(shape: StageShape, policy: Policy, micro: Pass) -> Phase:
    # Return the worst of some moments of the backward pass, which starts with all saved activations
    # alive.
    t = micro.tokens
    kept = policy.weight_bytes
    arch = shape.slices
    layout = policy.layout
    shared = layout.tensor if layout.sequence_parallel else 1
    layer = _kept_by_layer(shape, policy, micro)
    border = t * arch.hidden_size * kept // shared
    again = min(policy.recompute, shape.layers)
    stored = again // policy.recompute_group * border + (shape.layers - again) * layer
    saved = micro.in_flight * (stored + (0 if shape.last else border))
    # One recomputed group is alive at a time; layers that are not recomputed go backward first and
    # are freed.
    alive = policy.recompute_group * layer if again == shape.layers else 0
    # megatron gathers the sequence-parallel input again in backward instead of saving it.
    gathered = 2 * t * arch.hidden_size * kept if layout.sequence_parallel else 0
    in_layer = saved + alive + border + gathered
    weight = 2 * arch.ffn_size * arch.hidden_size * kept
    table = arch.vocab_size * arch.hidden_size
    if policy.lora is not None:
        weight = 0
        table = 0
    columns = t * arch.ffn_size * kept
    # A tied embedding's gradient waits for its other half.
    waiting = table * kept if shape.last and arch.tied_embeddings else 0
    moments = [
        # In SwiGLU: the gradients of input and output and two temporaries; the output itself is
        # freed.
        Phase("training", in_layer + 4 * columns + waiting),
        # At fc1's weight gradient: of the MLP only the gradient of gate and up is left.
        Phase("training", in_layer + border + weight - columns),
    ]
    if shape.first:
        moments.append(Phase("training", waiting + table * kept + border))
    if shape.last:
        # In the norm.
        moments.append(
            Phase("training", saved + waiting + 6 * FP32 * t * arch.hidden_size // shared)
        )
        narrow = 0 if kept == FP32 else kept
        at_head = (
            saved
            + 2 * FP32 * t * arch.hidden_size // shared
            + 2 * micro.scored * arch.hidden_size * kept
        )
        # The table's gradient is summed over chunks in fp32, then copied to the model's dtype.
        logits = min(micro.scored, policy.chunk_tokens) * arch.vocab_size * (2 * FP32 + narrow)
        moments.append(Phase("training", at_head + table * (FP32 + narrow), logits))
    return max(moments, key=lambda phase: phase.total)


def _optimizer_step(shape: StageShape, policy: Policy) -> Phase:
    if policy.gpu:
        # Plain Adam takes the root of all second moments at once; fused Adam has no temporaries.
        roots = 0 if policy.fused_adam else -(-shape.trained // policy.optimizer_shards) * FP32
        return Phase("optimizer step", activations=roots)
    # On a CPU Adam goes parameter by parameter; with fused Adam only the gradient norm has a
    # temporary.
    at_once = shape.largest * (1 if policy.fused_adam else 2) * FP32
    # With sharded states gloo all-gathers the weights into a copy.
    gathered = shape.trained * policy.weight_bytes if policy.optimizer_shards > 1 else 0
    return Phase("optimizer step", activations=max(at_once, gathered))


def _forward_activations(shape: StageShape, policy: Policy, tokens: int) -> int:
    # Gate and up with their product; with LoRA, gate and up three times: base, update and sum.
    arch = shape.slices
    matrices = 3 if policy.lora is None or not LORA_FC1 & {*policy.lora.targets} else 6
    inside_ffn = 5 * arch.hidden_size + matrices * arch.ffn_size
    inside_attention = 4 * arch.hidden_size + arch.head_size * (
        5 * arch.num_heads + 4 * arch.num_groups
    )
    return tokens * max(inside_ffn, inside_attention) * policy.weight_bytes


def _log_probs(name: str, shape: StageShape, policy: Policy, micro: Pass, moved: int) -> Phase:
    activations = _forward_activations(shape, policy, micro.tokens) + _gathered_keys(
        shape, policy, micro
    )
    logits = 0
    if shape.last:
        of_logit = FP32 if policy.weight_bytes == FP32 else FP32 + policy.weight_bytes
        at_head = min(micro.scored, policy.chunk_tokens) * shape.slices.vocab_size * of_logit
        head = (micro.tokens + micro.scored) * shape.slices.hidden_size * policy.weight_bytes
        if head + at_head >= activations:
            activations = head
            logits = at_head
    return Phase(name, activations, logits, moved=moved)


def _generation(
    name: str, shape: StageShape, policy: Policy, decoding: Decoding, moved: int
) -> Phase:
    schedule = decoding.schedule()
    arch = shape.slices
    tokens = schedule.slots * decoding.prompt_tokens + schedule.rows * decoding.response_tokens
    cache = tokens * shape.layers * 2 * arch.num_groups * arch.head_size * policy.weight_bytes
    reading = _forward_activations(shape, policy, schedule.slots * decoding.prompt_tokens)
    step = _forward_activations(shape, policy, schedule.rows)
    # Sampling: the logits, two buffers of noise, two of their combination.
    logits = 5 * schedule.rows * arch.vocab_size * policy.layout.tensor * FP32 if shape.last else 0
    # A CPU multiplies by packed copies of the weights, except an embedding that is not also the
    # head.
    is_head = shape.last and arch.tied_embeddings
    embedding = arch.vocab_size * arch.hidden_size if shape.first and not is_head else 0
    packed = 0 if policy.gpu else (shape.parameters - embedding) * policy.weight_bytes
    moments = (
        Phase(name, packed + reading, 0, cache, moved),
        Phase(name, packed + step, logits, cache, moved),
    )
    return max(moments, key=lambda phase: phase.total)


def stage_shapes(
    arch: Architecture, tp: int, layers: Sequence[int], lora: LoraSettings | None
) -> list[StageShape]:
    slices = {name: size // tp for name, size in arch.padded(tp)._asdict().items()}
    rank = replace(arch, **slices, ffn_size=arch.ffn_size // tp)
    rows = weight_map(arch, tp)
    updates = (
        [] if lora is None else [m for row in lora_map(arch, tp, lora) for m in (row.a, row.b)]
    )
    table = _numbers([row for row in rows if row.hf == EMBEDDING])
    shapes = []
    first_layer = 0
    for stage, count in enumerate(layers):
        first = stage == 0
        last = stage == len(layers) - 1
        numbers = range(first_layer, first_layer + count)
        stage_rows = [row for row in rows if _is_on(row, numbers, first, last)]
        weights = list(_numbers(stage_rows).values())
        if last and not first and arch.tied_embeddings:
            weights += table.values()
        low_rank = list(
            _numbers([row for row in updates if _is_on(row, numbers, first, last)]).values()
        )
        trained = weights if lora is None else low_rank
        parameters = sum(weights) + sum(low_rank)
        shapes.append(
            StageShape(count, first, last, rank, parameters, sum(trained), max(trained, default=0))
        )
        first_layer += count
    return shapes


def _numbers(rows: Sequence[Row]) -> dict[str, int]:
    # Elements of each megatron parameter on one tensor-parallel rank; rows may share a parameter.
    return {row.megatron: math.prod(row.local_shape) for row in rows}


def _is_on(row: Row, layers: range, first: bool, last: bool) -> bool:
    if row.megatron.startswith("decoder.layers."):
        return int(row.megatron.split(".")[2]) in layers
    return first if row.hf == EMBEDDING else last
