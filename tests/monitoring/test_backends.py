"""Back ends: files of TensorBoard, wandb, SwanLab and MLflow, alone and of whole runs."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.errors import check_fault, raises_error
from helpers.tiny_run import metrics_of, run, without_times
from helpers.wandb_files import history, offline_files, read_offline_file

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.monitoring import LOGGERS
from reinforce_rl.config.rules import find_faults
from reinforce_rl.errors import ConfigError
from reinforce_rl.monitoring import backends
from reinforce_rl.monitoring.backends import (
    MlflowLogger,
    SwanlabLogger,
    TensorboardLogger,
    WandbLogger,
)
from reinforce_rl.monitoring.loggers import MetricLogger
from reinforce_rl.trainer.inputs import read_inputs

RL = "trainer.reinforce"
MANAGER = "exp_manager"
ROWS = [
    {"prompt": "why?", "response": "because | <b>", "reward": 0.5},
    {"prompt": "so", "response": "", "reward": None},
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SWANLAB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "swanlab"))


def config_of(folder: Path, **manager) -> TrainConfig:
    wandb = {"project": "aligning", "name": "first", "mode": "offline"}
    return TrainConfig(
        exp_manager={"explicit_log_dir": str(folder), "wandb_logger_kwargs": wandb, **manager}
    )  # type: ignore[arg-type]


def log_two_steps(logger: MetricLogger) -> None:
    for step in (1, 2):
        metrics = {"rewards": step / 10, "grad_norm": math.nan}
        logger.log_metrics(metrics, step, "train/")
        logger.log_metrics({"rewards": 0.75}, step, "val/")
        logger.log_table("validation", ROWS, step)
        logger.commit(step)
    logger.alert("stopped", "time is up", 2, "INFO")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return each (step, value) by name, also values that the reader would hide."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(
        str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False
    )
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_numbers_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorboardLogger(config_of(tmp_path), "abcd1234")
    assert isinstance(logger, MetricLogger)
    for step in (0, 1):
        metrics = {"rewards": step + 0.5, "grad_norm": math.nan, "lr": math.inf}
        logger.log_metrics(metrics, step, "train/")
        logger.log_metrics({"rewards": 0.25}, step, "val/")
        logger.log_table("validation", [{"prompt": "a"}], step)
        logger.commit(step)
        assert len(scalars(tmp_path / "tensorboard")["train/rewards"]) == step + 1, (
            "it can be watched while the run goes on"
        )
    logger.finalize()
    expected = {
        "train/rewards": [(0, 0.5), (1, 1.5)],
        "val/rewards": [(0, 0.25), (1, 0.25)],
    }
    assert scalars(tmp_path / "tensorboard") == expected


def test_a_run_that_goes_on_shows_each_number_once(tmp_path):
    """Killed after step 3 and resumed from the checkpoint of step 2."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, value, resume_step in (([1, 2, 3], 1.0, None), ([3, 4], 9.0, 2)):
        logger = TensorboardLogger(config_of(tmp_path), "abcd1234", resume_step)
        for step in steps:
            logger.log_metrics({"rewards": value}, step, "train/")
            logger.log_table("validation", ROWS, step)
            logger.commit(step)
        logger.alert("stopped", "time is up", steps[-1], "INFO")
        logger.finalize()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [
        (1, 1.0),
        (2, 1.0),
        (3, 9.0),
        (4, 9.0),
    ]
    rewards = [(e.step, e.value) for e in events.Scalars("train/rewards")]
    assert rewards == expected
    text_steps = {event.step for event in events.Tensors("validation/text_summary")}
    assert text_steps == {1, 2, 3, 4}
    text = events.Tensors("validation/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    because | <b>" in text
    assert "reward 0.5" in text
    alert_steps = [event.step for event in events.Tensors("alerts/text_summary")]
    assert alert_steps == [3, 4]


def test_a_run_that_begins_again_shows_its_first_validation_once(tmp_path):
    """Killed before its first checkpoint."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for value, resume_step in ((1.0, None), (9.0, 0)):
        logger = TensorboardLogger(config_of(tmp_path), "abcd1234", resume_step)
        for step in (0, 1):
            logger.log_metrics({"rewards": value}, step, "val/")
        logger.finalize()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [(0, 9.0), (1, 9.0)]
    rewards = [(e.step, e.value) for e in events.Scalars("val/rewards")]
    assert rewards == expected


@pytest.mark.more
def test_an_offline_wandb_run_reads_back_and_resumes_under_its_id(tmp_path):
    pytest.importorskip("wandb")
    logger = WandbLogger(config_of(tmp_path), "abcd1234")
    log_two_steps(logger)
    logger.finalize()

    (path,) = offline_files(tmp_path)
    assert "abcd1234" in path.name
    steps = history(path)
    assert sorted(steps) == [1, 2]
    rewards = [steps[s]["train/rewards"] for s in (1, 2)]
    assert rewards == [0.1, 0.2]
    assert steps[2]["val/rewards"] == 0.75
    for values in steps.values():
        assert "train/grad_norm" not in values

    records = list(read_offline_file(path))
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    (run,) = runs
    assert run.project == "aligning"
    assert run.display_name == "first"
    assert run.run_id == "abcd1234"
    shown = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert shown["trainer"]["reinforce"]["max_steps"] == -1
    exit_codes = [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"]
    assert exit_codes == [0]
    alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    (alert,) = alerts
    assert alert.title == "stopped"
    assert alert.text == "step 2: time is up"
    assert alert.level == "INFO"

    tables = sorted(path.parent.glob("files/media/table/*.table.json"))
    assert len(tables) == 2
    expected = [
        ["why?", "because | <b>", 0.5],
        ["so", "", None],
    ]
    assert json.loads(tables[0].read_text())["data"] == expected

    resumed = WandbLogger(config_of(tmp_path / "again"), "abcd1234")
    resumed.log_metrics({"rewards": 0.3}, 3, "train/")
    resumed.log_table("samples", [], 3)
    resumed.finalize("failed")
    (path,) = offline_files(tmp_path / "again")
    assert "abcd1234" in path.name
    assert history(path)[3]["train/rewards"] == 0.3
    codes = [
        r.exit.exit_code for r in read_offline_file(path) if r.WhichOneof("record_type") == "exit"
    ]
    assert codes == [1]


@pytest.mark.slow
def test_a_wandb_server_that_hangs_does_not_delay_the_exit(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    code = """if True:
        import sys, time
        from reinforce_rl.config.actor import TrainConfig
        from reinforce_rl.monitoring import backends, loggers
        backends.START_SECONDS = 2
        manager = {"explicit_log_dir": sys.argv[1], "wandb_logger_kwargs": {"mode": "online"}}
        cfg = TrainConfig(exp_manager=manager)
        logger = loggers.BackgroundLogger(
            "wandb", lambda: backends.WandbLogger(cfg, "abcd1234"), print
        )
        logger.finalize()
        print(time.time())
    """
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with socket.create_server(("127.0.0.1", 0)) as server:
        # accepts no connection, so no request is answered
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    message, ended = done.stdout.splitlines()
    assert "logger wandb: failed" in message
    assert time.time() - float(ended) < 8


def test_swanlab_keeps_numbers_tables_and_alerts_for_a_later_sync(tmp_path):
    pytest.importorskip("swanlab")
    logger = SwanlabLogger(config_of(tmp_path), "abcd1234")
    log_two_steps(logger)
    logger.finalize("failed")
    (folder,) = (tmp_path / "swanlog").glob("run-*-abcd1234")
    written = (folder / "run-abcd1234.swanlab").read_bytes()
    assert b"train/rewards" in written
    assert b"val/rewards" in written
    assert b"train/grad_norm" not in written
    echarts_folder = folder / "media" / "echarts"
    tables = [json.loads(path.read_text()) for path in sorted(echarts_folder.iterdir())]
    assert len(tables) == 2
    assert "because | <b>" in json.dumps(tables[0])
    text_folder = folder / "media" / "text"
    assert [path.read_text() for path in text_folder.iterdir()] == ["time is up"]
    assert "max_steps" in (folder / "files" / "config.yaml").read_text()


def test_mlflow_keeps_a_run_in_files_and_goes_on_with_it(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    for status in ("success", "failed"):
        logger = MlflowLogger(config_of(tmp_path), "abcd1234")
        log_two_steps(logger)
        logger.finalize(status)
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    place = client.get_experiment_by_name("reinforce_rl")
    (mlflow_run,) = client.search_runs([place.experiment_id])
    assert mlflow_run.info.status == "FAILED"
    assert mlflow_run.info.run_name == "reinforce"
    past = client.get_metric_history(mlflow_run.info.run_id, "train/rewards")
    expected = [(1, 0.1), (2, 0.2)] * 2
    assert [(point.step, point.value) for point in past] == expected
    assert "train/grad_norm" not in mlflow_run.data.metrics
    folder = Path(mlflow_run.info.artifact_uri.removeprefix("file://"))
    validation_file = folder / "validation" / "step_00002.json"
    assert json.loads(validation_file.read_text())["data"][1] == [
        "so",
        "",
        None,
    ]
    assert (folder / "alerts" / "step_00002 stopped.txt").read_text() == "INFO: time is up\n"
    assert "max_steps: -1" in (folder / "config.yaml").read_text()


def test_other_runs_are_not_continued(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    for run_id in ("abcd1234", "abcd1235"):
        MlflowLogger(config_of(tmp_path), run_id).finalize()
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    place = client.get_experiment_by_name("reinforce_rl")
    run_ids = {
        run.data.tags["reinforce_rl.run_id"] for run in client.search_runs([place.experiment_id])
    }
    assert run_ids == {"abcd1234", "abcd1235"}


def silent_config(folder: Path, **manager) -> TrainConfig:
    values = {"explicit_log_dir": str(folder), **manager}
    return TrainConfig(exp_manager=values)  # type: ignore[arg-type]


def wandb_run(folder: Path):
    (path,) = offline_files(folder)
    runs = [r.run for r in read_offline_file(path) if r.WhichOneof("record_type") == "run"]
    (run,) = runs
    return run


def test_wandb_takes_its_own_variables_where_the_configuration_is_silent(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    variables = {
        "WANDB_PROJECT": "of the environment",
        "WANDB_ENTITY": "our-team",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(elsewhere),
        "WANDB_RUN_ID": "efgh5678",
        "WANDB_NAME": "its name",
        "WANDB_RUN_GROUP": "its group",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    WandbLogger(silent_config(tmp_path / "run"), "abcd1234").finalize()
    run = wandb_run(elsewhere)
    assert run.project == "of the environment"
    assert run.entity == "our-team"
    assert run.run_id == "efgh5678"
    assert run.display_name == "its name"
    assert run.run_group == "its group"


def test_the_configuration_beats_wandbs_variables(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {
        "WANDB_PROJECT": "other",
        "WANDB_MODE": "online",
        "WANDB_NAME": "other",
    }.items():
        monkeypatch.setenv(name, value)
    WandbLogger(config_of(tmp_path), "abcd1234").finalize()
    run = wandb_run(tmp_path)
    assert run.project == "aligning"
    assert run.display_name == "first"
    assert run.run_id == "abcd1234"


def test_wandb_without_any_choice(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbLogger(silent_config(tmp_path), "abcd1234").finalize()
    run = wandb_run(tmp_path)
    assert run.project == "reinforce_rl"
    assert run.display_name == "reinforce"
    assert run.run_id == "abcd1234"


def test_wandb_may_be_disabled_by_its_variable(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = WandbLogger(silent_config(tmp_path), "abcd1234")
    log_two_steps(logger)
    logger.finalize()
    assert offline_files(tmp_path) == []


def test_swanlab_takes_its_own_variables_where_the_configuration_is_silent(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    variables = {
        "SWANLAB_PROJ_NAME": "of-the-environment",
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(tmp_path / "elsewhere"),
        "SWANLAB_EXP_NAME": "its-name",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    logger = SwanlabLogger(silent_config(tmp_path / "run"), "abcd1234")
    log_two_steps(logger)
    logger.finalize()
    (file,) = (tmp_path / "elsewhere").glob("run-*/run-*.swanlab")
    written = file.read_bytes()
    assert b"of-the-environment" in written
    assert b"its-name" in written
    assert not (tmp_path / "run").exists()


def test_mlflow_takes_its_own_variables_where_the_configuration_is_silent(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    address = (tmp_path / "elsewhere").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    MlflowLogger(silent_config(tmp_path / "run"), "abcd1234").finalize()
    client = mlflow.MlflowClient(address)
    place = client.get_experiment_by_name("of the environment")
    (run,) = client.search_runs([place.experiment_id])
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", place.experiment_id)
    MlflowLogger(silent_config(tmp_path / "run"), "abcd1235").finalize()
    assert len(client.search_runs([place.experiment_id])) == 2
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    logger = MlflowLogger(silent_config(tmp_path / "run"), "abcd1236")
    log_two_steps(logger)
    logger.finalize()
    assert client.get_run(run.info.run_id).data.metrics["val/rewards"] == 0.75
    assert len(client.search_runs([place.experiment_id])) == 2
    assert not (tmp_path / "run").exists()


def test_the_configuration_beats_mlflows_variables(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other")
    given = {"tracking_uri": (tmp_path / "given").as_uri(), "experiment_name": "given"}
    MlflowLogger(silent_config(tmp_path / "run", mlflow_logger_kwargs=given), "abcd1234").finalize()
    assert mlflow.MlflowClient(given["tracking_uri"]).get_experiment_by_name("given") is not None


def test_faults_of_loggers_are_found_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    manager = {"loggers": ["wand", "swanlab"], "create_tensorboard_logger": True}
    faults = [
        fault
        for fault in find_faults(config_of(tmp_path, **manager))
        if "exp_manager.loggers" in fault
    ]
    unknown, not_installed = faults
    names = "tensorboard, wandb, swanlab, mlflow"
    check_fault([unknown], "config.loggers.unknown", "'wand'", names)
    command = "pip install 'reinforce-rl[swanlab]'"
    check_fault([not_installed], "config.loggers.not_installed", "swanlab", command)


CLASSES = """
from reinforce_rl.monitoring.loggers import MetricLogger

class Kept(MetricLogger):
    calls = []

    def __init__(self, cfg, run_id, resume_step):
        self.calls.append(("start", cfg.exp_manager.name, len(run_id), resume_step))

    def log_metrics(self, metrics, step, prefix=""):
        self.calls.append((prefix, step, metrics.get("rewards")))

    def finalize(self, status="success"):
        self.calls.append(("end", status))

class NoLogger:
    pass
"""


@pytest.fixture
def my_loggers(tmp_path, monkeypatch) -> Iterator[str]:
    """Write a module of loggers; return its name."""
    (tmp_path / "my_loggers.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_loggers"
    sys.modules.pop("my_loggers", None)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("my_loggers.Missing", "loggers.class.not_importable"),
        ("no_such_module.Kept", "loggers.class.not_importable"),
        ("my_loggers.NoLogger", "loggers.class.no_logger"),
    ],
)
def test_a_class_that_is_no_logger_is_refused_before_a_run(tmp_path, my_loggers, name, key):
    cfg = config_of(tmp_path, loggers=[name])
    assert [fault for fault in find_faults(cfg) if "exp_manager.loggers" in fault] == []
    with raises_error(key, "exp_manager.loggers", name):
        backends.check_logger_classes(cfg)
    (error,) = [error for error in read_inputs(cfg).errors if isinstance(error, ConfigError)]
    assert error.keys == [key]


def test_every_logger_of_the_registry_has_its_class():
    for name, entry in LOGGERS.items():
        assert issubclass(backends.logger_class(name), MetricLogger)
        assert entry.package == name


def test_names_and_switches_are_one_list(tmp_path):
    manager = config_of(tmp_path, loggers=["mlflow", "wandb"], create_wandb_logger=True).exp_manager
    assert manager.used_loggers == ["mlflow", "wandb"]
    assert config_of(tmp_path, create_tensorboard_logger=True).exp_manager.used_loggers == [
        "tensorboard"
    ]


class TestRuns:
    def test_a_class_of_a_dotted_name_gets_every_number(self, tmp_path, mesh, my_loggers):
        keys = (f"{MANAGER}.loggers=[my_loggers.Kept]", f"{RL}.max_epochs=2")
        run(tmp_path, mesh, *keys, f"{RL}.max_steps=1")
        lines = run(tmp_path, mesh, *keys, f"{RL}.max_steps=2")
        calls = sys.modules["my_loggers"].Kept.calls
        assert [call for call in calls if call[0] in ("start", "end")] == [
            ("start", "reinforce", 8, 0),
            ("end", "success"),
            ("start", "reinforce", 8, 1),
            ("end", "success"),
        ]
        rewards = {line["step"]: line["train/rewards"] for line in lines}
        logged = [call for call in calls if call[0] == "train/" and call[2] is not None]
        assert {step: reward for _, step, reward in logged} == rewards

    def test_loggers_that_fail_change_nothing_and_say_so_once(
        self, tmp_path, mesh, monkeypatch, capsys
    ):
        class Broken(MetricLogger):
            def __init__(self, *_):
                raise ConnectionError("no route to host")

        class Falling(MetricLogger):
            def __init__(self, *_):
                pass

            def commit(self, step):
                raise TimeoutError("no answer")

            def finalize(self, status="success"):
                raise TimeoutError("no answer")

        keys = (f"{RL}.max_steps=2", f"{RL}.val_check_interval=1")
        (tmp_path / "plain").mkdir()
        plain = run(tmp_path / "plain", mesh, *keys)
        capsys.readouterr()
        monkeypatch.setattr(backends, "WandbLogger", Broken)
        monkeypatch.setattr(backends, "MlflowLogger", Falling)
        (tmp_path / "logged").mkdir()
        logged = run(tmp_path / "logged", mesh, *keys, f"{MANAGER}.loggers=[wandb,mlflow]")
        numbers = [without_times(line) for line in logged]
        assert numbers == [without_times(line) for line in plain]
        messages = [line for line in capsys.readouterr().out.splitlines() if "logger " in line]
        failures = sorted(line.split(";")[0] for line in messages)
        assert failures == [
            "logger mlflow: failed (TimeoutError: no answer). The run continues",
            "logger wandb: failed (ConnectionError: no route to host). The run continues",
        ]

    def test_a_resumed_run_goes_on_under_its_id_with_samples_and_alerts(self, tmp_path, mesh):
        mlflow = pytest.importorskip("mlflow")
        keys = (
            f"{MANAGER}.loggers=[mlflow]",
            f"{MANAGER}.sample_table_interval=2",
            f"{RL}.max_epochs=2",
        )
        alike = lambda ids: 0.5  # noqa: E731  every group with zero std: an alert
        run(tmp_path, mesh, *keys, f"{RL}.max_steps=1", rm=alike)
        lines = {
            line["step"]: line for line in run(tmp_path, mesh, *keys, f"{RL}.max_steps=3", rm=alike)
        }
        assert metrics_of(tmp_path) == list(lines.values())
        client = mlflow.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
        (mlflow_run,) = client.search_runs(
            [client.get_experiment_by_name("reinforce_rl").experiment_id]
        )
        past = client.get_metric_history(mlflow_run.info.run_id, "train/response_lengths")
        expected = {s: lines[s]["train/response_lengths"] for s in (1, 2, 3)}
        assert {point.step: point.value for point in past} == expected
        folder = Path(mlflow_run.info.artifact_uri.removeprefix("file://"))
        names = sorted(path.name for path in (folder / "rollouts").iterdir())
        assert names == ["step_00001.json", "step_00003.json"]
        alerts = sorted(path.name for path in (folder / "alerts").glob("*zero_reward_std*"))
        assert alerts == ["step_00003 zero_reward_std.txt"], (
            "once, in the third such step over both starts"
        )

    def test_a_resumed_run_compares_with_its_first_step(self, tmp_path, mesh):
        mlflow = pytest.importorskip("mlflow")
        keys = (f"{MANAGER}.loggers=[mlflow]", f"{RL}.max_epochs=2")
        run(tmp_path, mesh, *keys, f"{RL}.max_steps=1", rm=lambda ids: 0.0)
        run(tmp_path, mesh, *keys, f"{RL}.max_steps=4", rm=lambda ids: 1.0)
        client = mlflow.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
        (mlflow_run,) = client.search_runs(
            [client.get_experiment_by_name("reinforce_rl").experiment_id]
        )
        alerts = Path(mlflow_run.info.artifact_uri.removeprefix("file://")) / "alerts"
        names = sorted(
            path.name
            for path in alerts.iterdir()
            if path.stem.endswith(("zero_reward_std", "solved"))
        )
        assert names == ["step_00004 solved.txt"], "the third such step"

    def test_an_error_is_an_alert(self, tmp_path, mesh):
        mlflow = pytest.importorskip("mlflow")
        from reinforce_rl.errors import RewardServerError

        with pytest.raises(RewardServerError):
            run(tmp_path, mesh, f"{MANAGER}.loggers=[mlflow]", rm=lambda ids: math.nan)
        client = mlflow.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
        (mlflow_run,) = client.search_runs(
            [client.get_experiment_by_name("reinforce_rl").experiment_id]
        )
        assert mlflow_run.info.status == "FAILED"
        (alert,) = (Path(mlflow_run.info.artifact_uri.removeprefix("file://")) / "alerts").iterdir()
        assert alert.name == "step_00000 failed.txt"
        assert "max_failed_fraction" in alert.read_text()
