"""Layers of the fake; see the package."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from transformer_engine import KERNELS, _kernels


def _gathered(x, group):
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scattered(x, group):
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _summed(x, group):
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def get_dummy_wgrad(shape, like, zero=False):
    """pytorch/module/base.py.

    Transformer Engine leaves the memory uninitialised; NaN shows that nobody reads it.
    """
    wgrad = torch.empty(shape, dtype=like.dtype, device=like.device)
    return wgrad if like.is_cuda else wgrad.fill_(0.0 if zero else float("nan"))


class _LinearFunction(torch.autograd.Function):
    """pytorch/module/linear.py, `_Linear`."""

    @staticmethod
    def forward(ctx, weight, inp, bias, layer, is_first_microbatch):
        ctx.layer = layer
        ctx.sequence_parallel = layer.sequence_parallel
        ctx.fuse_wgrad_accumulation = layer.fuse_wgrad_accumulation
        ctx.is_first_microbatch = is_first_microbatch
        ctx.save_for_backward(inp, weight)
        ctx.weight = weight
        ctx.has_bias = bias is not None
        column = layer.parallel_mode == "column"
        shared = layer.tp_size > 1
        total = _gathered(inp, layer.tp_group) if column and ctx.sequence_parallel else inp
        KERNELS["gemm"] += 1
        out = F.linear(total, weight, bias)
        if not column and shared:
            out = (_scattered if ctx.sequence_parallel else _summed)(out, layer.tp_group)
        return out

    @staticmethod
    def backward(ctx, grad):
        inp, saved = ctx.saved_tensors
        layer = ctx.layer
        weight = ctx.weight
        column = layer.parallel_mode == "column"
        shared = layer.tp_size > 1
        grad = (
            _gathered(grad, layer.tp_group)
            if not column and ctx.sequence_parallel
            else grad.contiguous()
        )
        dgrad = None
        wgrad = None
        if ctx.needs_input_grad[1]:
            dgrad = grad @ saved
            if column and shared:
                dgrad = (_scattered if ctx.sequence_parallel else _summed)(dgrad, layer.tp_group)
        if weight.requires_grad:
            total = _gathered(inp, layer.tp_group) if column and ctx.sequence_parallel else inp
            rows = grad.flatten(0, -2)
            columns = total.flatten(0, -2)
            if ctx.fuse_wgrad_accumulation:
                assert hasattr(weight, "grad_added_to_main_grad")
                _kernels.wgrad_accumulate(
                    weight.main_grad, rows, columns, bool(ctx.is_first_microbatch)
                )
                weight.grad_added_to_main_grad = True
                wgrad = get_dummy_wgrad(
                    weight.shape, weight, getattr(weight, "zero_out_wgrad", False)
                )
            else:
                KERNELS["wgrad"] += 1
                wgrad = rows.t() @ columns
        of_bias = grad.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
        return wgrad, dgrad, of_bias, None, None


class _Module(torch.nn.Module):
    """pytorch/module/base.py, pytorch/ops/op.py: extra state, unlike megatron's own layers."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class Linear(_Module):
    """pytorch/module/linear.py, with the arguments that megatron passes."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
    ):
        super().__init__()
        assert parallel_mode in ("row", "column")
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group = tp_group
        self.parallel_mode = parallel_mode
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        place = {"dtype": params_dtype, "device": device}
        weight = torch.empty(self.out_features, self.in_features, **place)
        self.weight = torch.nn.Parameter(weight)
        _mark(self.weight, 1 if parallel_mode == "row" else 0)
        (init_method or torch.nn.init.normal_)(self.weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **place))
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            else:
                _mark(self.bias, 0)
        else:
            self.bias = torch.empty(0, **place)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        for name, parameter in self.named_parameters(recurse=False):
            assert inp.dtype == parameter.dtype, (
                f"input dtype {inp.dtype}, {name} {parameter.dtype}"
            )
        applied = self.bias if self.apply_bias and self.parallel_mode == "column" else None
        out = _LinearFunction.apply(
            self.weight, inp.contiguous(), applied, self, is_first_microbatch
        )
        if self.apply_bias and self.parallel_mode == "row":
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


def _mark(parameter, dim):
    """pytorch/utils.py, `set_tensor_model_parallel_attributes`."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1


class RMSNorm(_Module):
    """pytorch/module/rmsnorm.py and pytorch/ops/basic/rmsnorm.py: computes in fp32, rounds once."""

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device=None,
    ):
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        size = hidden_size if normalized_shape is None else normalized_shape
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=params_dtype))
        self.sequence_parallel = sequence_parallel
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return _kernels.rmsnorm_fwd(x.contiguous(), self.weight, self.eps)[0]


class SwiGLU(_Module):
    """pytorch/ops/basic/activation.py: the gate is the first half."""

    def __init__(self, *, cache_quantized_input=False):
        super().__init__()
        assert not cache_quantized_input

    def forward(self, x):
        return _kernels.swiglu(x.contiguous())


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    """pytorch/attention/rope.py, its fused kernel: computes in fp32.

    common/fused_rope/fused_rope.cu and pytorch/csrc/extensions/apply_rope.cpp only take angles of
    [s2, 1, 1, d2].
    """
    assert fused
    assert tensor_format == "sbhd"
    assert start_positions is None
    assert not interleaved
    assert cp_size == 1
    assert freqs.dim() == 4, f"angles of shape {tuple(freqs.shape)}"
    assert freqs.shape[1] == freqs.shape[2] == 1, f"angles of shape {tuple(freqs.shape)}"
    assert freqs.shape[0] >= t.shape[0]
    assert freqs.shape[3] <= t.shape[3]
    assert freqs.dtype == torch.float32
    return _kernels.rope(t, freqs[: t.shape[0]], False)
