from .. import SIGNATURES

if SIGNATURES["ExecutorMemoryType"]["file"] == "tensorrt_llm/_torch/virtual_memory.py":
    from ..llmapi.llm_args import enum_of

    ExecutorMemoryType = enum_of("ExecutorMemoryType")
