"""RMSNorm and SwiGLU with explicit gradients, against autograd on the formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reinforce_rl.megatron.model.layers import rms_norm, swiglu


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def swiglu_formula(x):
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


@pytest.mark.parametrize("shape", [(8,), (5, 8), (3, 2, 8)])
def test_gradients_equal_finite_differences(shape):
    assert torch.autograd.gradcheck(swiglu, (random(*shape),))
    if len(shape) > 1:
        assert torch.autograd.gradcheck(
            lambda x, weight: rms_norm(x, weight, 1e-5), (random(*shape), random(8))
        )


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_values_are_the_formulas(eps):
    x = random(4, 3, 8)
    weight = random(8)
    torch.testing.assert_close(
        rms_norm(x, weight, eps), F.rms_norm(x, (8,), weight, eps), atol=1e-14, rtol=0
    )
    torch.testing.assert_close(swiglu(x), swiglu_formula(x), atol=0, rtol=0)


def test_bf16_rounds_once():
    """Like torch's, the norm of a bf16 tensor is computed in float32."""
    x = random(16, 256, dtype=torch.float32).bfloat16()
    weight = random(256, dtype=torch.float32).bfloat16()
    exact = F.rms_norm(x.double(), (256,), weight.double(), 1e-5)
    normed = rms_norm(x, weight, 1e-5)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed, exact.bfloat16(), atol=0, rtol=2**-7)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_has_no_gradient(frozen):
    tensors = {"x": random(4, 8), "weight": random(8)}
    tensors[frozen] = tensors[frozen].detach()
    rms_norm(tensors["x"], tensors["weight"], 1e-5).sum().backward()
    expected = {n: n == frozen for n in tensors}
    assert {name: value.grad is None for name, value in tensors.items()} == expected


def test_less_is_kept_for_the_backward_pass():
    kept = {}
    weight = random(64)
    for name, function in (
        ("norm", lambda x: rms_norm(x, weight, 1e-5)),
        ("torch's norm", lambda x: F.rms_norm(x, (64,), weight, 1e-5)),
        ("swiglu", swiglu),
        ("its formula", swiglu_formula),
    ):
        x = random(32, 64)
        sizes = {}

        def pack(t, sizes=sizes):
            storage = t.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            held = function(x)  # noqa: F841
        sizes.pop(x.untyped_storage().data_ptr(), None)
        kept[name] = sum(sizes.values())
    row = 8
    weights = 64 * 8
    assert kept["norm"] == 32 * row + weights < kept["torch's norm"]
    assert kept["swiglu"] == 0 < kept["its formula"]
