"""Make a folder of wheels for a machine without an index: python tools/make_wheelhouse.py FOLDER --python 3.12

Run by the Python of the project's environment, where there is a network; reads PIP_ARGS, as the Makefile's head
explains it. FOLDER then holds, for Linux on x86_64 and that Python, what the project needs (pyproject.toml's
`dependencies`) and what that needs in turn, at the versions of constraints/gpu.txt, and a requirements.txt that names
them. What is given as --without must be on the machine, and neither it nor what only it needs is fetched. Nor is what
--image lists, such as constraints/gpu-image.txt; the folder then has only what that image lacks. There:

    python -m pip install --no-deps --no-index --find-links FOLDER -r FOLDER/requirements.txt
    PYTHONPATH=/path/to/the/repository python ...

The list is complete, hence --no-deps: with it pip does not refuse what the machine has, such as an ml-dtypes that is
newer than tritonclient asks for.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = Path(__file__).resolve().parent.parent / "constraints" / "gpu.txt"
PROJECT = "reinforce-rl"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
# On PyPI only as source, of pure Python: built here.
SOURCE_ONLY = {"antlr4-python3-runtime"}


def requirements_in(path: Path) -> list[Requirement]:
    """Those of a file as pip reads it, without options."""
    lines = (
        re.sub(r"(^|\s)#.*", "", line).strip()
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    return [Requirement(line) for line in lines if line]


def holds(requirement: Requirement, python: str, extras: set[str]) -> bool:
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
    }
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra}) for extra in extras or {""}
    )


def wheels_needed(python: str, without: Collection[str], also: Sequence[str] = ()) -> list[str]:
    """Requirements, sorted: pinned, or as a package asks for them where neither a pin nor an installation is known."""
    pins = {
        canonicalize_name(pin.name): pin
        for pin in requirements_in(PINS)
        if holds(pin, python, set())
    }
    requirements: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(PROJECT), *map(Requirement, also)]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        extras = frozenset(wanted.extras)
        if name in without or (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            package = distribution(name)
        except PackageNotFoundError:  # wanted by another Python than this one only
            package = None
        if name != PROJECT:
            version = (
                pins[name].specifier
                if name in pins
                else f"=={package.version}"
                if package
                else wanted.specifier
            )
            requirements[name] = f"{name}{version}"
        needed = [Requirement(line) for line in (package.requires or [] if package else [])]
        todo += [other for other in needed if holds(other, python, set(extras) | {""})]
    return [requirements[name] for name in sorted(requirements)]


def pip(*arguments: str) -> None:
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--no-deps", "--quiet", *extra], check=True
    )


def make(folder: Path, requirements: list[str], python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sources = [line for line in requirements if Requirement(line).name in SOURCE_ONLY]
    wheels = [line for line in requirements if line not in sources]
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    target = [
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        *platforms,
    ]
    pip("download", "--dest", str(folder), *target, *wheels)
    if sources:
        pip("wheel", "--wheel-dir", str(folder), *sources)
    # Names alone: what the machine has and is new enough stays.
    names = [Requirement(line).name for line in requirements]
    (folder / "requirements.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--python", default="3.12", choices=("3.10", "3.11", "3.12"), help="of the machine"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=["torch", "numpy", "transformers"],
        metavar="NAME",
        help="what the machine has",
    )
    parser.add_argument(
        "--image",
        type=Path,
        metavar="FILE",
        help="pins of what the machine has, instead of --without",
    )
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        metavar="NAME",
        help="packages besides, e.g. hypothesis for tests",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the requirements and fetch nothing"
    )
    options = parser.parse_args()
    present = options.without
    if options.image is not None:
        present = [pin.name for pin in requirements_in(options.image)]
    without = {canonicalize_name(name) for name in present}
    requirements = wheels_needed(options.python, without, options.also)
    if options.list:
        print("\n".join(requirements))
        return
    try:
        make(options.folder, requirements, options.python)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"pip could not make {options.folder}; see its own message above"
        ) from error
    print(f"{len(requirements)} wheels for Python {options.python} in {options.folder}")


if __name__ == "__main__":
    main()
