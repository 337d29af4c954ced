from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
from helpers.errors import raises_error
from helpers.rows import write_rows
from omegaconf import OmegaConf
from typer.testing import CliRunner

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.launch.main import app
from reinforce_rl.monitoring.compare import compare, tables
from reinforce_rl.monitoring.loggers import JsonlLogger
from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.monitoring.run_folder import RunFolder

NAN = math.nan
LOG_DIR = "exp_manager.explicit_log_dir"
REWARDS = [0.1, 0.9, 0.4, -0.3]


def make_run(
    folder,
    lr: float,
    gains: list[float],
    validated=(0, 4),
    prompts=range(4),
    file="p",
    seed=1234,
    reward=NAN,
):
    folder.mkdir(parents=True)
    cfg = TrainConfig()
    cfg.model.optim.lr = lr
    cfg.model.seed = seed
    cfg.exp_manager.explicit_log_dir = str(folder)
    cfg.remote_rm.reward_model.port = 5000 + len(gains)  # says nothing about the run
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump())))
    logger = JsonlLogger(folder / "metrics.jsonl")
    for step in range(5):
        if step in validated:
            rewards = [reward + step * gain for reward, gain in zip(REWARDS, gains, strict=True)]
            rows = [
                RolloutRow(step, i, 0, f"{file}{i}", "r", rewards[i], "stop", 3) for i in prompts
            ]
            write_rows(folder, step, rows, "validation")
            validation_reward = (
                reward + step / 10 if reward == reward else 9.0 if step == 2 else step * lr
            )
            logger.log_metrics({"rewards": validation_reward}, step, "val/")
            logger.log_metrics({"rewards_accuracy": step / 4, "hard/rewards": 0.25}, step, "val/")
        logger.log_metrics({"rewards": step * lr}, step, "train/")
        logger.commit(step)
    return folder


def cells(table: dict, row: str) -> list[str]:
    return next(cells_of_row[1:] for cells_of_row in table["rows"] if cells_of_row[0] == row)


def test_settings_metrics_and_the_paired_difference(tmp_path):
    make_run(tmp_path / "a", 1.0, [0.0] * 4)
    make_run(tmp_path / "b", 2.0, [0.1, 0.2, 0.3, 0.0], validated=(0, 2, 4))
    runs = {name: RunFolder(tmp_path / name) for name in "ab"}
    metrics, paired, settings = tables(runs)
    changed = [row for row in settings["rows"] if row[0] != LOG_DIR]
    assert changed == [["model.optim.lr", "1.0", "2.0"]]
    assert cells(metrics, "training reward, last 10 steps") == ["2.000", "4.000"]
    assert cells(metrics, "validation reward, last") == ["4.000", "8.000"]
    assert cells(metrics, "validation reward, best") == ["4.000 (step 4)", "9.000 (step 2)"]
    assert cells(metrics, "validation accuracy, last") == ["1.000", "1.000"]
    assert cells(metrics, "validation hard/rewards, last") == ["0.250", "0.250"]
    differences = [0.4, 0.8, 1.2, 0.0]
    error = statistics.stdev(differences) / math.sqrt(4)
    mean = statistics.fmean(differences)
    expected = ["b - a", f"+{mean:.3f} ± {error:.3f}", "4", "step 4"]
    assert paired["rows"][0][:-1] == expected
    assert paired["rows"][0][-1] == (
        "0.275 -> 0.875: +0.600 ± 0.258 on the same 4 prompts (p = 0.103): indistinguishable from "
        "noise; this many "
        "prompts can detect gains of 1.074 or more; detecting 0.600 needs about 8"
    )
    assert "One run a side: this says nothing about other seeds." in paired["note"]


@pytest.mark.parametrize(
    ("validated", "at", "difference"),
    [((0, 2), "step 2", "+0.200"), ((0, 3), "step 3 against 4", "+0.300")],
)
def test_runs_of_other_lengths_are_compared_at_the_last_step_in_common(
    tmp_path, validated, at, difference
):
    make_run(tmp_path / "a", 1.0, [0.0] * 4, validated=(0, 2, 4) if at == "step 2" else (0, 4))
    make_run(tmp_path / "b", 1.0, [0.1] * 4, validated=validated)
    runs = {name: RunFolder(tmp_path / name) for name in "ab"}
    _, paired, settings = tables(runs)
    assert paired["rows"][0][-2] == at
    assert paired["rows"][0][1].startswith(difference)
    assert [row[0] for row in settings["rows"]] == ["exp_manager.explicit_log_dir"]
    assert "the effect of the seed" in paired["note"]


