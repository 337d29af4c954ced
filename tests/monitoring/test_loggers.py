"""Loggers: no step twice through kills and resumes, TensorBoard's and wandb's own files, several as one."""

from __future__ import annotations

import builtins
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.wandb_files import history, offline_files, read_offline_file

from reinforce_rl.errors import DataError, ReinforceError
from reinforce_rl.monitoring.loggers import (
    JsonlLogger,
    Loggers,
    MetricLogger,
    TensorboardLogger,
    WandbLogger,
    read_metrics,
)


def log_step(logger: MetricLogger, step: int, reward: float = 0.5) -> None:
    logger.log_metrics({"rewards": reward}, step, "train/")
    logger.log_metrics({"generate": 1.25}, step, "timers/")
    logger.commit(step)


def test_calls_of_one_step_become_one_line_with_step_first(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    logger = JsonlLogger(path)
    log_step(logger, 1)
    logger.log_metrics({"rewards": 0.1}, 2, "train/")
    logger.log_metrics({"rewards": 0.2}, 2, "val/")
    assert len(read_metrics(path)) == 1, "a step is written at its commit, not before"
    logger.commit(2)
    first, second = read_metrics(path)
    assert next(iter(first)) == "step"
    assert (second["train/rewards"], second["val/rewards"]) == (0.1, 0.2)
    assert first.pop("time") <= second["time"]
    assert first == {"step": 1, "train/rewards": 0.5, "timers/generate": 1.25}


def test_numbers_of_every_kind_and_not_finite_ones(tmp_path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    values = {"nan": math.nan, "inf": -math.inf, "tensor": torch.tensor(0.25), "numpy": np.float32(0.1), "count": 7}
    logger.log_metrics(values, 1)  # type: ignore[arg-type]
    logger.log_metrics({"tensor_nan": torch.tensor(math.nan)}, 1)  # type: ignore[dict-item]
    logger.commit(1)
    text = (tmp_path / "m.jsonl").read_text()

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    record = json.loads(text, parse_constant=refuse)
    assert record["nan"] is None and record["inf"] is None and record["tensor_nan"] is None
    assert record["tensor"] == 0.25 and record["count"] == 7 and isinstance(record["count"], int)
    assert np.float32(record["numpy"]) == np.float32(0.1)


def test_floats_survive_bit_for_bit(tmp_path):
    value = 0.1 + 0.2
    logger = JsonlLogger(tmp_path / "m.jsonl")
    log_step(logger, 1, value)
    assert read_metrics(tmp_path / "m.jsonl")[0]["train/rewards"] == value


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = JsonlLogger(path)
    for step in range(1, 8):
        log_step(logger, step, step / 10)
    with path.open("a") as file:
        file.write('{"step": 8, "train/rew')  # what SIGKILL leaves
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]
    resumed = JsonlLogger(path, resume_step=4)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    for step in range(5, 9):
        log_step(resumed, step, step / 10)
    assert [(line["step"], line["train/rewards"]) for line in read_metrics(path)] == [(s, s / 10) for s in range(1, 9)]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"], "no temporary file is left"


def test_resume_from_nothing_keeps_only_step_zero(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = JsonlLogger(path)
    for step in range(3):
        log_step(logger, step)
    JsonlLogger(path, resume_step=0)
    assert [line["step"] for line in read_metrics(path)] == [0]


def test_a_step_committed_again_is_merged_into_its_line(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = JsonlLogger(path)
    for step in range(3):
        log_step(logger, step)
    resumed = JsonlLogger(path, resume_step=2)
    resumed.log_metrics({"rewards": 0.9}, 2, "val/")
    resumed.commit(2)
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2]["val/rewards"] == 0.9 and lines[2]["train/rewards"] == 0.5


def test_a_new_run_refuses_the_metrics_of_another(tmp_path):
    path = tmp_path / "m.jsonl"
    log_step(JsonlLogger(path), 3)
    with pytest.raises(DataError, match=r"already holds metrics up to step 3.*choose another run folder"):
        JsonlLogger(path)
    assert len(read_metrics(path)) == 1


def test_a_new_run_takes_a_file_that_holds_only_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1')
    log_step(JsonlLogger(path), 1)
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_finalize_writes_what_was_not_committed(tmp_path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    logger.log_metrics({"rewards": 0.5}, 4, "train/")
    logger.finalize("failed")
    assert read_metrics(tmp_path / "m.jsonl")[0]["step"] == 4


@pytest.mark.parametrize(
    ("line", "message"), [("{oops}", "line 2: not valid JSON"), ("[1]", "line 2: found a JSON list"), ("{}", "line 2")]
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=message):
        read_metrics(path)
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path / "absent.jsonl")


class Recorder:
    def __init__(self, fails: bool = False):
        self.calls: list[tuple] = []
        self.fails = fails

    def log_metrics(self, metrics, step, prefix=""):
        self.calls.append(("metrics", dict(metrics), step, prefix))

    def log_table(self, key, rows, step):
        self.calls.append(("table", key, rows, step))

    def commit(self, step):
        self.calls.append(("commit", step))

    def finalize(self, status="success"):
        self.calls.append(("finalize", status))
        if self.fails:
            raise OSError("disk full")


def test_loggers_pass_everything_on_and_are_a_logger():
    one, two = Recorder(), Recorder()
    both = Loggers([one, two])
    assert isinstance(both, MetricLogger)
    both.log_metrics({"rewards": 1.0}, 3, "val/")
    both.log_table("samples", [{"a": 1}], 3)
    both.commit(3)
    both.finalize("failed")
    assert one.calls == two.calls
    assert one.calls == [
        ("metrics", {"rewards": 1.0}, 3, "val/"),
        ("table", "samples", [{"a": 1}], 3),
        ("commit", 3),
        ("finalize", "failed"),
    ]


def test_loggers_close_the_others_when_one_cannot_be_closed():
    one, two = Recorder(fails=True), Recorder()
    with pytest.raises(OSError, match="disk full"):
        Loggers([one, two]).finalize()
    assert two.calls == [("finalize", "success")]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every (step, value) by name, with nothing that the reader would tidy away."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_numbers_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorboardLogger(tmp_path)
    assert isinstance(logger, MetricLogger)
    for step in (0, 1):
        logger.log_metrics({"rewards": step + 0.5, "grad_norm": math.nan, "lr": math.inf}, step, "train/")
        logger.log_metrics({"rewards": 0.25}, step, "val/")
        logger.log_table("validation", [{"prompt": "a"}], step)
        logger.commit(step)
        assert len(scalars(tmp_path)["train/rewards"]) == step + 1, "it can be watched while the run goes on"
    logger.finalize()
    assert scalars(tmp_path) == {"train/rewards": [(0, 0.5), (1, 1.5)], "val/rewards": [(0, 0.25), (1, 0.25)]}


def test_a_run_that_goes_on_has_each_step_once(tmp_path):
    """Killed after step 3, gone on from the checkpoint of step 2, whose test was logged and is made again."""
    pytest.importorskip("tensorboard")
    lines = tmp_path / "metrics.jsonl"

    def log(steps: list[int], value: float, resume_step: int | None) -> None:
        jsonl = JsonlLogger(lines, resume_step)
        board = TensorboardLogger(tmp_path / "tensorboard", read_metrics(lines) if lines.exists() else ())
        for step in steps:
            for logger in (jsonl, board):
                logger.log_metrics({"rewards": value}, step, "train/" if step > 2 or value == 1.0 else "test/")
                if step == 2 and value == 1.0:
                    logger.log_metrics({"rewards": 7.0}, step, "test/")
                logger.commit(step)
        board.finalize()

    log([1, 2, 3], 1.0, None)
    log([2, 3, 4], 9.0, 2)
    assert scalars(tmp_path / "tensorboard") == {
        "train/rewards": [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)],
        "test/rewards": [(2, 7.0)],
    }
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ReinforceError, match=r"pip install 'reinforce-rl\[tensorboard\]'"):
        TensorboardLogger(tmp_path)


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))


