"""Training from Python: `from reinforce_rl import train`. docs/concepts.md has an example."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.errors import ConfigError, ReinforceError, key_of
from reinforce_rl.utils.files import encode, write_atomically
from reinforce_rl.utils.job_rank import JobRank, is_first_rank

if TYPE_CHECKING:
    from reinforce_rl.config.actor import TrainConfig

Prompts = str | Path | Iterable[str | Mapping[str, Any]]


COPIED_REWARD = "copied_reward"  # prefix of the modules of copied functions


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    folder: Path
    metrics: list[dict[str, Any]]  # one per step, as in metrics.jsonl
    model: Path | None  # Hugging Face folder of the trained policy; None if not exported


def train(
    model: str | Path,
    prompts: Prompts,
    reward: Callable[..., float] | str | None = None,
    output: str | Path = "results/reinforce",
    *,
    validation: Prompts | None = None,
    **settings: Any,
) -> Run:
    """Train a model in this process, as `reinforce-rl train` does; resume the run in `output`.

    Args:
        model: Hugging Face folder.
        prompts: file of prompts, or the prompts: texts, or dicts like the lines of such a file.
        reward: function of (prompt, response, record) or its dotted name. A `functools.partial`
            gives it keyword arguments. None asks the reward server of `remote_rm.reward_model`.
        output: folder of the run.
        settings: configuration keys, such as `**{"trainer.reinforce.max_steps": 20}`, and
            `algorithm`.

    Raises:
        ReinforceError: see its subclasses.
    """
    if (
        getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
        == "reinforce_rl.rewards.function_host"
    ):
        raise ReinforceError(
            "train(...) runs whenever this file is imported; put it under if __name__ == "
            "'__main__':",
            key="api.script.no_guard",
        )
    # Idle OpenMP threads that spin can slow a busy CPU tenfold.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    from reinforce_rl.rewards.function_pool import with_user_code
    from reinforce_rl.rewards.source_class import is_source_class

    folder = Path(output)
    files = dict[Path, str]()
    values = {
        "pretrained_checkpoint.restore_from_path": str(model),
        "exp_manager.explicit_log_dir": str(folder),
    }
    values["model.data.data_prefix.train"] = prompts_file(prompts, folder / "prompts.jsonl", files)
    if validation is not None:
        values["model.data.data_prefix.validation"] = prompts_file(
            validation, folder / "validation.jsonl", files
        )
    if isinstance(reward, str) and is_source_class(reward):
        values["reward"] = reward
    elif reward is not None:
        name, kwargs = (reward, {}) if isinstance(reward, str) else _by_name(reward, folder, files)
        values |= {
            "reward": "function",
            "reward_function.name": name,
            "reward_function.kwargs": kwargs,
        }
    config = configured(values, settings, files)
    from reinforce_rl.monitoring.loggers import read_metrics
    from reinforce_rl.runtime.run_lock import refuse_second_run
    from reinforce_rl.runtime.settings import freeze_template_date, may_start
    from reinforce_rl.trainer import run

    freeze_template_date(config)
    if may_start(config):
        if is_first_rank():
            refuse_second_run(folder)
        for path, text in files.items():
            write_atomically(path, text)
        run.train(with_user_code(config, []))
    exported = folder / "hf"
    return Run(
        folder, read_metrics(folder / "metrics.jsonl"), exported if exported.is_dir() else None
    )


def configured(
    values: Mapping[str, Any], settings: Mapping[str, Any], files: Iterable[Path] = ()
) -> TrainConfig:
    """Return the shipped configuration with `values` and a caller's `settings`, checked.

    Args:
        settings: configuration keys, and `algorithm`.
        files: written after the check, so their absence is no fault.

    Raises:
        ConfigError: has all faults in one message.
        ReinforceError: the settings are for another number of ranks.
    """
    from omegaconf import OmegaConf

    from reinforce_rl.config.compose import compose, unknown_keys
    from reinforce_rl.config.load import read_config

    keys = dict(settings)
    algorithm = keys.pop("algorithm", None)
    cfg = compose("train_reinforce_actor", [f"algorithm={algorithm}"] if algorithm else [])
    OmegaConf.set_struct(cfg, False)  # mappings take new names
    for key, value in {**values, **keys}.items():
        OmegaConf.update(cfg, key, str(value) if isinstance(value, Path) else value)
    config, faults = read_config(cfg)
    # Unknown keys come first: their faults suggest the nearest key. Files of prompts are written
    # only after all checks.
    faults = [fault for fault in faults if not _is_of_a_file_to_come(fault, files)]
    if faults := unknown_keys(keys, "train_reinforce_actor") or faults:
        raise ConfigError(faults)
    ranks = config.trainer.world_size
    if ranks != JobRank.of_process().size:
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "SCRIPT.py").name
        raise ReinforceError(
            f"trainer.devices x trainer.num_nodes is {ranks}, but this is one process; start it as "
            f"`torchrun --nproc-per-node {config.trainer.devices} {script}`, or use "
            "`reinforce-rl train`",
            key="api.ranks.one_process",
        )
    return config


def _is_of_a_file_to_come(fault: str, files: Iterable[Path]) -> bool:
    is_missing = key_of(fault) == "data.file.missing"
    return is_missing and any(str(path) in fault for path in files)


def prompts_file(prompts: Prompts, path: Path, files: dict[Path, str]) -> str:
    """Return the path of the file of prompts; prompts in memory are added to `files`."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    rows = ({"prompt": row} if isinstance(row, str) else row for row in prompts)
    return str(
        _add(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), files)
    )


