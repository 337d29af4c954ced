"""Pins are readable, name one version for each Python, and agree with pyproject.toml."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12")
# The Pythons of each file.
FILES = {"gpu.txt": PYTHONS, "cpu-py311.txt": ("3.11", "3.12")}
# The requirement of megatron-core 0.16.1's extra `dev`, and the newest flash-attn that Transformer
# Engine 2.11 uses.
OPTIONAL = {"transformer-engine": ">=2.9.0a0,<2.12.0", "flash-attn": "<=2.8.3"}


def pins(file: str, python: str) -> dict[str, str]:
    """Return the versions that FILE pins for one Python, by package.

    Each line names one version, and no two lines are for one package.
    """
    versions: dict[str, str] = {}
    for line in (ROOT / "constraints" / file).read_text(encoding="utf-8").splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        pin = Requirement(text)
        (version,) = pin.specifier
        assert version.operator == "==", line
        assert "*" not in version.version, line
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            name = canonicalize_name(pin.name)
            assert name not in versions, f"{file} has two pins of {name} for Python {python}"
            versions[name] = version.version
    return versions


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("file", "python"), [(file, python) for file in FILES for python in FILES[file]]
)
def test_no_pin_contradicts_the_project(file, python):
    versions = pins(file, python)
    ranges = project()
    extras = ranges["optional-dependencies"]
    wanted = [
        *ranges["dependencies"],
        *extras["server"],
        *extras["tensorboard"],
        *extras["vader"],
        *extras["demo"],
    ]
    for line in wanted:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != "reinforce-rl":
            assert requirement.specifier.contains(versions[name]), (
                f"{line}; {file} has {versions[name]}"
            )
    assert Requirement(f"python{ranges['requires-python']}").specifier.contains(python)


@pytest.mark.parametrize("python", PYTHONS)
def test_a_package_that_dropped_a_python_has_another_pin_for_it(python):
    versions = {other: pins("gpu.txt", other) for other in PYTHONS}
    # lazy-importer is importlib_metadata 10's, which 3.10 has not.
    assert set(versions["3.12"]) - set(versions[python]) <= {"lazy-importer"}
    # Python of each from PyPI's metadata: networkx 3.7 >= 3.12, 3.6.1 >= 3.11, 3.4.2 >= 3.10.
    expected = {"3.10": "3.4.2", "3.11": "3.6.1", "3.12": "3.7"}[python]
    assert versions[python]["networkx"] == expected


def test_optional_ones_are_what_megatron_asks_for():
    versions = pins("gpu.txt", "3.12")
    for name, specifier in OPTIONAL.items():
        assert Requirement(f"{name}{specifier}").specifier.contains(versions[name])
    engines = {
        version for name, version in versions.items() if name.startswith("transformer-engine")
    }
    assert len(engines) == 1, "its parts refuse one another at different versions"


def test_the_image_leaves_out_the_pins_of_what_its_base_has(tmp_path):
    """Two constraints on one package cannot both hold; the Dockerfile's own awk program is used."""
    dockerfile = (ROOT / "slurm/containers/gpu.Dockerfile").read_text(encoding="utf-8")
    awk_call = re.search(
        r"awk -F== '(.*?)' /tmp/base\.txt constraints/gpu\.txt", dockerfile, re.DOTALL
    )
    assert awk_call is not None
    (tmp_path / "base.txt").write_text(
        "Torch==2.9.0a0+nv25.10\nnetworkx==3.5\nimportlib-metadata==8.7.1\n"
    )
    program = awk_call[1].replace("\\\n", "\n")
    files = [str(tmp_path / "base.txt"), str(ROOT / "constraints/gpu.txt")]
    rest = subprocess.run(
        ["awk", "-F==", program, *files], check=True, text=True, capture_output=True
    ).stdout
    kept = {canonicalize_name(line.split("==")[0]) for line in rest.splitlines() if line}
    expected = set(pins("gpu.txt", "3.12")) - {"torch", "networkx", "importlib-metadata"}
    assert kept == expected
