"""Make the environment in which tests/peers runs TRL's and verl's own code: python tools/make_peers_env.py FOLDER

Run by the Python of the project's environment. A folder that is already complete is left as it is, in milliseconds.
Reads PIP_ARGS, as the Makefile's head explains it.
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
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "constraints" / "peers-py311.txt"
STAMP = ".installed"
INSTALL_SECONDS = 480
IMPORT_SECONDS = 240
IMPORTS = "import trl, verl; from trl import GRPOTrainer, RLOOTrainer; import verl.trainer.ppo.ray_trainer"


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def wanted_stamp() -> str:
    """Changes with the pins, with this script, and with the environment that stands behind the peers'."""
    parts = (REQUIREMENTS.read_text(), Path(__file__).read_text(), sys.version, sysconfig.get_path("purelib"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_complete(folder: Path) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text() == wanted_stamp() and python_of(folder).exists()


def run(command: list[str], seconds: int, what: str) -> None:
    try:
        done = subprocess.run(command, timeout=seconds, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired as expired:
        raise SystemExit(f"make_peers_env: {what} took more than {seconds} s: {shlex.join(command)}") from expired
    if done.returncode:
        raise SystemExit(f"make_peers_env: {what} failed ({done.returncode}): {shlex.join(command)}\n{done.stdout}")


def build(folder: Path) -> None:
    venv.create(folder, with_pip=False)
    python = str(python_of(folder))
    # Without dependencies: theirs are torch, vLLM's neighbours and hundreds of megabytes more that these modules never
    # import. pip of the project's environment installs, so that nothing else has to be there; bytecode is compiled
    # for what is imported, not for everything.
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-input", "--no-deps", "--no-compile"]
    pip += [
        "--only-binary=:all:",
        "--retries=2",
        "--progress-bar=off",
        "--quiet",
        *shlex.split(os.getenv("PIP_ARGS", "")),
    ]
    run([*pip, "-r", str(REQUIREMENTS)], INSTALL_SECONDS, "installing the peers from PyPI")
    # torch and transformers come from the project's environment: PyPI's torch alone would be gigabytes. A path in a
    # .pth file comes after the folder's own packages, so that the peers' numpy and all else pinned above win; and the
    # .pth files behind it are not read, so that the project itself, installed as editable, cannot be imported here.
    # Written last: pip would take a package that it finds behind the path for installed.
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        timeout=IMPORT_SECONDS,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(own, "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run([python, "-W", "ignore", "-c", IMPORTS], IMPORT_SECONDS, "importing the peers")
    (folder / STAMP).write_text(wanted_stamp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder.absolute()
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder and renamed when complete: two test runs may do this at once, and one may be ended half-way.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial.", dir=folder.parent))
    try:
        build(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    main()
