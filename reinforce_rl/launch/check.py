"""The command `check`: this machine, a reward server, a generation engine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.check_engine import check_engine

check = typer.Typer(help="Check this machine, a reward server, or a generation engine.")
check.command("engine")(check_engine)

# Packages, with their uses.
_PACKAGES = {
    "torch": "everything",
    "megatron-core": "everything",
    "transformers": "everything",
    "nvidia-pytriton": "serving reward models",
    "vllm": "generation=vllm in this environment",
    "tensorrt-llm": "generation=tensorrt_llm in this environment",
    "transformer-engine": "model.transformer_engine=true",
    "flash-attn": "attention of packed sequences on GPUs",
    "wandb": "exp_manager.loggers=[wandb]",
}


@check.command()
def server(
    url: Annotated[str, typer.Argument(help="http://HOST:PORT")],
    token_file: Annotated[
        str | None, typer.Option(help="file with the access token, mode 0600")
    ] = None,
) -> None:
    """Say whether a reward server is up, what it serves, how fast it is, and what is wrong.

    Reads the token from the file, or from the environment variable REINFORCE_REWARD_TOKEN. Exits
    with 0 if the server can be used, else with 1.
    """
    from reinforce_rl.launch.check_server import check_server
    from reinforce_rl.rewards.wire import read_token

    try:
        token = read_token(token_file, "--token-file")
        check_server(url, token, lambda line: print(line, flush=True))
    except ReinforceError as error:
        print(f"NOT OK: {error.with_keys()}")
        raise typer.Exit(1) from error
    print("OK: it can be used")


@check.command()
def machine() -> None:
    """Say what this machine has: Python, packages, GPUs, cores, memory and disk."""
    print(f"python {platform.python_version()} on {platform.platform()}")
    for package, needed_for in _PACKAGES.items():
        print(f"{package} {_version_of(package)}, for {needed_for}")
    for line in _gpus():
        print(line)
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    print(
        f"cores: {cores}; memory: {_gigabytes(memory.available)} of {_gigabytes(memory.total)} free"
    )
    for folder in (Path("/dev/shm"), Path.cwd()):
        if folder.is_dir():
            disk = shutil.disk_usage(folder)
            print(f"{folder}: {_gigabytes(disk.free)} of {_gigabytes(disk.total)} free")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _gpus() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        built = (
            "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        )
        return [f"GPUs: none that torch can use ({built})"]
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        try:
            free, total = torch.cuda.mem_get_info(index)
            memory = f"{_gigabytes(free)} of {_gigabytes(total)} free"
        except RuntimeError as error:  # full, or in exclusive use by another process
            memory = f"cannot be used: {str(error).splitlines()[0]}"
        lines.append(f"GPU {index}: {properties.name}, compute capability {capability}, {memory}")
    return lines


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
