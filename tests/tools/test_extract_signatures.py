"""The tool that reads signatures, on a source of a few lines."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "extract_signatures.py"
spec = importlib.util.spec_from_file_location("extract_signatures", TOOL)
assert spec is not None and spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

SOURCE = """
class Base:
    model: str = Field(description="")
    size: int = Field(default=3)
    _private: int = 1

class Args(Base):
    model_config = None
    tags: list = field(default_factory=list)
    size: int = 4

class LLM:
    async def call(self, a, /, b, c=None, *args, d, e="x", **kwargs):
        pass
"""


def test_functions():
    found = tool._signature(ast.parse(SOURCE), "LLM.call")
    assert (found["line"], found["call"]) == (13, "async")
    assert [(p["name"], p["kind"], p["default"]) for p in found["parameters"]] == [
        ("a", "POSITIONAL_ONLY", None),
        ("b", "POSITIONAL_OR_KEYWORD", None),
        ("c", "POSITIONAL_OR_KEYWORD", "None"),
        ("args", "VAR_POSITIONAL", None),
        ("d", "KEYWORD_ONLY", None),
        ("e", "KEYWORD_ONLY", "'x'"),
        ("kwargs", "VAR_KEYWORD", None),
    ]
    assert tool._signature(ast.parse(SOURCE), "LLM.nothing") is None


def test_fields_of_a_class_and_its_bases():
    found = tool._signature(ast.parse(SOURCE), "Args")["parameters"]
    assert [(p["name"], p["default"]) for p in found] == [("model", None), ("size", "4"), ("tags", "list()")]


def test_what_a_caller_would_notice():
    record = json.loads(tool.RECORD.read_text())
    assert tool.differences(record, record) == []
    other = copy.deepcopy(record)
    parameters = other["signatures"]["AsyncLLM.release"]["parameters"]
    parameters[0]["name"] = "memory"
    other["signatures"]["SamplingParams"]["parameters"][0]["default"] = "0"
    other["signatures"]["SamplingParams"]["line"] = 7
    assert [text.split(" {")[0] for text in tool.differences(record, other)] == [
        "AsyncLLM.release: memory is new and has no default",
        "AsyncLLM.release: tags is gone",
        "SamplingParams: end_id was",
    ]


def test_everything_wanted_is_recorded():
    wanted = {name for names in tool.WANTED.values() for name in names}
    assert json.loads(tool.RECORD.read_text())["signatures"].keys() == wanted
