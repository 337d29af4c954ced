"""The program `reinforce-rl generate`: finds the trainers by the run's folder, and generates until they end."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path
from socket import gethostname

from reinforce_rl.actor.build import build_actor, generator_mesh
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import GenerationError, LostRankError, ReinforceError, StoppedEarly
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.messages import RANKS, Arrival
from reinforce_rl.rollout.rendezvous import INVITATION_FILE, Guest, OpenInvitation
from reinforce_rl.rollout.separate_generator import SeparateGeneratorRank
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.settings import shared_settings
from reinforce_rl.runtime.status import NoStatus
from reinforce_rl.runtime.stop import StopRequest

_AGAIN_SECONDS = 1.0


def generate(cfg: TrainConfig, stop: StopRequest) -> None:
    """Be a rank of a generator until the trainers end, with their configuration.

    Raises:
        LostRankError: the trainers are lost, or have sent it away.
        GenerationError: there were none in time, or the engine failed.
        StoppedEarly: it got a signal, and has ended what it had under way.
    """
    folder = Path(cfg.exp_manager.explicit_log_dir)
    control = RunControl(folder, stop, NoStatus(folder))
    silence = cfg.trainer.heartbeat_timeout_seconds
    with (
        control.running(),
        generator_mesh(cfg) as mesh,
        # It may wait for ever while others generate; `SeparateGeneratorRank` ends where it stands
        # still.
        control.watching(mesh, silence_seconds=silence, hang_seconds=math.inf),
        contextlib.ExitStack() as stack,
    ):
        tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
        rank = _join(cfg, mesh, control)
        stack.callback(rank.close)
        try:
            control.phases.begin("waiting for the reward server", has_deadline=True)
            rm = stack.enter_context(
                contextlib.closing(
                    connect_to_reward_servers(
                        cfg, mesh, tokenizer, SilentMonitor(folder, notes=mesh.is_main)
                    )
                )
            )
            control.phases.begin("loading the model")
            model = build_actor(cfg, mesh, tokenizer, trains=False, with_reference=False)
            stack.callback(model.generator.close)
        except ReinforceError as error:
            rank.fail(error)
        stop.wait_for_checks()  # from here on it leaves in good order
        try:
            rank.run(model, rm, control.phases)
        except ConnectionError as error:
            raise LostRankError(
                f"{error}. Start the trainers and this generator again",
                key="generators.trainers.lost",
            ) from error
        if stop.reason is not None:
            raise StoppedEarly(
                f"this generator was stopped by {stop.reason}; others go on with its prompts",
                key="generators.generator.stopped",
            )


def _join(cfg: TrainConfig, mesh: Mesh, control: RunControl) -> SeparateGeneratorRank:
    """Connect this rank to the trainers, once they are there."""
    control.phases.begin("waiting for the trainers", has_deadline=True)
    timeout = timedelta(seconds=cfg.trainer.heartbeat_timeout_seconds)
    arrival = Arrival(
        mesh.world_size, f"{gethostname()}, process {os.getpid()}", shared_settings(cfg)
    )

    def connected(number: int, invitation: OpenInvitation) -> SeparateGeneratorRank:
        return SeparateGeneratorRank(
            Guest(number * RANKS + mesh.rank, invitation, timeout),
            mesh.device,
            arrival,
            cfg,
            control,
        )

    rank = None
    found = None
    with mesh.raise_on_all_ranks():
        if mesh.is_main:
            number = 1 + secrets.randbits(40)
            folder = Path(cfg.exp_manager.explicit_log_dir)
            seconds = cfg.generator_timeout_seconds
            deadline = time.monotonic() + seconds
            why = "there is no such file"
            while rank is None:
                if (invitation := OpenInvitation.read(folder)) is not None:
                    try:  # that of trainers who were killed is still there
                        rank = connected(number, invitation)
                        found = (number, invitation)
                        break
                    except ConnectionError as error:
                        why = str(error)
                if time.monotonic() > deadline:
                    raise GenerationError(
                        f"the trainers could not be reached by {folder / INVITATION_FILE} within "
                        f"{seconds:.0f} s (generator_timeout_seconds): {why}; start `reinforce-rl "
                        "train` with generators=separate and the same run's folder",
                        key="generators.trainers.missing",
                    )
                time.sleep(_AGAIN_SECONDS)
    found = mesh.from_main(found)
    with mesh.raise_on_all_ranks(_not_reached):
        if rank is None:
            rank = connected(*found)
    assert rank is not None
    return rank


def _not_reached(error: BaseException) -> LostRankError:
    return LostRankError(str(error), key="generators.trainers.unreachable")
