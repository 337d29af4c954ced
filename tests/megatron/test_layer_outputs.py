"""Outputs of two models' layers, and the first layer that differs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import LayersOfTransformers, megatron_model
from helpers.ranks import call_on_ranks

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.layer_outputs import ROUNDING, layer_outputs, layer_table


def nothing(layers) -> None:
    pass


def louder_values(layers) -> None:
    layers[2].self_attn.v_proj.weight *= 1.05


def other_mlp(layers) -> None:
    layers[1].mlp.down_proj.weight *= 0.9


def other_queries(layers) -> None:
    layers[3].self_attn.q_proj.weight *= 2


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("four"), vocab_size=61, layers=4)


TOKENS = (5, 9, 13, 7, 30, 22, 17)


@pytest.mark.parametrize(
    ("disturb", "said"),
    [
        (nothing, "no layer differs by more than 0.001: look at the final norm, the output layer"),
        (
            louder_values,
            "they diverge in layer 3, by more than 0.001; look at the first token too: V, O, MLP",
        ),
        (
            other_mlp,
            "they diverge in layer 2, by more than 0.001; look at the first token too: V, O, MLP",
        ),
        (
            other_queries,
            "they diverge in layer 4, by more than 0.001; look at RoPE, window, scale, Q, K",
        ),
    ],
)
def test_the_layer_that_was_disturbed_is_named(four_layers, mesh, disturb, said):
    outputs = layer_outputs(megatron_model(four_layers, mesh), TOKENS)
    shapes = [tuple(output.shape) for output in outputs]
    assert shapes == [(7, 32)] * 4
    assert {output.dtype for output in outputs} == {torch.float32}
    other = LayersOfTransformers(four_layers, disturb).layer_outputs(TOKENS)
    lines = layer_table(outputs, other, ROUNDING["32"]).splitlines()
    assert len(lines) == 6
    assert lines[-1].startswith(said)
    for number, (a, b, line) in enumerate(zip(outputs, other, lines[1:], strict=False), 1):
        tokens = zip(a.tolist(), b.tolist(), strict=True)
        gaps = [math.dist(x, y) / math.hypot(*x) for x, y in tokens]
        mean, largest, token = line.split()[1:]
        assert line.split()[0] == str(number)
        assert token == f"({gaps.index(max(gaps))})" or max(gaps) < 1e-5
        assert float(mean) == pytest.approx(sum(gaps) / 7, rel=0.06, abs=1e-6)
        assert float(largest) == pytest.approx(max(gaps), rel=0.06, abs=1e-6)


def outputs_of_shards(folder, tensor, pipeline, shares):
    with parallel_mesh(tensor, pipeline, sequence_parallel=shares) as mesh:
        return layer_outputs(megatron_model(folder, mesh), TOKENS)


@pytest.mark.more
@pytest.mark.parametrize(
    ("tensor", "pipeline", "shares"),
    [
        pytest.param(1, 2, False, marks=pytest.mark.slow),
        (2, 1, False),
        (2, 1, True),
        pytest.param(2, 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_shared_shows_the_same_layers(four_layers, mesh, tensor, pipeline, shares):
    """Each stage has some of the layers.

    Sequence parallelism splits 7 positions, which is not a multiple of its size.
    """
    layout = (tensor, pipeline, shares)
    ranks = call_on_ranks(outputs_of_shards, tensor * pipeline, four_layers, *layout)
    outputs = layer_outputs(megatron_model(four_layers, mesh), TOKENS)
    for shared_outputs in ranks:
        assert len(shared_outputs) == 4
        for output, other in zip(outputs, shared_outputs, strict=True):
            torch.testing.assert_close(other, output, rtol=1e-4, atol=1e-4)
