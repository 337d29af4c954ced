from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.errors import raises_error
from helpers.rows import write_rows
from omegaconf import OmegaConf

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.monitoring import metrics_file, run_folder
from reinforce_rl.monitoring.compare import compare
from reinforce_rl.monitoring.loggers import JsonlLogger
from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.monitoring.report import write_report
from reinforce_rl.monitoring.run_folder import RunFolder, open_run, runs_below
from reinforce_rl.runtime import settings
from reinforce_rl.runtime.status import EXIT_INTERRUPTED, StatusFile


def log(folder: Path, steps, resume_step: int | None = None, **metrics: float) -> None:
    logger = JsonlLogger(folder / "metrics.jsonl", resume_step=resume_step)
    for step in steps:
        logger.log_metrics({"rewards": float(step), **metrics}, step, "train/")
        logger.commit(step)


def test_the_lines_are_those_of_the_file_whatever_the_writer_does(tmp_path):
    """The writer appends, dies within a line, resumes earlier and merges its last line."""
    log(tmp_path, range(1, 6))
    run = RunFolder(tmp_path)

    def seen() -> list[int]:
        run.refresh()
        return [line["step"] for line in run.lines]

    assert seen() == [1, 2, 3, 4, 5]
    log(tmp_path, range(6, 8), resume_step=5)
    assert seen() == seen() == [*range(1, 8)]
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "train/rewa')
    assert seen() == [*range(1, 8)]
    log(tmp_path, (4, 5), resume_step=3, kl=1.0)  # the torn line and the steps after 3 are dropped
    assert seen() == [1, 2, 3, 4, 5]
    expected = [(4, 1.0), (5, 1.0)]
    assert run.series("train/kl") == expected
    logger = JsonlLogger(tmp_path / "metrics.jsonl", resume_step=5)
    logger.log_metrics({"rewards": 0.5}, 5, "test/")
    logger.commit(5)
    assert seen() == [1, 2, 3, 4, 5]
    assert run.lines[-1]["test/rewards"] == 0.5


def test_cut_anywhere_only_the_new_lines_are_read(tmp_path, monkeypatch):
    log(tmp_path, range(1, 30))
    path = tmp_path / "metrics.jsonl"
    read = []
    whole = path.read_bytes()
    run = RunFolder(tmp_path)
    parse = metrics_file.parse_line
    monkeypatch.setattr(metrics_file, "parse_line", lambda line: read.append(1) or parse(line))
    places = random.Random(0).sample(range(len(whole)), 40)
    for end in [*sorted(places), len(whole)]:
        path.write_bytes(whole[:end])
        run.refresh()
    expected = [json.loads(line) for line in whole.decode().splitlines()]
    assert run.lines == expected
    assert len(read) == 29


def test_a_rewritten_file_of_the_same_size_is_noticed(tmp_path):
    line = '{"step": %d, "time": %.3f, "train/rewards": 1.0}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_text(line % (1, 100.0) + line % (2, 101.0))
    run = RunFolder(tmp_path)
    run.refresh()
    path.write_text(line % (1, 100.0) + line % (2, 207.5))
    run.refresh()
    assert run.lines[-1]["time"] == 207.5
    assert len(run.lines) == 2


def test_reading_stops_at_its_deadline_and_goes_on_later(tmp_path):
    line = '{"step": %d, "train/rewards": 1.0}\n'
    count = 3 * metrics_file._CHUNK // len(line % 10_000)
    (tmp_path / "metrics.jsonl").write_text("".join(line % i for i in range(count)))
    run = RunFolder(tmp_path)
    assert not run.refresh(-1.0)
    first = len(run.lines)
    assert 0 < first < count
    assert not run.refresh(-1.0)
    assert first < len(run.lines) < count
    assert run.refresh()
    assert len(run.lines) == count


def test_too_many_names_are_refused_with_the_lines_that_have_them(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "_MAX_NAMES", 3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1, "b": 1, "c": 1, "d": 1}\n')
    with raises_error("metrics.names.too_many", tmp_path / "metrics.jsonl", 4, 3):
        RunFolder(tmp_path).refresh(-1.0)


