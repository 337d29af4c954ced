"""A run in forked processes: a single process, or a trainer and a generator.

The parent has loaded the libraries and never has process groups: forks of a process that had any
crash.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from findings.runs import CELLS, Job, Outcome, ReviewReward, configuration, lengthen_generation, run
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.policy.build import build_actor, configured_mesh
from reinforce_rl.rollout.worker import join_job
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.roles import RankRole
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.utils.ranks import STORE_VARIABLE

END_SECONDS = 30.0  # that a rank may take to end when the run is over


def run_forked(job: Job, folder: Path) -> Outcome:
    """`run` of `findings/runs.py`.

    Raises RuntimeError, with the rank's traceback, if it failed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    size = 1 if CELLS[job.cell].staleness is None else 2
    with tempfile.NamedTemporaryFile() as store:
        environments = [
            {"RANK": str(rank), "WORLD_SIZE": str(size), STORE_VARIABLE: store.name}
            for rank in range(size)
        ]
        ranks = [
            context.Process(target=_rank, args=(each, job, folder, sender)) for each in environments
        ]
        for process in ranks:
            process.start()
        sender.close()
        answer: Outcome | str = "its processes ended without an answer"
        try:
            with contextlib.suppress(EOFError):
                answer = receiver.recv()
        finally:
            for process in ranks:
                process.join(END_SECONDS)
                process.kill()
    if isinstance(answer, str):
        raise RuntimeError(f"{answer} (exit codes {[process.exitcode for process in ranks]})")
    return answer


def _rank(environment: dict[str, str], job: Job, folder: Path, sender: Connection) -> None:
    os.environ.update(environment)
    try:
        if CELLS[job.cell].staleness is None:
            with parallel_mesh() as mesh:
                sender.send(run(job, mesh, folder))
        else:
            _rank_of_role(job, folder, sender)
    except Exception:
        sender.send(traceback.format_exc())


def _rank_of_role(job: Job, folder: Path, sender: Connection) -> None:
    config = configuration(job, folder)
    role = RankRole.of_job(
        config.training_ranks, config.generation_tensor_parallel_size, config.torch_timeout_seconds
    )
    with configured_mesh(config, role) as mesh:
        if not role.generates:
            sender.send(run(job, mesh, folder, role))
            return
        generator = join_job(config, mesh, role, RunControl(folder, StopRequest()))
        with contextlib.closing(generator):
            tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
            model = build_actor(config, mesh, tokenizer, trains=False, with_reference=False)
            lengthen_generation(model, job)
            generator.run(model, ReviewReward(CELLS[job.cell], job.seed))
