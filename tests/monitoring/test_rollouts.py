from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.records import SAMPLE_COLUMNS, read_table
from reinforce_rl.monitoring.rollouts import RolloutRow, RolloutWriter, read_rollouts, rollout_files


def row(prompt_id: int = 0, reward: float = 0.5, **changes) -> RolloutRow:
    base = RolloutRow(
        step=12,
        prompt_id=prompt_id,
        sample_id=0,
        prompt="Human: why?",
        response="because",
        reward=reward,
        finish_reason="stop",
        response_length=3,
    )
    return dataclasses.replace(base, **changes)


def test_rows_come_back_as_they_were(tmp_path):
    rows = [
        row(1, 0.1 + 0.2, kl=1.5, reward_with_kl=0.2, baseline=-0.1, advantage=0.3, sample_id=1, shaped_reward=1 / 3),
        row(2, response='line one\nline "two" \u2028 separated \x85 测试 \\', finish_reason="length", valid=False),
        row(
            3, math.nan, response="", response_length=0, source_rewards={"a/b": 0.25, "ü": math.nan}, score_fault="no"
        ),
    ]
    path = RolloutWriter(tmp_path).write(12, rows)
    assert path == tmp_path / "rollouts" / "step_00012.parquet"
    back = read_rollouts(path)
    assert back[0] == rows[0]
    assert back[1].response == rows[1].response and not back[1].valid and not back[1].is_end
    assert math.isnan(back[1].kl) and back[1].score_fault is None and back[1].source_rewards == {}
    assert math.isnan(back[2].reward) and back[2].response == "" and back[2].score_fault == "no"
    assert back[2].source_rewards["a/b"] == 0.25 and math.isnan(back[2].source_rewards["ü"])


def test_failed_rewards_are_null_on_disk_and_tensors_are_numbers(tmp_path):
    rows = [row(0, math.nan), row(1, torch.tensor(0.25))]  # type: ignore[arg-type]
    path = RolloutWriter(tmp_path).write(1, rows, kind="validation")
    assert path == tmp_path / "validation" / "step_00001.parquet"
    records = read_table(path, list(SAMPLE_COLUMNS)).to_pylist()
    assert records[0]["reward"] is None and records[1]["reward"] == 0.25
    assert list(records[0]) == [field.name for field in dataclasses.fields(RolloutRow)]
    assert math.isnan(read_rollouts(path)[0].reward)


def test_a_lone_surrogate_in_a_prompt_does_not_end_the_run(tmp_path):
    path = RolloutWriter(tmp_path).write(1, [row(prompt="a \ud800 b")])
    assert read_rollouts(path)[0].prompt == "a ? b"


def test_a_step_written_again_replaces_its_file(tmp_path):
    writer = RolloutWriter(tmp_path)
    writer.write(3, [row(1), row(2)])
    path = writer.write(3, [row(7)])
    assert [r.prompt_id for r in read_rollouts(path)] == [7]
    assert [p.name for p in path.parent.iterdir()] == ["step_00003.parquet"]


def test_resume_removes_the_files_of_later_steps(tmp_path):
    writer = RolloutWriter(tmp_path)
    for step in (0, 5, 10):
        writer.write(step, [row()], "validation")
        writer.write(step, [row()])
    (tmp_path / "rollouts" / ".step_00003.parquet.x1").touch()  # of a kill
    RolloutWriter(tmp_path)
    assert list(rollout_files(tmp_path)) == [0, 5, 10]
    RolloutWriter(tmp_path, resume_step=5)
    assert list(rollout_files(tmp_path)) == list(rollout_files(tmp_path, "validation")) == [0, 5]
    assert len(list((tmp_path / "rollouts").iterdir())) == 2


def test_files_are_in_the_order_of_their_steps(tmp_path):
    writer = RolloutWriter(tmp_path)
    for step in (100000, 99999, 2):
        writer.write(step, [row()])
    assert list(rollout_files(tmp_path)) == [2, 99999, 100000]
    assert rollout_files(tmp_path, "validation") == {}


def test_a_line_with_other_fields_is_named(tmp_path):
    path = tmp_path / "step_00001.jsonl"
    path.write_text('{"step": 1, "colour": "red"}\n')
    with pytest.raises(DataError, match=r"line 1: missing fields .*'reward'.*unknown fields \['colour'\]"):
        read_rollouts(path)
    with pytest.raises(DataError, match="no such file"):
        read_rollouts(tmp_path / "absent.jsonl")


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """Its lines lack what is new; where a step has both forms, the later one counts."""
    earlier = {name: value for name, value in vars(row()).items() if name in list(vars(row()))[:13]}
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3):
        line = json.dumps(earlier | {"step": step, "kl": None})
        (tmp_path / "rollouts" / f"step_{step:05d}.jsonl").write_text(f"{line}\n")
    writer = RolloutWriter(tmp_path, resume_step=2)
    writer.write(2, [row(), row()])
    writer.write(3, [row(response="new")])
    assert [len(read_rollouts(path)) for path in rollout_files(tmp_path).values()] == [1, 2, 1]
    found = read_rollouts(rollout_files(tmp_path)[1])[0]
    assert found.set_name == "" and math.isnan(found.kl) and found.response == "because"
