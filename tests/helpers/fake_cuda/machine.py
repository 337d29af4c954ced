"""This process as any rank of a fake GPU cluster: `install`, then `with machine.rank(r, n):`.

Do not import torch before `install`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from helpers.fake_cuda.mode import FakeCuda, Ledger
    from helpers.fake_cuda.network import Network

_LEFT_OVER = 1 << 26
SOURCE = Path(__file__).with_name("guard.cpp")
COMPILE_SECONDS = 300.0


class FakeCudaError(RuntimeError):
    """This process cannot become a fake GPU machine; the message says why."""


@dataclass(frozen=True)
class Machine:
    gpu: FakeCuda
    network: Network

    @contextlib.contextmanager
    def rank(self, rank: int = 0, world_size: int = 1) -> Iterator[Ledger]:
        """Run the block as this rank, with an empty ledger."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        self.network.begin()
        if self.gpu.memory.bytes > _LEFT_OVER:
            gc.collect()  # a deleted model is still alive in reference cycles
        with mock.patch.dict(os.environ, place), self.gpu, self.gpu.counting() as ledger:
            yield ledger


@functools.cache
def install() -> Machine:
    """Turn this process permanently into a machine with fake GPUs, before torch is imported.

    Raises FakeCudaError: torch is already imported or not installed, or no C++ compiler builds the
    device guard, which is optional if torch detects a GPU.
    """
    _load_guard()
    from helpers.fake_cuda.device import replace_device, replace_kernels
    from helpers.fake_cuda.mode import FakeCuda
    from helpers.fake_cuda.network import Network

    gpu = FakeCuda()
    replace_device(gpu)
    replace_kernels(gpu)
    network = Network(gpu)
    network.install()
    return Machine(gpu, network)


def _load_guard() -> None:
    # Import torch with a device guard that accepts fake CUDA tensors.
    if "torch" in sys.modules:
        raise FakeCudaError(
            "torch was imported before fake CUDA; install fake CUDA first in the process",
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise FakeCudaError("torch is not installed in this Python environment")
    try:
        library = _library(Path(spec.origin).parent)
        guard = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except FakeCudaError:
        import torch

        if not torch.cuda.is_available():
            raise
    else:
        import torch

        guard.set_guard()  # replaces the guard of torch's CUDA build


def _library(torch: Path) -> Path:
    # Return the compiled guard, which takes seconds; it is built once per torch and source.
    version = (torch / "version.py").read_bytes()
    content = SOURCE.read_bytes() + version + str(torch).encode()
    digest = hashlib.sha256(content).hexdigest()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(caches) / "reinforce_rl"
    library = cache / f"cuda_guard-{digest[:16]}.so"
    if library.exists():
        return library
    names = (os.environ.get("CXX") or "c++", "g++", "clang++")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise FakeCudaError(
            "fake CUDA needs a C++ compiler on a machine without a GPU, but there is none of $CXX, "
            "c++, g++ and clang++; install one (Debian: apt-get install g++)"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "guard.so"
        command = [
            compiler,
            "-O0",
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-I{torch / 'include'}",
            str(SOURCE),
        ]
        command += [
            "-o",
            str(built),
            f"-L{torch / 'lib'}",
            "-lc10",
            "-ltorch_cpu",
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:
            said = done.stderr.strip()[-2000:]
            raise FakeCudaError(
                f"{compiler} could not build {SOURCE.name}, which fake CUDA needs:\n{said}",
            )
        built.replace(library)
    return library
