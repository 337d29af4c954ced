"""Shared by the example scripts: Hydra with readable errors, and starting one process per rank."""

from __future__ import annotations

import atexit
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reinforce_rl.config.load import renamed
from reinforce_rl.errors import EXIT_ERROR, EXIT_STOPPED, ConfigError, ReinforceError
from reinforce_rl.runtime.stop import StopNow

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
CONF_FOLDER = Path(__file__).resolve().parents[2] / "conf"


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
                _fail(str(_explained(error, name, [arg for arg in sys.argv[1:] if "=" in arg])))

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


def compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose conf/NAME.yaml with overrides, as `with_config` does. ConfigError has Hydra's text or a better one."""
    try:
        with hydra.initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            return hydra.compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error, name, overrides) from error


def _explained(error: Exception, name: str, overrides: Sequence[str]) -> ConfigError:
    """Name every unknown key. Hydra stops at the first, so retry without it until none is left."""
    if isinstance(error, OverrideParseException) and error.override:
        expected = "expected KEY=VALUE, with quotes around a text with special letters: \"KEY='a, b'\""
        return ConfigError([f"{error.override} cannot be read as an override; {expected}"])
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, found = error.missing_cfg_file.rpartition("/")
        return ConfigError([f"{group} is {found!r}; expected one of {', '.join(error.options)}"])
    text = str(error).partition("\nConfig search path:")[0].strip()
    unknown = re.search(r"Could not override '([^']+)'|not in struct\s+full_key: (\S+)", text)
    if unknown is None:
        return ConfigError([text])
    key = unknown.group(1) or unknown.group(2)
    faults = [_unknown_key(key, CONF_FOLDER / f"{name}.yaml")]
    rest = [override for override in overrides if override.partition("=")[0] != key]
    if len(rest) < len(overrides):
        try:
            compose(name, rest)
        except ConfigError as further:
            faults += further.faults
    return ConfigError(faults)


def _unknown_key(wanted: str, config_file: Path) -> str:
    config = OmegaConf.load(config_file)
    known = _dotted_keys(OmegaConf.to_container(config))
    if wanted in known:  # an empty group; Hydra adds keys to it only with a plus
        return f"{wanted} has entries of your own names; give each as +{wanted}.NAME=VALUE"
    if advice := renamed(wanted):
        return advice
    for key in known:
        if wanted.startswith(f"{key}.") and OmegaConf.is_config(OmegaConf.select(config, key)):
            return f"{key} has entries of your own names; give {wanted} as +{wanted}=VALUE"
    same_name = [key for key in known if key.split(".")[-1] == wanted.split(".")[-1]]
    close = get_close_matches(wanted, same_name, n=3, cutoff=0) or get_close_matches(wanted, known, n=1)
    advice = f"did you mean {' or '.join(close)}?" if close else f"its keys stand in {config_file}"
    return f"{wanted} is not a key of the configuration; {advice}"


def _dotted_keys(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [prefix[:-1]]
    return [key for name, child in node.items() for key in _dotted_keys(child, f"{prefix}{name}.")]
