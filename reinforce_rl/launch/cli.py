"""Shared by the example scripts: Hydra with readable errors, and starting one process per rank."""

from __future__ import annotations

import atexit
import errno
import os
import sys
from collections.abc import Callable

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from reinforce_rl.config.compose import CONF_FOLDER, explained
from reinforce_rl.errors import EXIT_ERROR, EXIT_STOPPED, ReinforceError
from reinforce_rl.runtime.stop import StopNow

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def with_config(name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make `main(cfg)` a program: Hydra composes conf/NAME.yaml and the command line's overrides.

    Errors raised on purpose by this project end the program with their exit code and text, without a traceback.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def run(cfg: DictConfig) -> None:
            try:
                main(cfg)
            except ReinforceError as error:
                _fail(str(error), error.exit_code)
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
                what = error.filename or "a file of the run"
                _fail(f"{what} cannot be written: {error.strerror}. Free some space, and start the same command again")
            except StopNow:
                _fail("stopped by a signal before the run began", EXIT_STOPPED)
            except KeyboardInterrupt:
                print("interrupted by Ctrl-C; what was saved before is whole", flush=True)
                atexit._run_exitfuncs()  # which os._exit would skip
                os._exit(130)  # a thread that is writing a checkpoint would abort while Python shuts down

        def program() -> None:
            try:
                os.getcwd()
            except OSError:
                _fail("the folder in which this was started does not exist any more; change to another one")
            # Have Hydra raise its errors instead of printing them, so that they look like all others.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            try:
                hydra.main(version_base="1.3", config_path=str(CONF_FOLDER), config_name=name)(run)()
            except (HydraException, OmegaConfBaseException) as error:
                _fail(str(explained(error, name, [arg for arg in sys.argv[1:] if "=" in arg])))

        return program

    return decorate


def start_ranks(devices: int, num_nodes: int, key: str = "trainer.num_nodes") -> None:
    """Replace a plain `python` process by torchrun (`utils/ranks.py`) if there are several ranks; not under torchrun.

    `key` is the config key of `num_nodes`, for the ReinforceError that several nodes raise.
    """
    if "WORLD_SIZE" in os.environ or devices * num_nodes == 1:
        return
    if num_nodes > 1:
        expected = f"`torchrun --nnodes {num_nodes} --nproc-per-node {devices} ...`"
        raise ReinforceError(f"{key} is {num_nodes}, but this is plain python; start it on every node with {expected}")
    # One thread per rank: ranks that each use all cores slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launcher = ["-m", "reinforce_rl.utils.ranks", "--standalone", "--nproc-per-node", str(devices)]
    # The package need not be installed for the script to run, and the script's own folder is not on the path of -m.
    paths = [str(CONF_FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


def _fail(text: str, code: int = EXIT_ERROR) -> None:
    print(text if code == EXIT_STOPPED else f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(code)
