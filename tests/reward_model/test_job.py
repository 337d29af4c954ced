"""Whole runs on tiny models: a head from pairs, and all weights.

Runs of all weights learn, stop, resume after a kill, and are served.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat_templates import write_chat_tokenizer
from helpers.errors import check_fault, printed_keys, raises_error
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks
from helpers.tiny_run import compose
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file

from reinforce_rl.config.load import load_config, resolve_defaults
from reinforce_rl.config.reward_model import PairsConfig, TrainRewardModelConfig, TrunkConfig
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.monitoring.loggers import read_metrics
from reinforce_rl.monitoring.report import EVALUATION_FILE, write_report
from reinforce_rl.reward_model import job
from reinforce_rl.reward_model.data import encode_sample, load_examples
from reinforce_rl.reward_model.job import train_reward_model
from reinforce_rl.reward_model.objectives import Best, Objective, Ranking, Regression
from reinforce_rl.reward_model.scorer import load_reward_model
from reinforce_rl.reward_model.train_full import FullTrainer
from reinforce_rl.rewards.base import TextSample
from reinforce_rl.utils.files import write_json_lines

GOOD = "etaoin"
BAD = "shrdlu"
NAMES = ("vowels", "length")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/train_reward_model.py"
STEPS = 30


def tiny_model(folder: Path, **sizes: Any) -> Path:
    if not folder.exists():
        tiny_llama_folder(
            folder, **{"vocab_size": 64, "hidden": 32, "ffn": 48, "max_positions": 64, **sizes}
        )
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    write_json_lines(path, lines)
    return path


def write_pairs(path: Path, count: int, *, noise: float = 0.0) -> Path:
    """Write pairs whose chosen answer has more letters of GOOD.

    `noise` is the share of swapped pairs.
    """
    rng = random.Random(0)

    def answer(good: int) -> str:
        letters = [rng.choice(GOOD) for _ in range(good)] + [
            rng.choice(BAD) for _ in range(8 - good)
        ]
        rng.shuffle(letters)
        return "".join(letters)

    lines = []
    for i in range(count):
        few, many = sorted(rng.sample(range(9), 2))
        texts = [answer(many), answer(few)]
        if rng.random() < noise:
            texts.reverse()
        lines.append({"prompt": f"say {i}", "chosen": texts[0], "rejected": texts[1]})
    return write_lines(path, lines)


def write_ratings(path: Path, count: int) -> Path:
    """Write two attributes that are linear in letter counts; every third rating is missing."""
    rng = random.Random(0)
    lines = []
    for i in range(count):
        good = rng.randrange(7)
        bad = rng.randrange(7)
        letters = [rng.choice(GOOD) for _ in range(good)]
        letters += [rng.choice(BAD) for _ in range(bad)]
        rng.shuffle(letters)
        attributes: dict[str, float | None] = {
            "vowels": 0.5 * good - 1,
            "length": 0.25 * (good + bad) - 0.5,
        }
        if i % 3 == 0:
            attributes[NAMES[i // 3 % 2]] = None
        response = "".join(letters)
        lines.append({"prompt": f"say {i}", "response": response, "attributes": attributes})
    return write_lines(path, lines)


def tiny_overrides(folder: Path, **sizes: Any) -> list[str]:
    return [
        "mode=full",
        f"model.restore_from_path={tiny_model(folder / 'trunk', **sizes)}",
        f"output_dir={folder / 'out'}",
        "data.max_length=40",
        "data.held_out_fraction=0.25",
        "full.global_batch_size=32",
        "full.val_check_interval=10",
        "full.patience=null",
        "model.optim.lr=3e-3",
        "model.optim.weight_decay=0",
        "model.optim.betas=[0.9,0.95]",
        "micro_batch_size=16",
    ]


def tiny_config(*overrides: str) -> TrainRewardModelConfig:
    cfg = compose(*overrides, name="train_reward_model")
    return load_config(cfg, TrainRewardModelConfig)


def run(*overrides: str) -> FullTrainer:
    trainer = train_reward_model(tiny_config(*overrides))
    assert isinstance(trainer, FullTrainer)
    return trainer


def run_until(suffix: str, overrides: Sequence[str]) -> None:
    """Kill the process instead of moving the first file or folder to a name with this end."""
    move = os.replace

    def replace(source, destination):
        if str(destination).endswith(suffix):
            os.kill(os.getpid(), signal.SIGKILL)
        move(source, destination)

    os.replace = replace  # type: ignore[assignment]
    run(*overrides)


def run_script(script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def ranking_overrides(folder: Path, *, noise: float = 0.0) -> list[str]:
    pairs = write_pairs(folder / "pairs.jsonl", 320, noise=noise)
    return [
        *tiny_overrides(folder),
        f"data.pairs_path={pairs}",
        "full.max_epochs=6",
        "num_threads=1",
    ]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """The folder of a run of 30 steps with an evaluation every 10."""
    folder = tmp_path_factory.mktemp("ranked")
    run(*ranking_overrides(folder), f"full.max_steps={STEPS}")
    return folder


def held_out_groups(overrides: list[str]) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Return the held-out examples of a run, and their sequences."""
    cfg = tiny_config(*overrides)
    objective: Objective = Ranking()
    if cfg.full.objective != "ranking":
        objective = Regression(cfg.full.attributes)
    examples = load_examples(cfg, load_tokenizer(cfg.model.restore_from_path)).held_out
    return examples, [s for example in examples for s in objective.sequences_of(example)]


