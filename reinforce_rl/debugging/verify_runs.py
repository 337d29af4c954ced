"""What `verify` tries in processes of their own: layouts of several ranks, and a run that is killed and resumed.

`python -m reinforce_rl.debugging.verify_runs FOLDER layouts|train NAME...` is such a process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.rules import find_faults
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.debugging.verify_step import BOUNDS, GRADIENT, SAMPLES, Check, Measured, Named, Step, check, checks
from reinforce_rl.errors import Fault
from reinforce_rl.megatron.checkpointer import folder_name, latest_checkpoint
from reinforce_rl.megatron.convert import plain_tensors
from reinforce_rl.megatron.mesh import Mesh, job_rank, job_store, parallel_mesh
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.run import train
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.trainer.build import build_actor, configured_mesh
from reinforce_rl.utils.process import RUN_MODULE, Child, die_with_parent, import_path

DEADLINE = 3600.0  # seconds, of a process
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GIVEN, UNDISTURBED, KILLED = "given.pt", "undisturbed", "killed"
RESUME = "killed after step 1 and resumed"


def with_values(cfg: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return a copy with other values, by dotted key."""
    cfg = cfg.model_copy(deep=True)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(cfg, section), name, value)
    return cfg


def value_of(cfg: TrainConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), cfg)


def label(values: Mapping[str, Any]) -> str:
    """Return the values as words of a command line."""
    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())


def layouts(cfg: TrainConfig, step: Step, base: Measured, ranks: int, folder: Path) -> Iterator[list[Check]]:
    """Compare the layouts of this many ranks with `base`, one after the other."""
    model, optim, devices = "model.", "model.optim.", {"trainer.devices": ranks}
    tensor = devices | {f"{model}tensor_model_parallel_size": ranks}
    unshared = {f"{model}shared_prefix": False} if cfg.model.shared_prefix else {}
    every = [
        tensor,
        tensor | {f"{model}sequence_parallel": True},
        devices | {f"{model}pipeline_model_parallel_size": ranks},
        devices | {f"{model}context_parallel_size": ranks} | unshared,
        devices,
        devices | {f"{optim}distributed": True, f"{optim}overlap_grad_sync": True},
    ]
    tried = {}
    for values in every:
        faults, gpus = list(find_faults(with_values(cfg, values))), torch.cuda.device_count()
        if torch.cuda.is_available() and gpus < ranks:
            sentence = f"{ranks} ranks need {ranks} GPUs, but there are {gpus}"
            faults = [Fault(sentence, key="verify.gpus.too_few")]
        if faults:
            yield [Check(label(values), "layout", detail=faults[0])]
        else:
            tried[str(len(tried))] = values
    torch.save((cfg, step, tried, base), folder / GIVEN)
    left = list(tried)
    while left:
        code, said = _run(folder, "layouts", *left, ranks=ranks)
        while left and (file := folder / f"{left[0]}.pt").is_file():
            yield torch.load(file, weights_only=False)
            left.pop(0)
        if left:  # the others are tried without it
            detail = f"it ended with code {code}: {said}"
            yield [Check(label(tried[left.pop(0)]), "layout", detail=detail, failed=True)]


def resume(cfg: TrainConfig, folder: Path) -> list[Check]:
    """Kill a run after the checkpoint of its first step, go on, and compare it with an undisturbed one."""
    torch.save((cfg, None, {}, {}), folder / GIVEN)
    code, said = _run(folder, "train", UNDISTURBED, KILLED)
    if code == -signal.SIGKILL:
        code, said = _run(folder, "train", KILLED)
    runs = [folder / name for name in (UNDISTURBED, KILLED)]
    paths = [run / "checkpoints" / folder_name(2) for run in runs]
    if code or not all(path.is_dir() for path in paths):
        return [Check(RESUME, "run", detail=f"it ended with code {code}: {said}", failed=True)]
    with parallel_mesh():
        tensors = [plain_tensors(path) for path in paths]

    def samples(run: Path) -> Named:
        rows = RunFolder(run).samples(2)
        return {
            f"prompt {r.prompt_id} sample {r.sample_id}": torch.tensor([*r.response.encode(), r.reward]) for r in rows
        }

    # On a GPU some sums have no fixed order.
    bound = BOUNDS[GRADIENT][cfg.trainer.precision == "bf16"] if torch.cuda.is_available() else 0.0
    found = [check(RESUME, SAMPLES, samples(runs[0]), samples(runs[1]), bound)]
    for kind, is_kind in (("weights after step 2", False), ("Adam's moments after step 2", True)):
        one, other = ({k: v for k, v in of.items() if k.startswith("optimizer.") == is_kind} for of in tensors)
        found.append(check(RESUME, kind, one, other, bound))
    if not any(one.any() for name, one in tensors[0].items() if name.startswith("optimizer.")):
        found.append(Check(RESUME, "Adam's moments", detail="all are 0, as the rewards of each prompt are equal"))
    return found


def _run(folder: Path, *words: str, ranks: int = 1) -> tuple[int | None, str]:
    """Run this module with these words; return its exit code, and the last line that it said."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    environment["PYTHONPATH"] = import_path()
    launcher: list[str] = []
    if ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
        launcher = [RUN_MODULE, "reinforce_rl.utils.ranks", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks)]
    program = [RUN_MODULE, "reinforce_rl.debugging.verify_runs", str(folder), *words]
    command = [sys.executable, *launcher, *program]
    log = folder / "log"
    with log.open("w", encoding="utf-8") as file:
        child = Child(command, death_signal=signal.SIGTERM, env=environment, stdout=file, stderr=file)
        try:
            code = child.wait(DEADLINE)
        finally:
            child.stop(10.0)
    said = ["", *filter(str.strip, log.read_text(errors="replace", encoding="utf-8").splitlines())]
    return code, said[-1] if code is not None else f"it was ended after {DEADLINE:.0f} s"


class _KillAfterFirstStep(StopRequest):
    """Kills this process once the run in `folder` has a checkpoint."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def check(self, mesh: Mesh, verdict: str | None = None) -> None:
        if latest_checkpoint(self._folder / "checkpoints") is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        super().check(mesh, verdict)


def main() -> None:
    die_with_parent(os.getppid())
    folder, (job, *names) = Path(sys.argv[1]), sys.argv[2:]
    cfg, step, layouts, base = torch.load(folder / GIVEN, weights_only=False, mmap=True)
    if job == "layouts":
        rank, size = job_rank()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, store=job_store(size))
    for name in names:
        gc.collect()  # the model before, which holds itself
        if job == "layouts":
            _compare(with_values(cfg, layouts[name]), step, base, label(layouts[name]), folder / f"{name}.pt")
            continue
        is_new = latest_checkpoint(folder / name / "checkpoints") is None
        stop = _KillAfterFirstStep(folder / name) if name == KILLED and is_new else StopRequest()
        train(with_values(cfg, {"exp_manager.explicit_log_dir": str(folder / name)}), stop)
    if dist.is_initialized():
        dist.destroy_process_group()


def _compare(cfg: TrainConfig, step: Step, base: Measured, setting: str, out: Path) -> None:
    with configured_mesh(cfg) as mesh:
        tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
        actor = build_actor(cfg, mesh, tokenizer, with_reference=False)
        with contextlib.closing(actor.generator):
            found = step.measure(cfg, actor)
        if mesh.is_main:
            torch.save(checks(setting, base, found, cfg), out.with_suffix(".part"))
            os.replace(out.with_suffix(".part"), out)
        mesh.barrier()


if __name__ == "__main__":
    main()
