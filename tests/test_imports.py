"""Rules for imports: optional packages on use, megatron in one folder, pure maths apart."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "tools")]
import house  # noqa: E402
from house import PACKAGE, imported_names, source_files  # noqa: E402

OPTIONAL = (
    "pytriton",
    "tritonclient",
    "tensorrt_llm",
    "wandb",
    "tensorboard",
    "matplotlib",
    "vaderSentiment",
    "gguf",
    "peft",
    "swanlab",
    "mlflow",
)

# `sys.modules[name] = None` makes an import of `name` and of everything below it fail, installed or
# not.
IMPORT_ALL = f"""
import importlib, pkgutil, sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None

def failed(name):
    raise

import reinforce_rl
modules = pkgutil.walk_packages(reinforce_rl.__path__, "reinforce_rl.", onerror=failed)
names = [module.name for module in modules]
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{{name}} does not import without the optional parts: {{error}}")
print(*names, sep="\\n")
"""


def uses_of(files: list[Path], *forbidden: str) -> list[str]:
    uses = []
    for path in files:
        for line, name in imported_names(path):
            if any(name == module or name.startswith(f"{module}.") for module in forbidden):
                uses.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports {name}")
    return uses


@pytest.mark.more
def test_every_module_imports_without_the_optional_parts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = set()
    for path in source_files(PACKAGE):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        expected.add(".".join(parts).removesuffix(".__init__"))
    assert {*done.stdout.split(), "reinforce_rl"} == expected, (
        "a folder without __init__.py is not walked"
    )


def test_folders_import_downwards_only() -> None:
    """Annotations and imports inside functions count too."""
    upwards = []
    for path in source_files(PACKAGE):
        floor = house.floor_of(house.module_of(path))
        for line, name in imported_names(path):
            other = house.floor_of(name)
            if floor and other and house.FLOORS.index(other) > house.FLOORS.index(floor):
                upwards.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports {name}")
    assert upwards == []


def test_the_drawing_is_that_of_the_code() -> None:
    assert house.drawn()[1] == house.drawing(), "run: python tools/house.py --write"


def test_every_folder_has_a_floor() -> None:
    assert house.rooms() == {*house.FLOORS, "__init__", "__main__"}


@pytest.mark.more
def test_rooms_and_arrows_between_them_do_not_grow() -> None:
    assert len(house.rooms()) <= house.MAX_ROOMS
    assert len(house.arrows()) <= house.MAX_ARROWS


def test_an_arrow_leads_to_the_imported_room(tmp_path, monkeypatch) -> None:
    """From any depth, in functions, and to the package itself; once for each pair."""
    sources = {
        "__init__.py": "from reinforce_rl.high.module import run",
        "errors.py": "import json",
        "low/__init__.py": "from reinforce_rl import errors",
        "high/module.py": "def run():\n    import reinforce_rl.low.module",
        "high/deep/module.py": "from reinforce_rl import run\nfrom reinforce_rl.high import run",
    }
    package = tmp_path / "reinforce_rl"
    for name, source in sources.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.setattr(house, "PACKAGE", package)
    assert house.rooms() == {"__init__", "errors", "low", "high"}
    assert house.arrows() == {
        ("__init__", "high"),
        ("low", "errors"),
        ("high", "low"),
        ("high", "__init__"),
    }


def test_no_module_imports_itself_through_others() -> None:
    modules = [path for path in source_files(PACKAGE) if path.name != "__init__.py"]
    names = {house.module_of(path): path for path in modules}
    edges = {}
    for name, path in names.items():
        edges[name] = {other for _, other in imported_names(path) if other in names}
    graphlib.TopologicalSorter(edges).prepare()  # CycleError names the circle


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = (
        "import sys, reinforce_rl\n"
        "print(*(m for m in ('torch', 'transformers', 'megatron') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.strip() == ""


# For reward servers, records and pages: a run with `reward=function` starts without
# them.
IMPORTED_WHERE_USED = ("plotly", "pyarrow", "tritonclient", "pebble", "scipy")
ENTRY_POINTS = """
import sys
import reinforce_rl.launch.main
import reinforce_rl.launch.programs
import reinforce_rl.trainer.run
from reinforce_rl.rewards import function_pool
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.more
def test_a_run_starts_without_the_libraries_of_pages_records_and_servers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENTRY_POINTS], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch" in done.stdout.split()
    assert set(done.stdout.split()) & set(IMPORTED_WHERE_USED) == set()


def test_only_the_megatron_folder_imports_megatron() -> None:
    outside = [path for path in source_files(PACKAGE) if PACKAGE / "megatron" not in path.parents]
    assert outside
    assert uses_of(outside, "megatron") == []
    assert uses_of(source_files(PACKAGE / "megatron"), "megatron"), (
        "the scan finds no import where there must be some"
    )


def test_cpu_support_is_met_in_three_places() -> None:
    """On the GPU's path CPU code appears only where a model is built, wrapped or decodes."""
    cpu = PACKAGE / "megatron" / "cpu"
    others = [path for path in source_files(PACKAGE) if cpu not in path.parents]
    uses = uses_of(others, "reinforce_rl.megatron.cpu")
    files = {use.partition(":")[0].removeprefix("reinforce_rl/megatron/") for use in uses}
    assert files == {"__init__.py", "optimizer.py", "model/decoding.py"}


def test_the_algorithm_knows_neither_processes_nor_configurations() -> None:
    assert (
        uses_of(source_files(PACKAGE / "algorithm"), "torch.distributed", "omegaconf", "hydra")
        == []
    )


@pytest.mark.parametrize(
    ("source", "imports_megatron"),
    [
        ("import megatron.core as core", True),
        ("from megatron.core import parallel_state", True),
        ("def f():\n    from megatron import core", True),
        ("from reinforce_rl.megatron import mesh", False),
        ("import megatronish", False),
    ],
)
def test_the_scan_tells_imports_apart(tmp_path: Path, source: str, imports_megatron: bool) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    names = [name for _, name in imported_names(path)]
    assert any(name.split(".")[0] == "megatron" for name in names) == imports_megatron
