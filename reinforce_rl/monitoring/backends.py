"""Back ends of metrics besides `metrics.jsonl`: TensorBoard, wandb, SwanLab and MLflow.

Their libraries are imported when they are used.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.monitoring import LOGGERS
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.monitoring.loggers import SUCCESS, BackgroundLogger, Level, MetricLogger
from reinforce_rl.utils.files import plain_number
from reinforce_rl.utils.user_class import OR_A_CLASS, import_user_class

# Timeouts of a wandb run; `FINISH_SECONDS` is below `CLOSE_SECONDS` of its thread.
START_SECONDS = 60
FINISH_SECONDS = 50
PROJECT = "reinforce_rl"
# Called with the configuration, the run's id and the step after which it is continued, or None.
LoggerClass = Callable[[TrainConfig, str, "int | None"], MetricLogger]
# Environment variables of a library by its argument. They count if the configuration has no value.
_OF_WANDB = {
    "project": ("WANDB_PROJECT",),
    "name": ("WANDB_NAME",),
    "mode": ("WANDB_MODE",),
    "dir": ("WANDB_DIR",),
    "id": ("WANDB_RUN_ID",),
    "resume": ("WANDB_RESUME",),
}
_OF_SWANLAB = {
    "project": ("SWANLAB_PROJ_NAME", "SWANLAB_PROJECT_NAME"),
    "name": ("SWANLAB_EXP_NAME", "SWANLAB_EXPERIMENT_NAME"),
    "mode": ("SWANLAB_MODE",),
    "log_dir": ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR"),
    "id": ("SWANLAB_RUN_ID",),
    "resume": ("SWANLAB_RESUME", "SWANLAB_RUN_RESUME"),
}


def start_loggers(
    cfg: TrainConfig, run_id: str, resume_step: int | None, tell: Callable[[str], None]
) -> list[BackgroundLogger]:
    """Start the back ends of `exp_manager.loggers`, each in a separate thread.

    A class is called with `cfg`, `run_id` and `resume_step`, in that thread.

    Args:
        run_id: identifies the run: a back end continues the run of the same id.
        resume_step: step after which it is continued.
        tell: shows a message.
    """
    loggers = []
    for name in cfg.exp_manager.used_loggers:
        start = partial(logger_class(name), cfg, run_id, resume_step)
        loggers.append(BackgroundLogger(name, start, tell))
    return loggers


def logger_class(name: str) -> LoggerClass:
    """Return the class of a name in `LOGGERS`, or of a dotted name, which is imported.

    Raises ConfigError: it cannot be imported, or is not a subclass of `MetricLogger`.
    """
    entry = LOGGERS.get(name)
    class_name = name if entry is None else entry.class_name
    try:
        kind = import_user_class(class_name)
    except ImportError as error:
        sentence = (
            f"exp_manager.loggers has {name!r}, which {error}. Expected {', '.join(LOGGERS)}, "
            f"{OR_A_CLASS}"
        )
        raise ConfigError([Fault(sentence, key="loggers.class.not_importable")]) from error
    if not (isinstance(kind, type) and issubclass(kind, MetricLogger)):
        sentence = (
            f"exp_manager.loggers has {name!r}; expected a subclass of MetricLogger "
            "(reinforce_rl/monitoring/loggers.py)"
        )
        raise ConfigError([Fault(sentence, key="loggers.class.no_logger")])
    return kind


def check_logger_classes(cfg: TrainConfig) -> None:
    """Raise ConfigError with the faults of all classes that `exp_manager.loggers` names."""
    faults: list[str] = []
    for name in cfg.exp_manager.used_loggers:
        try:
            logger_class(name)
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)


class TensorboardLogger(MetricLogger):
    """Writes an event file into the run's folder.

    The file of a resumed run hides earlier events after `resume_step`; all for 0.
    """

    def __init__(self, cfg: TrainConfig, run_id: str, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(cfg.exp_manager.explicit_log_dir) / "tensorboard"
        # A run that starts again from 0 repeats the validation of step 0.
        self._writer = SummaryWriter(str(folder), purge_step=resume_step and resume_step + 1)

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        for name, number in _finite(metrics, prefix).items():
            self._writer.add_scalar(name, number, step)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        if rows:
            self._writer.add_text(key, "\n\n---\n\n".join(map(_as_markdown, rows)), step)

    def alert(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        self._writer.add_text("alerts", f"**{level}, {title}**: {text}", step)

    def commit(self, step: int) -> None:
        """Flush to the operating system: TensorBoard shows the step, and it survives a kill."""
        self._writer.flush()

    def finalize(self, status: str = SUCCESS) -> None:
        self._writer.close()


def _as_markdown(row: Mapping[str, Any]) -> str:
    numbers = ", ".join(
        f"{name} {value}" for name, value in row.items() if not isinstance(value, str)
    )
    texts = [(name, value) for name, value in row.items() if isinstance(value, str)]
    # Indented, so that a sample's Markdown and HTML are shown as text.
    blocks = [
        f"{name}:\n\n" + textwrap.indent(value, "    ", lambda line: True) for name, value in texts
    ]
    return "\n\n".join([numbers, *blocks])


class WandbLogger(MetricLogger):
    """A wandb run, with the settings of `exp_manager.wandb_logger_kwargs`.

    wandb rejects steps below its last one: steps of a killed run after its last checkpoint keep
    their values (on one process they are the same). Mode "offline" keeps everything in the run's
    folder, for `wandb sync`.
    """

    def __init__(self, cfg: TrainConfig, run_id: str, resume_step: int | None = None):
        # At exit, wandb's telemetry waits up to a minute for a server that hangs.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        defaults = {
            "init_timeout": START_SECONDS,
            "finish_timeout": FINISH_SECONDS,
            "finish_timeout_raises": True,
            # wandb's capture of stdout and the live progress display disturb each other.
            "console": "off",
            "silent": True,
        }
        settings = wandb.Settings(
            **{
                name: value
                for name, value in defaults.items()
                if not os.environ.get(f"WANDB_{name.upper()}")
            }
        )
        folder = Path(cfg.exp_manager.explicit_log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            settings=settings, **_arguments(cfg, run_id, _OF_WANDB, dir=str(folder))
        )
        self._table: Callable[..., Any] = partial(wandb.Table, allow_mixed_types=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        self._run.log(_finite(metrics, prefix), step=step)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        if rows:
            self._run.log(
                {key: self._table(list(rows[0]), [list(row.values()) for row in rows])}, step=step
            )

    def alert(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        self._run.alert(title=title, text=f"step {step}: {text}", level=level)

    def finalize(self, status: str = SUCCESS) -> None:
        try:
            self._run.finish(exit_code=0 if status == SUCCESS else 1)
        except TimeoutError:
            import wandb

            # Wait for the server in this thread, which may be left behind, not in an exit handler.
            wandb.teardown()
            raise


class SwanlabLogger(WandbLogger):
    """A SwanLab run, with the same settings; "offline" is for `swanlab sync`. Alerts are texts."""

    def __init__(self, cfg: TrainConfig, run_id: str, resume_step: int | None = None):
        import swanlab

        quiet = {
            "interactive": False,
            "terminal": {"proxy_type": "none"},
            "probe": {"requirements": False},
        }
        # `swanlab.Settings` takes precedence over variables such as SWANLAB_TERMINAL_PROXY_TYPE.
        given = tuple(
            name
            for name in quiet
            if any(v.startswith(f"SWANLAB_{name.upper()}") for v in os.environ)
        )
        settings = swanlab.Settings(
            **{name: value for name, value in quiet.items() if name not in given}
        )
        folder = Path(cfg.exp_manager.explicit_log_dir) / "swanlog"
        self._run = swanlab.init(
            settings=settings, **_arguments(cfg, run_id, _OF_SWANLAB, log_dir=str(folder))
        )
        self._table = lambda columns, data: swanlab.echarts.Table().add(columns, data)
        self._text = swanlab.Text

    def alert(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        self._run.log({"alerts": self._text(text, caption=f"{level}, {title}")}, step=step)

    def finalize(self, status: str = SUCCESS) -> None:
        failure = {} if status == SUCCESS else {"state": "crashed", "error": "see the run's log"}
        self._run.finish(**failure)


class MlflowLogger(MetricLogger):
    """An MLflow run: numbers as metrics, configuration, tables and alerts as artifacts.

    The tag `reinforce_rl.run_id` identifies a run that is continued. Steps of a killed run after
    its last checkpoint appear twice.
    """

    def __init__(self, cfg: TrainConfig, run_id: str, resume_step: int | None = None):
        # The file store is not maintained any more, but mlflow-skinny has no other.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        options = cfg.exp_manager.mlflow_logger_kwargs
        folder = Path(cfg.exp_manager.explicit_log_dir)
        self._metric = Metric
        self._pending = dict[str, float]()
        address = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        client = MlflowClient(address or (folder / "mlruns").absolute().as_uri())
        self._client = client
        place = self._experiment(options.experiment_name)
        past = client.search_runs([place], filter_string=f"tags.`reinforce_rl.run_id` = '{run_id}'")
        tags = {"reinforce_rl.run_id": run_id}
        self._id = os.environ.get("MLFLOW_RUN_ID") or (past[0].info.run_id if past else "")
        if not self._id:
            self._id = client.create_run(
                place, run_name=cfg.exp_manager.name, tags=tags
            ).info.run_id
        client.update_run(self._id, status="RUNNING")
        client.log_dict(self._id, cfg.model_dump(), "config.yaml")

    def _experiment(self, name: str | None) -> str:
        """Return the id of the experiment; create a named experiment that does not exist."""
        number = os.environ.get("MLFLOW_EXPERIMENT_ID")
        name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None and number:
            return number
        name = name or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self._client.create_experiment(name)

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Hold numbers; `commit` sends them in one request."""
        self._pending |= _finite(metrics, prefix)

    def log_table(self, key: str, rows: list[dict[str, Any]], step: int) -> None:
        if rows:
            table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            self._client.log_text(
                self._id, json.dumps(table, ensure_ascii=False), f"{key}/step_{step:05d}.json"
            )

    def alert(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        self._client.log_text(self._id, f"{level}: {text}\n", f"alerts/step_{step:05d} {title}.txt")

    def commit(self, step: int) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(name, value, now, step) for name, value in self._pending.items()]
        self._pending = {}
        self._client.log_batch(self._id, metrics=metrics)

    def finalize(self, status: str = SUCCESS) -> None:
        self._client.set_terminated(self._id, "FINISHED" if status == SUCCESS else "FAILED")


def _arguments(
    cfg: TrainConfig, run_id: str, variables: Mapping[str, Sequence[str]], **folder: str
) -> dict[str, Any]:
    """Return the arguments of `init`.

    They are the configured values, and defaults for arguments without an environment variable.
    """
    section = cfg.exp_manager.wandb_logger_kwargs
    configured = {"project": section.project, "mode": section.mode, "config": cfg.model_dump()}
    defaults = {
        "project": PROJECT,
        "mode": "online",
        "name": section.name,
        "id": run_id,
        "resume": "allow",
        **folder,
    }
    if section.name != type(section).model_fields["name"].default:
        configured["name"] = section.name
    arguments = {name: value for name, value in configured.items() if value is not None}
    for name, value in defaults.items():
        if not any(os.environ.get(variable) for variable in variables[name]):
            arguments.setdefault(name, value)
    return arguments


def _finite(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the finite numbers, by full name."""
    numbers = {prefix + name: plain_number(value) for name, value in metrics.items()}
    return {name: number for name, number in numbers.items() if number is not None}