def test_runs_without_a_prompt_or_a_validation_in_common(tmp_path):
    make_run(tmp_path / "a", 1.0, [0.0] * 4, prompts=range(2))
    make_run(tmp_path / "b", 1.0, [0.0] * 4, prompts=range(2, 4))
    make_run(tmp_path / "c", 1.0, [0.0] * 4, validated=())
    runs = {name: RunFolder(tmp_path / name) for name in "abc"}
    _, paired, _ = tables(runs)
    assert paired["rows"] == [["b - a", "-", "0", "step 4", "no prompt was scored on both sides"]]


def test_prompts_of_other_texts_are_not_paired(tmp_path):
    make_run(tmp_path / "a", 1.0, [0.0] * 4)
    make_run(tmp_path / "b", 1.0, [0.1] * 4, file="q")
    changed = make_run(tmp_path / "c", 1.0, [0.1] * 4)
    rows = RunFolder(changed).samples(4, "validation")
    other = dataclasses.replace(rows[0], prompt="other")
    write_rows(changed, 4, [other, *rows[1:]], "validation")
    runs = {name: RunFolder(tmp_path / name) for name in "abc"}
    _, paired, _ = tables(runs)
    expected = [
        ["b - a", "-", "0", "step 4; left out: 4 of 4 prompts, whose texts differ"],
        ["c - a", "+0.400 ± 0.000", "3", "step 4; left out: 1 of 4 prompts, whose texts differ"],
    ]
    cells = [row[:-1] for row in paired["rows"]]
    assert cells == expected
    assert "all differences are equal" in paired["rows"][1][-1]
    assert "not scored" not in paired["rows"][1][-1]


def make_sides(
    tmp_path, first: dict[int, float], last: dict[int, float], validated=(0, 2, 4)
) -> dict[str, RunFolder]:
    """Runs by seed of two learning rates, with their validation reward before the first step."""
    runs = {}
    for side, lr, seeds in (("a", 1.0, first), ("b", 2.0, last)):
        for seed, reward in seeds.items():
            folder = tmp_path / f"{side}{seed}"
            made = make_run(folder, lr, [0.1] * 4, validated, seed=seed, reward=reward)
            runs[folder.name] = RunFolder(made)
    return runs


def test_seeds_are_the_unit_where_runs_differ_in_nothing_else(tmp_path):
    before = {1: 0.1, 2: 0.3, 3: 0.2}
    after = {1: 0.3, 2: 0.35, 3: 0.4}
    runs = make_sides(tmp_path, before, after)
    _, over_seeds, paired, _ = tables(runs)
    differences = [0.2, 0.05, 0.2]
    error = statistics.stdev(differences) / math.sqrt(3)
    (row,) = over_seeds["rows"]
    low = 0.15 - 4.3027 * error
    high = 0.15 + 4.3027 * error
    expected = [
        "b1 and 2 more - a1 and 2 more",
        f"+0.150 ± {error:.3f}",
        f"{low:+.3f} to {high:+.3f}",
        "step 4",
    ]
    assert row[:-1] == expected
    assert row[-1] == (
        f"0.600 -> 0.750: +0.150 ± {error:.3f} on the same 3 seeds (p = 0.095): indistinguishable "
        "from noise; "
        f"this many seeds can detect gains of {(4.3027 + 1.0607) * error:.3f} or more; detecting "
        "0.150 needs about 5"
    )
    pairs = [row[0] for row in paired["rows"]]
    assert pairs == ["b1 - a1", "b2 - a2", "b3 - a3"], "prompts are paired within a seed"
    assert "One run a side" not in paired["note"]


