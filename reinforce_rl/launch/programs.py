"""The programs that Hydra configures, with readable errors.

They import torch and megatron late, so that a wrong configuration does not wait for them.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from reinforce_rl.config.compose import CONF_FOLDER, explained, with_quotes
from reinforce_rl.config.describe import PROGRAMS
from reinforce_rl.config.load import load_config, read_config
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.config.rewards import ServeRewardModelConfig
from reinforce_rl.errors import EXIT_STOPPED, ReinforceError
from reinforce_rl.launch.api import COPIED_REWARD
from reinforce_rl.launch.terminal import end_at_once, fail, plain_errors, start_ranks, use_utf8
from reinforce_rl.runtime.settings import freeze_template_date, may_start
from reinforce_rl.runtime.stop import StopNow, StopRequest
from reinforce_rl.utils.job_rank import RANKS_VARIABLE

HELP = ("--help", "-h")


def with_config(name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make `main(cfg)` a program: Hydra composes conf/NAME.yaml and the command line's overrides.

    Errors raised on purpose by this project end the program with their exit code and text, without
    a traceback.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def run(cfg: DictConfig) -> None:
            config_name = HydraConfig.get().job.config_name
            if config_name != name and (
                missing := [key for key in PROGRAMS[name].model_fields if key not in cfg]
            ):
                fault = ReinforceError(
                    f"{config_name} has no {missing[0]}; expected it to begin with "
                    f"`defaults: [{name}, _self_]`",
                    key="config_file.no_defaults",
                )
                fail(fault.with_keys())
            try:
                with plain_errors():
                    main(cfg)
            except StopNow:
                print("stopped by a signal before the run began", file=sys.stderr, flush=True)
                # A thread of torch's may still wait for other ranks.
                end_at_once(EXIT_STOPPED)

        def run_program() -> None:
            use_utf8()
            words = [arg for arg in sys.argv[1:] if arg not in HELP]
            if len(words) < len(sys.argv) - 1:
                from reinforce_rl.launch.help import show_help

                with plain_errors():
                    show_help(name, words)
                return
            if any(arg.partition("=")[0] in ("--config-path", "-cp") for arg in words):
                fault = ReinforceError(
                    "--config-path hides the configuration that yours extends; give its folder "
                    "with --config-dir",
                    key="config_file.config_path",
                )
                fail(fault.with_keys())
            sys.argv[1:] = [
                arg if arg.startswith("-") else with_quotes(arg) for arg in sys.argv[1:]
            ]
            # Have Hydra raise its errors instead of printing them, so that they look like all
            # others.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            # Hydra then adds it at the end, which is what everybody means.
            warnings.filterwarnings("ignore", ".*Defaults list is missing `_self_`")
            try:
                hydra.main(version_base="1.3", config_path=str(CONF_FOLDER), config_name=name)(
                    run
                )()
            except (HydraException, OmegaConfBaseException) as error:
                overrides = [arg for arg in words if "=" in arg and arg[0] != "-"]
                names_file = any(arg.partition("=")[0] in ("--config-name", "-cn") for arg in words)
                fail(explained(error, name, overrides, is_whole=not names_file).with_keys())
            except YAMLError as error:
                fault = ReinforceError(
                    f"a configuration is not valid YAML: {error}",
                    key="config_file.not_yaml",
                )
                fail(fault.with_keys())

        return run_program

    return decorate


def find_copied_functions(cfg: DictConfig) -> None:
    """Let the run's folder be searched for modules if `reinforce_rl.train` copied a reward function
    there.
    """
    names = [OmegaConf.select(cfg, "reward_function.name", default=None)]
    functions = OmegaConf.select(cfg, "reward_function.more_functions", default=None)
    if isinstance(functions, DictConfig):
        names += [OmegaConf.select(functions, f"{key}.name", default=None) for key in functions]
    if any(str(name).startswith(COPIED_REWARD) for name in names):
        folder = str(OmegaConf.select(cfg, "exp_manager.explicit_log_dir", default="."))
        sys.path.append(os.path.abspath(os.path.expanduser(folder)))


@with_config("train_reinforce_actor")
def train(cfg: DictConfig) -> None:
    find_copied_functions(cfg)
    if cfg.preflight in (True, "deep"):
        from reinforce_rl.preflight.run import preflight

        preflight(cfg)
        return
    from reinforce_rl.rewards.function_pool import with_user_code

    config = with_user_code(*read_config(cfg))
    freeze_template_date(config)
    if not may_start(config):
        return
    start_ranks(config.trainer.devices, config.trainer.num_nodes)
    stop = StopRequest.on_signals()
    from reinforce_rl.trainer.run import train

    train(config, stop)


@with_config("train_reinforce_actor")
def generate(cfg: DictConfig) -> None:
    find_copied_functions(cfg)
    from reinforce_rl.rewards.function_pool import with_user_code

    # These are the generator's ranks, and the rules would compare them with the trainers'.
    ranks = os.environ.pop(RANKS_VARIABLE, None)
    config = with_user_code(*read_config(cfg))
    size = config.generation_tensor_parallel_size
    if not config.uses_external_generators:
        raise ReinforceError(
            f"placement is {config.placement} and generation_ranks is {config.generation_ranks}, "
            "so the trainers accept no generators; expected placement=disaggregated and "
            "generation_ranks=0, for them and for this program",
            key="generate.trainers.no_external_generators",
        )
    if ranks is not None:
        os.environ[RANKS_VARIABLE] = ranks
        if int(ranks) != size:
            raise ReinforceError(
                f"{ranks} ranks were started (WORLD_SIZE), but generation_tensor_parallel_size is "
                f"{size}; start {size}",
                key="generate.ranks.wrong_number",
            )
    freeze_template_date(config, joins=True)
    start_ranks(size, 1, "generation_tensor_parallel_size")
    stop = StopRequest.on_signals()
    from reinforce_rl.rollout.worker import generate

    generate(config, stop)


@with_config("serve_reward_model")
def serve(cfg: DictConfig) -> None:
    config = load_config(cfg, ServeRewardModelConfig)
    from reinforce_rl.launch.serve import serve

    serve(config)


@with_config("train_reward_model")
def train_rm(cfg: DictConfig) -> None:
    config = load_config(cfg, TrainRewardModelConfig)
    if config.mode == "full":
        start_ranks(config.trainer.devices, config.trainer.num_nodes)
    from reinforce_rl.reward_model.job import train_reward_model

    train_reward_model(config)
