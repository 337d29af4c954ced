"""Align language models with REINFORCE and RLOO: a megatron-core actor, a reward model served by PyTriton.

Importing this package does not import torch, PyTriton, TensorRT-LLM or wandb; `train` does.
"""

import os
import sys


def _leave_out_current_folder() -> None:
    """Take away the current folder, which `python -m reinforce_rl` has put first on the import path.

    It may be somebody else's, and have a `yaml.py` or `torch.py`. Commands that run code of it put it last. Nothing
    else is imported before, and a checkout that is the current folder stays.
    """
    # Python's own word for the program while it looks for the package.
    is_module = sys.argv[:1] == ["-m"] and any(
        word.removeprefix("-m").partition(".")[0] == __name__ for word in sys.orig_argv
    )
    has_folder = is_module and not getattr(sys.flags, "safe_path", False)
    package_parent = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if has_folder and os.path.realpath(sys.path[0]) != package_parent:
        del sys.path[0]


_leave_out_current_folder()

from typing import TYPE_CHECKING, Any  # noqa: E402

from reinforce_rl.aliases import install  # noqa: E402

if TYPE_CHECKING:
    from reinforce_rl.launch.api import Run, train

__all__ = ["Run", "train"]
__version__ = "0.1.0"

# Large CPU tensors get 2 MiB pages, as 4 KiB page faults dominate the cost of fresh memory. torch reads the variable
# at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

install()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reinforce_rl.launch import api

    return getattr(api, name)
