from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.loggers import JsonlLogger
from reinforce_rl.monitoring.report import compare_validation, main, run_summary, write_report
from reinforce_rl.monitoring.rollouts import RolloutRow, RolloutWriter

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


class Page(HTMLParser):
    """The tags that a browser would see, and whether they close in order."""

    VOID = frozenset({"meta", "line", "rect", "circle", "path", "br", "img"})

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [], "every element is closed"
    assert not {"script", "img", "link", "iframe"} & set(page.tags), "no scripts, nothing from elsewhere"
    assert not [a for a in page.attributes if a[0] in ("src", "href") or a[0].startswith("on")]
    assert not re.search(r"url\(|@import", text)
    return page


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
    logger, writer = JsonlLogger(folder / "metrics.jsonl"), RolloutWriter(folder)
    for step in range(steps + 1):
        if step in (0, steps):
            rewards = [-1 + gain * step / steps + noise.gauss(0, 0.1) for _ in range(16)]
            rewards[3] = math.nan
            writer.write(step, [sample(step, i, reward) for i, reward in enumerate(rewards)], "validation")
            logger.log_metrics({"rewards": rewards[0], "response_lengths": 17.5}, step, "val/")
        if step:
            numbers = {"rewards": -1 + step / steps, "init_policy_kl": step / 10, "grad_norm": math.nan, "lr": 1e-5}
            logger.log_metrics(numbers, step, "train/")
            logger.log_metrics({"generate": 2.0, "train_time": 1.0, "step_time": 4.0}, step, "timers/")
            rows = [sample(step, i, i / 10, kl=1.0, advantage=0.5, valid=i != 1) for i in range(8)]
            writer.write(step, [*rows, sample(step, 9, math.nan, valid=False)])
        logger.commit(step)
    logger.finalize()
    (folder / "config.yaml").write_text(CONFIG + f"note: {json.dumps(EVIL)}\n")
    return folder


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_a_whole_run(tmp_path, steps):
    path = write_report(make_run(tmp_path / "seed-1", steps))
    assert path == tmp_path / "seed-1" / "report.html"
    page = read(path)
    assert "The mean validation reward rose by 1.0" in page.text and "on 15 prompts" in page.text
    assert EVIL in page.text, "shown as text, not taken as markup"
    assert f"response 0 of step {steps}" in page.text and "response 0 of step 0" in page.text
    assert "initial_policy_kl_penalty" in page.text and "${oc.env:NOT_SET}/model" in page.text
    assert "rest of the step" in page.text and f"Training samples of step {steps}" in page.text
    assert page.tags.count("svg") == 5  # reward, KL, length, lr, phases; gradient norm, loss and share have no data
    assert page.text.count("no data") == 3
    assert "nan" not in page.text.split()


def test_the_sentence_on_the_slowest_rank(tmp_path):
    assert "slowest" not in read(write_report(make_run(tmp_path / "one", 3))).text
    run = make_run(tmp_path / "four", 3)
    logger = JsonlLogger(run / "metrics.jsonl", resume_step=3)
    for step, rank in ((1, 2), (2, 0), (3, 2)):
        logger.log_metrics(
            {"generate/max": 3.0 + step, "generate/median": 2.0, "generate/rank": rank}, step, "timing/"
        )
        logger.log_metrics({"train_time/max": 9.0, "train_time/median": 8.9, "train_time/rank": 1}, step, "timing/")
        logger.commit(step)
    assert (
        "The ranks lost most to the slowest one in generate: it took 5.0 s a step there, the median rank 2.0 s. "
        "In 2 of 3 steps it was rank 2"
    ) in read(write_report(run)).text


def test_the_verdict_of_a_loss_and_of_noise(tmp_path):
    fell = write_report(make_run(tmp_path / "fell", 4, gain=-1.0)).read_text()
    assert "The mean validation reward fell by" in fell and 'class="verdict bad"' in fell
    still = write_report(make_run(tmp_path / "still", 4, gain=0.0)).read_text()
    assert "within noise" in still and 'class="verdict "' in still


def test_an_empty_folder_and_a_run_that_has_just_begun(tmp_path):
    assert "No step has been logged yet" in read(write_report(tmp_path)).text
    writer = RolloutWriter(tmp_path)
    writer.write(0, [sample(0, 0, math.nan)], "validation")
    writer.write(1, [sample(1, 0, math.nan, valid=False)])
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log_metrics({"rewards": math.nan}, 0, "val/")
    logger.commit(0)
    page = read(write_report(tmp_path))
    assert "needs a validation before and one after" in page.text


def test_no_prompt_in_common(tmp_path):
    writer = RolloutWriter(tmp_path)
    writer.write(0, [sample(0, 0, 1.0)], "validation")
    writer.write(5, [sample(5, 1, 1.0)], "validation")
    assert "cannot be compared" in read(write_report(tmp_path)).text


