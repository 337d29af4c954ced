"""Align language models with REINFORCE and RLOO.

The actor is a megatron-core model; PyTriton serves the reward model.

Importing this package does not import torch, PyTriton, TensorRT-LLM or wandb; `train` does.
"""

import os
import sys


def _leave_out_current_folder() -> None:
    """Take away the current folder, which `python -m reinforce_rl` has put first on the import
    path.

    It may be somebody else's, and have a `yaml.py` or `torch.py`. Commands that run code of it put
    it last. Nothing else is imported before, and a checkout that is the current folder stays.
    """
    # "-m" is Python's own word for the program while it looks for the package.
    if sys.argv[:1] != ["-m"] or _module_word().partition(".")[0] != __name__:
        return
    try:
        current_folder = os.getcwd()
    except OSError:  # it does not exist any more
        return
    package_parent = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if sys.path[0] == current_folder and os.path.realpath(current_folder) != package_parent:
        del sys.path[0]


def _module_word() -> str:
    """Return what follows -m on Python's command line: `-m NAME`, `-mNAME` or `-Bm NAME`."""
    words = list(getattr(sys, "orig_argv", ()))  # from Python 3.10 on
    while len(words) > 1:
        letters = words.pop(1)
        if not letters.startswith("-"):
            break
        if letters.startswith("--"):
            continue
        for position, letter in enumerate(letters):
            rest = letters[position + 1 :]
            if letter == "m":
                return rest or words[1]
            if letter in "WX":  # options with a value
                if not rest:
                    del words[1]
                break
    return ""


_leave_out_current_folder()

from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from reinforce_rl.launch.api import Run, train
    from reinforce_rl.launch.loop import Policy, UpdateResult, open_policy

_MODULES = {
    "Run": "reinforce_rl.launch.api",
    "train": "reinforce_rl.launch.api",
    "Policy": "reinforce_rl.launch.loop",
    "UpdateResult": "reinforce_rl.launch.loop",
    "open_policy": "reinforce_rl.launch.loop",
}
__all__ = ["Policy", "Run", "UpdateResult", "open_policy", "train"]
__version__ = "0.1.0"

# Large CPU tensors get 2 MiB pages, as 4 KiB page faults dominate the cost of fresh memory. torch
# reads the variable at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
