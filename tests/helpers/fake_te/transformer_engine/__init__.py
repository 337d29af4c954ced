"""A fake of Transformer Engine for tests on a CPU, in plain torch.

It has the interface that megatron-core calls. Names, signatures, attributes of parameters,
assertions and return values are those of Transformer Engine 2.11
(github.com/NVIDIA/TransformerEngine, tag v2.11, commit c188b53; each class names its file), as far
as megatron-core 0.16.1 imports them and this project reaches them. FP8, the overlap of
communication with GEMMs, and the assertion that inputs are on CUDA are left out. Code that this
project must not reach raises.

Put this file's grandparent on PYTHONPATH of a separate process: megatron looks for Transformer
Engine when it is imported.
"""

import sys
import types
from collections import Counter

__version__ = "2.11.0"

# Number of runs of each kernel.
KERNELS: Counter = Counter()


class _NotReached:
    """Base of modules that megatron subclasses at import."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"the fake Transformer Engine has no {type(self).__name__}")


def _module(name, **members):
    module = types.ModuleType(f"{__name__}.{name}")
    module.__path__ = []  # a package, so that `import a.b.c` works
    module.__dict__.update(members)
    sys.modules[module.__name__] = module
    parent, _, child = module.__name__.rpartition(".")
    setattr(sys.modules[parent], child, module)


def _classes(*names, base=_NotReached):
    return {name: type(name, (base,), {}) for name in names}


class _Fp8State:
    """pytorch/quantization.py: no FP8 here."""

    @staticmethod
    def is_fp8_enabled():
        return False


def _autocast(*args, **kwargs):
    raise NotImplementedError("the fake Transformer Engine has no FP8")


_module("common")
_module("common.recipe", **_classes("DelayedScaling", "Format"))
_module("pytorch")

from transformer_engine import _modules, _optimizers  # noqa: E402

_pytorch = sys.modules[f"{__name__}.pytorch"]
_pytorch.__dict__.update(
    Linear=_modules.Linear,
    RMSNorm=_modules.RMSNorm,
    fp8_autocast=_autocast,
    fp8_model_init=_autocast,
    **_classes("LayerNormLinear", "LayerNorm", "DotProductAttention", "GroupedLinear"),
)
_module("pytorch.ops", SwiGLU=_modules.SwiGLU, **_classes("Sequential", "FusibleOperation"))
_module("pytorch.fp8", FP8GlobalStateManager=_Fp8State, fp8_autocast=_autocast)
_module(
    "pytorch.distributed",
    **_classes("CudaRNGStatesTracker"),
    activation_recompute_forward=_autocast,
)
_module("pytorch.attention")  # without _SplitAlongDim, which moved in 2.3
_module("pytorch.attention.rope", apply_rotary_pos_emb=_modules.apply_rotary_pos_emb)
_module("pytorch.module")
_module("pytorch.module.base", get_dummy_wgrad=_modules.get_dummy_wgrad)
_module("pytorch.tensor", **_classes("QuantizedTensor", base=object))
_module(
    "pytorch.router",
    fused_compute_score_for_moe_aux_loss=_autocast,
    fused_moe_aux_loss=_autocast,
    fused_topk_with_score_function=_autocast,
)
_module(
    "pytorch.optimizers",
    FusedAdam=_optimizers.FusedAdam,
    **_classes("FusedSGD"),
    multi_tensor_applier=_optimizers.multi_tensor_applier,
    multi_tensor_l2norm=_optimizers.multi_tensor_l2norm,
    multi_tensor_scale=_optimizers.multi_tensor_scale,
)
