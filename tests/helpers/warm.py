"""What programs under test import, of which much not before it is used, and the command in a fork.

A process that forks them imports it once: two of the three CPU-seconds of a short run.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from typing import NoReturn

MODULES = (
    "torch",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "plotly.offline",
    "hydra.main",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "megatron.core.models.gpt",
    "reinforce_rl.debugging.diff",
    "reinforce_rl.debugging.differences",
    "reinforce_rl.debugging.gradient",
    "reinforce_rl.debugging.recompute",
    "reinforce_rl.debugging.replay",
    "reinforce_rl.evaluation.chat",
    "reinforce_rl.evaluation.evaluate",
    "reinforce_rl.launch.main",
    "reinforce_rl.launch.programs",
    "reinforce_rl.megatron.convert",
    "reinforce_rl.monitoring.compare",
    "reinforce_rl.preflight.run",
    "reinforce_rl.trainer.run",
)


def import_all() -> None:
    for name in MODULES:
        importlib.import_module(name)
    # A fork would copy the memory that its collector marks.
    gc.freeze()


def be_command(words: list[str]) -> NoReturn:
    """Be `reinforce-rl WORDS` to its end; for a fork."""
    code = 70
    try:
        sys.argv = ["reinforce-rl", *words]
        importlib.import_module("reinforce_rl.launch.main").main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
