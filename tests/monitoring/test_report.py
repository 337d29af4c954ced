from __future__ import annotations

import base64
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises_error
from helpers.rows import write_rows

from reinforce_rl.monitoring.loggers import JsonlLogger, Loggers
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.records import RolloutRow, Samples
from reinforce_rl.monitoring.report import overview, run_summary, summarize, write_report
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.monitoring.view import MAX_POINTS
from reinforce_rl.runtime.status import StatusFile
from reinforce_rl.utils.files import write_json_lines

EVIL = "</pre></div><script>alert('x')</script><img src=https://evil.example/x.png> & \"quoted\""
CONFIG = """\
seed: 3
trainer:
  devices: 2
  reinforce:
    initial_policy_kl_penalty: 0.05
model:
  pretrained: ${oc.env:NOT_SET}/model
"""


class Scripts(HTMLParser):
    """The script elements that a browser would see, by id, and each address in an attribute."""

    def __init__(self, text: str):
        super().__init__()
        self.found: dict[str, str] = {}
        self.addresses: list[str | None] = []
        self._open: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self._open = dict(attrs).get("id", "page") if tag == "script" else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open is not None:
            self.found[self._open] = self.found.get(self._open, "") + data


def read(path: Path) -> dict[str, Any]:
    """The data of the only run of a page, with its samples."""
    page = Scripts(path.read_text(encoding="utf-8"))
    assert page.found.keys() == {"data", "plotly", "page"}, (
        "a response cannot open or close a script"
    )
    assert not [
        address for address in page.addresses if address and not address.startswith(("#", "data:"))
    ], "nothing from elsewhere"
    assert b"Plotly" in zlib.decompress(base64.b64decode(page.found["plotly"]))
    data = json.loads(page.found["data"])
    (name,) = data["runs"]
    return {**data["runs"][name], "samples": data["samples"][name]}


def line(page: dict[str, Any], key: str) -> list[tuple[int, float | None]]:
    series = page["series"][key]
    pairs = zip(page["axes"][series["axis"]]["step"], series["y"], strict=True)
    return list(pairs)


def sample(step: int, prompt_id: int, reward: float, **changes) -> RolloutRow:
    fields = {
        "step": step,
        "prompt_id": prompt_id,
        "sample_id": 0,
        "prompt": f"prompt {prompt_id} {EVIL}",
        "response": f"response {prompt_id} of step {step} {EVIL}",
        "reward": reward,
        "finish_reason": "stop" if prompt_id % 2 else "length",
        "response_length": 10 + prompt_id,
        **changes,
    }
    return RolloutRow(**fields)


def make_run(folder: Path, steps: int, gain: float = 1.0) -> Path:
    noise = random.Random(0)
    logger = JsonlLogger(folder / "metrics.jsonl")
    for step in range(steps + 1):
        if step in (0, steps):
            rewards = [-1 + gain * step / steps + noise.gauss(0, 0.1) for _ in range(16)]
            rewards[3] = math.nan
            validated = [sample(step, i, reward) for i, reward in enumerate(rewards)]
            write_rows(
                folder,
                step,
                validated,
                "validation",
            )
            logger.log_metrics({"rewards": rewards[0], "response_lengths": 17.5}, step, "val/")
        if step:
            numbers = {
                "rewards": -1 + step / steps,
                "init_policy_kl": step / 10,
                "grad_norm": math.nan,
                "lr": 1e-5,
            }
            logger.log_metrics(numbers, step, "train/")
            logger.log_metrics(
                {"generate": 2.0, "train_time": 1.0, "step_time": 4.0}, step, "timers/"
            )
            rows = [sample(step, i, i / 10, kl=1.0, advantage=0.5, valid=i != 1) for i in range(8)]
            write_rows(folder, step, [*rows, sample(step, 9, math.nan, valid=False)])
        logger.commit(step)
    logger.finalize()
    (folder / "config.yaml").write_text(CONFIG + f"note: {json.dumps(EVIL)}\n")
    return folder


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_a_whole_run(tmp_path, steps):
    path = write_report(make_run(tmp_path / "seed-1", steps))
    assert path == tmp_path / "seed-1" / "report.html"
    page = read(path)
    assert page["name"] == "seed-1"
    assert page["verdict"].startswith("Validation reward, first and last: -1.0")
    assert (
        "on the same 15 prompts (p < 0.001): a significant gain at the 5 % level; this many prompts"
        in page["verdict"]
    )
    assert page["verdict"].endswith("or more; 1 left out, not scored on both sides.")
    titles = {chart["title"]: [name for name, _ in chart["lines"]] for chart in page["charts"]}
    assert titles["Reward"] == ["training", "validation"]
    assert titles["Step time by phase"] == [
        "generation",
        "update",
        "rest",
    ]
    assert "Gradient norm" not in titles, "no finite number"
    expected = [(step, step / 10) for step in range(1, steps + 1)]
    assert line(page, "train/init_policy_kl") == expected
    expected = [(step, 1.0) for step in range(1, steps + 1)]
    assert line(page, "timers/rest of the step") == expected
    validated_steps = [step for step, _ in line(page, "val/rewards")]
    assert validated_steps == [0, steps]
    first, last = page["samples"]["validation"].values()
    assert last[0]["response"] == f"response 0 of step {steps} {EVIL}"
    assert first[3]["reward"] is None
    settings = {key: value for key, value, _ in page["config"]["settings"]}
    assert settings["model.pretrained"] == '"${oc.env:NOT_SET}/model"'
    assert settings["trainer.devices"] == "2"


