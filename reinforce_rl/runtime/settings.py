"""History of a run's configuration, compared with the settings of a resume. Torch-free.

config_history.jsonl has a line for the first start and for each later start with changes: number of
steps done by then, the configuration from there on, as YAML, and a digest of the file of each
reward function. If it became too long to read, the oldest lines but the first are dropped, and the
first line records their steps.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import Section
from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.runtime.status import read_status, saved_step
from reinforce_rl.runtime.stored_config import config_text, parse_stored, read_stored
from reinforce_rl.utils.files import (
    encode,
    json_line,
    parse_json_lines,
    write_atomically,
    write_json_lines,
)
from reinforce_rl.utils.job_rank import is_first_rank
from reinforce_rl.utils.untrusted_files import read_bounded

HISTORY_FILE = "config_history.jsonl"
CONFIG_FILE = "config.yaml"
_MAX_HISTORY_BYTES = 16 << 20
_MAX_HISTORY_LINES = 1000  # starts with changed settings
_DROPPED_BYTES = 100  # room for the two keys below, in the first line
_DROPPED_FROM = "dropped_from"  # step after which the first dropped line began
_DROPPED_UP_TO = "dropped_up_to"  # last step of a dropped line
DATE_KEY = "model.data.chat_template_date"
# Keys that change the meaning of a run: refused on resume without resume_with_changes.
MEANING = re.compile(
    r"trainer\.reinforce\."
    r"(?!(max_epochs|max_steps|val_check_interval|save_interval|gradient_clip_val"
    r"|max_failed_fraction|max_skipped_steps|generation_work_queue|generator_log_probs"
    r"|rollout_batch_seq_length)$)"
    r"|pretrained_checkpoint\.|model\.(data|peft)\."
    r"|model\.(seed|global_batch_size|encoder_seq_length)$"
    r"|model\.reinforce\."
    r"(num_rollout_samples$|skip_special_tokens$|sampling_params\.|length_params\.)"
    r"|max_staleness$|rollout_order$|inflight_updates$"
    r"|reward$|reward_function\.(name|kwargs|weight|more_functions)$"
    r"|remote_rm\.(reward_model\.weight|more_reward_models)$"
    r"|environment\.(name|kwargs|max_turns|max_episode_tokens|tool_format)$"
)
LENGTH = re.compile(r"trainer\.reinforce\.max_(steps|epochs)$")
# Keys that may differ at every start and do not affect results.
SILENT = re.compile(
    r"resume_with_changes$|preflight|trainer\.profile\.|generator_host$"
    r"|remote_rm\.reward_model\.(ip|port|replicas|ready_files|token_file)$"
)


def compare(before: str, now: str, schema: type[Section] = TrainConfig) -> dict[str, str]:
    """Return the keys that differ between two YAML texts, with both values.

    A missing key has its default.
    """
    trees = [read_tree(text) for text in (before, now)]
    differing = {}
    for key, default in flatten(schema().model_dump()):
        old, new = (_value(tree, key, default) for tree in trees)
        if old != new and not SILENT.match(key):
            differing[key] = f"{json.dumps(old)} -> {json.dumps(new)}"
    return differing


@dataclass(frozen=True)
class Setting:
    """A key whose value differs from the schema's default."""

    key: str
    value: Any
    default: Any


def set_keys(tree: Any, schema: type[Section]) -> list[Setting]:
    """Return the settings of a configuration that differ from the defaults.

    A key without a default always differs.
    """
    defaults = dict(flatten(schema().model_dump()))
    settings = [
        Setting(key, _value(tree, key, default), default) for key, default in defaults.items()
    ]
    known = tuple(f"{key}." for key in defaults)
    undeclared = [
        Setting(key, value, None)
        for key, value in flatten(tree)
        if key and key not in defaults and not key.startswith(known)
    ]
    return [setting for setting in (*settings, *undeclared) if setting.value != setting.default]


def flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested dicts by dotted key; an empty dict is a leaf."""
    if not isinstance(tree, dict) or not tree:
        return [(prefix, tree)]
    return [
        leaf
        for key, value in tree.items()
        for leaf in flatten(value, f"{prefix}.{key}" if prefix else str(key))
    ]


def _value(tree: Any, key: str, default: Any) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    if not key.endswith("more_reward_models") or not isinstance(tree, dict):
        return tree
    # Compare weights only, not the servers' addresses.
    return {name: _weight(server) for name, server in tree.items()}


def _weight(server: Any) -> Any:
    """Return the weight in a reward server's settings; other values are returned unchanged."""
    return server.get("weight", 1.0) if isinstance(server, dict) else server