@torch.no_grad()
def transformers_scores(folder: Path, sequences: list[tuple[int, ...]]) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = {"input_ids": [list(s) for s in sequences]}
    batch: Any = AutoTokenizer.from_pretrained(folder).pad(inputs)
    rows = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
    return model(**rows).logits


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without times."""
    lines = read_metrics(folder / "out/metrics.jsonl")
    timeless = []
    for line in lines:
        numbers = {name: value for name, value in line.items() if not name.startswith("timers/")}
        del numbers["time"]
        timeless.append(numbers)
    return timeless


def test_held_out_pairs_are_learnt(ranked):
    lines = lines_of(ranked)
    expected = list(range(STEPS + 1))
    assert [line["step"] for line in lines] == expected
    values = {line["step"]: line for line in lines if "val/accuracy" in line}
    assert list(values) == [0, 10, 20, 30]
    assert values[0]["val/accuracy"] < 0.65
    assert values[30]["val/accuracy"] > 0.9 > 0.6 > values[30]["val/length_baseline_accuracy"]
    assert values[30]["val/loss"] < 0.3 < values[0]["val/loss"]
    for line in lines[1:]:
        assert line["train/grad_norm"] > 0
        assert line["train/skipped_step"] == 0


def test_the_exported_folder_is_the_best_model_for_transformers_and_for_the_server(ranked):
    best = TypeAdapter(Best).validate_json((ranked / "out" / EVALUATION_FILE).read_bytes())
    assert best.step in (10, 20, 30)
    examples, sequences = held_out_groups(ranking_overrides(ranked))
    scores = transformers_scores(ranked / "out/model", sequences)
    evaluation = Ranking().evaluate(scores.view(-1, 2, 1), examples)
    assert evaluation.loss == pytest.approx(best.evaluation.loss, rel=1e-4)
    with parallel_mesh() as mesh:
        model = load_reward_model(ranked / "out/model", None, mesh)
        served = model.score([list(s) for s in sequences])
    torch.testing.assert_close(torch.tensor(served), scores[:, 0], atol=1e-5, rtol=0)
    config = json.loads((ranked / "out/model/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "reward"}


def test_the_report_has_the_evaluation(ranked):
    page = (ranked / "out/report.html").read_text()
    best = TypeAdapter(Best).validate_json((ranked / "out" / EVALUATION_FILE).read_bytes())
    assert "Calibration" in page
    assert "Predicted and observed" in page
    assert "the longer answer wins" in page
    assert f"{best.evaluation.loss:.4f}" in page
    (ranked / "out" / EVALUATION_FILE).rename(ranked / "kept.json")
    assert "There has been no evaluation" in write_report(ranked / "out").read_text()
    (ranked / "kept.json").rename(ranked / "out" / EVALUATION_FILE)
    write_report(ranked / "out")


@pytest.mark.more
def test_a_killed_run_goes_on_as_if_nothing_had_happened(ranked, tmp_path):
    overrides = [*ranking_overrides(tmp_path), f"full.max_steps={STEPS}"]
    with pytest.raises(AssertionError, match=f"ended with {-signal.SIGKILL}"):
        call_on_ranks(run_until, 1, "step_00000020", overrides)
    assert not (tmp_path / "out/checkpoints/step_00000020").exists()
    steps = [line["step"] for line in lines_of(tmp_path)]
    assert steps == list(range(21))
    run(*overrides)
    assert lines_of(tmp_path) == lines_of(ranked)
    weights = load_file(tmp_path / "out/model/model.safetensors")
    others = load_file(ranked / "out/model/model.safetensors")
    for name in others:
        assert torch.equal(weights[name], others[name])
    assert weights.keys() == others.keys()
    expected = (ranked / "out" / EVALUATION_FILE).read_text()
    assert (tmp_path / "out" / EVALUATION_FILE).read_text() == expected

    again = run(*overrides)  # it has ended: nothing is computed again
    assert again.step == STEPS
    assert lines_of(tmp_path) == lines_of(ranked)
    changes = "full.global_batch_size: 32 -> 16; data.max_pairs: null -> 300. "
    with raises_error("reward_model.resume.other_settings", changes):
        run(*overrides, "data.max_pairs=300", "full.global_batch_size=16", "model.optim.lr=1e-5")
    pairs = tmp_path / "pairs.jsonl"
    lines = pairs.read_text().splitlines(keepends=True)
    pairs.write_text("".join(lines[:300]))
    with raises_error("reward_model.checkpoint.other_data"):
        run(*overrides)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.held_out_fraction=0.4", r"data\.held_out_fraction: \S+ -> 0\.4"),
        ("seed=77", r"seed: \d+ -> 77"),
    ],
)
def test_a_run_with_another_split_or_seed_is_refused(tmp_path, change, said):
    overrides = [*ranking_overrides(tmp_path), "full.max_steps=1"]
    run(*overrides)
    with raises_error("reward_model.resume.other_settings") as caught:
        run(*overrides, "full.max_steps=2", change)
    assert re.search(rf": {said}\. ", str(caught.value)), caught.value


def test_it_stops_early_and_keeps_the_best(tmp_path):
    """Half of the pairs are reversed, so anything learnt beyond that is memorised."""
    overrides = [
        *ranking_overrides(tmp_path, noise=0.5),
        "full.val_check_interval=4",
        "full.patience=2",
    ]
    trainer = run(*overrides, "full.keep_last=1")
    losses = {}
    for line in lines_of(tmp_path):
        if "val/loss" in line and line["step"]:
            losses[line["step"]] = line["val/loss"]
    best_step = min(losses, key=lambda step: losses[step])
    assert trainer.best is not None
    assert trainer.best.step == best_step
    assert trainer.stopped_early
    assert trainer.step == best_step + 8 < 48
    names = {path.name for path in (tmp_path / "out/checkpoints").glob("step_*")}
    expected = {f"step_{best_step:08d}", f"step_{trainer.step:08d}"}
    assert names == expected
    examples, sequences = held_out_groups(overrides)
    scores = transformers_scores(tmp_path / "out/model", sequences).view(-1, 2, 1)
    evaluation = Ranking().evaluate(scores, examples)
    assert evaluation.loss == pytest.approx(losses[best_step], rel=1e-4)
    again = run(*overrides, "full.keep_last=1")
    assert again.step == trainer.step


def test_regression_recovers_planted_attributes(tmp_path):
    ratings = write_ratings(tmp_path / "ratings.jsonl", 400)
    overrides = [
        *tiny_overrides(tmp_path, layers=1),
        f"data.ratings_path={ratings}",
        "full.objective=regression",
        f"full.attributes=[{','.join(NAMES)}]",
        "full.max_epochs=8",
        "full.val_check_interval=36",
        "num_threads=1",
    ]
    trainer = run(*overrides)
    assert trainer.best is not None
    metrics = trainer.best.evaluation.metrics
    for name in NAMES:
        assert metrics[f"pearson_{name}"] > 0.95
        assert metrics[f"spearman_{name}"] > 0.9
    assert trainer.best.evaluation.loss < 0.1
    examples, sequences = held_out_groups(overrides)
    scores = transformers_scores(tmp_path / "out/model", sequences)
    by_attribute = scores.view(len(examples), 1, 2)
    evaluation = Regression(NAMES).evaluate(by_attribute, examples)
    assert evaluation.loss == pytest.approx(trainer.best.evaluation.loss, rel=1e-3)
    with parallel_mesh() as mesh:
        assert load_reward_model(tmp_path / "out/model", None, mesh).attributes == NAMES
    page = (tmp_path / "out/report.html").read_text()
    assert "Correlation with held-out ratings" in page
    assert "calibrated model" not in page


DATED = "{{ strftime_now('%d %B') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_date_of_a_template_is_that_of_the_first_start(tmp_path, monkeypatch):
    """A resume reads it from config.yaml; without one, and for a new run, it is today's date."""
    dates = []
    monkeypatch.setattr(job, "parallel_mesh", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(job, "_run_full", lambda cfg, *_: dates.append(cfg.data.chat_template_date))

    def start(day: str, *extra: str) -> None:
        today = classmethod(lambda cls: date.fromisoformat(day))
        monkeypatch.setattr(
            "reinforce_rl.config.template.date",
            type("Stopped", (date,), {"today": today}),
        )
        train_reward_model(tiny_config(*overrides, *extra))

    pairs = write_pairs(tmp_path / "pairs.jsonl", 4)
    overrides = [*tiny_overrides(tmp_path), f"data.pairs_path={pairs}"]
    start("2024-02-05")
    write_chat_tokenizer(tmp_path / "trunk", DATED)
    start("2024-02-05")
    recorded = tmp_path / "out" / "config.yaml"
    recorded.parent.mkdir()
    recorded.write_text("data:\n  chat_template_date: '2024-02-05'\n")
    start("2024-02-06")
    start("2024-02-06", "full.resume_if_exists=false")
    start("2024-02-06", "data.chat_template_date=2024-03-01")
    assert dates == [None, "2024-02-05", "2024-02-05", "2024-02-06", "2024-03-01"]


def test_all_faults_are_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        tiny_config(
            *tiny_overrides(tmp_path),
            "full.objective=regression",
            "full.attributes=[a,a]",
            "data.pairs_path=some.jsonl",
            "full.pooling=max",
            "full.patience=0",
            "full.max_steps=0",
            "data.max_length=1000",
            "model.optim.lr=0",
            "model.tensor_model_parallel_size=2",
            "trainer.precision=16",
        )
    out_of_range = "config.value.out_of_range"
    no_choice = "config.value.not_a_choice"
    for key, *values in (
        ("config.value.not_set", "data.ratings_path=VALUE"),
        ("config.pairs_path.conflicts_with_regression", "data.pairs_path", "data.ratings_path"),
        ("config.attributes.empty_or_repeated", "full.attributes is ['a', 'a']"),
        (no_choice, "full.pooling is 'max'"),
        (out_of_range, "full.patience is 0"),
        (out_of_range, "full.max_steps is 0"),
        ("config.length.above_positions_of_model", "data.max_length is 1000", "64 positions"),
        (out_of_range, "model.optim.lr is 0"),
        (
            "config.parallel_sizes.not_a_divisor_of_ranks",
            "model.tensor_model_parallel_size is 2",
            "1 x 1",
        ),
        (no_choice, "trainer.precision is '16'"),
    ):
        check_fault(caught.value.faults, key, *values)


def test_the_shipped_settings_are_the_defaults_of_the_code(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 2)
    shipped = tiny_config(f"model.restore_from_path={tmp_path}", f"data.pairs_path={pairs}")
    code = TrainRewardModelConfig(
        model=TrunkConfig(restore_from_path=str(tmp_path)), data=PairsConfig(pairs_path=str(pairs))
    )
    resolve_defaults(code)
    assert shipped == code


def test_faults_of_the_modes(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 2)
    overrides = [*tiny_overrides(tmp_path), f"data.pairs_path={pairs}"]
    with raises_error("config.micro_batch_size.too_small_for_ranking", "micro_batch_size is 1", 2):
        tiny_config(*overrides, "micro_batch_size=1")
    with raises_error("config.value.not_a_choice", "full.objective is 'sorting'"):
        tiny_config(*overrides, "full.objective=sorting")
    with raises_error("config.value.not_a_choice", "mode is 'all'"):
        tiny_config(*overrides, "mode=all")
    with raises_error("config.mode.head_on_several_ranks", "mode is head", "trainer.devices"):
        tiny_config(*overrides, "mode=head", "trainer.devices=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        ["model.optim.distributed=true"],
    ],
    ids=["DP2", "TP2 SP", "DP2 distributed optimizer"],
)
def test_the_script_on_two_ranks(layout, ranked, tmp_path):
    overrides = [
        *ranking_overrides(tmp_path),
        f"full.max_steps={STEPS}",
        "trainer.devices=2",
        *layout,
    ]
    done = run_script(SCRIPT, *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path)
    pairs = zip(lines[:6], lines_of(ranked)[:6], strict=True)
    for line, other in pairs:
        # rounding grows from then on
        for key, value in other.items():
            assert line[key] == pytest.approx(value, rel=1e-2, abs=1e-3), (line["step"], key)
    assert lines_of(tmp_path)[-1]["val/accuracy"] > 0.9