def test_an_offline_run_reads_back_and_resumes_under_its_id(tmp_path):
    config = {"trainer": {"reinforce": {"max_steps": 2}}, "seed": 7}
    logger = WandbLogger("aligning", "first", tmp_path, config)
    assert isinstance(logger, MetricLogger)
    for step in (1, 2):
        logger.log_metrics({"rewards": step / 10, "grad_norm": math.nan}, step, "train/")
        logger.log_metrics({"rewards": 0.75}, step, "val/")
        logger.log_table("samples", [{"prompt": "why?", "response": "because", "reward": None}], step)
        logger.commit(step)
    run_id = logger.run_id
    logger.finalize()

    (path,) = offline_files(tmp_path)
    assert run_id in path.name
    steps = history(path)
    assert sorted(steps) == [1, 2]
    assert [steps[s]["train/rewards"] for s in (1, 2)] == [0.1, 0.2]
    assert steps[2]["val/rewards"] == 0.75
    assert all("train/grad_norm" not in values for values in steps.values())

    records = list(read_offline_file(path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_id) == ("aligning", "first", run_id)
    shown = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert shown["seed"] == 7 and shown["trainer"]["reinforce"]["max_steps"] == 2
    assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [0]

    tables = sorted(path.parent.glob("files/media/table/*.table.json"))
    assert len(tables) == 2
    assert json.loads(tables[0].read_text())["data"] == [["why?", "because", None]]

    resumed = WandbLogger("aligning", "first", tmp_path / "again", config, run_id=run_id)
    assert resumed.run_id == run_id
    resumed.log_metrics({"rewards": 0.3}, 3, "train/")
    resumed.log_table("samples", [], 3)
    resumed.finalize("failed")
    (path,) = offline_files(tmp_path / "again")
    assert run_id in path.name
    assert history(path)[3]["train/rewards"] == 0.3
    codes = [r.exit.exit_code for r in read_offline_file(path) if r.WhichOneof("record_type") == "exit"]
    assert codes == [1]


def test_without_wandb_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "wandb":
            raise ImportError("No module named 'wandb'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ReinforceError, match=r"pip install 'reinforce-rl\[wandb\]'"):
        WandbLogger("p", "n", tmp_path, {})


def test_online_without_a_key_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ReinforceError, match=r"mode 'online'.*wandb login"):
        WandbLogger("p", "n", tmp_path, {}, mode="online")
