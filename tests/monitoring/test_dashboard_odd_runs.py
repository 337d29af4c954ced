"""The dashboard's server with runs that are damaged, or built to hang or mislead it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.errors import raises_error
from helpers.rows import write_rows

from reinforce_rl.monitoring import dashboard as dashboard_module
from reinforce_rl.monitoring.dashboard import DashboardRun
from reinforce_rl.monitoring.loggers import JsonlLogger
from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.runtime.status import Status, StatusFile, read_status, run_status

from .test_dashboard import ask, dashboard

SECONDS = 60.0
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 400


def good_run(folder: Path, steps: int = 3) -> Path:
    folder.mkdir(parents=True)
    logger = JsonlLogger(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        logger.log_metrics({"rewards": float(step)}, step, "train/")
        logger.commit(step)
    status = StatusFile(folder, enabled=True)
    status.progress(steps, steps)
    status.end(0)
    return folder


def with_status(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "status.json").write_text(text)

    return make


def with_value(key: str, value: str) -> Callable[[Path], None]:
    """The status of a running run with one value, given as JSON, replaced."""
    status = {
        "state": "running",
        "step": 1,
        "max_steps": 2,
        "pid": 1,
        "host": socket.gethostname(),
        "time": 1.0,
    }

    def make(folder: Path) -> None:
        text = json.dumps(status | {key: "VALUE"}).replace('"VALUE"', value)
        (folder / "status.json").write_text(text)

    return make


def with_lines(text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "metrics.jsonl").write_text(text)

    return make


def with_fifo(name: str) -> Callable[[Path], None]:
    return lambda folder: os.mkfifo(folder / name)


def with_link(name: str, target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).symlink_to(target)


# The contents of the odd run's folder, and the text of its row.
ODD = {
    "deep status": (with_status(DEEP), "nested"),
    "deep value": (with_value("step", DEEP), "nested"),
    "text step": (with_value("step", '"two"'), "step='two'"),
    "infinite step": (with_value("step", "Infinity"), "step=inf"),
    "step that is NaN": (with_value("step", "NaN"), "step=nan"),
    "step of 400 digits": (with_value("step", HUGE), "400 digits"),
    "negative step": (with_value("step", "-1"), "step=-1"),
    "infinite time": (with_value("time", "-Infinity"), "time=-inf"),
    "huge pid": (with_value("pid", "99999999999999999999"), "pid=99999999999999999999"),
    "negative pid": (with_value("pid", "-7"), "pid=-7"),
    "bool pid": (with_value("pid", "true"), "pid=True"),
    "list as state": (with_value("state", "[]"), "state=a JSON list"),
    "unknown state": (with_value("state", '"<b>"'), "state='<b>'"),
    "alerts that are no texts": (with_value("alerts", '{"kl": {}}'), "alerts=a JSON dict"),
    "unknown key": (with_value("more", "1"), "unknown key 'more'"),
    "list as status": (with_status("[]"), "a JSON list"),
    "status not UTF-8": (
        lambda folder: (folder / "status.json").write_bytes(b'{"reason": "\xff"}'),
        "status.json",
    ),
    "large status": (with_status('{"reason": "%s"}' % ("x" * (1 << 20))), "at most 1048576"),
    "fifo as status": (with_fifo("status.json"), "a fifo"),
    "fifo as metrics": (with_fifo("metrics.jsonl"), "a fifo"),
    "folder as metrics": (lambda folder: (folder / "metrics.jsonl").mkdir(), "a folder"),
    "device as metrics": (with_link("metrics.jsonl", "/dev/zero"), "/dev/zero"),
    "metrics elsewhere": (with_link("metrics.jsonl", "/etc/passwd"), "/etc/passwd"),
    "status elsewhere": (with_link("status.json", "/etc/passwd"), "/etc/passwd"),
    "deep line": (
        with_lines(f'{{"step": 1, "x": {DEEP[:10]}{DEEP[-10:]}}}\n'),
        "'x' = a JSON list",
    ),
    "very deep line": (
        with_lines(f'{{"step": 1, "x": {DEEP[:9_000]}{DEEP[-9_000:]}}}\n'),
        "nested",
    ),
    "text as step of a line": (with_lines('{"step": "two"}\n'), "step='two'"),
    "infinite step of a line": (with_lines('{"step": Infinity}\n'), "step=inf"),
    "large step of a line": (with_lines('{"step": 9007199254740992}\n'), "step=9007199254740992"),
    "text as metric": (
        with_lines('{"step": 1, "train/rewards": "high"}\n'),
        "'train/rewards' = 'high'",
    ),
    "metric of 400 digits": (with_lines(f'{{"step": 1, "x": {HUGE}}}\n'), "digits"),
}


@pytest.fixture(scope="module")
def odd_port(tmp_path_factory):
    root = tmp_path_factory.mktemp("odd")
    good_run(root / "good")
    for name, (make, _) in ODD.items():
        (root / name).mkdir()
        make(root / name)
    with dashboard(root) as port:
        yield port


def test_the_good_run_beside_all_odd_ones(odd_port):
    status, answer, _ = ask(odd_port, "/api/runs")
    assert status == 200
    rows = {row["name"]: row for row in answer["runs"]}
    assert rows.keys() == {"good", *ODD}
    good = rows["good"]
    assert good["state"] == "finished"
    assert good["step"] == 3
    assert good["reward"] == 3.0
    assert good["fault"] == ""
    status, run, _ = ask(odd_port, "/api/run?name=good")
    assert status == 200
    assert run["state"]["step"] == 3


@pytest.mark.parametrize("name", ODD)
def test_an_odd_run_is_a_row_with_a_sentence(odd_port, name):
    _, answer, _ = ask(odd_port, "/api/runs")
    row = next(row for row in answer["runs"] if row["name"] == name)
    assert ODD[name][1] in row["fault"]
    assert len(row["fault"]) < 600
    path = name.replace(" ", "%20")
    status, run, _ = ask(odd_port, f"/api/run?name={path}")
    text = run["error"] if status == 404 else run["state"]["reason"]
    assert status in (200, 404)
    assert ODD[name][1] in text
    assert ask(odd_port, f"/api/samples?name={path}&kind=rollouts&step=1")[0] == 404
    assert ask(odd_port, f"/api/tables?name=good&name={path}")[0] in (200, 404)


def test_nan_and_infinity_in_metrics_are_gaps_of_a_curve(tmp_path):
    (tmp_path / "run").mkdir()
    values = ["NaN", "Infinity", "-Infinity", "null", "1e999", "2.5"]
    lines = [
        f'{{"step": {i}, "time": {value}, "train/rewards": {value}}}\n'
        for i, value in enumerate(values)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    with dashboard(tmp_path) as port:
        assert ask(port, "/api/runs")[1]["runs"][0]["reward"] == 2.5
        status, run, _ = ask(port, "/api/run?name=run")
        assert status == 200
        expected = [None] * 5 + [2.5]
        assert run["series"]["train/rewards"]["y"] == expected


def test_names_and_reasons_that_are_not_utf_8(tmp_path):
    name = os.fsdecode(b"run \xff")
    good_run(tmp_path / name)
    good_run(tmp_path / "other")
    (tmp_path / "other" / "status.json").write_text('{"state": "failed", "reason": "\\ud800"}')
    with dashboard(tmp_path) as port:
        status, answer, _ = ask(port, "/api/runs")
        assert status == 200
        names = {row["name"] for row in answer["runs"]}
        assert names == {"run \\xff", "other"}
        assert ask(port, "/api/run?name=run%20%5Cxff")[1]["state"]["step"] == 3
        status, run, _ = ask(port, "/api/run?name=other")
        assert status == 200
        assert run["state"]["reason"] == "\ud800"


def test_links_within_the_folder_only(tmp_path):
    good_run(tmp_path / "elsewhere" / "run")
    good_run(tmp_path / "results" / "real")
    (tmp_path / "results" / "inside").symlink_to("real")
    out_folder = tmp_path / "results" / "out"
    out_folder.symlink_to(tmp_path / "elsewhere" / "run")
    (tmp_path / "results" / "above").symlink_to(tmp_path / "elsewhere")
    part = good_run(tmp_path / "results" / "part")
    run_folder = tmp_path / "elsewhere" / "run"
    write_rows(run_folder, 1, [RolloutRow(1, 0, 0, "secret", "r", 1.0, "stop", 2)])
    rollouts_folder = tmp_path / "elsewhere" / "run" / "rollouts"
    (part / "rollouts").symlink_to(rollouts_folder)
    with dashboard(tmp_path / "results") as port:
        rows = {row["name"]: row for row in ask(port, "/api/runs")[1]["runs"]}
        assert rows.keys() == {"real", "inside", "out", "above", "part"}
        assert rows["inside"]["step"] == 3
        assert rows["inside"]["fault"] == ""
        for name in ("out", "above"):
            target = (tmp_path / "results" / name).resolve()
            assert rows[name]["state"] == "unreadable"
            assert str(target) in rows[name]["fault"]
            status, answer, _ = ask(port, f"/api/run?name={name}")
            assert status == 404
            assert answer["key"] == "dashboard.run.leads_out"
            assert str(target) in answer["error"]
        status, answer, _ = ask(port, "/api/samples?name=part&kind=rollouts&step=1")
        assert status == 404
        assert answer["key"] == "samples.folder.leads_out"
        assert str(part / "rollouts") in answer["error"]


@pytest.mark.parametrize(
    "name",
    ["config_history.jsonl", "config.yaml", "evaluation.json", "profile/top_operations.json"],
)
def test_a_fifo_in_place_of_any_file_that_is_read(tmp_path, name):
    run = good_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/loss": 1.0}\n')
    (run / name).parent.mkdir(exist_ok=True)
    os.mkfifo(run / name)
    with dashboard(tmp_path) as port:
        status, answer, _ = ask(port, "/api/run?name=run")
        assert status == 404
        assert answer["key"] == "file.not_regular"
        assert f"{run / name} is a fifo" in answer["error"]
        assert ask(port, "/api/runs")[1]["runs"][0]["step"] == 4


def test_a_fifo_as_samples(tmp_path):
    run = good_run(tmp_path / "run")
    (run / "rollouts").mkdir()
    os.mkfifo(run / "rollouts" / "step_00001.parquet")
    with dashboard(tmp_path) as port:
        status, answer, _ = ask(port, "/api/samples?name=run&kind=rollouts&step=1")
        assert status == 404
        assert answer["key"] == "file.not_regular"
        path = run / "rollouts" / "step_00001.parquet"
        assert f"{path} is a fifo" in answer["error"]


def test_a_run_that_is_read_for_long_delays_no_other_and_not_the_end(tmp_path):
    good_run(tmp_path / "good")
    good_run(tmp_path / "slow")
    code = """
