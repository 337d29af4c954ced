"""CPU support only patches megatron.core, and nothing related to CUDA.

Gradients accumulated in place equal autograd's.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import accumulate_gradients, megatron_model, padded_sequences

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.model.log_probs import response_scores
from reinforce_rl.megatron.model.model import ModelOptions
from reinforce_rl.megatron.model.sequences import PaddedSequences
from reinforce_rl.megatron.optimizer import wrap_data_parallel

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")

WITH_CUDA = """
import sys
import torch
# As on a machine with CUDA, before anything of this package is imported.
torch.cuda.is_available = lambda: True
before = dict(vars(torch.cuda)), torch.Tensor.type, torch.Tensor.cuda
dynamo = torch._dynamo.config.disable

import reinforce_rl.megatron
from reinforce_rl.megatron.cpu import enable_cpu_support
import megatron.core.tensor_parallel.layers as layers
import megatron.core.tensor_parallel.random as tracker

assert enable_cpu_support() is False
assert layers.torch is torch
assert tracker.torch is torch
assert tracker._get_cuda_rng_state.__module__ == tracker.__name__
changed = [name for name, value in before[0].items() if vars(torch.cuda)[name] is not value]
assert not changed, changed
assert torch.Tensor.type is before[1]
assert torch.Tensor.cuda is before[2]
finders = [type(finder).__module__ for finder in sys.meta_path]
assert not [module for module in finders if "reinforce_rl.megatron" in module]
assert torch._dynamo.config.disable == dynamo
print("untouched")
"""


@cpu_only
def test_megatron_sees_a_facade_and_nobody_else_does():
    import transformers.modeling_utils

    import reinforce_rl.megatron.model.model as ours

    rebound = [
        m
        for name, m in sys.modules.items()
        if name.startswith("megatron.core") and hasattr(m, "torch")
    ]
    assert len(rebound) > 30
    for module in rebound:
        assert module.torch is not torch
    assert transformers.modeling_utils.torch is torch
    assert ours.torch is torch
    assert sys.modules["torch"] is torch


@pytest.mark.more
@cpu_only
def test_modules_imported_later_get_the_facade_too():
    code = (
        "import sys, torch, reinforce_rl.megatron\n"
        "assert 'megatron.core.models.bert.bert_model' not in sys.modules\n"
        "import megatron.core.models.bert.bert_model as late\n"
        "assert late.torch is not torch\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.more
@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("8", "8")])
def test_kernels_start_in_the_order_of_their_launches_unless_the_user_says_otherwise(
    given, expected, monkeypatch
):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    # CUDA reads the variable at its start, so it must be set before anything uses a GPU.
    code = (
        "import os, torch\n"
        "torch.cuda.is_available = lambda: print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')) "
        "or False\n"
        "import reinforce_rl.megatron"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.split()[0] == expected


@cpu_only
def test_torch_cuda_is_untouched_outside_megatron(mesh):
    assert torch.cuda.is_available() is False
    assert torch.cuda.device_count() == 0
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64


@cpu_only
def test_the_facade_forwards_everything_but_cuda():
    import megatron.core.tensor_parallel.layers as layers

    facade = layers.torch
    assert facade.nn is torch.nn
    assert facade.distributed is torch.distributed
    assert facade.Tensor is torch.Tensor
    assert facade.cuda.current_device() == torch.device("cpu")
    assert facade.zeros(2, device="cuda").device.type == "cpu"
    assert (
        facade.empty(2, device=facade.cuda.current_device(), dtype=torch.int32).dtype == torch.int32
    )
    with pytest.raises(AttributeError):
        _ = facade.no_such_name


@cpu_only
def test_rng_tracker_forks_the_cpu_generator(mesh):
    from megatron.core import tensor_parallel

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    assert not torch.equal(inside, expected)


@pytest.mark.more
def test_nothing_is_patched_where_cuda_is_present():
    run = subprocess.run(
        [sys.executable, "-c", WITH_CUDA], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "untouched"


@pytest.mark.more
def test_torch_does_not_warn_of_the_collectives_that_megatron_calls(tmp_path):
    code = (
        "import sys, torch, torch.distributed as dist, reinforce_rl.megatron\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=0, "
        "world_size=1)\n"
        "dist.all_gather_into_tensor(torch.empty(1), torch.ones(1))\n"
        "dist.reduce_scatter_tensor(torch.empty(1), torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # torch's CUDA build also logs that there is no CUDA runtime.
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert done.returncode == 0, done.stderr
    assert warned == [], done.stderr


RECOMPUTED = ModelOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
MICRO_BATCHES = [([3, 5], [4, 2]), ([6], [1]), ([2, 2], [3, 7])]


def accumulated(folder, mesh, options=None, dtype=torch.float32, **settings):
    """Return the wrapped model and its gradients by name after two calls over all micro-batches."""
    lm = megatron_model(folder, mesh, dtype, options or ModelOptions())
    ddp = wrap_data_parallel(lm, OptimConfig(**settings))

    def loss_of(model, lengths):
        layout = PaddedSequences(lm, *padded_sequences(*lengths, lm.architecture.vocab_size))
        scores = response_scores(
            layout, layout.hidden(model), lm, 1.3, 8, chunk_tokens=3, with_entropy=True
        )
        return scores.log_probs.sum() + 0.3 * scores.entropy.sum()

    for _ in range(2):  # the second call must reset the first one's gradients
        accumulate_gradients(ddp, MICRO_BATCHES, loss_of)
    return ddp, {name: p.main_grad.clone() for name, p in ddp.named_parameters()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [None, RECOMPUTED])
def test_gradients_equal_autograd(tied, overlap, options, tmp_path, mesh):
    folder = tiny_llama_folder(tmp_path / "model", tied=tied)
    _, plain = accumulated(folder, mesh, options, in_place_gradients=False)
    ddp, accumulated_in_place = accumulated(folder, mesh, options, overlap_grad_sync=overlap)
    assert accumulated_in_place.keys() == plain.keys()
    for name, gradient in plain.items():
        assert gradient.abs().max() > 1e-3
        atol = 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(accumulated_in_place[name], gradient, rtol=1e-5, atol=atol)
    # The rest of a layer is two vectors.
    for p in ddp.parameters():
        assert p.grad_added_to_main_grad == (p.dim() == 2)


@pytest.mark.parametrize("settings", [{"in_place_gradients": False}, {"dtype": torch.bfloat16}])
def test_it_can_be_switched_off_and_is_for_float32_alone(settings, tmp_path, mesh):
    ddp, _ = accumulated(tiny_llama_folder(tmp_path / "model"), mesh, **settings)
    for p in ddp.parameters():
        assert not p.grad_added_to_main_grad


def test_what_is_never_touched_is_never_added(tmp_path, mesh, monkeypatch):
    """The placeholder of a gradient contains uninitialised memory."""
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **kwargs: torch.full_like(x, float("nan"), **kwargs)
    )
    real = torch.empty

    def nan(*args, **kwargs):
        gradients = real(*args, **kwargs)
        return gradients.fill_(float("nan")) if gradients.is_floating_point() else gradients

    monkeypatch.setattr(torch, "empty", nan)
    _, gradients = accumulated(tiny_llama_folder(tmp_path / "model"), mesh)
    for gradient in gradients.values():
        assert gradient.isfinite().all()