@pytest.fixture(scope="module")
def trunk(tmp_path_factory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("trunk") / "tiny-llama", vocab_size=128, max_positions=128
    )


def test_a_head_from_one_split_of_a_folder(trunk, tmp_path):
    """One of several splits has to be chosen; the record of the data names no single file."""
    rows = []
    for i in range(24):
        row = {"prompt": f"question {i}", "chosen": f"please {i}", "rejected": f"XX {i} ZZ"}
        rows.append(row)
    folder = tmp_path / "pairs"
    folder.mkdir()
    write_lines(folder / "train-0.jsonl", rows[:12])
    write_lines(folder / "train-1.jsonl", rows[12:])
    write_lines(folder / "test-0.jsonl", rows[:3])
    overrides = [
        f"model.restore_from_path={trunk}",
        f"output_dir={tmp_path / 'out'}",
        "num_threads=1",
        "data.held_out_fraction=0.3",
    ]
    values = (f"data.pairs_path: {folder} ", "test, train;")
    with raises_error("data.split.several", *values):
        tiny_config(*overrides, f"data.pairs_path={folder}")
    train_reward_model(tiny_config(*overrides, f"data.pairs_path={folder}:train"))
    with safe_open(tmp_path / "out" / "head.safetensors", framework="pt") as file:
        about = file.metadata()
    assert int(about["train_pairs"]) + int(about["held_out_pairs"]) == 24
    assert about["data_file"] == "pairs:train"
    assert len(about["data_sha256"]) == 64


