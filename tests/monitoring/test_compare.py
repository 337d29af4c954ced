from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
from helpers.rows import write_rows
from omegaconf import OmegaConf

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.compare import compare, tables
from reinforce_rl.monitoring.loggers import JsonlLogger
from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.monitoring.run_folder import RunFolder

REWARDS = [0.1, 0.9, 0.4, -0.3]


def make_run(folder, lr: float, gains: list[float], validated=(0, 4), prompts=range(4), file="p"):
    folder.mkdir(parents=True)
    cfg = TrainConfig()
    cfg.model.optim.lr = lr
    cfg.remote_rm.reward_model.port = 5000 + len(gains)  # says nothing about the run
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump())))
    logger = JsonlLogger(folder / "metrics.jsonl")
    for step in range(5):
        if step in validated:
            rewards = [reward + step * gain for reward, gain in zip(REWARDS, gains, strict=True)]
            rows = [RolloutRow(step, i, 0, f"{file}{i}", "r", rewards[i], "stop", 3) for i in prompts]
            write_rows(folder, step, rows, "validation")
            logger.log_metrics({"rewards": 9.0 if step == 2 else step * lr}, step, "val/")
            logger.log_metrics({"rewards_accuracy": step / 4, "hard/rewards": 0.25}, step, "val/")
        logger.log_metrics({"rewards": step * lr}, step, "train/")
        logger.commit(step)
    return folder


def cells(table: dict, row: str) -> list[str]:
    return next(found[1:] for found in table["rows"] if found[0] == row)


def test_settings_metrics_and_the_paired_difference(tmp_path):
    make_run(tmp_path / "a", 1.0, [0.0] * 4)
    make_run(tmp_path / "b", 2.0, [0.1, 0.2, 0.3, 0.0], validated=(0, 2, 4))
    metrics, paired, settings = tables({name: RunFolder(tmp_path / name) for name in "ab"})
    assert settings["rows"] == [["model.optim.lr", "1.0", "2.0"]]
    assert cells(metrics, "training reward, last 10 steps") == ["2.000", "4.000"]
    assert cells(metrics, "validation reward, last") == ["4.000", "8.000"]
    assert cells(metrics, "validation reward, best") == ["4.000 (step 4)", "9.000 (step 2)"]
    assert cells(metrics, "validation accuracy, last") == ["1.000", "1.000"]
    assert cells(metrics, "validation hard/rewards, last") == ["0.250", "0.250"]
    differences = [0.4, 0.8, 1.2, 0.0]
    error = statistics.stdev(differences) / math.sqrt(4)
    mean = statistics.fmean(differences)
    assert paired["rows"] == [["b - a", f"+{mean:.3f} ± {error:.3f}", f"{mean / error:.1f}", "4", "step 4"]]


@pytest.mark.parametrize(
    ("validated", "at", "difference"), [((0, 2), "step 2", "+0.200"), ((0, 3), "step 3 against 4", "+0.300")]
)
def test_runs_of_other_lengths_are_compared_at_the_last_step_in_common(tmp_path, validated, at, difference):
    make_run(tmp_path / "a", 1.0, [0.0] * 4, validated=(0, 2, 4) if at == "step 2" else (0, 4))
    make_run(tmp_path / "b", 1.0, [0.1] * 4, validated=validated)
    _, paired, settings = tables({name: RunFolder(tmp_path / name) for name in "ab"})
    assert paired["rows"][0][-1] == at and paired["rows"][0][1].startswith(difference)
    assert settings["rows"] == []


def test_runs_without_a_prompt_or_a_validation_in_common(tmp_path):
    make_run(tmp_path / "a", 1.0, [0.0] * 4, prompts=range(2))
    make_run(tmp_path / "b", 1.0, [0.0] * 4, prompts=range(2, 4))
    make_run(tmp_path / "c", 1.0, [0.0] * 4, validated=())
    _, paired, _ = tables({name: RunFolder(tmp_path / name) for name in "abc"})
    assert paired["rows"] == [["b - a", "-", "-", "0", "step 4"]]


def test_prompts_of_other_texts_are_not_paired(tmp_path):
    make_run(tmp_path / "a", 1.0, [0.0] * 4)
    make_run(tmp_path / "b", 1.0, [0.1] * 4, file="q")
    changed = make_run(tmp_path / "c", 1.0, [0.1] * 4)
    rows = RunFolder(changed).samples(4, "validation")
    write_rows(changed, 4, [dataclasses.replace(rows[0], prompt="other"), *rows[1:]], "validation")
    _, paired, _ = tables({name: RunFolder(tmp_path / name) for name in "abc"})
    assert paired["rows"] == [
        ["b - a", "-", "-", "0", "step 4; left out: 4 of 4 prompts, whose texts differ"],
        ["c - a", "+0.400 ± 0.000", "-", "3", "step 4; left out: 1 of 4 prompts, whose texts differ"],
    ]


def test_as_text_and_as_a_page(tmp_path):
    make_run(tmp_path / "one" / "run", 1e-5, [0.0] * 4)
    make_run(tmp_path / "two" / "run", 1e-6, [0.1] * 4)
    names = [str(tmp_path / name / "run") for name in ("one", "two")]
    text = compare(names, tmp_path / "both.html")
    assert "+0.400 ± 0.000" in text and "1e-05" in text and "1e-06" in text
    assert "… " not in text, "no cell is cut"
    page = (tmp_path / "both.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert list(data["runs"]) == ["one/run", "two/run"], "equal folder names are told apart"
    assert data["tables"][1]["rows"][0][1] == "+0.400 ± 0.000"


def test_faults(tmp_path):
    folder = make_run(tmp_path / "a", 1.0, [0.0] * 4)
    with pytest.raises(DataError, match="at least two different runs"):
        compare([folder, f"{folder}/"])
    with pytest.raises(DataError, match="no such folder"):
        compare([folder, tmp_path / "b"])
