"""No number depends on the layout of the ranks.

Loss, gradient, steps, log-probs and samples are those of one process.
"""

from __future__ import annotations

import pytest
import torch
from helpers.batches import VOCAB_SIZE, flat, relative_difference
from helpers.layouts import (
    ALL_LAYOUTS,
    LAYOUTS,
    LORA_LAYOUTS,
    Layout,
    computed,
    on_layouts,
)
from helpers.lora import EVERY
from helpers.models import tiny_llama_folder
from helpers.policies import random_tokens, transformers_logits, transformers_model
from helpers.ranks import call_on_ranks

ON_TWO = tuple(name for name, layout in (LAYOUTS | LORA_LAYOUTS).items() if layout.ranks == 2)
ON_FOUR = tuple(name for name, layout in (LAYOUTS | LORA_LAYOUTS).items() if layout.ranks == 4)


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory):
    """Heads, groups and vocabulary need padding at TP=2 and TP=4."""
    root = tmp_path_factory.mktemp("model")
    tied = request.param == "tied"
    return tiny_llama_folder(
        root, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36, layers=4, tied=tied, seed=5
    )


@pytest.fixture(scope="module")
def one_process(folder, mesh):
    """The whole model trained, and LoRA updates alone."""
    every = {"whole": Layout(), "lora": Layout(updates=EVERY)}
    return {kind: computed(layout, folder, mesh, folder / kind) for kind, layout in every.items()}


def check(name, folder, one_process, ranks, out):
    kind_of_training = "lora" if name in LORA_LAYOUTS else "whole"
    expected = one_process[kind_of_training]
    for rank, results in enumerate(ranks):
        who = f"{name}, rank {rank}"
        for kind in ("greedy", "sampled"):
            assert results[kind]["tokens"] == expected[kind]["tokens"], who
            log_probs = results[kind]["log_probs"]
            expected_log_probs = expected[kind]["log_probs"]
            torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-5, rtol=0, msg=who)
        assert results["bounded"]["tokens"] == expected["sampled"]["tokens"], who
        for kind in ("log_probs", "reference_log_probs"):
            torch.testing.assert_close(results[kind], expected[kind], atol=1e-5, rtol=0, msg=who)
        if name not in LORA_LAYOUTS:
            assert torch.equal(results["weights_before"], expected["weights_before"]), who
        assert results["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5), who
        assert results["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5), who
        if "gradient" in results:
            assert relative_difference(results["gradient"], expected["gradient"]) <= 1e-5, who
        moved = expected["weights"] - expected["weights_before"]
        distance = (results["weights"] - expected["weights"]).norm()
        assert float(distance) <= 1e-3 * float(moved.norm()), who
        # Ranks of a block compute on with these, so they must agree bit for bit.
        for kind in ("log_probs_after", "losses", "norms"):
            result = torch.as_tensor(results[kind])
            assert torch.equal(result, torch.as_tensor(ranks[0][kind])), who
    exported = transformers_model(out / name)
    exported_weights = flat(dict(exported.named_parameters()))
    assert torch.equal(exported_weights, ranks[0]["weights"]), name
    tokens = random_tokens(VOCAB_SIZE, 2, 12)
    theirs = transformers_logits(transformers_model(folder / kind_of_training), tokens)
    torch.testing.assert_close(
        transformers_logits(exported, tokens), theirs, atol=2e-3, rtol=0, msg=name
    )


def run_and_check(names, folder, one_process, out):
    ranks = ALL_LAYOUTS[names[0]].ranks
    results = call_on_ranks(on_layouts, ranks, names, computed, folder, out, timeout=600)
    for name in names:
        check(name, folder, one_process, [of_rank[name] for of_rank in results], out)


@pytest.mark.more
@pytest.mark.parametrize("folder", ["tied"], indirect=True)
def test_every_layout_of_two_ranks(folder, one_process, tmp_path):
    quick = ("PP2 LoRA", "DP2 distributed optimizer LoRA")  # LoRA
    names = [name for name in ON_TWO if name in (*LAYOUTS, *quick)]
    run_and_check(names, folder, one_process, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("names", [ON_TWO, ON_FOUR], ids=["two ranks", "four ranks"])
def test_every_layout(names, folder, one_process, tmp_path):
    run_and_check(names, folder, one_process, tmp_path)