def test_a_single_sample_is_not_both_best_and_worst(tmp_path):
    RolloutWriter(tmp_path).write(1, [sample(1, 0, 0.5)])
    assert read(write_report(tmp_path)).text.count("response 0 of step 1") == 1


def test_best_and_worst_of_the_last_step(tmp_path):
    text = read(write_report(make_run(tmp_path, 2))).text
    best, worst = text.split("Highest rewards")[1].split("Lowest rewards")
    assert re.findall(r"prompt (\d), sample", best) == ["7", "6", "5"]
    assert re.findall(r"prompt (\d), sample", worst) == ["0", "1", "2"]
    assert "left out of the loss" in worst


def test_the_printed_summary(tmp_path):
    lines = run_summary(make_run(tmp_path, 20), {"checkpoint": tmp_path / "last"}).splitlines()
    assert re.match(
        r"The mean validation reward rose by 1\.0\d\d ± 0\.0\d\d on 15 prompts, \d+\.\d standard", lines[0]
    )
    kl = next(line for line in lines if "KL, nats" in line)
    assert re.search(r"0\.550 +-> +1\.550 +\+1\.000 +\(training, first and last 10 steps\)", kl)
    assert lines[-1].split() == ["checkpoint", str(tmp_path / "last")]
    assert lines[-2].split() == ["run", "folder", str(tmp_path)]


def test_errors_name_the_file(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        write_report(tmp_path / "absent")
    (tmp_path / "config.yaml").write_text("a: [1\n")
    with pytest.raises(DataError, match=r"config\.yaml: not valid YAML"):
        write_report(tmp_path)


def test_as_a_command(tmp_path, capsys):
    assert main([str(make_run(tmp_path, 1))]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main([str(tmp_path / "absent")]) == 1
    assert "no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([])


@pytest.mark.parametrize(
    ("module", "program"),
    [
        ("reinforce_rl.monitoring.report", "reinforce_rl.monitoring.report"),
        ("reinforce_rl.reward_model.report", "reinforce_rl.reward_model.report"),
        ("reinforce_rl.reward_model.full.report", "reinforce_rl.reward_model.report"),  # the old name
    ],
)
def test_help_is_help(module, program):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: python -m {program} [-h] RUN_DIR" in done.stdout


def test_the_package_imports_without_wandb():
    code = "import sys; sys.modules['wandb'] = None; import reinforce_rl.monitoring.run"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def row(prompt_id: int = 0, reward: float = 0.5, **changes) -> RolloutRow:
    return sample(12, prompt_id, reward, **changes)


def test_paired_comparison_by_hand():
    before = [row(0, 0.0), row(1, 1.0), row(2, 2.0), row(3, 5.0)]
    after = [row(3, 5.0), row(2, 4.0), row(1, 2.0), row(0, 1.0)]  # another order: pairs go by prompt
    result = compare_validation(before, after)
    assert (result.n, result.mean_before, result.mean_after, result.mean_difference) == (4, 2.0, 3.0, 1.0)
    # differences 1, 1, 2, 0: variance 2 / 3, over 4 prompts
    assert result.standard_error == pytest.approx(math.sqrt(2 / 3 / 4))
    assert result.z == pytest.approx(1 / math.sqrt(2 / 3 / 4))


def test_pairing_makes_the_error_smaller_than_the_spread_of_prompts():
    before = [row(i, 10.0 * i) for i in range(50)]
    after = [row(i, 10.0 * i + 1 + 0.1 * (-1) ** i) for i in range(50)]
    assert compare_validation(before, after).z > 50


def test_failed_and_unpaired_prompts_are_left_out():
    before = [row(0, 0.0), row(1, math.nan), row(2, 1.0), row(8, 100.0)]
    after = [row(0, 1.0), row(1, 50.0), row(2, math.nan), row(9, -100.0)]
    result = compare_validation(before, after)
    assert (result.n, result.mean_before, result.mean_after, result.mean_difference) == (1, 0.0, 1.0, 1.0)
    assert math.isnan(result.standard_error) and math.isnan(result.z)


def test_several_samples_of_a_prompt_count_once():
    before = [row(0, 0.0), row(0, 2.0, sample_id=1), row(1, 0.0), row(1, math.nan, sample_id=1), row(2, 0.0)]
    after = [row(0, 4.0), row(1, 0.0), row(2, 1.0)]
    result = compare_validation(before, after)
    assert (result.n, result.mean_difference) == (2, 2.0)


@pytest.mark.parametrize(("gain", "z"), [(1.0, math.inf), (-1.0, -math.inf), (0.0, math.nan)])
def test_equal_differences(gain, z):
    result = compare_validation([row(0, 1.0), row(1, 2.0)], [row(0, 1.0 + gain), row(1, 2.0 + gain)])
    assert result.standard_error == 0
    assert result.z == z or (math.isnan(result.z) and math.isnan(z))


def test_nothing_to_compare():
    result = compare_validation([], [row()])
    assert result.n == 0 and math.isnan(result.mean_difference)
