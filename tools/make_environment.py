"""Make an environment for another's code: python tools/make_environment.py NAME FOLDER

NAME is one of ENVIRONMENTS below. Run by the Python of the project's environment. A folder that is already complete is
left as it is, in milliseconds. Reads PIP_ARGS and, for `image`, TORCH_INDEX_URL and IMAGE_PYTHON, as the Makefile's
head explains them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints"
STAMP = ".installed"
OLDEST_PYTHON = (3, 11)  # of TRL 1.16 and of vLLM
SUPPORTED_PYTHONS = ((3, 10), (3, 11), (3, 12))
CHECK_SECONDS = 240
PROBE_SECONDS = 60


@dataclass(frozen=True)
class Environment:
    title: str
    pins: Path
    check: str
    """Python code that fails in an environment that does not work."""
    borrows: bool = True
    """Installs the pins alone; what else is imported comes from the project's environment, torch above all."""
    torch: str | None = None
    """The only release of torch that goes with the pins."""
    seconds: int = 480
    python: tuple[int, int] | None = None
    """The Python that the pins are for, searched on this machine; None: the one that runs this."""


@dataclass(frozen=True)
class Interpreter:
    path: str
    version: tuple[int, int]


ENVIRONMENTS = {
    "peers": Environment(
        "TRL and verl",
        CONSTRAINTS / "peers-py311.txt",
        "import trl, verl; from trl import GRPOTrainer, RLOOTrainer; import verl.trainer.ppo.ray_trainer",
    ),
    "engine-cpu": Environment(
        "vLLM for CPUs",
        CONSTRAINTS / "engine-cpu-py311.txt",
        "import vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker",
        torch="2.13.0",
    ),
    "engine-gpu": Environment(
        "vLLM for GPUs", CONSTRAINTS / "engine-gpu.txt", "import vllm", borrows=False, seconds=3600
    ),
    "image": Environment(
        "the GPU image's packages",
        CONSTRAINTS / "gpu-image.txt",
        "import accelerate, numpy, pytest, torch, transformers",
        borrows=False,
        seconds=1800,
        python=(3, 12),
    ),
}


def fail(sentence: str) -> SystemExit:
    return SystemExit(f"make_environment: {sentence}")


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def candidates(version: tuple[int, int]) -> list[str]:
    """Return paths that may be an interpreter of this or another version, likely ones first."""
    releases = sorted(SUPPORTED_PYTHONS, key=lambda release: release != version)
    names = [f"python{major}.{minor}" for major, minor in releases]
    names.insert(1, "python3")
    # Every folder of PATH: a shim of pyenv that starts nothing may hide an interpreter.
    paths = [Path(folder, name) for name in names for folder in os.get_exec_path()]
    for major, minor in releases:
        paths += sorted(Path.home().glob(f".pyenv/versions/{major}.{minor}.*/bin/python"))
    existing = [str(path) for path in paths if path.is_file()]
    named = os.getenv("IMAGE_PYTHON")
    return [named, *existing] if named else existing


