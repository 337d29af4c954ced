"""No number depends on how the ranks are laid out: loss, gradient, steps, log-probs and samples are one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.batches import VOCAB_SIZE, flat, relative_difference
from helpers.layouts import LAYOUTS, Layout, computed
from helpers.models import tiny_llama_folder
from helpers.policies import random_tokens, transformers_logits, transformers_model
from helpers.ranks import run_ranks

SCRIPT = Path(__file__).parents[1] / "helpers/rank_scripts/layouts.py"
# Of layouts with four ranks; every one of two is in the quick tests.
QUICK = ("TP2 PP2 SP", "PP2 CP2")
ON_TWO = tuple(name for name, layout in LAYOUTS.items() if layout.ranks == 2)
ON_FOUR = tuple(name for name, layout in LAYOUTS.items() if layout.ranks == 4)


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory):
    """Heads, groups and vocabulary need padding at TP=2 and TP=4."""
    root = tmp_path_factory.mktemp("model")
    tied = request.param == "tied"
    return tiny_llama_folder(root, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36, layers=4, tied=tied)


@pytest.fixture(scope="module")
def one_process(folder, mesh):
    return computed(Layout(), folder, mesh, folder / "one")


def check(name, folder, one, out):
    ranks = [torch.load(out / f"{name}.{rank}", weights_only=False) for rank in range(LAYOUTS[name].ranks)]
    for rank, found in enumerate(ranks):
        who = f"{name}, rank {rank}"
        for kind in ("greedy", "sampled"):
            assert found[kind]["tokens"] == one[kind]["tokens"], who
            torch.testing.assert_close(found[kind]["log_probs"], one[kind]["log_probs"], atol=1e-5, rtol=0, msg=who)
        for kind in ("log_probs", "reference_log_probs"):
            torch.testing.assert_close(found[kind], one[kind], atol=1e-5, rtol=0, msg=who)
        assert torch.equal(found["weights_before"], one["weights_before"]), who
        assert found["losses"][0] == pytest.approx(one["losses"][0], rel=1e-5), who
        assert found["norms"][0] == pytest.approx(one["norms"][0], rel=1e-5), who
        if "gradient" in found:
            assert relative_difference(found["gradient"], one["gradient"]) <= 1e-5, who
        moved = one["weights"] - one["weights_before"]
        assert float((found["weights"] - one["weights"]).norm()) <= 1e-3 * float(moved.norm()), who
        # Ranks of a block go on to compute with these, so they must agree to the bit.
        for kind in ("log_probs_after", "losses", "norms"):
            assert torch.equal(torch.as_tensor(found[kind]), torch.as_tensor(ranks[0][kind])), who
    exported = transformers_model(out / name)
    assert torch.equal(flat(dict(exported.named_parameters())), ranks[0]["weights"]), name
    tokens = random_tokens(VOCAB_SIZE, 2, 12)
    theirs = transformers_logits(transformers_model(folder / "one"), tokens)
    torch.testing.assert_close(transformers_logits(exported, tokens), theirs, atol=2e-3, rtol=0, msg=name)


def test_every_layout_of_two_ranks(folder, one_process, tmp_path):
    run_ranks(SCRIPT, 2, tmp_path, folder, *ON_TWO, timeout=300)
    for name in ON_TWO:
        check(name, folder, one_process, tmp_path)


def test_layouts_of_four_ranks(folder, one_process, tmp_path):
    run_ranks(SCRIPT, 4, tmp_path, folder, *QUICK, timeout=300)
    for name in QUICK:
        check(name, folder, one_process, tmp_path)


@pytest.mark.slow
def test_every_layout_of_four_ranks(folder, one_process, tmp_path):
    run_ranks(SCRIPT, 4, tmp_path, folder, *(set(ON_FOUR) - set(QUICK)), timeout=900)
    for name in set(ON_FOUR) - set(QUICK):
        check(name, folder, one_process, tmp_path)
