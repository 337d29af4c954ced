"""Compiles and loads `guard.cpp`. Torch-free: the library must be in the process before libtorch is."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from reinforce_rl.errors import ConfigError

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILE_SECONDS = 300.0


def load_guard() -> None:
    """Import torch so that it takes fake CUDA tensors in this process.

    Raises:
        ConfigError: torch was imported already, is not installed, or no C++ compiler can build the library. Where
            torch finds a GPU, it can do without.
    """
    if "torch" in sys.modules:
        raise ConfigError(["fake CUDA was asked for after torch was imported; it must come first in the process"])
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError(["torch is not installed in this Python environment"])
    try:
        guard = ctypes.CDLL(str(_library(Path(spec.origin).parent)), ctypes.RTLD_GLOBAL)
    except ConfigError:
        import torch

        if not torch.cuda.is_available():
            raise
    else:
        import torch

        guard.set_guard()  # in place of that of torch's CUDA build


def _library(torch: Path) -> Path:
    """The compiled guard, made once for each torch and source; compiling takes seconds."""
    content = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reinforce_rl"
    library = cache / f"cuda_guard-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise ConfigError(
            [
                "fake CUDA needs a C++ compiler where there is no GPU, and none was found (looked for $CXX, c++, g++ "
                "and clang++); install one (Debian: apt-get install g++)"
            ]
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "guard.so"
        command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", str(SOURCE)]
        command += ["-o", str(built), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        if done.returncode:
            raise ConfigError(
                [f"{compiler} could not build {SOURCE.name}, which fake CUDA needs:\n{done.stderr.strip()[-2000:]}"]
            )
        built.replace(library)
    return library