def probe(path: str) -> Interpreter | None:
    """Start an interpreter; None if it does not run, cannot make environments, or is not supported."""
    code = "import sys, venv; print(*sys.version_info[:2])"
    try:
        output = subprocess.check_output(
            [path, "-I", "-c", code],
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            timeout=PROBE_SECONDS,
        )
        major, minor = map(int, output.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    version = (major, minor)
    return Interpreter(path, version) if version in SUPPORTED_PYTHONS else None


@functools.cache
def find_interpreter(version: tuple[int, int]) -> Interpreter:
    """Return an interpreter that runs: of this version, or of the nearest that there is."""
    nearest: Interpreter | None = None
    for path in candidates(version):
        interpreter = probe(path)
        if interpreter is None:
            continue
        if interpreter.version == version:
            return interpreter
        if nearest is None or interpreter.version > nearest.version:
            nearest = interpreter
    if nearest is None:
        raise fail(
            "no Python 3.10 to 3.12 runs here and has the venv module; install one "
            "(Debian: apt-get install python3.12 python3.12-venv) or name it in IMAGE_PYTHON"
        )
    return nearest


def borrowed_torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        raise fail(
            f"torch is borrowed from {sys.executable}, which has none; run it by .venv's Python"
        ) from None


def wanted_stamp(wanted: Environment) -> str:
    """Changes with the pins, with this script, and with the environment that is borrowed from."""
    behind = (sysconfig.get_path("purelib"), borrowed_torch()) if wanted.borrows else ()
    if wanted.python is not None:
        behind = (str(find_interpreter(wanted.python).version),)
    parts = (
        str(wanted),
        wanted.pins.read_text(encoding="utf-8"),
        Path(__file__).read_text(encoding="utf-8"),
        sys.version,
        *behind,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_complete(wanted: Environment, folder: Path) -> bool:
    stamp = folder / STAMP
    return (
        stamp.is_file()
        and stamp.read_text(encoding="utf-8") == wanted_stamp(wanted)
        and python_of(folder).exists()
    )


def run(command: list[str], seconds: int, purpose: str) -> str:
    try:
        done = subprocess.run(
            command,
            timeout=seconds,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as expired:
        raise fail(f"{purpose} took more than {seconds} s: {shlex.join(command)}") from expired
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        reason = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise fail(
            f"{purpose} failed ({done.returncode}): {shlex.join(command)}: {' '.join(reason)}"
        )
    return done.stdout


def install_torch(pip: list[str], wanted: Environment, index: str) -> None:
    """Install the pinned torch from an index of its own, such as one of CPU builds, if it has it."""
    pins = wanted.pins.read_text(encoding="utf-8").splitlines()
    (torch,) = [pin for pin in pins if pin.startswith("torch==")]
    command = [*pip, "--no-deps", "--index-url", index, torch]
    try:
        run(command, wanted.seconds, f"installing {torch} from {index}")
    except SystemExit as error:
        print(f"{error}; PyPI's is taken", file=sys.stderr)


def requirements_for(wanted: Environment, folder: Path) -> Path:
    """Return the pins; without their Python, a file that wants the newest releases up to them."""
    if wanted.python is None or find_interpreter(wanted.python).version == wanted.python:
        return wanted.pins
    path = folder / "nearest.txt"
    path.write_text(wanted.pins.read_text(encoding="utf-8").replace("==", "<="), encoding="utf-8")
    return path


def build(wanted: Environment, folder: Path) -> None:
    if wanted.python is None:
        venv.create(folder, with_pip=False)
    else:
        interpreter = find_interpreter(wanted.python)
        command = [interpreter.path, "-m", "venv", "--without-pip", str(folder)]
        run(command, CHECK_SECONDS, f"making an environment of {interpreter.path}")
    python = str(python_of(folder))
    # pip of the project's environment installs, so that nothing else has to be there; bytecode is
    # compiled for what is imported, not for everything.
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-input", "--no-compile"]
    pip += ["--only-binary=:all:", "--retries=2", "--progress-bar=off", "--quiet"]
    if wanted.borrows:
        # dependencies would be torch and hundreds of megabytes more that nothing here imports
        pip.append("--no-deps")
    index = os.getenv("TORCH_INDEX_URL")
    if wanted.python is not None and index:
        install_torch(pip, wanted, index)
    pip += [*shlex.split(os.getenv("PIP_ARGS", "")), "-r", str(requirements_for(wanted, folder))]
    run(pip, wanted.seconds, f"installing {wanted.title}")
    if wanted.borrows:
        # A path in a .pth file comes after the folder's site_packages packages, so that the pins win; and the
        # .pth files behind it are not read, so that the project itself, installed as editable,
        # cannot be imported here. Written last: pip would take a package that it finds behind the
        # path for installed.
        ask = [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site_packages = run(ask, CHECK_SECONDS, "starting Python").strip()
        Path(site_packages, "behind.pth").write_text(
            sysconfig.get_path("purelib") + "\n", encoding="utf-8"
        )
    run(
        [python, "-I", "-W", "ignore", "-c", wanted.check],
        CHECK_SECONDS,
        f"importing {wanted.title}",
    )
    (folder / STAMP).write_text(wanted_stamp(wanted), encoding="utf-8")


def make(wanted: Environment, folder: Path) -> None:
    folder = folder.absolute()
    if is_complete(wanted, folder):
        return
    if wanted.python is None and sys.version_info < OLDEST_PYTHON:
        raise fail(
            f"{wanted.title} has no wheel for {sys.executable}, Python {sys.version.split()[0]}; 3.11 and 3.12 do"
        )
    if wanted.torch is not None and borrowed_torch().split("+")[0] != wanted.torch:
        borrowed = f"{sysconfig.get_path('purelib')} has {borrowed_torch()}"
        raise fail(
            f"{wanted.title} borrows torch and works with {wanted.torch} only, but {borrowed}: install that release"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder and renamed when complete: two test runs may do this at once, and one may be
    # ended half-way.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial.", dir=folder.parent))
    try:
        build(wanted, partial)
        if not is_complete(wanted, folder):  # another may have been faster, and have it in use
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=ENVIRONMENTS, metavar="NAME")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    make(ENVIRONMENTS[args.name], args.folder)


if __name__ == "__main__":
    main()
