"""Write down the signatures of TensorRT-LLM that the adapter depends on, or compare a source tree with them.

    python tools/extract_signatures.py SOURCE > tests/generation/tensorrt_llm_signatures.json
    python tools/extract_signatures.py SOURCE --check

SOURCE is the folder that holds the package `tensorrt_llm`: a checkout, or a site-packages. Nothing of it is imported.
A class of fields (a dataclass, a pydantic model) counts as a function with one keyword a field, those of its bases in
the same file included; of an enum the values count too. `--check` compares 1.3 with the record of 1.2 and what
`tensorrt_llm_signatures_1.3.json` changes in it.
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
    changes = CHANGES.get(".".join(version.split(".")[:2]))
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
    """What a caller would notice: parameters that went, came, or changed their kind; not where they lie."""
    texts = []
    for name, entry in expected["signatures"].items():
        values = actual["signatures"][name].get("values")
        if entry.get("values") != values:
            texts.append(f"{name}: the values were {entry.get('values')}, are {values}")
        before = {p["name"]: p for p in entry["parameters"]}
        after = {p["name"]: p for p in actual["signatures"][name]["parameters"]}
        texts += [f"{name}: {parameter} is gone" for parameter in before.keys() - after.keys()]
        texts += [
            f"{name}: {parameter} is new and has no default"
            for parameter in after.keys() - before.keys()
            if after[parameter]["default"] is None
            and not after[parameter]["kind"].startswith("VAR")
        ]
        texts += [
            f"{name}: {parameter} was {before[parameter]}, is {after[parameter]}"
            for parameter in before.keys() & after.keys()
            if before[parameter] != after[parameter]
        ]
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
    """Return the class that the name stands for, as of `Old = New`."""
    aliases = {
        target.id: node.value.id
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return aliases.get(name, name)


def _parameters(args: ast.arguments) -> list[dict[str, str | None]]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(
        args.defaults
    )
    parameters = [
        _parameter(argument, KINDS[0] if i < len(args.posonlyargs) else KINDS[1], defaults[i])
        for i, argument in enumerate(positional)
    ]
    if args.vararg:
        parameters.append(_parameter(args.vararg, KINDS[2], None))
    parameters += [
        _parameter(a, KINDS[3], d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parameters.append(_parameter(args.kwarg, KINDS[4], None))
    return parameters[1:]  # less self


def _fields(owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[dict[str, str | None]]:
    fields: dict[str, dict[str, str | None]] = {}
    for base in owner.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            fields.update({p["name"]: p for p in _fields(classes[base.id], classes) if p["name"]})
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            if not name.startswith("_") and name != "model_config":
                fields[name] = {
                    "name": name,
                    "kind": KINDS[3],
                    "default": _default_of_field(node.value),
                }
    return list(fields.values())


def _enum_values(owner: ast.ClassDef) -> dict[str, str]:
    """Return the members of an enum of strings."""
    if not any(ast.unparse(base).endswith("Enum") for base in owner.bases):
        return {}
    return {
        target.id: str(node.value.value)
        for node in owner.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _default_of_field(value: ast.expr | None) -> str | None:
    """`Field(default=x)` and `field(default=x)` have the default x; a Field without one has none."""
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("Field", "field")
    ):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in given:
            return f"{ast.unparse(given['default_factory'])}()"
        first = given.get("default", value.args[0] if value.args else None)
        if first is None or (isinstance(first, ast.Constant) and first.value is ...):
            return None
        return ast.unparse(first)
    return None if value is None else ast.unparse(value)


def _parameter(argument: ast.arg, kind: str, default: ast.expr | None) -> dict[str, str | None]:
    return {
        "name": argument.arg,
        "kind": kind,
        "default": None if default is None else ast.unparse(default),
    }


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
    expected = record_of(extracted["version"])
    texts = differences(expected, extracted)
    print("\n".join(texts) or f"{extracted['version']} has the signatures of {expected['version']}")
    return bool(texts)


if __name__ == "__main__":
    sys.exit(main())
