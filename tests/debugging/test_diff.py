"""Where two runs diverge: the first setting, step, phase, prompt and token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.errors import raises_error
from helpers.tiny_run import tiny_config
from rich.console import Console

from reinforce_rl.debugging.diff import diff, write
from reinforce_rl.monitoring.records import rollout_files
from reinforce_rl.trainer.run import train

pytestmark = pytest.mark.more

RL = "trainer.reinforce"
SETTINGS = [
    f"{RL}.max_epochs=2",
    f"{RL}.val_check_interval=2",
    "reward=function",
    "reward_function.name=helpers.reward_functions.counted",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four steps: `base`, an identical one, and some with one changed setting."""
    folder = tmp_path_factory.mktemp("diff")
    for name, overrides in {
        "base": [],
        "same": [],
        "beta": [f"{RL}.initial_policy_kl_penalty=0.05"],
        "lr": ["model.optim.lr=0.011"],
        "cut": ["model.micro_batch_size=2"],
        "seed": ["model.seed=77"],
        "data": ["model.data.shuffle=false"],
    }.items():
        cfg = tiny_config(
            folder, f"exp_manager.explicit_log_dir={folder / name}", *SETTINGS, *overrides
        )
        train(cfg)
    return folder


def test_the_same_run_twice(folder: Path) -> None:
    result = diff(folder / "base", folder / "same")
    assert not result.parts
    assert result.settings == {}
    assert result.facts == []
    assert result.sentence == "The two runs are the same bit for bit in all 4 steps that both have."


@pytest.mark.parametrize(
    ("other", "step", "phase", "column", "setting"),
    [
        ("beta", 2, "advantages", "reward_with_kl", f"{RL}.initial_policy_kl_penalty"),
        ("lr", 1, "update", "lr", "model.optim.lr"),
        ("cut", 1, "update", "", "model.micro_batch_size"),
        ("seed", 1, "generate", "response_tokens", "model.seed"),
        ("data", 1, "prompts", " of the step", "model.data.shuffle"),
    ],
)
def test_the_first_place_is_named(
    other: str, step: int, phase: str, column: str, setting: str, folder: Path, tmp_path: Path
) -> None:
    result = diff(folder / "base", folder / other)
    first = min(result.exact.values(), key=lambda parting: parting.step)
    assert setting in result.settings
    assert first.step == step
    assert first.phase == phase
    assert first.difference.quantity.endswith(column)
    assert f"They diverge at step {step}, in {phase}: " in result.sentence
    if other == "cut":
        assert result.beyond_rounding == {}
        assert "within rounding" in result.sentence
    elif other == "lr":
        assert result.exact["weights"].step == result.exact["generate"].step == 2
        assert result.exact["generate"].difference.quantity in (
            "generator_log_probs",
            "response_tokens",
        )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(result.table())
    shown = capture.get().replace("\n", " ").replace("  ", " ")
    assert result.sentence in shown or len(result.sentence) > 190
    write(result, folder / "base", folder / other, tmp_path / "diff.json", tmp_path / "diff.html")
    values = json.loads((tmp_path / "diff.json").read_text())
    assert values["sentence"] == result.sentence
    assert values["exact"][phase]["step"] == step
    assert "Where they diverge" in (tmp_path / "diff.html").read_text()
    titles = [result_table["title"] for result_table in result.tables]
    assert "Difference over prompts" in titles


def test_what_was_not_recorded_is_not_called_the_same(folder: Path, tmp_path: Path) -> None:
    """The samples are equal in step 1.

    Only the records show the effect of the learning rate.
    """
    for name in ("base", "lr"):
        shutil.copytree(folder / name, tmp_path / name)
        for path in (tmp_path / name / "rollouts").iterdir():
            if "00001" not in path.name:
                path.unlink()
    assert diff(tmp_path / "base", tmp_path / "lr").exit_code == 1
    (tmp_path / "lr" / "record" / "step_00001.json").unlink()
    result = diff(tmp_path / "base", tmp_path / "lr")
    assert result.exit_code == 2
    assert not result.parts
    assert (
        "as far as they were compared: samples in all, weights in 0 and update in 0"
        in result.sentence
    )
    rows = {row[0]: row[1] for row in result.rows()}
    assert rows["weights"] == rows["update"] == "not compared"
    assert rows["generate"] == "same"


@pytest.mark.parametrize(("age", "phases"), [(1, []), (0, ["generate"]), (2, ["generate"])])
def test_versions_that_the_ranks_that_train_leave_out(
    folder: Path, tmp_path: Path, age: int, phases: list
) -> None:
    """The second run's generators use weights that are `age` steps older."""
    shutil.copytree(folder / "base", tmp_path / "other")
    for step, path in rollout_files(tmp_path / "other").items():
        table = pq.read_table(path)
        lengths = table["response_length"].to_pylist()
        rows = [[step - age] * length for length in lengths]
        versions = pa.array(rows, pa.list_(pa.int32()))
        place = table.column_names.index("weight_versions")
        assert table["weight_versions"].null_count == table.num_rows
        pq.write_table(table.set_column(place, "weight_versions", versions), path)
    result = diff(folder / "base", tmp_path / "other")
    assert list(result.exact) == phases
    if phases:
        parting = result.exact["generate"]
        assert parting.step == 1
        assert parting.difference.quantity == "weight_versions"
        assert parting.difference.first == 0
        assert parting.difference.second == 1 - age


def test_what_changed_on_the_way_is_named_with_its_step(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "base", tmp_path / "other")
    history = tmp_path / "other" / "config_history.jsonl"
    line = json.loads(history.read_text().splitlines()[0])
    changed = {**line, "step": 2, "config": line["config"].replace("lr: 0.01", "lr: 0.02")}
    history.write_text(json.dumps(line) + "\n" + json.dumps(changed) + "\n")
    record = tmp_path / "other" / "record" / "step_00003.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "scorer": "another"}))
    record = tmp_path / "other" / "record" / "step_00002.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "machine": {**values["machine"], "threads": 99}}))
    result = diff(folder / "base", tmp_path / "other")
    assert result.settings == {"model.optim.lr": "0.01 -> 0.02, from step 3 on"}
    assert any(
        fact.startswith("machine: threads: ") and fact.endswith("from step 2 on")
        for fact in result.facts
    )


def test_runs_without_a_common_step(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 1, "time": 0}\n')
    rollouts_folder = folder / "base" / "rollouts"
    rollouts = [rollouts_folder, tmp_path / "empty" / "rollouts"]
    with raises_error("diff.steps.none_in_common", "1 to 4", *rollouts):
        diff(folder / "base", tmp_path / "empty")
