"""What a run was configured with, step by step: kept in its folder, and compared when the run goes on.

config_history.jsonl has a line for the begin of the run, and one for each start that changed something: how many steps
were done then, and the configuration from there on. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from reinforce_rl.config import TrainConfig
from reinforce_rl.config_reading import default_config
from reinforce_rl.errors import ConfigError
from reinforce_rl.files import read_json_lines, write_atomically, write_json_lines
from reinforce_rl.status import read_status

HISTORY_FILE, CONFIG_FILE = "config_history.jsonl", "config.yaml"
_LENGTH = re.compile(r"trainer\.reinforce\.max_(steps|epochs)$")
# With another value of one of these, the steps before and after it belong to different runs.
_MEANING = re.compile(
    r"trainer\.reinforce\.(?!(max_epochs|max_steps|val_check_interval|save_interval|gradient_clip_val"
    r"|max_failed_fraction|max_skipped_steps|generation_work_queue|generator_log_probs|rollout_batch_seq_length)$)"
    r"|pretrained_checkpoint\.|model\.(data|peft)\.|model\.(seed|global_batch_size|encoder_seq_length)$"
    r"|model\.reinforce\.(num_rollout_samples$|sampling_params\.|length_params\.)"
    r"|reward$|reward_function\.(name|kwargs|weight|more_functions)$"
    r"|remote_rm\.(reward_model\.weight|more_reward_models)$"
)
# These may be others at every start, and change no number.
_SILENT = re.compile(r"resume_with_changes$|preflight|remote_rm\.reward_model\.(ip|port|replicas|token_file)$")


@dataclass(frozen=True)
class Change:
    """A key whose value is another one than it was."""

    key: str
    before: Any
    now: Any

    @property
    def has_meaning(self) -> bool:
        """The steps before and after it belong to different runs."""
        return _MEANING.match(self.key) is not None

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.before)} -> {json.dumps(self.now)}"


def compare(before: str, now: str) -> list[Change]:
    """The keys that differ between two configurations, in YAML; one that lacks a key has its default."""
    trees = [OmegaConf.to_container(OmegaConf.create(text)) for text in (before, now)]
    found = []
    for key, default in _leaves(default_config()).items():
        values = [_value(tree, key, default) for tree in trees]
        if values[0] != values[1] and not _SILENT.match(key):
            found.append(Change(key, *values))
    return found


def _leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    if not dataclasses.is_dataclass(config):
        return {prefix[:-1]: config}
    fields = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return {key: leaf for name, value in fields for key, leaf in _leaves(value, f"{prefix}{name}.").items()}


def _value(tree: Any, key: str, default: Any) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    if key == "remote_rm.more_reward_models":  # where they are does not matter
        return {name: server.get("weight", 1.0) for name, server in tree.items()}
    return tree


def saved_step(cfg: TrainConfig) -> int:
    """The step that a run goes on after; 0 for a new one."""
    latest = _folder(cfg) / "checkpoints" / "latest"
    if not cfg.exp_manager.resume_if_exists or not latest.is_file():
        return 0
    number = latest.read_text(encoding="utf-8").strip().removeprefix("step_")
    return int(number) if number.isdecimal() else 0


def check_changes(cfg: TrainConfig) -> list[Change]:
    """What differs from the configuration that the last step before this start had.

    Every rank may call it at any time: what the first rank records does not change the answer.

    Raises:
        ConfigError: something that changes the meaning of the run, without `resume_with_changes`.
    """
    step = saved_step(cfg)
    past = _before(_folder(cfg), step)
    found = compare(past[-1]["config"], _text(cfg)) if past else []
    refused = [str(change) for change in found if change.has_meaning]
    if refused and not cfg.resume_with_changes:
        raise ConfigError(
            [
                f"{_folder(cfg)} goes on after step {step}, and its steps so far had other settings: "
                f"{'; '.join(refused)}. Set them back, choose another exp_manager.explicit_log_dir for a new run, or "
                "go on with them by resume_with_changes=true"
            ]
        )
    return found


def record(cfg: TrainConfig) -> None:
    """Write down what this start is configured with; on the first rank."""
    folder, step, text = _folder(cfg), saved_step(cfg), _text(cfg)
    lines = _before(folder, step)
    if not lines or compare(lines[-1]["config"], text):
        lines.append({"step": step, "time": time.time(), "config": text})
    write_json_lines(folder / HISTORY_FILE, lines)
    write_atomically(folder / CONFIG_FILE, text)


def settings_of_steps(folder: Path, last_step: int) -> tuple[str, list[tuple[int, Change]]]:
    """The configuration, in YAML, that a step had, and after which steps something was changed before."""
    lines = _before(folder, max(last_step, 1))
    changes = [
        (line["step"], change)
        for before, line in itertools.pairwise(lines)
        for change in compare(before["config"], line["config"])
    ]
    return (lines[-1]["config"] if lines else ""), changes


def may_start(cfg: TrainConfig) -> bool:
    """False where the run has finished, which is said then.

    Raises:
        ConfigError: see `check_changes`.
    """
    step = _finished_at(cfg)
    if step is None:
        check_changes(cfg)
        return True
    if os.environ.get("RANK", "0") == "0":
        where = "trainer.reinforce.max_steps, and max_epochs where that ends it"
        print(f"the run in {_folder(cfg)} has finished, at step {step}; raise {where}, to go on", flush=True)
    return False


def _finished_at(cfg: TrainConfig) -> int | None:
    """The last step, where nothing is left to do."""
    folder, status, most = _folder(cfg), None, cfg.trainer.reinforce.max_steps
    with contextlib.suppress(OSError, ValueError, TypeError):  # written by another version
        status = read_status(folder)
    step = saved_step(cfg)
    if status is None or status.state != "finished" or step != status.step or step == 0:
        return None
    if cfg.exp_manager.checkpoint_callback_params.save_hf_on_train_end and not (folder / "hf").is_dir():
        return None
    if 0 < most <= step:
        return step
    past = _before(folder, step)
    changes = compare(past[-1]["config"], _text(cfg)) if past else []
    return None if any(one.has_meaning or _LENGTH.match(one.key) for one in changes) else step


def _folder(cfg: TrainConfig) -> Path:
    return Path(cfg.exp_manager.explicit_log_dir)


def _text(cfg: TrainConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))


def _before(folder: Path, step: int) -> list[dict[str, Any]]:
    """The lines of the history that steps up to this one had."""
    path, config = folder / HISTORY_FILE, folder / CONFIG_FILE
    if path.is_file():
        return [line for line in read_json_lines(path) if line["step"] < step]
    # of a run that began before there was a history
    return [{"step": 0, "config": config.read_text(encoding="utf-8")}] if config.is_file() and step > 0 else []