def test_a_long_run_stays_small_and_keeps_its_ends_its_spikes_and_its_validations(tmp_path):
    numbers = [
        {"step": step, "train/rewards": step, "train/grad_norm": 50.0 if step == 4321 else 1.0}
        for step in range(1, 10_001)
    ]
    for step in range(0, 10_001, 2000):
        numbers.append({"step": step, "val/rewards": step / 10})
    write_json_lines(tmp_path / "metrics.jsonl", numbers)
    for step in range(1, 41):
        rows = [sample(step, i, 0.5) for i in range(300)]
        write_rows(tmp_path, step, rows)
    path = write_report(tmp_path)
    page = read(path)
    assert path.stat().st_size < 4_000_000
    rewards = line(page, "train/rewards")
    assert len(rewards) <= MAX_POINTS
    assert rewards[-1][0] == 10_000
    for (before, _), (step, value) in itertools.pairwise(rewards):
        expected = (before + 1 + step) / 2
        assert value == pytest.approx(expected, rel=1e-4), "the mean of the bin's steps"
    largest = max(value for _, value in line(page, "train/grad_norm"))
    assert largest == 50.0
    assert line(page, "val/rewards") == [(step, step / 10) for step in range(0, 10_001, 2000)]
    assert list(page["samples"]["rollouts"]) == ["1", "11", "21", "30", "40"]


def test_errors_of_the_mean_reward(tmp_path):
    """Prompts with distant means count once each, whatever the number of samples.

    Prompts with equal means count as their samples.
    """
    generator = random.Random(1)
    for name, spread in (("apart", 3.0), ("alike", 0.0)):
        means = []
        rows = []
        for _ in range(400):
            rows = []
            for _ in range(8):
                prompt = generator.gauss(0, spread)
                rows.append([prompt + generator.gauss(0, 1) for _ in range(4)])
            means.append(statistics.fmean(map(statistics.fmean, rows)))
        folder = tmp_path / name
        write_rows(folder, 1, [sample(1, i, 0.0, sample_id=j) for i in range(8) for j in range(4)])
        deviation = math.sqrt(spread**2 + 1)
        records = [
            {
                "step": 1,
                "train/rewards": 0,
                "train/reward_std": deviation,
                "train/reward_group_std": 1.0,
            }
        ]
        write_json_lines(
            folder / "metrics.jsonl",
            records,
        )
        ((_, error),) = line(overview(RunFolder(folder)), "train/rewards_error")
        assert error == pytest.approx(statistics.stdev(means), rel=0.15)


def test_the_verdict_of_a_loss_and_of_noise(tmp_path):
    run_dir = make_run(tmp_path / "fell", 4, gain=-1.0)
    fell = read(write_report(run_dir))
    assert "(p < 0.001): a significant loss at the 5 % level" in fell["verdict"]
    assert fell["tone"] == "bad"
    still = read(write_report(make_run(tmp_path / "still", 4, gain=0.0)))
    assert "indistinguishable from noise" in still["verdict"]
    assert still["tone"] == ""


