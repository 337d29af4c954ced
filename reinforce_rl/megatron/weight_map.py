"""Maps Hugging Face tensors to places in megatron-core's parameters, in both directions.

megatron fuses q, k and v, interleaved by group (q heads of group 0, k of group 0, v of group 0, q
heads of group 1, ...), and the gate and up projections, gate first on each rank.
`Architecture.padded` describes the padding. No process groups are used.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reinforce_rl.megatron.architecture import Architecture

# The second is megatron's name of the first.
OUTPUT_LAYER = "lm_head.weight"
OUTPUT_PARAMETER = "output_layer.weight"
EMBEDDING = "model.embed_tokens.weight"
SCORE_LAYER = "score.weight"  # a classifier's head, which has one name


@dataclass(frozen=True)
class Split:
    """Mapping of one axis of a Hugging Face tensor into megatron's parameter.

    The parameter's axis, over all tensor-parallel ranks, is `padded_units` units of `width` rows.
    The tensor has `units` units of `size` rows, which lie at `offset` within the parameter's units.
    """

    axis: int  # 0 or 1
    units: int  # in the tensor
    padded_units: int  # in the parameter; a multiple of the number of ranks
    width: int  # rows per unit in the parameter
    offset: int  # of the tensor's rows in the unit
    size: int  # rows per unit in the tensor


@dataclass(frozen=True)
class Row:
    """One Hugging Face tensor and its place in megatron's parameters."""

    hf: str  # Hugging Face name
    megatron: str  # parameter name, with the global layer number
    shape: tuple[int, ...]  # unsharded
    tp_size: int
    split: Split | None  # None if replicated on every rank

    @property
    def axis(self) -> int:
        return self.split.axis if self.split else 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return this tensor's shape on a rank, padding included."""
        if self.split is None:
            return self.shape
        size = self.split.padded_units // self.tp_size * self.split.width
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])

    def part(self, tp_rank: int) -> tuple[int, int]:
        """Return a rank's range along `axis` of the tensor; empty if it holds padding only."""
        if self.split is None:
            return 0, self.shape[0]
        first, end = self._units(tp_rank)
        return first * self.split.size, end * self.split.size

    def place(self, parameter: Tensor, tp_rank: int) -> Tensor:
        """Return the view of a rank's parameter that holds `part`; a split adds one axis."""
        if self.split is None:
            return parameter
        first, end = self._units(tp_rank)
        axis = self.axis
        units = parameter.unflatten(axis, (-1, self.split.width)).narrow(axis, 0, end - first)
        return units.narrow(axis + 1, self.split.offset, self.split.size)

    def part_in(self, tensor: Tensor, tp_rank: int) -> Tensor:
        """Return a rank's `part` as a view of the whole tensor, in the shape of `place`."""
        start, end = self.part(tp_rank)
        return self.like_place(tensor.narrow(self.axis, start, end - start))

    def like_place(self, part: Tensor) -> Tensor:
        return (
            part if self.split is None else part.unflatten(self.split.axis, (-1, self.split.size))
        )

    def _units(self, tp_rank: int) -> tuple[int, int]:
        assert self.split is not None
        per_rank = self.split.padded_units // self.tp_size
        units = self.split.units
        return min(tp_rank * per_rank, units), min((tp_rank + 1) * per_rank, units)


def weight_map(arch: Architecture, tp_size: int) -> list[Row]:
    """Return all tensors of a model, layer by layer.

    Tensors that share a parameter are neighbours.
    """
    sizes = arch.padded(tp_size)
    hidden = arch.hidden_size
    head = arch.head_size
    heads = arch.num_heads // arch.num_groups * head  # query rows per group
    fused = heads + 2 * head
    ffn = arch.ffn_size // tp_size  # per rank, since gate comes first on each

    vocabulary = Split(0, arch.vocab_size, sizes.vocab_size, 1, 0, 1)
    groups = (arch.num_groups, sizes.num_groups)
    query = Split(0, *groups, fused, 0, heads)
    key = Split(0, *groups, fused, heads, head)
    value = Split(0, *groups, fused, heads + head, head)
    mixed = Split(1, *groups, heads, 0, heads)
    ranks = (tp_size, tp_size)
    gate = Split(0, *ranks, 2 * ffn, 0, ffn)
    up = Split(0, *ranks, 2 * ffn, ffn, ffn)
    down = Split(1, *ranks, ffn, 0, ffn)

    # (Hugging Face name, megatron name, size of the unsplit axis, split of the other axis, present)
    qkv = "self_attention.linear_qkv.weight"
    biases = arch.qkv_bias
    layer: list[tuple[str, str, int | None, Split | None, bool]] = [
        ("input_layernorm.weight", "input_layernorm.weight", hidden, None, True),
        ("self_attn.q_proj.weight", qkv, hidden, query, True),
        ("self_attn.k_proj.weight", qkv, hidden, key, True),
        ("self_attn.v_proj.weight", qkv, hidden, value, True),
        ("self_attn.q_proj.bias", "self_attention.linear_qkv.bias", None, query, biases),
        ("self_attn.k_proj.bias", "self_attention.linear_qkv.bias", None, key, biases),
        ("self_attn.v_proj.bias", "self_attention.linear_qkv.bias", None, value, biases),
        ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", head, None, arch.qk_norm),
        ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", head, None, arch.qk_norm),
        ("self_attn.o_proj.weight", "self_attention.linear_proj.weight", hidden, mixed, True),
        (
            "self_attn.o_proj.bias",
            "self_attention.linear_proj.bias",
            hidden,
            None,
            arch.output_bias,
        ),
        ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", hidden, None, True),
        ("mlp.gate_proj.weight", "mlp.linear_fc1.weight", hidden, gate, True),
        ("mlp.up_proj.weight", "mlp.linear_fc1.weight", hidden, up, True),
        ("mlp.down_proj.weight", "mlp.linear_fc2.weight", hidden, down, True),
    ]

    def row(hf: str, megatron: str, other: int | None, split: Split | None) -> Row:
        shape = [] if other is None else [other]
        if split is not None:
            shape.insert(split.axis, split.units * split.size)
        return Row(hf, megatron, tuple(shape), tp_size, split)

    output = (
        [] if arch.tied_embeddings else [row(OUTPUT_LAYER, OUTPUT_PARAMETER, hidden, vocabulary)]
    )
    if arch.num_labels is not None:
        output = [Row(SCORE_LAYER, SCORE_LAYER, (arch.num_labels, hidden), tp_size, None)]
    return [
        row(EMBEDDING, "embedding.word_embeddings.weight", hidden, vocabulary),
        *(
            row(f"model.layers.{number}.{hf}", f"decoder.layers.{number}.{megatron}", other, split)
            for number in range(arch.num_layers)
            for hf, megatron, other, split, present in layer
            if present
        ),
        row("model.norm.weight", "decoder.final_layernorm.weight", hidden, None),
        *output,
    ]
