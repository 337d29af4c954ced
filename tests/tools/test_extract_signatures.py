"""The tool that reads signatures, on a source of a few lines."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "extract_signatures.py"
spec = importlib.util.spec_from_file_location("extract_signatures", TOOL)
assert spec is not None
assert spec.loader is not None
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
    signature = tool._signature(ast.parse(SOURCE), "LLM.call")
    assert signature["line"] == 13
    assert signature["call"] == "async"
    expected = [
        ("a", "POSITIONAL_ONLY", None),
        ("b", "POSITIONAL_OR_KEYWORD", None),
        ("c", "POSITIONAL_OR_KEYWORD", "None"),
        ("args", "VAR_POSITIONAL", None),
        ("d", "KEYWORD_ONLY", None),
        ("e", "KEYWORD_ONLY", "'x'"),
        ("kwargs", "VAR_KEYWORD", None),
    ]
    assert [(p["name"], p["kind"], p["default"]) for p in signature["parameters"]] == expected
    assert tool._signature(ast.parse(SOURCE), "LLM.nothing") is None


def test_fields_of_a_class_and_its_bases():
    parameters = tool._signature(ast.parse(SOURCE), "Args")["parameters"]
    expected = [
        ("model", None),
        ("size", "4"),
        ("tags", "list()"),
    ]
    assert [(p["name"], p["default"]) for p in parameters] == expected


ENUMS = """
import enum

class Tag(str, enum.Enum):
    KV = "kv_cache"
    MODEL = "model"
    COUNT: int = 3
    def text(self): ...

class Policy(StrEnum):
    FIRST = "first"

class Plain:
    LEVEL = "high"

OldTag = Tag
a = b = Tag
OldTag2 = make("x")
"""


def test_values_of_an_enum():
    assert tool._signature(ast.parse(ENUMS), "Policy")["values"] == {"FIRST": "first"}
    assert tool._signature(ast.parse(ENUMS), "Tag")["values"] == {
        "KV": "kv_cache",
        "MODEL": "model",
    }
    assert "values" not in tool._signature(ast.parse(ENUMS), "Plain")


def test_a_class_by_its_old_name():
    module = ast.parse(ENUMS)
    for name in ("OldTag", "a", "b"):
        assert tool._signature(module, name) == tool._signature(module, "Tag")
    assert tool._signature(module, "OldTag2") is None


def test_a_field_that_must_be_given_has_no_default():
    source = (
        "class A:\n    x: int = Field(...)\n    y: int = Field(default=...)\n"
        "    z: int = Field(None, gt=0)\n"
    )
    parameters = tool._signature(ast.parse(source), "A")["parameters"]
    expected = [
        ("x", None),
        ("y", None),
        ("z", "None"),
    ]
    assert [(p["name"], p["default"]) for p in parameters] == expected


def write_tree(folder: Path, version: str, names: dict[str, list[str]]) -> Path:
    """Write a source tree that has these names in these files, each with a minimal body."""
    package = folder / "tensorrt_llm"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f'__version__ = "{version}"\n')
    for file, wanted in names.items():
        methods: dict[str, list[str]] = {}
        for name in wanted:
            owner, _, method = name.partition(".")
            methods.setdefault(owner, []).extend([method] * bool(method))
        text = ""
        for owner, of_owner in methods.items():
            bodies = [f"    def {method}(self, a): pass" for method in of_owner] or [
                "    size: int = 1"
            ]
            text += "\n".join([f"class {owner}:", *bodies, ""])
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def files_of(version: str) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for file, names in tool.wanted(version):
        files.setdefault(file, []).extend(names)
    return files


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0rc5", "1.4.0"])
def test_a_source_tree_is_read_where_its_version_has_the_names(tmp_path, version):
    extracted = tool.extract(write_tree(tmp_path, version, files_of(version)))
    assert extracted["version"] == version
    is_new = version != "1.2.0"
    wanted = {name for names in tool.WANTED.values() for name in names} | (
        {"SleepConfig"} if is_new else set()
    )
    assert extracted["signatures"].keys() == wanted
    folder = "executor/ray/gpu_worker.py" if is_new else "executor/ray_gpu_worker.py"
    expected = {
        "file": f"tensorrt_llm/{folder}",
        "line": 1 + 1,
        "call": "plain",
        "parameters": [{"name": "a", "kind": "POSITIONAL_OR_KEYWORD", "default": None}],
    }
    assert extracted["signatures"]["RayGPUWorker.sleep"] == expected


def test_all_that_a_tree_lacks_is_named(tmp_path):
    files = files_of("1.3.0")
    files["llmapi/llm_args.py"].remove("SleepConfig")
    del files["sampling_params.py"]
    with pytest.raises(SystemExit) as caught:
        tool.extract(write_tree(tmp_path, "1.3.0", files))
    package = tmp_path / "tensorrt_llm"
    expected = [
        f"{package / 'sampling_params.py'} is not there",
        f"{package / 'llmapi/llm_args.py'} has no SleepConfig",
    ]
    assert str(caught.value).splitlines() == expected
    (package / "version.py").write_text("version = 1\n")
    with pytest.raises(SystemExit, match="has no __version__"):
        tool.extract(tmp_path)


def test_the_record_of_a_version():
    old = json.loads(tool.RECORD.read_text())
    assert tool.record_of("1.2.1") == old
    new = tool.record_of("1.3.0rc2")
    assert new["version"] == "1.3"
    expected = old["signatures"].keys() | {"SleepConfig"}
    assert new["signatures"].keys() == expected
    changed = json.loads(tool.CHANGES["1.3"].read_text())["signatures"]
    assert {name: new["signatures"][name] for name in changed} == changed


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0"])
def test_check_compares_with_the_record_of_the_version(tmp_path, monkeypatch, capsys, version):
    source = write_tree(tmp_path, version, files_of(version))
    monkeypatch.setattr("sys.argv", ["extract_signatures.py", str(source), "--check"])
    monkeypatch.setattr(tool, "record_of", lambda of: {"version": of[:3], **tool.extract(source)})
    assert tool.main() == 0
    assert f"{version} has the signatures of {version}" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", ["extract_signatures.py", str(source), "--check"])
    assert tool.main() == 1
    assert "AsyncLLM.release: tags is gone" in capsys.readouterr().out


def test_values_that_came_or_went_are_noticed():
    before = {
        "signatures": {"Tag": {"parameters": [], "values": {"KV": "kv"}}, "A": {"parameters": []}}
    }
    after = {
        "signatures": {
            "Tag": {"parameters": [], "values": {"KV": "cache"}},
            "A": {"parameters": []},
        }
    }
    assert tool.differences(before, before) == []
    assert tool.differences(before, after) == [
        "Tag: the values were {'KV': 'kv'}, are {'KV': 'cache'}"
    ]


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