def test_a_run_that_has_just_begun(tmp_path):
    StatusFile(tmp_path, enabled=True).begin()
    assert read(write_report(tmp_path))["span"] == "No step has been logged yet."
    write_rows(tmp_path, 0, [sample(0, 0, math.nan)], "validation")
    rows = [sample(1, 0, math.nan, valid=False)]
    write_rows(tmp_path, 1, rows)
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log_metrics({"rewards": math.nan}, 0, "val/")
    logger.log_metrics({"rewards": math.nan}, 1, "train/")
    logger.commit(0)
    logger.commit(1)
    page = read(write_report(tmp_path))
    assert "needs a validation before and one after" in page["verdict"]
    assert page["charts"] == []
    kinds = [alert["kind"] for alert in page["alerts"]]
    assert kinds == ["not_finite"]


def test_the_report_that_a_run_writes_last_says_that_it_is_finished(tmp_path):
    StatusFile(tmp_path, enabled=True).begin()
    assert read(write_report(tmp_path))["state"]["state"] == "running"
    monitor = RunMonitor(tmp_path, Loggers(), TrainingProgress(1, enabled=False))
    assert read(monitor.report())["state"]["state"] == "finished"


def test_a_run_says_after_each_validation_whether_its_reward_has_moved(tmp_path, capsys):
    monitor = RunMonitor(tmp_path, Loggers(), TrainingProgress(4))
    for step in (0, 2, 4):
        rows = [sample(step, i, i + step * (0.5 + 0.1 * (i % 3))) for i in range(9)]
        monitor.log_validation(step, {"rewards": 4.0 + step * 0.6}, Samples(rows))
    first, *then = capsys.readouterr().out.splitlines()
    assert first.startswith("validation after step 0:")
    assert len(then) == 4
    assert then[1].startswith(
        "reward since the first validation: 4.000 -> 5.200: +1.200 ± 0.058 on the same 9 prompts ("
    )
    assert then[3].startswith(
        "reward since the first validation: 4.000 -> 6.400: +2.400 ± 0.115 on the same 9 prompts ("
    )


def test_every_row_of_two_validations_is_tested(tmp_path):
    for step in (0, 2):
        rows = []
        for i in range(4):
            source_rewards = {"tests": i / 4 * step}
            length = 10 + i * step
            rows.append(sample(step, i, 0.5, source_rewards=source_rewards, response_length=length))
        write_rows(tmp_path, step, rows, "validation")
    records = [
        {"step": step, "val/rewards_tests": 9, "val/response_lengths": 9.0} for step in (0, 2)
    ]
    write_json_lines(
        tmp_path / "metrics.jsonl",
        records,
    )
    (table, *_) = overview(RunFolder(tmp_path))["tables"]
    basis = "validation, the same 4 prompts"
    expected = [
        ["Reward", "0.500", "0.500", "+0.000 ± 0.000", basis],
        ["  tests", "0.000", "0.750", "+0.750 ± 0.323, p = 0.103", basis],
        ["Response length, tokens", "10.0", "13.0", "+3.0 ± 1.3, p = 0.103", basis],
        ["Not truncated", "50.0%", "50.0%", "+0.0% ± 0.0%", basis],
    ]
    assert table["rows"] == expected


def test_the_top_operations_of_a_profile(tmp_path):
    path = tmp_path / "profile" / "top_operations.json"
    path.parent.mkdir()
    operation = {"name": "aten::<mm>", "calls": 7, "self_seconds": 1.25, "share": 0.5}
    step = {"rank": 0, "device": "cpu", "seconds": 2.5, "trace": "step_00003/rank_0.trace.json.gz"}
    StatusFile(tmp_path, enabled=True).begin()
    steps = [{**step, "step": i, "operations": [operation] * 30} for i in range(5)]
    path.write_text(json.dumps({"steps": steps}))
    tables = read(write_report(tmp_path))["tables"][1:]
    titles = [table["title"][:7] for table in tables]
    assert titles == ["Step 2:", "Step 3:", "Step 4:"]
    expected = [["aten::<mm>", "7", "1.250", "50.0%"]] * 12
    assert tables[0]["rows"] == expected
    path.write_text("{}")
    with raises_error("report.profile.damaged", path):
        write_report(tmp_path)


def test_many_sources_of_a_reward_are_not_all_compared(tmp_path):
    names = [f"val/rewards_{number}" for number in range(52)]
    values = json.dumps({"step": 1, **dict.fromkeys(names, 1.0)})
    (tmp_path / "metrics.jsonl").write_text(f"{values}\n{values}\n")
    rows = summarize(RunFolder(tmp_path))
    assert len(rows) == 51
    assert rows[0][0].strip() == "0"
    assert rows[49][0].strip() == "49"
    assert rows[50][0] == "2 more sources"
    assert "over 50" in rows[50][-1]


