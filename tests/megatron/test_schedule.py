"""Transfers between pipeline stages: shapes are known and need not be exchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.batches import VOCAB_SIZE
from helpers.models import tiny_llama_folder
from helpers.ranks import run_ranks

from reinforce_rl.megatron.schedule import _Ahead

SCRIPT = Path(__file__).parents[1] / "helpers/rank_scripts/stage_shapes.py"


@pytest.mark.parametrize(
    "tp_size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["PP2", "TP2 PP2 SP"]
)
def test_stages_send_each_other_hidden_states_only(tp_size, tmp_path):
    folder = tiny_llama_folder(
        tmp_path, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36, layers=4, seed=5
    )
    output = run_ranks(SCRIPT, 2 * tp_size, folder, tp_size, timeout=240)
    assert output.count("all checks passed") == 2 * tp_size


def test_shapes_come_in_the_order_of_one_forward_one_backward():
    """A middle stage takes a micro-batch early, once, for its shape.

    It keeps the shapes for the gradients.
    """
    made = []

    def micro_batches():
        for size in (3, 1, 2, 5):
            made.append(size)
            yield size

    ahead = _Ahead(micro_batches(), lambda size: (size, 1, 8))
    assert ahead.next_shape() == (3, 1, 8)
    assert next(ahead) == 3
    assert ahead.next_shape() == (1, 1, 8)
    assert next(ahead) == 1
    assert made == [3, 1]
    assert ahead.next_gradient_shape() == (3, 1, 8)
    assert ahead.next_shape() == (2, 1, 8)
    assert next(ahead) == 2
    expected = [(1, 1, 8), (2, 1, 8)]
    assert [ahead.next_gradient_shape() for _ in range(2)] == expected
    # a first stage needs no forward shape
    assert next(ahead) == 5
    assert ahead.next_gradient_shape() == (5, 1, 8)