def _add(path: Path, text: str, files: dict[Path, str]) -> Path:
    """Add a file to write, with a digest in its name.

    So another text is another setting, and overwrites nothing.
    """
    path = path.with_stem(f"{path.stem}_{hashlib.sha256(encode(text)).hexdigest()[:8]}")
    files[path] = text
    return path


def _by_name(
    function: Callable[..., Any], folder: Path, files: dict[Path, str]
) -> tuple[str, dict[str, Any]]:
    """Return the dotted name and kwargs by which other processes import a function.

    A function of a notebook or script, if it uses only modules from there, is copied to a file in
    `folder`.
    """
    kwargs: dict[str, Any] = {}
    if isinstance(function, functools.partial) and not function.args:
        kwargs = function.keywords
        function = function.func
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", repr(function))
    is_plain = inspect.isfunction(function) and name.isidentifier()
    if is_plain and module != "__main__":
        return f"{module}.{name}", kwargs
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    why = "it is not a plain function"
    if inspect.isfunction(function) and function.__name__.isidentifier():
        used = inspect.getclosurevars(function)
        modules = {
            alias: value.__name__
            for alias, value in used.globals.items()
            if inspect.ismodule(value)
        }
        others = sorted({*used.globals, *used.nonlocals} - {*modules, name})
        if not others:
            return _copied(function, modules, folder, files), kwargs
        if is_plain and script.suffix == ".py" and script.stem.isidentifier():
            return f"{script.stem}.{name}", kwargs
        why = f"it uses {', '.join(others)} from outside of it"
    raise ReinforceError(
        f"the reward {name} cannot be imported by the reward processes: {why}. Put it and "
        "everything it uses into a file, such as my_rewards.py, and pass my_rewards.NAME; in a "
        "notebook, begin a cell with %%writefile my_rewards.py",
        key="api.reward.not_importable",
    )


def _copied(function: Any, modules: Mapping[str, str], folder: Path, files: dict[Path, str]) -> str:
    lines = [
        "from __future__ import annotations",
        *(f"import {name} as {alias}" for alias, name in modules.items()),
    ]
    try:
        lines.append(textwrap.dedent(inspect.getsource(function)))
        code = ast.unparse(ast.parse("\n".join(lines)))  # without comments
    except (OSError, SyntaxError) as error:
        raise ReinforceError(
            f"the source of the reward {function.__name__} cannot be read; put it into a file, "
            f"such as my_rewards.py, and give my_rewards.{function.__name__}",
            key="api.reward.no_source",
        ) from error
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))
    return f"{_add(folder / f'{COPIED_REWARD}.py', code, files).stem}.{function.__name__}"
