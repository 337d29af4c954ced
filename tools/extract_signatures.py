"""Write down the signatures of TensorRT-LLM that the adapter depends on, or compare a source tree.

    python tools/extract_signatures.py SOURCE > tests/generation/tensorrt_llm_signatures.json
    python tools/extract_signatures.py SOURCE --check

SOURCE is the folder that holds the package `tensorrt_llm`: a checkout, or a site-packages. Nothing
of it is imported. A class of fields (a dataclass, a pydantic model) counts as a function with a
keyword for each field, fields of its bases in the same file included; an enum counts with its
values. `--check` compares 1.3 with the record of 1.2 and the changes in
`tensorrt_llm_signatures_1.3.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "generation"
RECORD = FOLDER / "tensorrt_llm_signatures.json"
CHANGES = {"1.3": FOLDER / "tensorrt_llm_signatures_1.3.json"}  # to the record, by version
# File below the package, and what is called or read there.
WANTED = {
    "_torch/virtual_memory.py": ("ExecutorMemoryType",),
    "_torch/async_llm.py": (
        "AsyncLLM.__init__",
        "AsyncLLM.setup_async",
        "AsyncLLM.release",
        "AsyncLLM.resume",
        "AsyncLLM.collective_rpc",
    ),
    "executor/ray_gpu_worker.py": (
        "RayGPUWorker.sleep",
        "RayGPUWorker.wakeup",
        "RayWorkerWrapper.report_device_id",
    ),
    "executor/result.py": (
        "CompletionOutput",
        "GenerationResult.abort",
        "GenerationResult.aresult",
        "Logprob",
    ),
    "llmapi/llm.py": ("BaseLLM.__init__", "BaseLLM.generate_async", "BaseLLM.shutdown"),
    "llmapi/llm_args.py": (
        "CapacitySchedulerPolicy",
        "CudaGraphConfig",
        "KvCacheConfig",
        "SchedulerConfig",
        "TorchLlmArgs",
    ),
    "llmapi/rlhf_utils.py": ("WorkerExtension.update_weights",),
    "sampling_params.py": ("SamplingParams",),
}
MOVED = {  # from 1.3 on
    "_torch/virtual_memory.py": "llmapi/llm_args.py",
    "executor/ray_gpu_worker.py": "executor/ray/gpu_worker.py",
}
ADDED = {"llmapi/llm_args.py": ("SleepConfig",)}  # in 1.3
Parameter = dict[str, str | None]  # name, kind, default
KINDS = (
    "POSITIONAL_ONLY",
    "POSITIONAL_OR_KEYWORD",
    "VAR_POSITIONAL",
    "KEYWORD_ONLY",
    "VAR_KEYWORD",
)


def extract(source: Path) -> dict[str, Any]:
    """The version of a source tree, and the signature of each wanted name.

    Raises:
        SystemExit: a file or a name is not there.
    """
    package = source / "tensorrt_llm"
    version = _version_of(package)
    signatures: dict[str, Any] = {}
    missing = []
    for file, names in wanted(version):
        path = package / file
        if not path.is_file():
            missing.append(f"{path} is not there")
            continue
        module = ast.parse(path.read_text(encoding="utf-8"))
        for name in names:
            entry = _signature(module, name)
            if entry is None:
                missing.append(f"{path} has no {name}")
            else:
                signatures[name] = {"file": f"tensorrt_llm/{file}", **entry}
    if missing:
        raise SystemExit("\n".join(missing))
    return {"version": version, "signatures": signatures}


def wanted(version: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield files below the package with the names that are wanted of each."""
    is_changed = not version.startswith("1.2")
    for file, names in WANTED.items():
        yield (MOVED.get(file, file) if is_changed else file), names
    if is_changed:
        yield from ADDED.items()