def freeze_template_date(cfg: TrainConfig, *, joins: bool = False) -> None:
    """Give chat templates, in place of today's date, the recorded date of the run's first start.

    `joins` is for a program that joins a run of other processes.
    """
    folder, step = _place(cfg)
    file = folder / CONFIG_FILE
    recorded = ""
    if joins and file.is_file():
        recorded = read_stored(file)
    elif step and not joins:
        recorded = settings_of(folder, step)[0]
    tree = read_tree(recorded) if recorded else {}
    cfg.model.data.freeze_date(
        cfg.pretrained_checkpoint.restore_from_path, _value(tree, DATE_KEY, None)
    )


def check_changes(cfg: TrainConfig) -> dict[str, str]:
    """Return changes since the settings of the last step before this start.

    The result is equal before and after `record`. Raises ConfigError on a change of the run's
    meaning without `resume_with_changes`, and if the next start could not read a setting.
    """
    folder, step = _place(cfg)
    line = _line(cfg, step)
    past = _history(folder, step)
    changes = _differences(past[-1], line) if past else {}
    refused = "; ".join(f"{key}: {values}" for key, values in changes.items() if MEANING.match(key))
    if refused and not cfg.resume_with_changes:
        sentence = (
            f"{folder} resumes after step {step}, but its earlier steps had other settings: "
            f"{refused}. Set them back, or choose another exp_manager.explicit_log_dir for a new "
            "run, or accept the new ones with resume_with_changes=true"
        )
        raise ConfigError([Fault(sentence, key="run.resume.other_settings")])
    return changes


def shared_settings(cfg: TrainConfig) -> dict[str, Any]:
    """Return the settings, by key, that all programs of a run must share."""
    shared = {key: value for key, value in flatten(cfg.model_dump()) if MEANING.match(key)}
    return {**shared, "trainer.precision": cfg.trainer.precision}


def record(cfg: TrainConfig) -> None:
    """Write the configuration of this start to the run's folder; call on rank 0."""
    folder, step = _place(cfg)
    line = _line(cfg, step)
    lines = _history(folder, step)
    if lines and lines[0].get(_DROPPED_UP_TO, 0) > step:
        # The run repeats the steps after an older checkpoint.
        lines[0][_DROPPED_UP_TO] = step
    if not lines or _differences(lines[-1], line):
        lines.append(line)
    write_json_lines(folder / HISTORY_FILE, _within_bounds(lines))
    write_atomically(folder / CONFIG_FILE, line["config"])


def _within_bounds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the oldest lines but the first until `_history` can read them.

    The first line records the steps of the dropped lines. The first and the last line always fit,
    because `config_text` bounds their size.
    """
    first = lines[0]
    sizes = [len(encode(json_line(line))) for line in lines]
    total = sum(sizes) + _DROPPED_BYTES
    start = 1
    while start < len(lines) - 1:
        kept_lines = len(lines) - start + 1
        if kept_lines <= _MAX_HISTORY_LINES and total <= _MAX_HISTORY_BYTES:
            break
        total -= sizes[start]
        start += 1
    if start == 1:
        return lines
    begin = min(first.get(_DROPPED_FROM, lines[1]["step"]), lines[1]["step"])
    kept = lines[start:]
    return [{**first, _DROPPED_FROM: begin, _DROPPED_UP_TO: kept[0]["step"]}, *kept]


def settings_of(folder: Path, step: int, *, within: Path | None = None) -> tuple[str, list[str]]:
    """Return the configuration of a step as YAML, and a sentence for each change before it.

    Its files may not be links that leave the folder `within`, if given. Raises DataError if the
    line of this step was dropped from the history.
    """
    lines = _history(folder, max(step, 1), within)
    first = lines[0] if lines else {}
    after = first.get(_DROPPED_FROM, 0)
    up_to = first.get(_DROPPED_UP_TO, 0)
    if after < step <= up_to:
        raise DataError(
            f"{folder / HISTORY_FILE} no longer has the settings of step {step}; this run had too "
            f"many changes to keep the settings of steps {after + 1} to {up_to}",
            key="history.settings.dropped",
        )
    changes = [
        f"changed after step {line['step']}: {key}: {values}"
        for before, line in itertools.pairwise(lines)
        for key, values in _differences(before, line).items()
    ]
    return (lines[-1]["config"] if lines else ""), changes


def may_start(cfg: TrainConfig) -> bool:
    """Run `check_changes`; return False, with a message, if the run has finished."""
    changes = check_changes(cfg)
    folder, step = _place(cfg)
    status = read_status(folder)
    limit = cfg.trainer.reinforce.max_steps
    is_exported = (
        folder / "hf"
    ).is_dir() or not cfg.exp_manager.checkpoint_callback_params.save_hf_on_train_end
    is_done = 0 < limit <= step or not any(
        MEANING.match(key) or LENGTH.match(key) for key in changes
    )
    if not (
        step
        and is_exported
        and is_done
        and status
        and (status.state, status.step) == ("finished", step)
    ):
        return True
    if is_first_rank():
        others = "; ".join(
            f"{key}: {values}" for key, values in changes.items() if not LENGTH.match(key)
        )
        message = (
            f"the run in {folder} has finished, at step {step}; raise trainer.reinforce.max_steps "
            "to continue"
        )
        print(f"{message}, with {others}" if others else message)
    return False


def _place(cfg: TrainConfig) -> tuple[Path, int]:
    """Return the run's folder and the step to resume from; 0 for a new run."""
    folder = Path(cfg.exp_manager.explicit_log_dir)
    return folder, saved_step(folder) if cfg.exp_manager.resume_if_exists else 0


