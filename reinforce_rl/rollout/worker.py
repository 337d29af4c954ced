"""Programs that only generate: `reinforce-rl generate`, and the ranks of a job that do not train.

Both register with the trainers and answer their prompts until they end. `reinforce-rl generate`
finds them by the run's folder, and may join or leave mid-run.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import GenerationError, LostRankError, ReinforceError, StoppedEarly
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.policy.build import build_actor, generator_mesh
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.episodes import play_episodes, started_environment
from reinforce_rl.rollout.generator_rank import GeneratorRank
from reinforce_rl.rollout.messages import Register
from reinforce_rl.rollout.rendezvous import RENDEZVOUS, RENDEZVOUS_FILE, RendezvousInfo
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.roles import RANKS, RankRole
from reinforce_rl.runtime.settings import shared_settings
from reinforce_rl.runtime.status import NoStatus
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.utils.untrusted_files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RETRY_SECONDS = 1.0
_FIRST_NUMBER = 1 << 40  # of generators outside of a job; those of one have small numbers


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
        # It may wait forever while others generate; `GeneratorRank` ends a rank that hangs.
        control.watching(mesh, silence_seconds=silence, hang_seconds=math.inf),
    ):
        tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
        rank = _join_trainers(cfg, mesh, control)
        try:
            _answer_trainers(rank, cfg, mesh, tokenizer, control, notes=mesh.is_main)
        except ConnectionError as error:
            raise LostRankError(
                f"{error}. Start the trainers and this generator again",
                key="generators.trainers.lost",
            ) from error
        if stop.reason is not None:
            raise StoppedEarly(
                f"this generator was stopped by {stop.reason}; other generators take over its "
                "prompts",
                key="generators.generator.stopped",
            )


def generate_in_job(
    cfg: TrainConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    role: RankRole,
    control: RunControl,
) -> None:
    """Be a rank of the trainers' job that only generates, until they end."""
    # A signal reaches the trainers by the watch, and they end the run.
    control.stop.wait_for_checks()
    rank = join_job(cfg, mesh, role, control)
    _answer_trainers(rank, cfg, mesh, tokenizer, control, notes=False)


def join_job(cfg: TrainConfig, mesh: Mesh, role: RankRole, control: RunControl) -> GeneratorRank:
    """Register this rank with the trainers of its job."""
    info = RendezvousInfo.from_values(parse_json(role.shared(RENDEZVOUS)))
    return GeneratorRank(
        role.link_rank,
        info,
        _registration(cfg, mesh),
        mesh.device,
        cfg,
        control,
        is_of_job=True,
    )


def _answer_trainers(
    rank: GeneratorRank,
    cfg: TrainConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    control: RunControl,
    *,
    notes: bool,
) -> None:
    """Load the model, and answer the trainers' prompts until they end or this generator leaves."""
    with contextlib.ExitStack() as stack:
        stack.callback(rank.close)
        try:
            control.phases.begin("waiting for the reward server", has_deadline=True)
            monitor = SilentMonitor(cfg.exp_manager.explicit_log_dir, notes=notes)
            rm = connect_to_reward_servers(cfg, mesh, tokenizer, monitor)
            stack.callback(rm.close)
            environment = stack.enter_context(started_environment(cfg, mesh))
            control.phases.begin("loading the model")
            model = build_actor(cfg, mesh, tokenizer, trains=False, with_reference=False)
            stack.callback(model.generator.close)
            play_episodes(model, environment, cfg)
        except ReinforceError as error:
            rank.fail(error)
            return
        control.stop.wait_for_checks()  # from here on it leaves in good order
        rank.run(model, rm)


def _registration(cfg: TrainConfig, mesh: Mesh) -> Register:
    name = f"{gethostname()}, process {os.getpid()}"
    return Register(mesh.world_size, name, shared_settings(cfg))


def _join_trainers(cfg: TrainConfig, mesh: Mesh, control: RunControl) -> GeneratorRank:
    """Connect the ranks of this generator to the trainers, once they are there."""
    control.phases.begin("waiting for the trainers", has_deadline=True)

    def connect(number: int, info: RendezvousInfo) -> GeneratorRank:
        return GeneratorRank(
            number * RANKS + mesh.rank,
            info,
            _registration(cfg, mesh),
            mesh.device,
            cfg,
            control,
            is_of_job=False,
        )

    number = _FIRST_NUMBER + secrets.randbits(40)
    rank = None
    info = None
    with mesh.raise_on_all_ranks():
        if mesh.is_main:
            rank, info = _first_connection(cfg, lambda info: connect(number, info))
    number, info = mesh.from_main((number, info))
    with mesh.raise_on_all_ranks(_unreachable):
        if rank is None:
            rank = connect(number, info)
    assert rank is not None
    return rank


def _first_connection(
    cfg: TrainConfig, connect: Callable[[RendezvousInfo], GeneratorRank]
) -> tuple[GeneratorRank, RendezvousInfo]:
    """Connect to the trainers as soon as they are there, by the run's folder."""
    folder = Path(cfg.exp_manager.explicit_log_dir)
    seconds = cfg.generator_timeout_seconds
    deadline = time.monotonic() + seconds
    why = "there is no such file"
    while True:
        if (info := RendezvousInfo.read(folder)) is not None:
            try:
                return connect(info), info
            except ConnectionError as error:  # the file of trainers who were killed is still there
                why = str(error)
        if time.monotonic() > deadline:
            raise GenerationError(
                f"the trainers could not be reached by {folder / RENDEZVOUS_FILE} within "
                f"{seconds:.0f} s (generator_timeout_seconds): {why}; start `reinforce-rl "
                "train` with placement=disaggregated, generation_ranks=0 and the same run's folder",
                key="generators.trainers.missing",
            )
        time.sleep(_RETRY_SECONDS)


def _unreachable(error: BaseException) -> LostRankError:
    return LostRankError(str(error), key="generators.trainers.unreachable")