@pytest.mark.more
def test_the_script_from_pairs_to_a_head_that_scores(trunk, tmp_path, capsys):
    rows = []
    for i in range(24):
        answers = {"chosen": f"please, {i} is fine", "rejected": f"XX {i} ZZ!!"}
        rows.append({"prompt": f"question {i}", **answers})
    pairs = write_lines(tmp_path / "pairs.jsonl", rows)
    out = tmp_path / "out"
    overrides = [
        f"model.restore_from_path={trunk}",
        f"data.pairs_path={pairs}",
        f"output_dir={out}",
        f"features_cache={tmp_path / 'features.safetensors'}",
        "head.pooling=last",
        "num_threads=1",
        "data.held_out_fraction=0.3",
    ]
    first = run_script(SCRIPT, *overrides, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "24 pairs read, 24 used" in first.stdout
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "features.safetensors",
        "out",
        "pairs.jsonl",
    ]
    head = RewardHead.load(out / "head.safetensors")
    assert head.weight.shape == (32,)
    assert head.pooling == "last"
    evaluation = json.loads((out / job.HEAD_EVALUATION_FILE).read_text())
    with safe_open(out / "head.safetensors", framework="pt") as file:
        about = file.metadata()
    assert about["trunk"] == "tiny-llama"
    assert int(about["train_pairs"]) + int(about["held_out_pairs"]) == 24
    assert about["data_file"] == "pairs.jsonl"
    assert about["l2"] == "0.001"
    # The two kinds of answer share few letters.
    assert evaluation["held_out"]["value"] > 0.9
    assert 0 <= evaluation["longer_wins"]["value"] <= 1
    assert evaluation.keys() == {
        "train",
        "held_out",
        "held_out_cut_to_24",
        "held_out_above_made",
        "longer_wins",
        "longer_wins_cut_to_24",
    }

    train_reward_model(tiny_config(*overrides))
    assert "features from" in capsys.readouterr().out
    assert torch.equal(RewardHead.load(out / "head.safetensors").weight, head.weight)

    # The served model orders an unseen pair by the very tokens that training encodes.
    messages = [{"role": "user", "content": "question 99"}]
    texts = ("please, 99 is fine", "XX 99 ZZ!!")
    with parallel_mesh() as mesh:
        model = load_reward_model(trunk, out / "head.safetensors", mesh)
        tokenizer = load_tokenizer(trunk)
        samples = [TextSample("", text, {}, tuple(messages)) for text in texts]
        sequences = [encode_sample(ChatRenderer(tokenizer), sample) for sample in samples]
        good, bad = model.score(sequences)
    assert good > bad


