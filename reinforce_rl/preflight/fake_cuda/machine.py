"""A process as any rank of a fake GPU cluster: `install`, then `with machine.rank(r, n):`. Torch-free until then."""

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

from reinforce_rl.errors import ConfigError, Fault

if TYPE_CHECKING:
    from reinforce_rl.preflight.fake_cuda.mode import FakeCuda, Ledger
    from reinforce_rl.preflight.fake_cuda.network import Network

_LEFT_OVER = 1 << 26
SOURCE = Path(__file__).with_name("guard.cpp")
COMPILE_SECONDS = 300.0


@dataclass(frozen=True)
class Machine:
    gpu: FakeCuda
    network: Network

    @contextlib.contextmanager
    def rank(self, rank: int = 0, world_size: int = 1) -> Iterator[Ledger]:
        """Be this rank inside the block, with an empty ledger."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        self.network.begin()
        if self.gpu.memory.bytes > _LEFT_OVER:
            gc.collect()  # a dropped model still holds itself in cycles
        with mock.patch.dict(os.environ, place), self.gpu, self.gpu.counting() as ledger:
            yield ledger


@functools.cache
def install() -> Machine:
    """Make this process a machine with fake GPUs, for good. torch must not have been imported before.

    Raises ConfigError: torch is already imported or not installed, or no C++ compiler builds the device guard,
    optional if torch finds a GPU.
    """
    _load_guard()
    from reinforce_rl.preflight.fake_cuda.device import replace_device, replace_kernels
    from reinforce_rl.preflight.fake_cuda.mode import FakeCuda
    from reinforce_rl.preflight.fake_cuda.network import Network

    gpu = FakeCuda()
    replace_device(gpu)
    replace_kernels(gpu)
    network = Network(gpu)
    network.install()
    return Machine(gpu, network)


def _load_guard() -> None:
    # Import torch with a device guard that accepts fake CUDA tensors.
    if "torch" in sys.modules:
        sentence = "torch was imported before fake CUDA; install fake CUDA first in the process"
        raise ConfigError([Fault(sentence, key="preflight.fake_cuda.after_torch")])
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sentence = "torch is not installed in this Python environment"
        raise ConfigError([Fault(sentence, key="preflight.fake_cuda.no_torch")])
    try:
        guard = ctypes.CDLL(str(_library(Path(spec.origin).parent)), ctypes.RTLD_GLOBAL)
    except ConfigError:
        import torch

        if not torch.cuda.is_available():
            raise
    else:
        import torch

        guard.set_guard()  # replaces the one of torch's CUDA build


def _library(torch: Path) -> Path:
    # Return the compiled guard, built once per torch and source, which takes seconds.
    content = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reinforce_rl"
    library = cache / f"cuda_guard-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        sentence = (
            "fake CUDA needs a C++ compiler on a machine without a GPU, but there is none of $CXX, c++, "
            "g++ and clang++; install one (Debian: apt-get install g++)"
        )
        raise ConfigError([Fault(sentence, key="preflight.fake_cuda.no_compiler")])
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / "guard.so"
        command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", str(SOURCE)]
        command += ["-o", str(built), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
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
            sentence = f"{compiler} could not build {SOURCE.name}, which fake CUDA needs:\n{said}"
            raise ConfigError([Fault(sentence, key="preflight.fake_cuda.not_built")])
        built.replace(library)
    return library