def test_damage_is_named(tmp_path):
    with raises_error("run.folder.missing", tmp_path / "absent"):
        RunFolder(tmp_path / "absent")
    run = RunFolder(tmp_path)
    assert run.lines == []
    assert run.alerts() == []
    assert run.validations is None
    assert run.configuration().text == ""
    assert run.state().state == "unknown"
    metrics = tmp_path / "metrics.jsonl"
    for bad, value in (("{", "JSON"), ('{"loss": 1}', "step=None")):
        metrics.write_text(f'{{"step": 1}}\n{bad}\n')
        with raises_error("metrics.line.invalid", metrics, "line 2", value):
            RunFolder(tmp_path).refresh()
    metrics.unlink()
    for text, value in (("a: [", "YAML"), ("- 1", "list")):
        (tmp_path / "config.yaml").write_text(text)
        with raises_error("run.config.invalid", tmp_path / "config.yaml", value):
            run.configuration()
    lines = '{"step": 0, "config": "a: 1"}\n{"step": 0}\n'
    (tmp_path / "config_history.jsonl").write_text(lines)
    history = tmp_path / "config_history.jsonl"
    with raises_error("history.line.no_settings", f"{history}, line 2", "['step']"):
        run.configuration()


@pytest.mark.parametrize("files", [["f"], "f", 1, None, {"f": 1}, {"f": ["digest"]}])
def test_a_history_with_files_of_an_odd_type(tmp_path, files):
    lines = [
        json.dumps({"step": 0, "config": "a: 1", "files": {"f": "digest"}}),
        json.dumps({"step": 0, "config": "a: 2", "files": files}),
    ]
    history = tmp_path / "config_history.jsonl"
    history.write_text("\n".join([*lines, ""]))
    with raises_error("history.line.files_invalid", f"{history}, line 2", files):
        RunFolder(tmp_path).configuration()


def test_a_history_of_many_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "_MAX_HISTORY_LINES", 10)
    line = '{"step": 0, "config": "a: 1"}\n'
    history = tmp_path / "config_history.jsonl"
    history.write_text(line * 10)
    assert RunFolder(tmp_path).configuration().text == "a: 1"
    history.write_text(line * 11)
    with raises_error("history.file.too_many_lines", history, "11 lines", 10):
        RunFolder(tmp_path).configuration()


def test_a_configuration_is_read_again_only_after_a_change(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    settings_of = Mock(wraps=run_folder.settings_of)
    monkeypatch.setattr(run_folder, "settings_of", settings_of)
    (tmp_path / "config.yaml").write_text("model.seed: 1\n")
    assert run.configuration() is run.configuration()
    assert settings_of.call_count == 1
    (tmp_path / "config.yaml").write_text("a: [")
    for _ in range(2):
        with raises_error("run.config.invalid", "YAML"):
            run.configuration()
    assert settings_of.call_count == 2, "also what is wrong is read once"
    (tmp_path / "config.yaml").unlink()
    assert run.configuration().text == ""
    assert settings_of.call_count == 3
    log(tmp_path, [1])
    run.refresh()
    assert run.configuration().text == ""
    assert settings_of.call_count == 4


def test_metrics_of_many_names(tmp_path):
    def write(num_names: int) -> None:
        values = {f"train/{i}": 1.0 for i in range(num_names)}
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **values}) + "\n")

    write(4096)
    assert len(RunFolder(tmp_path).metric_names()) == 4096
    write(4097)
    with raises_error("metrics.names.too_many", tmp_path / "metrics.jsonl", 4097, 4096):
        RunFolder(tmp_path).metric_names()


def test_lines_without_metrics_count_as_values(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' * 200)
    assert len(RunFolder(tmp_path, max_values=200).lines) == 200
    run = RunFolder(tmp_path, max_values=199)
    with raises_error("metrics.values.too_many", tmp_path / "metrics.jsonl", 199):
        run.refresh()


def test_steps_are_copied_once_for_all_metrics(tmp_path):
    log(tmp_path, [1, 2])
    run = RunFolder(tmp_path)
    expected = [(1, 1.0), (2, 2.0)]
    assert run.series("train/rewards") == expected
    assert run.metrics.steps() is run.metrics.steps()
    log(tmp_path, [3], resume_step=2)
    run.refresh()
    expected = [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert run.series("train/rewards") == expected
    assert run.last_step == 3


def test_samples_follow_a_file_that_is_written_again(tmp_path):
    run = RunFolder(tmp_path)
    rollout = RolloutRow(3, 0, 0, "p", "r", 1.0, "stop", 2)
    write_rows(tmp_path, 3, [rollout])
    assert len(run.samples(3)) == 1
    assert run.samples(3) is run.samples(3), "read once"
    write_rows(tmp_path, 3, [rollout, rollout])
    assert len(run.samples(3)) == 2
    assert run.sample_steps() == [3]
    with raises_error("samples.step.missing", tmp_path / "rollouts", "step 4", "3 to 3"):
        run.samples(4)
    with raises_error("samples.step.missing", tmp_path / "validation", "step 0"):
        run.samples(0, "validation")


@pytest.mark.parametrize("schema", [TrainConfig, TrainRewardModelConfig])
def test_settings_are_what_differs_from_the_defaults(tmp_path, schema):
    tree = schema().model_dump()
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(tree)))
    assert RunFolder(tmp_path).configuration().settings == []
    tree["model"]["seed" if schema is TrainConfig else "restore_from_path"] = 77
    tree["of_a_later_version"] = {"colour": "red"}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(tree)))
    settings = RunFolder(tmp_path).configuration().settings
    assert [(setting.value, setting.default) for setting in settings][1:] == [("red", None)]
    assert settings[0].value == 77
    assert settings[1].key == "of_a_later_version.colour"
    assert settings[0].default != 77


