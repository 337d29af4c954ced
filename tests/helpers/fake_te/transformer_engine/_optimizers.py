"""Adam and the multi-tensor functions of the fake; see the package."""

import torch

from transformer_engine import _kernels


class FusedAdam(torch.optim.Optimizer):
    """pytorch/optimizers/fused_adam.py, with fp32 states.

    A group has a step count, a parameter has none. It takes the arguments that megatron passes.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *, adam_w_mode=True
    ):
        assert adam_w_mode
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
            moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
            numbers = group["lr"], beta1, beta2, group["eps"], group["step"], group["weight_decay"]
            if params:
                _kernels.adam(
                    [p.grad for p in params], [p.detach() for p in params], *moments, *numbers
                )


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    """pytorch/optimizers/multi_tensor_apply.py."""
    keep = [tensor.numel() > 0 for tensor in tensor_lists[0]]
    lists = [[t for t, kept in zip(tensors, keep, strict=True) if kept] for tensors in tensor_lists]
    return op(2048 * 32, noop_flag_buffer, lists, *args) if lists[0] else None


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """transformer_engine_torch: fp32 [1]; norms of single tensors are not requested here."""
    return _kernels.l2norm(tensor_lists[0]), None


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    """transformer_engine_torch: the second list is the first, scaled."""
    _kernels.scale(*tensor_lists, float(scale))