def record_of(version: str) -> dict[str, Any]:
    """Return the record to compare a version with."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    release = ".".join(version.split(".")[:2])
    changes = CHANGES.get(release)
    if changes is None:
        return record
    changed = json.loads(changes.read_text(encoding="utf-8"))
    return {
        "version": changed["version"],
        "signatures": record["signatures"] | changed["signatures"],
    }


def _version_of(package: Path) -> str:
    text = (package / "version.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "([^"]+)"', text)
    if version is None:
        raise SystemExit(f"{package / 'version.py'} has no __version__")
    return version[1]


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """The changes that a caller would notice: parameters that went, came or changed."""
    texts = []
    for name, entry in expected["signatures"].items():
        actual_entry = actual["signatures"][name]
        old_values = entry.get("values")
        values = actual_entry.get("values")
        if old_values != values:
            texts.append(f"{name}: the values were {old_values}, are {values}")
        before = {p["name"]: p for p in entry["parameters"]}
        after = {p["name"]: p for p in actual_entry["parameters"]}
        for parameter, old in before.items():
            new = after.get(parameter)
            if new is None:
                texts.append(f"{name}: {parameter} is gone")
            elif old != new:
                texts.append(f"{name}: {parameter} was {old}, is {new}")
        for parameter, new in after.items():
            is_optional = new["default"] is not None or new["kind"].startswith("VAR")
            if parameter not in before and not is_optional:
                texts.append(f"{name}: {parameter} is new and has no default")
    return sorted(texts)


def _signature(module: ast.Module, name: str) -> dict[str, Any] | None:
    first, _, method = name.partition(".")
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    owner = classes.get(_aliased(module, first))
    if owner is None:
        return None
    if not method:
        values = _enum_values(owner)
        entry = {"line": owner.lineno, "parameters": _fields(owner, classes)}
        return {**entry, "values": values} if values else entry
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
            kind = "async" if isinstance(node, ast.AsyncFunctionDef) else "plain"
            return {"line": node.lineno, "call": kind, "parameters": _parameters(node.args)}
    return None


def _aliased(module: ast.Module, name: str) -> str:
    """Return the class that the name stands for, such as New after `Old = New`."""
    aliases = {}
    for target, value in _assigned(module.body):
        if isinstance(value, ast.Name):
            aliases[target] = value.id
    return aliases.get(name, name)


def _assigned(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that is assigned to, with its value."""
    for node in body:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value


def _parameters(args: ast.arguments) -> list[Parameter]:
    kinds = [KINDS[0]] * len(args.posonlyargs) + [KINDS[1]] * len(args.args)
    positional = args.posonlyargs + args.args
    # Defaults belong to the last of the positional parameters.
    num_required = len(positional) - len(args.defaults)
    defaults: list[ast.expr | None] = [None] * num_required
    defaults += args.defaults
    parameters = []
    for argument, kind, default in zip(positional, kinds, defaults, strict=True):
        parameters.append(_parameter(argument, kind, default))
    if args.vararg:
        parameters.append(_parameter(args.vararg, KINDS[2], None))
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(_parameter(argument, KINDS[3], default))
    if args.kwarg:
        parameters.append(_parameter(args.kwarg, KINDS[4], None))
    return parameters[1:]  # less self


def _fields(owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[Parameter]:
    fields: dict[str | None, Parameter] = {}
    for base in owner.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            parent = classes[base.id]
            for inherited in _fields(parent, classes):
                fields[inherited["name"]] = inherited
    for node in owner.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name = node.target.id
        if name.startswith("_") or name == "model_config":
            continue
        default = _default_of_field(node.value)
        fields[name] = {"name": name, "kind": KINDS[3], "default": default}
    return list(fields.values())


def _enum_values(owner: ast.ClassDef) -> dict[str, str]:
    """Return the members of an enum of strings."""
    bases = [ast.unparse(base) for base in owner.bases]
    if not any(base.endswith("Enum") for base in bases):
        return {}
    values = {}
    for name, value in _assigned(owner.body):
        if isinstance(value, ast.Constant):
            values[name] = str(value.value)
    return values


def _default_of_field(value: ast.expr | None) -> str | None:
    """The default x of `Field(default=x)` and `field(default=x)`; None if there is none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field"):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        factory = keywords.get("default_factory")
        if factory is not None:
            return f"{ast.unparse(factory)}()"
        first = value.args[0] if value.args else None
        value = keywords.get("default", first)
        if isinstance(value, ast.Constant) and value.value is ...:
            return None
    return None if value is None else ast.unparse(value)


def _parameter(argument: ast.arg, kind: str, default: ast.expr | None) -> Parameter:
    text = None if default is None else ast.unparse(default)
    return {"name": argument.arg, "kind": kind, "default": text}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="compare with the record in place of printing"
    )
    arguments = parser.parse_args()
    extracted = extract(arguments.source)
    if not arguments.check:
        print(json.dumps(extracted, indent=1))
        return 0
    version = extracted["version"]
    expected = record_of(version)
    texts = differences(expected, extracted)
    if texts:
        print("\n".join(texts))
        return 1
    print(f"{version} has the signatures of {expected['version']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