def _line(cfg: TrainConfig, step: int) -> dict[str, Any]:
    """Return the history's line of this start."""
    return {"step": step, "config": config_text(cfg.model_dump()), "files": files_of_functions(cfg)}


def files_of_functions(cfg: TrainConfig) -> dict[str, str | None]:
    """Return a digest of the file of each function or class of the user's, by its dotted name."""
    names = [section.name for section in cfg.reward_functions.values()]
    names += [cfg.reward_class, cfg.environment.name]
    return {name: _file_digest(name) for name in names if name}


def _file_digest(function: str) -> str | None:
    """Return a digest of a function's file without importing it; None if there is no file."""
    module = function.split(".")[:-1]
    places = [Path(folder, *module) for folder in sys.path if module]
    files = [
        file
        for place in places
        for file in (place / "__init__.py", Path(f"{place}.py"))
        if file.is_file()
    ]
    return hashlib.sha256(files[0].read_bytes()).hexdigest() if files else None


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Compare two lines of the history: configurations, and files of reward functions."""
    old = before.get("files", {})
    new = now.get("files", {})
    changed = {
        name: "its file was changed" for name in new if new[name] != old.get(name, new[name])
    }
    return compare(before["config"], now["config"]) | changed


def _history(folder: Path, step: int, within: Path | None = None) -> list[dict[str, Any]]:
    """Return the configurations in effect up to this step."""
    path = folder / HISTORY_FILE
    config = folder / CONFIG_FILE
    within = within or folder
    lines = []
    if path.exists():
        data = read_bounded(path, max_bytes=_MAX_HISTORY_BYTES, within=within)
        lines = parse_json_lines(path, io.BytesIO(data))
    if not lines and config.exists():  # a run from before config_history.jsonl existed
        path = config
        lines = [{"step": 0, "config": read_stored(config)}]
    if len(lines) > _MAX_HISTORY_LINES:
        raise DataError(
            f"{path}: {len(lines)} lines; expected at most {_MAX_HISTORY_LINES}; restore the file",
            key="history.file.too_many_lines",
        )
    for number, line in enumerate(lines, 1):
        place = path if path == config else f"{path}, line {number}"
        if not (type(line.get("step")) is int and isinstance(line.get("config"), str)):
            raise DataError(
                f"{place}: found the keys {sorted(line)[:10]}; expected step, a number, and "
                "config, a text; restore the file",
                key="history.line.no_settings",
            )
        if not all(type(line.get(key, 0)) is int for key in (_DROPPED_FROM, _DROPPED_UP_TO)):
            keys = f"{_DROPPED_FROM} and {_DROPPED_UP_TO}"
            raise DataError(
                f"{place}: {keys} must be step numbers; restore the file",
                key="history.line.dropped_no_numbers",
            )
        files = line.get("files", {})
        if not (
            isinstance(files, dict)
            and all(isinstance(digest, str | None) for digest in files.values())
        ):
            shown = str(files)[:100]
            raise DataError(
                f"{place}: files is {shown}; expected a digest for each function; restore the file",
                key="history.line.files_invalid",
            )
        read_tree(line["config"], place)
    return [line for line in lines if line["step"] < step]


@functools.lru_cache(32)
def read_tree(text: str, where: str = "the run's configuration") -> dict[str, Any]:
    """Read a configuration by `parse_stored`; callers must not change the result."""
    return parse_stored(text, where)
