from __future__ import annotations

import builtins
import json
import math

import pytest
from helpers.wandb_files import history, offline_files, read_offline_file

from reinforce_rl.errors import ReinforceError
from reinforce_rl.monitoring import MetricLogger, WandbLogger


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
