"""Transformer Engine's modules agree with megatron's and torch's; tested with a fake.

The fake is on PYTHONPATH of separate processes, since megatron looks for it at import. It is not
available in this process.
"""

from __future__ import annotations

import json

import pytest
import torch
from helpers.batches import flat, relative_difference
from helpers.errors import raises_error
from helpers.families import MODELS
from helpers.layouts import Layout, computed
from helpers.lora import EVERY
from helpers.models import tiny_family_folder
from helpers.policies import megatron_model, transformers_model
from helpers.ranks import TESTS
from helpers.resharding import CASES as SETTINGS
from helpers.resharding import ONE, load_and_train, save_and_train, stored_tensors, write_model
from helpers.with_te import CASES, SAVED, TE_LAYOUTS, run_with_fake, with_te

from reinforce_rl.megatron.model.layers import OLDEST_VERSION

# Biases in all attention projections, tied, padded at TP=2; norms of queries and keys, untied,
# padded.
FAMILIES = ("llama_bias_padded", "qwen3_padded")
SCRIPT = TESTS / "helpers/rank_scripts/te_layouts.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Return a folder with models and one process's checkpoints without Transformer Engine."""
    return tmp_path_factory.mktemp("te")


@pytest.fixture(scope="module")
def without(out, mesh):
    """Return one process's results for each family, with all weights and with LoRA."""
    results = {}
    for name in FAMILIES:
        family, keys = MODELS[name]
        model_folder = out / name / "model"
        folder = tiny_family_folder(model_folder, family, **{**keys, "num_hidden_layers": 4})
        results[name] = {
            updates: computed(Layout(updates=updates), folder, mesh) for updates in (None, EVERY)
        }
    return results


@pytest.fixture(scope="module")
def losses(out, mesh):
    """Return the losses of three steps after a save, by case."""
    losses_of_cases = {}
    for case in CASES:
        write_model(out, case)
        losses_of_cases[case], _ = save_and_train(out, case, ONE, mesh)
    return losses_of_cases


@pytest.mark.more
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_numbers_kernels_and_checkpoints(ranks, out, without, losses, mesh, monkeypatch):
    run_with_fake(monkeypatch, SCRIPT, ranks, out, *FAMILIES)
    runs = [(FAMILIES[0], name) for name in TE_LAYOUTS[ranks]]
    runs += [(name, SAVED[ranks]) for name in FAMILIES[1:]]
    for family, name in runs:
        results = torch.load(out / family / f"{name}.pt")
        check_numbers(
            results, without[family][TE_LAYOUTS[ranks][name].updates], f"{family}, {name}"
        )
        exported = transformers_model(out / family / name)
        assert torch.equal(flat(dict(exported.named_parameters())), results["weights"]), (
            f"{family}, {name}"
        )
    saved = SAVED[ranks]
    report = json.loads((out / f"{saved}.json").read_text())
    check_kernels(report, recomputed=ranks == 2)
    for case, expected in losses.items():
        back, _ = load_and_train(out, case, saved, ONE, mesh)
        # bf16 results differ in the rounding of RoPE's sines.
        rel = 1e-5 if SETTINGS[case].dtype == torch.float32 else 2e-2
        close = pytest.approx(expected, rel=rel)
        assert report["losses"][case] == {"saved": close, "loaded": close}, case
        assert back == close, case
        assert (
            stored_tensors(out / case / saved).keys() == stored_tensors(out / case / ONE).keys()
        ), case


def check_numbers(results, expected, who):
    for kind in ("greedy", "sampled"):
        assert results[kind]["tokens"] == expected[kind]["tokens"], who
        torch.testing.assert_close(
            results[kind]["log_probs"], expected[kind]["log_probs"], atol=1e-5, rtol=0, msg=who
        )
    for kind in ("log_probs", "reference_log_probs"):
        torch.testing.assert_close(results[kind], expected[kind], atol=1e-5, rtol=0, msg=who)
    assert torch.equal(results["weights_before"], expected["weights_before"]), who
    assert results["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5), who
    assert results["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-5), who
    if "gradient" in results:
        assert relative_difference(results["gradient"], expected["gradient"]) <= 1e-5, who
    moved = expected["weights"] - expected["weights_before"]
    assert float((results["weights"] - expected["weights"]).norm()) <= 1e-3 * float(moved.norm()), (
        who
    )


def check_kernels(report, *, recomputed):
    """Check the kernels of a step with one micro-batch and four layers, and of a generation."""
    layers = 4
    passes = 2 if recomputed else 1
    training = report["training"]
    assert training["column layers"] == 2 * layers
    assert training["gemm"] == 4 * layers * passes
    assert training["swiglu"] == layers * passes
    assert training["dswiglu"] == layers
    assert training["rope"] == 2 * layers * (passes + 1)  # queries and keys; backward too
    assert training["rmsnorm_fwd"] == 2 * layers * passes + 1
    assert training["rmsnorm_bwd"] == 2 * layers + 1
    assert training["wgrad_accumulate"] == 4 * layers
    assert "wgrad" not in training
    assert training["l2norm"]
    assert training["adam"]
    # In the KV cache each row has its own position, which the fused RoPE does not support. Matrix
    # products run without autograd.
    assert report["generation"]["rmsnorm_fwd"]
    assert not {"rope", "gemm"} & set(report["generation"])


def test_a_missing_package_is_reported(mesh, out, without):
    values = ("model.transformer_engine", OLDEST_VERSION)
    with raises_error("config.transformer_engine.missing_or_old", *values):
        model_folder = out / FAMILIES[0] / "model"
        megatron_model(model_folder, mesh, options=with_te(Layout()).model)
