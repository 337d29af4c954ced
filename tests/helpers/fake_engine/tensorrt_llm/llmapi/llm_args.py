from __future__ import annotations

import enum
from typing import Any

from .. import SIGNATURES, bind

SleepConfig: Any


def enum_of(name: str) -> Any:
    bind(name)
    return enum.Enum(name, SIGNATURES[name]["values"], type=str)


if SIGNATURES["ExecutorMemoryType"]["file"] == "tensorrt_llm/llmapi/llm_args.py":
    ExecutorMemoryType = enum_of("ExecutorMemoryType")