def test_wrong_settings_end_in_one_message(trunk, tmp_path):
    result = run_script(
        SCRIPT,
        f"model.restore_from_path={trunk}",
        f"data.pairs_path={tmp_path / 'none.jsonl'}",
        "head.pooling=max",
        "data.held_out_fraction=1.5",
        "prefixes.max_tokens=2",
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert sorted(printed_keys(result.stderr)) == [
        "config.max_tokens.below_min_tokens",
        "config.value.not_a_choice",
        "config.value.out_of_range",
        "data.file.missing",
    ]
    for setting in (
        "data.pairs_path: ",
        "head.pooling is ",
        "data.held_out_fraction is ",
        "prefixes.max_tokens is ",
    ):
        assert setting in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_keys_are_named():
    with pytest.raises(ConfigError) as caught:
        tiny_config()
    not_set = "config.value.not_set"
    check_fault(caught.value.faults, not_set, "data.pairs_path=VALUE")
    check_fault(caught.value.faults, not_set, "model.restore_from_path=VALUE")


@pytest.mark.slow
def test_an_unknown_key_is_named(tmp_path):
    unknown = run_script(SCRIPT, "data.max_lenght=3", cwd=tmp_path)
    assert unknown.returncode == 1
    assert "config.key.unknown" in printed_keys(unknown.stderr)
    assert "data.max_lenght" in unknown.stderr
