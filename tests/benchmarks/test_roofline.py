"""The arithmetic of the bounds, by hand, and the data that are read from a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.models import tiny_llama_folder
from helpers.rows import write_rows
from helpers.tiny_run import compose, tiny_overrides
from omegaconf import OmegaConf

from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.monitoring.loggers import JsonlLogger
from reinforce_rl.monitoring.records import RolloutRow

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import roofline
from rloo_step.floors import (
    FORWARD,
    Machine,
    ModelParts,
    StepTokens,
    decoding_seconds,
    generation_floor,
    pass_floor,
    training_floor,
)

MODEL = ModelParts(body=100, head=20, all=130)


class TestDecoding:
    def test_a_step_reads_each_weight_once(self):
        # 120 numbers of 4 bytes at 48 bytes a second: 10 s a step; 5 tokens take 4 steps for any
        # number of rows.
        machine = Machine(bandwidth=48.0, flops=1e9)
        assert decoding_seconds(machine, MODEL, [5]) == pytest.approx(40.0)
        assert decoding_seconds(machine, MODEL, [5, 3, 1, 0]) == pytest.approx(40.0)

    def test_many_rows_cost_their_arithmetic(self):
        # 2 * 120 operations a row: 1 s each. Three rows in the first step, two in the second, one
        # in the third.
        machine = Machine(bandwidth=1e9, flops=240.0)
        assert decoding_seconds(machine, MODEL, [4, 3, 2, 1]) == pytest.approx(3.0 + 2.0 + 1.0)

    def test_the_greater_of_the_two_counts(self):
        machine = Machine(bandwidth=480.0 / 1.5, flops=240.0)  # 1.5 s of reading
        assert decoding_seconds(machine, MODEL, [4, 3, 2, 1]) == pytest.approx(3.0 + 2.0 + 1.5)

    @pytest.mark.parametrize("lengths", [[], [0], [1, 1]])
    def test_the_first_token_comes_of_the_prompt(self, lengths):
        assert decoding_seconds(Machine(1.0, 1.0), MODEL, lengths) == 0.0


# 2 prompts of 5 and 7 tokens with 3 samples each; 11 response tokens in two batches.
TOKENS = StepTokens(prompt_tokens=12, group=3, response_lengths=[[1, 1, 1], [2, 2, 4]])


def test_passes_count_the_prompt_once_or_for_each_sample_and_the_head_apart():
    floor = pass_floor(Machine(1.0, flops=2.0), MODEL, TOKENS, FORWARD)
    expected = 100 * (12 + 11) + 20 * 11
    assert floor.shared == pytest.approx(expected)
    expected = 100 * (36 + 11) + 20 * 11
    assert floor.repeated == pytest.approx(expected)


def test_generation_reads_the_prompts_with_the_head_at_their_ends():
    machine = Machine(bandwidth=480.0, flops=240.0)
    decoding = 3.0 + 1.0 + 1.0  # second batch: three rows, then one
    floor = generation_floor(machine, MODEL, TOKENS)
    expected = decoding + 2 * (100 * 12 + 20 * 2) / 240
    assert floor.shared == pytest.approx(expected)
    expected = decoding + 2 * (100 * 36 + 20 * 6) / 240
    assert floor.repeated == pytest.approx(expected)


def test_training_takes_three_times_a_pass_and_adam_goes_over_memory():
    machine = Machine(bandwidth=7 * 4 * 13.0, flops=2.0)
    floor = training_floor(machine, MODEL, TOKENS)
    forward = pass_floor(machine, MODEL, TOKENS, FORWARD)
    assert floor.shared == pytest.approx(3 * forward.shared + 10.0)
    assert floor.repeated == pytest.approx(3 * forward.repeated + 10.0)


@pytest.mark.parametrize("tied", [True, False])
def test_parts_of_a_model(tmp_path, tied):
    arch = Architecture.from_folder(
        tiny_llama_folder(tmp_path, vocab_size=64, hidden=32, ffn=64, layers=2, tied=tied)
    )
    # Query and output 32 x 32, key and value 32 x 16, three feed-forward matrices, two norms; and
    # the last norm.
    body = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    table = 64 * 32
    assert roofline.parts_of(arch) == ModelParts(body, table, body + table * (1 if tied else 2))


def write_run(folder: Path, *overrides: str) -> Path:
    config = load_config(compose(*tiny_overrides(folder), *overrides))
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())))
    logger = JsonlLogger(run / "metrics.jsonl")
    for step in (1, 2, 3):
        # The first step is slow, and is skipped.
        seconds = {
            "generate": 100.0 if step == 1 else 2.0 + step,
            "train_time": 8.0,
            "step_time": 20.0,
        }
        logger.log_metrics(seconds, step, "timers/")
        logger.log_metrics({"prompt_lengths": 3.0}, step, "train/")
        logger.commit(step)
        rows = []
        for i in range(16):
            rows.append(RolloutRow(step, i // 4, i % 4, "abc", "a", 0.0, "stop", 1 + i % 2))
        write_rows(run, step, rows)
    return run


def test_steps_of_a_run(tmp_path):
    model, steps = roofline.steps_of_run(write_run(tmp_path))
    assert model == tmp_path / "model"
    expected = [
        {"generate": 4.0, "train_time": 8.0},
        {"generate": 5.0, "train_time": 8.0},
    ]
    assert [step.seconds for step in steps] == expected
    for step in steps:  # 4 prompts x 4, and three prompts are generated together
        response_lengths = [[1, 2] * 6, [1, 2] * 2]
        assert step.tokens == StepTokens(12.0, 4, response_lengths)
    rows = roofline.table_rows(Machine(1.0, 1.0), MODEL, steps)
    expected = [
        ("generate", 4.5),
        ("train_time", 8.0),
        ("together", 12.5),
    ]
    assert [(row.name, row.seconds) for row in rows] == expected
    expected = rows[0].floor.shared + rows[1].floor.shared
    assert rows[-1].floor.shared == pytest.approx(expected)


def test_runs_that_the_floors_do_not_hold_for_are_refused(tmp_path):
    run = write_run(tmp_path, "trainer.precision=bf16")
    with pytest.raises(
        ValueError, match=r"trainer\.precision is 'bf16'; the floors are those of a run with '32'"
    ):
        roofline.steps_of_run(run)