def test_an_alert_is_over_after_some_steps_without(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step in range(1, 15):
        metrics = {"skipped_step": float(step in (2, 3, 6, 12)), "actor_loss": 0.1, "rewards": 1.0}
        logger.log_metrics(
            metrics,
            step,
            "train/",
        )
        logger.log_metrics({"rewards": 1.0}, step, "val/")
        logger.commit(step)
    expected = [
        ("skipped", 12, 12, 1),
        ("skipped", 2, 6, 3),
    ]
    fired = RunFolder(tmp_path).alerts()
    alerts = [(a.kind, a.first, a.last, a.count) for a in fired]
    assert alerts == expected
    (tmp_path / "config.yaml").write_text("alerts: {rules: {skipped: 'off'}}\n")
    assert RunFolder(tmp_path).alerts() == []


def test_stragglers_are_those_of_the_run_s_own_factor(tmp_path):
    timing = {
        "timing/x/max": 9.0,
        "timing/x/median": 2.0,
        "timing/x/rank": 3,
        "timers/step_time": 10.0,
    }
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "train/rewards": 0.0, **timing}) + "\n"
    )
    kinds = [alert.kind for alert in RunFolder(tmp_path).alerts()]
    assert kinds == ["straggler"]
    (tmp_path / "config.yaml").write_text("trainer: {straggler_factor: 5.0}\n")
    assert RunFolder(tmp_path).alerts() == []


def test_a_run_whose_process_is_gone_is_lost(tmp_path):
    status = StatusFile(tmp_path, enabled=True)
    status.progress(3, 10)
    assert RunFolder(tmp_path).state().state == "running"
    assert RunFolder(tmp_path).state().step == 3
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    record = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(record | {"pid": child.pid}))
    assert RunFolder(tmp_path).state().state == "lost"
    assert RunFolder(tmp_path).alerts()[0].kind == "lost"
    (tmp_path / "status.json").write_text(
        json.dumps(record | {"host": "elsewhere", "pid": child.pid})
    )
    assert RunFolder(tmp_path).state().state == "running", (
        "another machine's processes are not known here"
    )
    status.end(1, "the disk is full")
    alert = RunFolder(tmp_path).alerts()[0]
    assert alert.kind == "failed"
    assert alert.text == "the disk is full"
    assert alert.last == 3


def test_what_is_neither_running_nor_failed(tmp_path):
    StatusFile(tmp_path / "run", enabled=True).end(EXIT_INTERRUPTED, "interrupted by Ctrl-C")
    run = RunFolder(tmp_path / "run")
    assert run.state().state == "interrupted"
    assert run.alerts() == []
    log(tmp_path / "eval" / "model", (0,))
    model_folder = tmp_path / "eval" / "model"
    assert RunFolder(model_folder).state().state == "unknown"
    (tmp_path / "eval" / "results.json").touch()
    assert RunFolder(tmp_path / "eval" / "model").state().state == "evaluation"


def test_a_folder_that_holds_no_run_itself_is_refused(tmp_path):
    for open_it in (open_run, write_report, lambda path: compare([path, path])):
        with raises_error("run.folder.no_run", tmp_path, "metrics.jsonl", "status.json") as caught:
            open_it(tmp_path)
        assert str(caught.value).count(str(tmp_path)) == 1, "no run below is named"
    log(tmp_path / "a" / "one", (1,))
    with raises_error("run.folder.no_run", tmp_path / "a" / "one"):
        write_report(tmp_path)
    assert open_run(tmp_path / "a" / "one").lines
    assert not (tmp_path / "report.html").exists()


def test_runs_are_found_below_a_folder(tmp_path):
    log(tmp_path / "a" / "one", (1,))
    (tmp_path / "b").mkdir()
    StatusFile(tmp_path / "two", enabled=True).begin()
    log(tmp_path / "a" / "one" / "inner", (1,))
    log(tmp_path / ".hidden", (1,))
    folder = tmp_path / "b" / "c" / "d" / "e"
    log(folder, (1,))
    expected = [tmp_path / "a" / "one", tmp_path / "two"]
    assert runs_below(tmp_path) == expected
    assert runs_below(tmp_path / "two") == [tmp_path / "two"]
    assert os.sep in str(tmp_path)
