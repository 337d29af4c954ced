"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from reinforce_rl.errors import ReinforceError
from reinforce_rl.monitoring import JsonlLogger, MetricLogger, TensorboardLogger, read_metrics


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