def test_other_seeds_are_compared_without_pairs_and_runs_of_one_seed_count_once(tmp_path):
    runs = make_sides(tmp_path, {1: 0.1, 2: 0.3}, {2: 0.7, 3: 0.8, 4: 0.9})
    made = make_run(tmp_path / "a2-again", 1.0, [0.1] * 4, (0, 4), seed=2, reward=0.5)
    runs["a2-again"] = RunFolder(made)
    (row,) = tables(runs)[1]["rows"]
    assert row[0] == "b2 and 2 more - a1 and 2 more"
    # seeds of 0.1 and (0.3 + 0.5) / 2 at the start
    assert row[-1].startswith("0.650 -> 1.200: +0.550 ± 0.161 over 2 and 3 seeds (p = ")


def test_one_seed_on_a_side_and_no_step_in_common(tmp_path):
    runs = make_sides(tmp_path, {1: 0.1}, {1: 0.3, 2: 0.4})
    (row,) = tables(runs)[1]["rows"]
    assert (
        row[-1] == "0.500 -> 0.750: +0.250 over 1 and 2 seeds: this says nothing about other seeds"
    )
    runs |= make_sides(tmp_path / "more", {}, {5: 0.1}, validated=(0, 3))
    (row,) = tables(runs)[1]["rows"]
    assert row[1:] == ["-", "- to -", "no step in common", "no seed was scored on both sides"]


def test_sides_that_are_named_may_have_equal_settings(tmp_path, monkeypatch):
    """Such as before and after a change of the program."""
    runs = make_sides(tmp_path, {1: 0.1, 2: 0.3, 3: 0.2}, {})
    make_sides(tmp_path / "new", {1: 0.6, 2: 0.7, 3: 0.7}, {})
    old, new = ([folder / name for name in runs] for folder in (tmp_path, tmp_path / "new"))
    monkeypatch.setenv("COLUMNS", "400")  # no line is folded
    words = [
        "compare",
        *map(str, new),
        "--against",
        *map(str, old),
        "--html",
        str(tmp_path / "a.html"),
    ]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert "new/a1 and 2 more - a1 and 2 more" in said.output
    assert said.output == compare(new, against=old)
    assert (
        "0.600 -> 1.067: +0.467 ± 0.033 on the same 3 seeds (p = 0.005): a significant gain at the "
        "5 % level"
    ) in said.output
    assert (tmp_path / "a.html").is_file()
    alone = tables({name: RunFolder(path) for name, path in zip(runs, old, strict=True)})
    assert len(alone) == 3
    assert "the effect of the seed" in alone[1]["note"]
    with raises_error("compare.runs.too_few", len(old), "--against"):
        compare(old, against=old)
    assert CliRunner().invoke(app, ["compare", str(old[0]), "--against"]).exit_code == 2


def test_runs_without_a_configuration_are_sides_of_their_own(tmp_path):
    runs = make_sides(tmp_path, {1: 0.1, 2: 0.3}, {})
    for run in runs.values():
        (run.path / "config.yaml").unlink()
    titles = [table["title"] for table in tables(runs)]
    assert titles == ["Metrics", "Difference over prompts", "Settings that differ"]
    assert len(tables(runs, 1)[1]["rows"]) == 1


def test_as_text_and_as_a_page(tmp_path):
    run_folder = tmp_path / "one" / "run"
    make_run(run_folder, 1e-5, [0.0] * 4)
    make_run(tmp_path / "two" / "run", 1e-6, [0.1] * 4)
    names = [str(tmp_path / name / "run") for name in ("one", "two")]
    text = compare(names, tmp_path / "both.html")
    assert "+0.400 ± 0.000" in text
    assert "1e-05" in text
    assert "1e-06" in text
    assert "… " not in text, "no cell is cut"
    page = (tmp_path / "both.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert list(data["runs"]) == ["one/run", "two/run"], "equal folder names are told apart"
    assert data["tables"][1]["rows"][0][1] == "+0.400 ± 0.000"


def test_faults(tmp_path):
    folder = make_run(tmp_path / "a", 1.0, [0.0] * 4)
    with raises_error("compare.runs.too_few", 1):
        compare([folder, f"{folder}/"])
    with raises_error("run.folder.missing", tmp_path / "b"):
        compare([folder, tmp_path / "b"])