def test_no_prompt_in_common(tmp_path):
    write_rows(tmp_path, 0, [sample(0, 0, 1.0)], "validation")
    write_rows(tmp_path, 5, [sample(5, 1, 1.0)], "validation")
    StatusFile(tmp_path, enabled=True).begin()
    assert "no prompt was scored on both sides" in read(write_report(tmp_path))["verdict"]


def test_the_printed_summary(tmp_path):
    lines = run_summary(make_run(tmp_path, 20), {"checkpoint": tmp_path / "last"}).splitlines()
    assert re.match(
        (
            r"Validation reward, first and last: -\d\.\d{3} -> \d\.\d{3}: \+1\.0\d\d ± 0\.0\d\d on "
            r"the same 15 prompts"
        ),
        lines[0],
    )
    kl = next(line for line in lines if "KL, nats" in line)
    assert re.search(
        r"0\.550 +-> +1\.550 +\+1\.000 +\(training, first and last 10 steps, not paired\)", kl
    )
    assert re.search(
        r"Reward +-.* \+1\.0\d\d ± 0\.0\d\d, p < 0\.001 +\(validation, the same 15 prompts\)",
        lines[1],
    )
    lengths = next(line for line in lines if "length, tokens" in line)
    assert re.search(
        r"17\.5 -> +17\.5 +\+0\.0 ± 0\.0 +\(validation, the same 16 prompts\)", lengths
    )
    expected = ["checkpoint", str(tmp_path / "last")]
    assert lines[-1].split() == expected
    assert lines[-2].split() == ["run", "folder", str(tmp_path)]


def test_errors_name_the_file(tmp_path):
    with raises_error("run.folder.missing", tmp_path / "absent"):
        write_report(tmp_path / "absent")
    StatusFile(tmp_path, enabled=True).begin()
    (tmp_path / "config.yaml").write_text("a: [1\n")
    with raises_error("run.config.invalid", tmp_path / "config.yaml", "YAML"):
        write_report(tmp_path)


def test_the_page_of_a_reward_model(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step, loss in enumerate((0.7, 0.4)):
        logger.log_metrics({"loss": loss}, step, "train/")
        logger.log_metrics({"loss": loss}, step, "val/")
        logger.commit(step)
    assert (
        overview(RunFolder(tmp_path))["verdict"]
        == "There has been no evaluation since the first step."
    )
    metrics = {"accuracy": 0.75, "accuracy_standard_error": 0.05, "length_baseline_accuracy": 0.5}
    bins = [{"low": 0.5, "high": 0.55, "count": 8, "predicted": 0.52, "observed": 0.625}]
    best = {"step": 1, "evaluation": {"loss": 0.4, "metrics": metrics, "reliability": bins}}
    (tmp_path / "evaluation.json").write_text(json.dumps(best))
    page = read(write_report(tmp_path))
    assert page["verdict"] == (
        "The held-out loss went from 0.7000 to 0.4000 (step 1); the accuracy on held-out pairs is "
        "75.0% ± 5.0%, against 50.0% for 'the longer answer wins'."
    )
    assert page["tables"][0]["rows"][1] == ["accuracy", "0.7500"]
    assert page["tables"][1]["rows"] == [["0.50 to 0.55", "8", "0.520", "0.625"]]
    expected = {"name": "observed", "x": [52.0], "y": [0.625]}
    assert page["figures"][0]["lines"][0] == expected
    (tmp_path / "evaluation.json").write_text("{}")
    with raises_error("report.evaluation.damaged", tmp_path / "evaluation.json"):
        overview(RunFolder(tmp_path))


def test_the_package_imports_without_wandb():
    code = "import sys; sys.modules['wandb'] = None; import reinforce_rl.monitoring.run"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_folder_that_is_not_ones_own_is_one_sentence(tmp_path, monkeypatch):
    def refused(path, content):
        raise PermissionError(13, "Permission denied", str(path))

    make_run(tmp_path, 2)
    monkeypatch.setattr("reinforce_rl.monitoring.report.write_atomically", refused)
    with raises_error("report.file.not_writable", tmp_path / "report.html", "Permission denied"):
        write_report(tmp_path)
