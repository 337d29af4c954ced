"""Make an environment for another's code: python tools/make_environment.py NAME FOLDER

NAME is one of ENVIRONMENTS below. Run by the Python of the project's environment. A folder that is already complete is
left as it is, in milliseconds. Reads PIP_ARGS, as the Makefile's head explains it.
"""

from __future__ import annotations

import argparse
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
CHECK_SECONDS = 240


@dataclass(frozen=True)
class Environment:
    what: str
    pins: Path
    check: str
    """Python code that fails in an environment that does not work."""
    borrows: bool = True
    """Installs the pins alone; what else is imported comes from the project's environment, torch above all."""
    torch: str | None = None
    """The only release of torch that goes with the pins."""
    seconds: int = 480


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
}


def fail(sentence: str) -> SystemExit:
    return SystemExit(f"make_environment: {sentence}")


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def borrowed_torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        raise fail(f"torch is borrowed from {sys.executable}, which has none; run it by .venv's Python") from None


def wanted_stamp(wanted: Environment) -> str:
    """Changes with the pins, with this script, and with the environment that is borrowed from."""
    behind = (sysconfig.get_path("purelib"), borrowed_torch()) if wanted.borrows else ()
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
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted_stamp(wanted) and python_of(folder).exists()


def run(command: list[str], seconds: int, what: str) -> str:
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
        raise fail(f"{what} took more than {seconds} s: {shlex.join(command)}") from expired
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        reason = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise fail(f"{what} failed ({done.returncode}): {shlex.join(command)}: {' '.join(reason)}")
    return done.stdout


def build(wanted: Environment, folder: Path) -> None:
    venv.create(folder, with_pip=False)
    python = str(python_of(folder))
    # pip of the project's environment installs, so that nothing else has to be there; bytecode is compiled for what is
    # imported, not for everything.
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-input", "--no-compile"]
    pip += ["--only-binary=:all:", "--retries=2", "--progress-bar=off", "--quiet"]
    if wanted.borrows:  # dependencies would be torch and hundreds of megabytes more that nothing here imports
        pip.append("--no-deps")
    pip += [*shlex.split(os.getenv("PIP_ARGS", "")), "-r", str(wanted.pins)]
    run(pip, wanted.seconds, f"installing {wanted.what}")
    if wanted.borrows:
        # A path in a .pth file comes after the folder's own packages, so that the pins win; and the .pth files behind
        # it are not read, so that the project itself, installed as editable, cannot be imported here. Written last:
        # pip would take a package that it finds behind the path for installed.
        ask = [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = run(ask, CHECK_SECONDS, "starting Python").strip()
        Path(own, "behind.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    run([python, "-I", "-W", "ignore", "-c", wanted.check], CHECK_SECONDS, f"importing {wanted.what}")
    (folder / STAMP).write_text(wanted_stamp(wanted), encoding="utf-8")


def make(wanted: Environment, folder: Path) -> None:
    folder = folder.absolute()
    if is_complete(wanted, folder):
        return
    if sys.version_info < OLDEST_PYTHON:
        raise fail(
            f"{wanted.what} has no wheel for {sys.executable}, Python {sys.version.split()[0]}; 3.11 and 3.12 do"
        )
    if wanted.torch is not None and borrowed_torch().split("+")[0] != wanted.torch:
        found = f"{sysconfig.get_path('purelib')} has {borrowed_torch()}"
        raise fail(
            f"{wanted.what} borrows torch and works with {wanted.torch} only, but {found}: install that release"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder and renamed when complete: two test runs may do this at once, and one may be ended half-way.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial.", dir=folder.parent))
    try:
        build(wanted, partial)
        if not is_complete(wanted, folder):  # another may have been faster, and have it in use
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENVIRONMENTS, metavar="NAME")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    make(ENVIRONMENTS[args.name], args.folder)


if __name__ == "__main__":
    main()