import sys, time
from reinforce_rl.monitoring import dashboard
from reinforce_rl.monitoring.run_folder import RunFolder
refresh = RunFolder.refresh
def hang(self, seconds):
    while self.name == "slow":
        time.sleep(1)
    return refresh(self, seconds)
RunFolder.refresh = hang
dashboard._ANSWER_SECONDS = 1.0
dashboard.serve(sys.argv[1], port=0)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split("; ")
            port = int(words[0].rpartition(":")[2])
            status, answer, _ = ask(port, "/api/run?name=slow")
            assert status in (404, 503)
            assert "1 s" in answer["error"]
            assert ask(port, "/api/run?name=good")[0] == 200
            assert len(ask(port, "/api/runs")[1]["runs"]) == 2
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
            assert time.monotonic() - began < 10
        finally:
            process.kill()


@pytest.mark.more
def test_a_long_run_is_answered_with_what_has_been_read(tmp_path, monkeypatch):
    """Whole lines arrive a few at a time.

    The page's stamp changes until all of them are there.
    """
    monkeypatch.setattr(dashboard_module, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(dashboard_module, "_SLICE_SECONDS", 0.01)
    run = tmp_path / "run"
    run.mkdir()
    lines = [f'{{"step": {i}, "time": {i}.5, "train/rewards": {i}.0}}\n' for i in range(1, 50_001)]
    (run / "metrics.jsonl").write_text("".join(lines))
    with dashboard(tmp_path) as port:
        stamps = set()
        ends = []
        deadline = time.monotonic() + SECONDS
        answer = {"span": "so far"}
        while "so far" in answer["span"] or ends[-1] != 50_000:
            assert time.monotonic() < deadline
            _, answer, _ = ask(port, "/api/run?name=run&stamp=none")
            stamps.add(answer["stamp"])
            axis = answer["axes"][answer["series"]["train/rewards"]["axis"]]
            ends.append(axis["step"][-1])
            assert answer["series"]["train/rewards"]["y"][-1] == ends[-1], "the last value is exact"
            assert len(axis["step"]) <= 600
        assert len(stamps) > 1
        assert ends == sorted(ends)
        assert ask(port, f"/api/run?name=run&stamp={answer['stamp']}")[0] == 204


def test_only_new_bytes_are_read_and_a_replaced_file_anew(tmp_path):
    line = '{"step": %d, "train/rewards": %.1f}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line % (i, i) for i in range(10_000)))
    run = RunFolder(tmp_path)
    assert run.refresh()
    assert run.values("train/rewards")[0] == 0
    # Other values far before the end, which reading the end does not show: the new file is
    # another inode.
    new = tmp_path / "new"
    new.write_text("".join(line % (i, i + 5 if i < 5 else i) for i in range(10_000)))
    assert new.stat().st_size == path.stat().st_size
    os.replace(new, path)
    assert run.refresh()
    assert run.values("train/rewards")[0] == 5
    os.truncate(path, len(line % (0, 5)))
    assert run.refresh()
    assert run.series("train/rewards") == [(0, 5.0)]
    path.unlink()
    assert run.refresh()
    assert run.lines == []


def test_bounds_on_lines_and_values(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "x": "%s' % ("y" * (1 << 20)))
    path = tmp_path / "metrics.jsonl"
    with raises_error("metrics.line.too_long", path, "line 2", 1048576):
        RunFolder(tmp_path).refresh()
    path.write_text("".join(f'{{"step": {i}, "{i}": 1}}\n' for i in range(100)))
    assert RunFolder(tmp_path).refresh()
    run = RunFolder(tmp_path, max_values=1000)
    for _ in range(3):
        with raises_error("metrics.values.too_many", path, 1000):
            run.refresh()
        assert len(run._file.columns) == 100


def test_a_reader_s_fault_is_said_until_the_file_is_mended(tmp_path):
    path = good_run(tmp_path / "run") / "metrics.jsonl"
    text = path.read_text()
    run = DashboardRun(tmp_path / "run", tmp_path)
    path.write_text(text + "{\n")
    for _ in range(2):
        with raises_error("metrics.line.invalid", path, "line 4"), run.opened():
            pass
    path.write_text(text)
    with run.opened() as opened:
        assert len(opened.lines) == 3


def test_a_status_that_cannot_be_read_is_none_to_launchers(tmp_path):
    status = StatusFile(tmp_path, enabled=True)
    status.progress(3, 10, {"kl": "grows"})
    assert read_status(tmp_path) == run_status(tmp_path)
    assert run_status(tmp_path).alerts == {"kl": "grows"}
    (tmp_path / "status.json").write_text('{"step": "two"}')
    assert read_status(tmp_path) is None
    shown = run_status(tmp_path)
    assert shown.state == "unknown"
    assert shown.step == 0
    assert "step='two'" in shown.reason
    assert isinstance(shown, Status)
