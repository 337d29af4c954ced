"""`preflight=true` or `deep`: print the plan of a run and its faults without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from omegaconf import DictConfig

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import DEEP
from reinforce_rl.config.load import read_config
from reinforce_rl.config.rewards import RewardServerConfig
from reinforce_rl.errors import CheckpointError, ConfigError, Fault, RewardServerError
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import check_headers
from reinforce_rl.preflight.fake_gpu import check_clone
from reinforce_rl.preflight.memory import RankMemory
from reinforce_rl.preflight.plan import plan_batches, plan_memory
from reinforce_rl.preflight.report import print_plan, print_warnings, resident
from reinforce_rl.rewards.environment_pool import environment_faults
from reinforce_rl.rewards.function_pool import function_faults
from reinforce_rl.rewards.transport import FailedAttempt, ModelAddress, ask_description, wait_for
from reinforce_rl.rewards.wire import ServerInfo, read_token, unlike
from reinforce_rl.trainer.disk import gigabytes
from reinforce_rl.trainer.inputs import Inputs, layout_of, read_inputs
from reinforce_rl.utils.console import Console, chosen_width
from reinforce_rl.utils.job_rank import is_first_rank
from reinforce_rl.utils.net import Address

SERVER_SECONDS = 3.0


def preflight(cfg: DictConfig, console: Console | None = None) -> None:
    """Print the plan and the warnings; under torchrun on rank 0 only.

    Nothing is printed for a configuration that has faults itself.

    Raises:
        ConfigError: has all faults in one message, or a deep preflight runs outside of a clone.
    """
    if not is_first_rank():
        return
    if cfg.preflight == DEEP:
        check_clone()
    console = console or wide_console()
    examination = examine(cfg, console)
    # A deep preflight runs even with other faults, such as a full disk.
    if cfg.preflight == DEEP and examination.memory:
        from reinforce_rl.preflight.deep import deep

        examination.faults.extend(deep(examination.config, examination.inputs, console))
    if examination.faults:
        raise ConfigError(examination.faults)
    console.print("\nNo fault was found. Nothing was started.")


@dataclass(frozen=True)
class Examination:
    config: TrainConfig
    inputs: Inputs
    memory: Sequence[RankMemory]  # of a rank of each pipeline stage; empty if unknown
    faults: list[str]  # one sentence each


def examine(cfg: DictConfig, console: Console, *, here: bool = True) -> Examination:
    """Find all faults; print the plan if the configuration has none.

    `here` is False if the run starts on another machine: neither this machine nor the reward server
    of the run is checked.
    """
    config, faults = read_config(cfg, is_plan=True)
    loaded = config if here else _without_sandbox(config)
    inputs = read_inputs(loaded)
    memory: list[RankMemory] = []
    if not faults:
        layout = layout_of(config)
        if inputs.layers is not None and layout is not None:
            gpu = planned_for_gpu(config)
            batches = plan_batches(config, layout, inputs.datasets)
            memory = plan_memory(config, inputs, batches, gpu=gpu)
            print_plan(console, config, inputs, batches, memory, gpu=gpu)
        print_warnings(console, list(_warnings(config, inputs, memory, here=here)))
    faults += [*inputs.faults, *_weight_faults(config, inputs)]
    faults += function_faults(config, here=here)
    # The data sets have loaded it as well, for its tools.
    load_faults = environment_faults(loaded.environment)
    faults += [fault for fault in load_faults if fault not in faults]
    return Examination(config, inputs, memory, faults)


def _without_sandbox(config: TrainConfig) -> TrainConfig:
    """Return a configuration whose environment is loaded without bubblewrap, as on a login node."""
    environment = config.environment.model_copy(update={"sandbox": False})
    return config.model_copy(update={"environment": environment})


def wide_console() -> Console:
    width = chosen_width() or max(Console().width, 110)
    return Console(highlight=False, soft_wrap=True, width=width)


def planned_for_gpu(cfg: TrainConfig) -> bool:
    """Return whether the run uses GPUs: this machine has one, or the precision is bf16."""
    return torch.cuda.is_available() or cfg.trainer.implies_gpus


def _warnings(
    cfg: TrainConfig, inputs: Inputs, memory: Sequence[RankMemory], *, here: bool
) -> Iterator[str]:
    if inputs.disk is not None and inputs.disk.warning is not None:
        yield inputs.disk.warning
    if not _has_weights(cfg):
        yield (
            f"{cfg.pretrained_checkpoint.restore_from_path} holds no safetensors: a run could not "
            "load its weights"
        )
    for setting, server in cfg.reward_servers.items():
        # A job starts its own reward server later.
        if here or setting != "remote_rm.reward_model":
            yield from _server_warnings(server)
    if here and memory:
        yield from _too_much_memory(cfg, memory)


def _server_warnings(server: RewardServerConfig) -> Iterator[str]:
    try:
        token = read_token(server.token_file, "token_file")
    except ConfigError as error:
        yield str(error)
        return
    first: tuple[Address, ServerInfo] | None = None
    for place in server.addresses:
        try:
            info = wait_for(
                ask_description(ModelAddress(place, server.name, token), SERVER_SECONDS)
            )
        except FailedAttempt as error:
            yield f"the reward server at {place} is not ready now: it {error}"
        except RewardServerError as error:
            yield str(error)
        else:
            first = first or (place, info)
            if differences := first[1].differences(info, f"at {first[0]}", f"at {place}"):
                yield unlike(first[0], place, differences)


def _has_weights(cfg: TrainConfig) -> bool:
    return any(Path(cfg.pretrained_checkpoint.restore_from_path).glob("*.safetensors"))


def _weight_faults(cfg: TrainConfig, inputs: Inputs) -> Iterator[str]:
    if inputs.architecture is not None and _has_weights(cfg):
        # A plan needs no weights.
        try:
            check_headers(
                inputs.architecture, HFFolder(cfg.pretrained_checkpoint.restore_from_path)
            )
        except CheckpointError as error:
            yield Fault(str(error), key=error.key)


def host_memory_of_node(cfg: TrainConfig, memory: Sequence[RankMemory]) -> int:
    """Return the planned peak of host memory for the ranks of one node, in bytes."""
    largest = max(memory, key=lambda rank: rank.peak)
    of_rank = largest.peak_phase.total + resident(largest, gpu=False)
    return (largest.on_host if planned_for_gpu(cfg) else of_rank) * cfg.trainer.devices


def _too_much_memory(cfg: TrainConfig, memory: Sequence[RankMemory]) -> Iterator[str]:
    if torch.cuda.is_available():
        needed = max(rank.peak for rank in memory)
        there = torch.cuda.get_device_properties(0).total_memory
        if needed > there:
            yield f"a rank needs {gigabytes(needed)}, and this machine's GPU has {gigabytes(there)}"
    elif planned_for_gpu(cfg):
        return  # the GPUs of another machine are unknown
    on_host = host_memory_of_node(cfg, memory)
    there = psutil.virtual_memory().total
    if on_host > there:
        ranks = f"{cfg.trainer.devices} ranks need {gigabytes(on_host)} of host memory"
        yield f"{ranks}, and this machine has {gigabytes(there)}"
