"""Each use of another project's private member has a reason beside it, and there is no new use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "tools")]
from house import PACKAGE, source_files  # noqa: E402

OF_NAMED_TUPLES = {"_asdict", "_replace"}
SHARED_NAMES = {"_timeout", "_devices"}  # options of torch and objects of this package
LINES_BELOW = 8  # a comment, at most
AT_MOST = 3
KNOWN = {
    "megatron/cpu/__init__.py": {"_set_cuda_rng_state"},
    "runtime/profiling.py": {"_dump_snapshot", "_record_memory_history"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "reinforce_rl", "__future__"}


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def names_of_this_package(trees: list[ast.Module]) -> set[str]:
    """Return the functions, classes, fields and attributes that the package defines."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and is_own(node.value):
                names.add(node.attr)
    return names


def private_members(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Return (line, name) of other projects' private members.

    Operators are left out, since their schemas name them so.
    """
    foreign = set()
    standard = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = []
            for alias in node.names:
                modules.append((alias.name, alias.asname or alias.name.partition(".")[0]))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [(node.module, alias.asname or alias.name) for alias in node.names]
            for alias in node.names:
                if is_foreign(node.module) and is_private(alias.name):
                    yield node.lineno, alias.name
        else:
            continue
        for module, name in modules:
            (foreign if is_foreign(module) else standard).add(name)
            parts = module.split(".")
            for number, part in enumerate(parts, 1):
                if is_foreign(module) and is_private(part):
                    yield node.lineno, ".".join(parts[:number])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            if is_own(root):
                continue
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            name = root.id if isinstance(root, ast.Name) else ""
            is_operator = ast.unparse(node).startswith("torch.ops.")
            is_of_foreign_module = name in foreign and not is_operator
            is_unknown = node.attr not in ours and name not in foreign | standard
            if (is_of_foreign_module or is_unknown) and node.attr not in OF_NAMED_TUPLES:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            for text in [] if is_own(node.args[0]) else node.args:
                if isinstance(text, ast.Constant) and is_private(str(text.value)):
                    yield node.lineno, str(text.value)


def members_of_others() -> dict[str, list[tuple[int, str]]]:
    """Return (line, name) by file of the package."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in source_files(PACKAGE)}
    ours = names_of_this_package(list(trees.values())) - SHARED_NAMES
    members = {}
    for path, tree in trees.items():
        of_file = sorted(private_members(tree, ours))
        if of_file:
            members[str(path.relative_to(PACKAGE))] = of_file
    return members


@pytest.mark.more
def test_no_private_member_of_another_project_is_added() -> None:
    members = members_of_others().items()
    names = {file: {name for _, name in of_file} for file, of_file in members}
    assert names == KNOWN, "find a public one, or take one that is gone out of KNOWN"
    assert sum(map(len, names.values())) <= AT_MOST


@pytest.mark.more
def test_each_says_why_and_since_which_release() -> None:
    without_reason = []
    for file, of_file in members_of_others().items():
        lines = (PACKAGE / file).read_text(encoding="utf-8").splitlines()
        for line, name in of_file:
            above = lines[max(0, line - LINES_BELOW - 1) : line]
            if not any("#" in text for text in above):
                without_reason.append(f"{file}:{line} {name}")
    assert without_reason == []


def members_of_other_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return (line, name) of private members of package objects that other modules define."""
    libraries = set()
    package_names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            libraries |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] == "reinforce_rl":
                for alias in node.names:
                    if is_private(alias.name):
                        yield node.lineno, alias.name
            else:
                libraries |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            package_names |= names_of_this_package([ast.Module([node], [])])
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr) or is_own(node.value):
            continue
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        is_of_library = isinstance(root, ast.Name) and root.id in libraries
        if node.attr not in package_names | OF_NAMED_TUPLES and not is_of_library:
            yield node.lineno, node.attr


@pytest.mark.more
def test_nobody_reaches_into_an_object_of_another_module() -> None:
    reached = []
    for path in source_files(PACKAGE):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = str(path.relative_to(PACKAGE))
        for line, name in members_of_other_modules(tree):
            if name not in KNOWN.get(file, ()):
                reached.append(f"{file}:{line} {name}")
    assert reached == [], "make it public, or ask for what it is needed for"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(actor):\n    return actor._ddp", ["_ddp"]),
        ("class A:\n    def f(self):\n        return self.queue._items", ["_items"]),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
        ("from reinforce_rl.trainer.run import _build", ["_build"]),
        ("import os\nos._exit(1)", []),
        ("make()._x", ["_x"]),
        ("self._x", []),
    ],
)
def test_the_scan_sees_what_belongs_to_another_module(source: str, names: list[str]) -> None:
    uses = [name for _, name in members_of_other_modules(ast.parse(source))]
    assert uses == names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._dynamo import config", ["torch._dynamo"]),
        ("import torch\ntorch._foreach_mul_(x)", ["_foreach_mul_"]),
        ("import torch.distributed as dist\ndist.distributed_c10d._world.pg", ["_world"]),
        ("from torch import _C", ["_C"]),
        ("def f(options):\n    options._devices = []", ["_devices"]),
        ("import torch\ntorch.Tensor()._version", ["_version"]),
        ("getattr(current, '_Namespace__attrs')", ["_Namespace__attrs"]),
        ("import os\nos._exit(1)", []),
        ("import torch\ntorch.ops.aten._flash_attention_forward(x)", []),
        ("class A:\n    def f(self, other):\n        return self._x + other._x", []),
        ("from reinforce_rl.trainer.run import _private", []),
        ("row._asdict()", []),
    ],
)
def test_the_scan_tells_them_apart(source: str, names: list[str]) -> None:
    members = private_members(ast.parse(source), {"_x"})
    uses = [name for _, name in members]
    assert uses == names
