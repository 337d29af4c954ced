"""Named validation sets: each set's numbers equal a run with it alone; totals are of the union."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.tiny_run import (
    json_lines,
    metrics_of,
    run,
    three_letters,
    without_times,
    write_prompts,
)

from reinforce_rl.data.prompts import build_train_valid_test_rlhf_datasets, fixed_prompts
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.report import verdict
from reinforce_rl.monitoring.run_folder import RunFolder

VALIDATION = "model.data.data_prefix.validation"
STEPS = ("trainer.reinforce.max_steps=2", "trainer.reinforce.val_check_interval=1")
BEST = "exp_manager.checkpoint_callback_params."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    texts = three_letters(30)
    return {
        "one": write_prompts(folder / "one.jsonl", texts[9:13]),
        "two": write_prompts(folder / "two.jsonl", texts[20:26]),
    }


def of_validation(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k.startswith("val/")} for line in metrics_of(folder)]


def without_validation(line: dict) -> dict:
    numbers = without_times(line)
    return {name: value for name, value in numbers.items() if not name.startswith("val/")}


@pytest.mark.more
def test_each_set_has_the_numbers_that_it_has_alone(
    tmp_path: Path, mesh: Mesh, files: dict[str, Path]
) -> None:
    ways = {
        "sets": f"{VALIDATION}={{one: {files['one']}, two: [{files['two']}]}}",
        "one": f"{VALIDATION}={files['one']}",
        "two": f"{VALIDATION}={files['two']}",
        "union": f"{VALIDATION}=[{files['one']},{files['two']}]",
    }
    metrics = {}
    whole = {}
    for name, override in ways.items():
        (tmp_path / name).mkdir()
        best = (
            [f"{BEST}keep_best=1", f"{BEST}best_metric=val/two/rewards"] if name == "sets" else []
        )
        whole[name] = run(tmp_path / name, mesh, *STEPS, override, *best)
        metrics[name] = of_validation(tmp_path / name)
    assert len(metrics["sets"]) == 3
    for step, line in enumerate(metrics["sets"]):
        for name in ("one", "two"):
            prefix = f"val/{name}/"
            of_set = {}
            for metric, value in line.items():
                if metric.startswith(prefix):
                    of_set["val/" + metric.removeprefix(prefix)] = value
            assert of_set == metrics[name][step]
        together = {k: v for k, v in line.items() if k.count("/") == 1}
        assert together == metrics["union"][step]
    trained = {}
    for name in ways:
        trained[name] = [without_validation(line) for line in whole[name]]
    assert trained["sets"] == trained["one"], "no validation changes the training"
    assert trained["sets"] == trained["two"]
    records = RunFolder(tmp_path / "sets" / "run")
    prompt_ids = [row.prompt_id for row in records.samples(0, "validation")]
    assert prompt_ids == list(range(10))
    set_names = [row.set_name for row in records.samples(2, "validation")]
    assert set_names == ["one"] * 4 + ["two"] * 6
    assert "on the same 10 prompts" in verdict(records)


def test_prompts_are_numbered_over_all_sets_and_the_first_of_each_are_taken(
    tmp_path: Path, files: dict[str, Path]
) -> None:

    tokenizer = load_tokenizer(
        tiny_llama_folder(tmp_path / "model", vocab_size=32, max_positions=16)
    )
    prefix = {"train": files["one"], "validation": {"one": files["one"], "two": [files["two"]]}}
    both = build_train_valid_test_rlhf_datasets(
        tokenizer, prefix, max_prompt_tokens=None
    ).validation
    assert both is not None
    set_names = [prompt.set_name for prompt in fixed_prompts(both)[0]]
    assert set_names == ["one"] * 4 + ["two"] * 6
    parts = [fixed_prompts(both, 2, rank, 3)[0] for rank in range(3)]
    prompts = [(p.id, p.set_name) for part in parts for p in part]
    assert prompts == [(0, "one"), (1, "one"), (4, "two"), (5, "two")]
    lines = files["two"].read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    assert parts[2][-1].text == texts[1]
    named = ("set one has 4 prompts", "1 to 4")
    with raises_error("data.validation.too_few_prompts", *named):
        fixed_prompts(both, 5)


@pytest.mark.parametrize(
    ("value", "key", "named"),
    [
        ("{}", "data.validation.empty", "{NAME: path or list, ...}"),
        ("{a/b: x.jsonl}", "data.validation.invalid_name", "'a/b'"),
        ("{a: none.jsonl}", "data.file.missing", "none.jsonl"),
        ("{a: null}", "config.value.wrong_type", "{'a': None}"),
    ],
)
def test_a_wrong_set_is_said_at_the_start(
    tmp_path: Path,
    mesh: Mesh,
    value: str,
    key: str,
    named: str,
) -> None:
    with raises_error(key, VALIDATION, named):
        run(tmp_path, mesh, f"{VALIDATION}={value}")


@pytest.mark.more
def test_a_run_with_sets_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, mesh: Mesh, files: dict[str, Path]
) -> None:
    sets = [
        f"{VALIDATION}={{one: {files['one']}, two: {files['two']}}}",
        "trainer.reinforce.val_check_interval=1",
    ]
    lines = {}
    for name, steps in (("whole", (2,)), ("parts", (1, 2))):
        (tmp_path / name).mkdir()
        for last in steps:
            run(tmp_path / name, mesh, *sets, f"trainer.reinforce.max_steps={last}")
        metrics = json_lines(tmp_path / name / "run" / "metrics.jsonl")
        lines[name] = [without_times(line) for line in metrics]
    assert lines["parts"] == lines["whole"]
