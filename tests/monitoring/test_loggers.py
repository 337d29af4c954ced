"""Loggers: no step appears twice after kills and resumes, and several loggers act as one.

Back ends may fail, hang or fall behind.
"""

from __future__ import annotations

import errno
import json
import math
import threading

import numpy as np
import pytest
import torch
from helpers.errors import raises_error
from helpers.full_disk import files_of_at_most

from reinforce_rl.monitoring import loggers
from reinforce_rl.monitoring.loggers import (
    BackgroundLogger,
    JsonlLogger,
    Loggers,
    MetricLogger,
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
    assert second["train/rewards"] == 0.1
    assert second["val/rewards"] == 0.2
    assert first.pop("time") <= second["time"]
    assert first == {"step": 1, "train/rewards": 0.5, "timers/generate": 1.25}


def test_numbers_of_every_kind_and_not_finite_ones(tmp_path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    values = {
        "nan": math.nan,
        "inf": -math.inf,
        "tensor": torch.tensor(0.25),
        "numpy": np.float32(0.1),
        "count": 7,
    }
    logger.log_metrics(values, 1)  # type: ignore[arg-type]
    logger.log_metrics({"tensor_nan": torch.tensor(math.nan)}, 1)  # type: ignore[dict-item]
    logger.commit(1)
    text = (tmp_path / "m.jsonl").read_text()

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    record = json.loads(text, parse_constant=refuse)
    assert record["nan"] is None
    assert record["inf"] is None
    assert record["tensor_nan"] is None
    assert record["tensor"] == 0.25
    assert record["count"] == 7
    assert isinstance(record["count"], int)
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
        file.write('{"step": 8, "train/rew')  # SIGKILL leaves such a line
    expected = [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in read_metrics(path)] == expected
    resumed = JsonlLogger(path, resume_step=4)
    expected = [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in read_metrics(path)] == expected, (
        "the start may still be refused"
    )
    resumed.begin()
    steps = [line["step"] for line in read_metrics(path)]
    assert steps == [1, 2, 3, 4]
    for step in range(5, 9):
        log_step(resumed, step, step / 10)
    expected = [(s, s / 10) for s in range(1, 9)]
    rewards = [(line["step"], line["train/rewards"]) for line in read_metrics(path)]
    assert rewards == expected
    names = [p.name for p in tmp_path.iterdir()]
    assert names == ["m.jsonl"], "no temporary file is left"


def test_resume_from_nothing_keeps_only_step_zero(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = JsonlLogger(path)
    for step in range(3):
        log_step(logger, step)
    JsonlLogger(path, resume_step=0).begin()
    steps = [line["step"] for line in read_metrics(path)]
    assert steps == [0]


def test_a_step_committed_again_is_merged_into_its_line(tmp_path):
    path = tmp_path / "m.jsonl"
    logger = JsonlLogger(path)
    for step in range(3):
        log_step(logger, step)
    resumed = JsonlLogger(path, resume_step=2)
    resumed.log_metrics({"rewards": 0.9}, 2, "val/")
    resumed.commit(2)
    lines = read_metrics(path)
    steps = [line["step"] for line in lines]
    assert steps == [0, 1, 2]
    assert lines[2]["val/rewards"] == 0.9
    assert lines[2]["train/rewards"] == 0.5


def test_a_new_run_refuses_the_metrics_of_another(tmp_path):
    path = tmp_path / "m.jsonl"
    log_step(JsonlLogger(path), 3)
    with raises_error("metrics.file.of_another_run", path, "step 3"):
        JsonlLogger(path)
    assert len(read_metrics(path)) == 1


def test_a_new_run_takes_a_file_that_holds_only_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1')
    log_step(JsonlLogger(path), 1)
    steps = [line["step"] for line in read_metrics(path)]
    assert steps == [1]


def test_a_line_that_finds_no_space_leaves_none_of_itself(tmp_path):
    """Half a line would corrupt the next one once there is space again."""
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log_metrics({"a": 1.0}, 1)
    logger.commit(1)
    before = path.read_bytes()
    logger.log_metrics({"a" * 500: 2.0}, 2)
    with (
        files_of_at_most(len(before) + 100),
        pytest.raises(OSError, match=r"metrics\.jsonl") as caught,
    ):
        logger.commit(2)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == before
    logger.log_metrics({"a": 3.0}, 3)
    logger.finalize()
    steps = [line["step"] for line in read_metrics(path)]
    assert steps == [1, 3]


def test_finalize_writes_what_was_not_committed(tmp_path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    logger.log_metrics({"rewards": 0.5}, 4, "train/")
    logger.finalize("failed")
    assert read_metrics(tmp_path / "m.jsonl")[0]["step"] == 4


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("{oops}", "json_lines.line.not_json"),
        ("[1]", "json_lines.line.no_object"),
        ("{}", "metrics.line.invalid"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, key):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with raises_error(key, path, "line 2"):
        read_metrics(path)
    with raises_error("metrics.file.missing", tmp_path / "absent.jsonl"):
        read_metrics(tmp_path / "absent.jsonl")


class Recorder:
    def __init__(self, fails: bool = False):
        self.calls: list[tuple] = []
        self.fails = fails

    def log_metrics(self, metrics, step, prefix=""):
        self.calls.append(("metrics", dict(metrics), step, prefix))

    def log_table(self, key, rows, step):
        self.calls.append(("table", key, rows, step))

    def alert(self, title, text, step, level="WARN"):
        self.calls.append(("alert", title, text, step, level))

    def commit(self, step):
        self.calls.append(("commit", step))

    def finalize(self, status="success"):
        self.calls.append(("finalize", status))
        if self.fails:
            raise OSError("disk full")


def test_loggers_pass_everything_on_and_are_a_logger():
    first = Recorder()
    second = Recorder()
    both = Loggers([first, second])
    assert isinstance(both, MetricLogger)
    both.log_metrics({"rewards": 1.0}, 3, "val/")
    both.log_table("samples", [{"a": 1}], 3)
    both.alert("diverged", "of nothing", 3, "ERROR")
    both.commit(3)
    both.finalize("failed")
    assert first.calls == second.calls
    expected = [
        ("metrics", {"rewards": 1.0}, 3, "val/"),
        ("table", "samples", [{"a": 1}], 3),
        ("alert", "diverged", "of nothing", 3, "ERROR"),
        ("commit", 3),
        ("finalize", "failed"),
    ]
    assert first.calls == expected


def test_loggers_close_the_others_when_one_cannot_be_closed():
    failing = Recorder(fails=True)
    healthy = Recorder()
    with pytest.raises(OSError, match="disk full"):
        Loggers([failing, healthy]).finalize()
    assert healthy.calls == [("finalize", "success")]


class TestBackgroundLogger:
    def test_calls_arrive_in_order(self):
        recorder = Recorder()
        messages = []
        start = lambda: recorder  # noqa: E731
        logger = BackgroundLogger("wandb", start, messages.append)  # type: ignore[arg-type]
        values = {"rewards": 1.0}
        logger.log_metrics(values, 3, "val/")
        values["rewards"] = 2.0  # the caller's object, afterwards
        logger.alert("diverged", "of nothing", 3)
        logger.commit(3)
        logger.finalize("failed")
        expected = [
            ("metrics", {"rewards": 1.0}, 3, "val/"),
            ("alert", "diverged", "of nothing", 3, "WARN"),
            ("commit", 3),
            ("finalize", "failed"),
        ]
        assert recorder.calls == expected
        assert messages == []

    @pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1)])
    def test_a_back_end_that_cannot_start_is_reported_once(self, error):
        messages: list[str] = []

        def start() -> MetricLogger:
            raise error

        logger = BackgroundLogger("wandb", start, messages.append)
        for step in range(loggers.QUEUED_CALLS + 5):
            logger.commit(step)
        logger.finalize()
        assert len(messages) == 1
        assert "logger wandb: failed" in messages[0]
        assert str(error) in messages[0]
        assert "metrics.jsonl" in messages[0]

    def test_a_back_end_that_fails_is_asked_again_and_reported_once(self):
        class Flaky(Recorder):
            def commit(self, step):
                super().commit(step)
                if step < 3:
                    raise TimeoutError("no answer")

        flaky = Flaky(fails=True)
        messages = []
        start = lambda: flaky  # noqa: E731
        logger = BackgroundLogger("mlflow", start, messages.append)  # type: ignore[arg-type]
        for step in (1, 2, 3):
            logger.commit(step)
        logger.finalize()
        arguments = [call[1] for call in flaky.calls]
        assert arguments == [1, 2, 3, "success"]
        assert len(messages) == 1
        assert "mlflow: failed (TimeoutError: no answer)" in messages[0]

    @pytest.mark.parametrize("where", ["start", "commit", "finalize"])
    def test_one_that_hangs_neither_blocks_nor_is_waited_for(self, where, monkeypatch):
        monkeypatch.setattr(loggers, "QUEUED_CALLS", 3)
        monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.2)
        freed = threading.Event()
        messages = []

        class Hanging(Recorder):
            def commit(self, step):
                freed.wait(60) if where == "commit" else None

            def finalize(self, status="success"):
                freed.wait(60)

        def start():
            freed.wait(60) if where == "start" else None
            return Hanging()

        logger = BackgroundLogger("swanlab", start, messages.append)
        for step in range(1 if where == "finalize" else 20):
            logger.commit(step)
        logger.finalize()
        assert len(messages) == 1
        assert (
            "abandoned" if where == "finalize" else ("is too slow: 3 calls are queued")
        ) in messages[0]
        freed.set()

    def test_a_long_call_is_reported_before_the_queue_is_full(self, monkeypatch):
        monkeypatch.setattr(loggers, "CALL_SECONDS", 0.0)
        entered = threading.Event()
        freed = threading.Event()
        messages = []

        class Slow(Recorder):
            def commit(self, step):
                entered.set()
                freed.wait(60)

        logger = BackgroundLogger("wandb", Slow, messages.append)  # type: ignore[arg-type]
        logger.commit(1)
        assert entered.wait(60)
        logger.commit(2)
        assert len(messages) == 1
        assert "has been in one call" in messages[0]
        freed.set()
        logger.finalize()

    def test_one_that_is_idle_for_long_is_no_long_call(self, monkeypatch):
        recorder = Recorder()
        messages = []
        start = lambda: recorder  # noqa: E731
        logger = BackgroundLogger("wandb", start, messages.append)  # type: ignore[arg-type]
        logger.commit(1)
        while len(recorder.calls) < 1 or logger._busy_since is not None:
            threading.Event().wait(0.01)
        monkeypatch.setattr(loggers, "CALL_SECONDS", 0.0)
        logger.commit(2)
        logger.finalize()
        assert messages == []
