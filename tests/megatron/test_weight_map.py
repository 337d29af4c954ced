"""The weight table: over all ranks each element has exactly one place, for any shape."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.weight_map import weight_map


@st.composite
def shapes(draw):
    tp_size = draw(st.integers(1, 4))
    groups = draw(st.integers(1, 5))
    family = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    raw = {
        "model_type": family,
        "vocab_size": draw(st.integers(1, 12)),
        "hidden_size": draw(st.integers(1, 6)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "num_key_value_heads": groups,
        "head_dim": 2 * draw(st.integers(1, 2)),
        "intermediate_size": tp_size * draw(st.integers(1, 3)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return Architecture.from_hf(raw), tp_size


def local_shape(rows, arch, tp_size):
    """Return the local shape that megatron creates for the parameter of these rows."""
    split = rows[0].split
    whole = list(rows[0].shape)
    if split is not None:
        whole[split.axis] = split.padded_units // tp_size * split.width
    return whole


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_every_element_has_one_place_and_comes_back(shape):
    arch, tp_size = shape
    names = [row.hf for row in weight_map(arch, tp_size)]
    assert len(names) == len(set(names))
    groups = itertools.groupby(weight_map(arch, tp_size), key=lambda row: row.megatron)
    by_parameter = [(name, list(rows)) for name, rows in groups]
    # Rows of a parameter are adjacent.
    assert len({name for name, _ in by_parameter}) == len(by_parameter)
    for _, rows in by_parameter:
        sources = []
        for i, row in enumerate(rows):
            elements = torch.arange(1, torch.Size(row.shape).numel() + 1)
            sources.append(elements.view(row.shape) + 1000 * i)
        parameters = [
            torch.zeros(local_shape(rows, arch, tp_size), dtype=torch.long) for _ in range(tp_size)
        ]
        for rank, (row, source) in itertools.product(
            range(tp_size), zip(rows, sources, strict=True)
        ):
            start, end = row.part(rank)
            if start < end:
                part = source.narrow(row.axis, start, end - start)
                place = row.place(parameters[rank], rank)
                assert not place.any()  # not filled yet
                place.copy_(row.like_place(part))
        filled = sum(int(parameter.count_nonzero()) for parameter in parameters)
        copies = tp_size if rows[0].split is None else 1
        expected = copies * sum(source.numel() for source in sources)
        assert filled == expected
        for row, source in zip(rows, sources, strict=True):
            back = torch.zeros_like(source)
            for rank, parameter in enumerate(parameters):
                start, end = row.part(rank)
                if start < end:
                    row.part_in(back, rank).copy_(row.place(parameter, rank))
            assert torch.equal(back, source)


def test_groups_are_interleaved_as_megatron_has_them():
    """6 query heads in 3 groups on two ranks, one row per head.

    Each group is q q k v; the last one is zeros.
    """
    raw = {
        "model_type": "llama",
        "vocab_size": 4,
        "hidden_size": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 2,
    }
    arch = Architecture.from_hf(
        {**raw, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2}
    )
    arch = dataclasses.replace(arch, head_size=1)  # no model has this size; a row is then a head
    rows = {row.hf.split(".")[-2]: row for row in weight_map(arch, 2) if "proj" in row.hf}
    sources = {"q_proj": [1, 2, 3, 4, 5, 6], "k_proj": [10, 20, 30], "v_proj": [100, 200, 300]}
    parameters = []
    for rank in (0, 1):
        parameter = torch.zeros(8, 1, dtype=torch.long)
        for name, values in sources.items():
            start, end = rows[name].part(rank)
            part = torch.tensor(values)[start:end, None]
            rows[name].place(parameter, rank).copy_(rows[name].like_place(part))
        parameters.append(parameter[:, 0].tolist())
    expected = [[1, 2, 10, 100, 3, 4, 20, 200], [5, 6, 30, 300, 0, 0, 0, 0]]
    assert parameters == expected
    gate = rows["gate_proj"]
    up = rows["up_proj"]
    assert gate.part(1) == (1, 2)
    assert up.part(1) == (1, 2)
    parameter = torch.tensor([[7], [8]])
    assert gate.place(parameter, 1).item() == 7
    assert up.place(parameter, 1).item() == 8
