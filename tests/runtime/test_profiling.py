"""Profiles of chosen steps: the files, their steps and ranks; the run's numbers do not change."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from helpers.errors import check_fault
from helpers.ranks import call_on_ranks
from helpers.tiny_run import run, tiny_config, tiny_overrides, train_on_ranks, without_times

from reinforce_rl.config.actor import ProfileConfig
from reinforce_rl.config.rules import find_faults
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.runtime import profiling
from reinforce_rl.runtime.profiling import StepProfiler

RL = "trainer.reinforce"
PROFILE = "trainer.profile"


def events_of(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def top_of(folder: Path) -> list[dict]:
    return json.loads((folder / "top_operations.json").read_text())["steps"]


@pytest.mark.more
def test_a_run_and_its_resume_profile_the_chosen_steps_and_change_no_number(tmp_path, mesh):
    (tmp_path / "plain").mkdir()
    plain = run(tmp_path / "plain", mesh, f"{RL}.max_steps=2")
    (tmp_path / "profiled").mkdir()
    run(
        tmp_path / "profiled",
        mesh,
        f"{RL}.max_steps=1",
        f"{PROFILE}.steps=[1]",
        f"{PROFILE}.shapes=true",
    )
    profiled = run(
        tmp_path / "profiled",
        mesh,
        f"{RL}.max_steps=2",
        f"{PROFILE}.steps=[1,2]",
        f"{PROFILE}.shapes=true",
    )
    assert [without_times(line) for line in profiled] == [without_times(line) for line in plain]

    folder = tmp_path / "profiled" / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00001",
        "step_00002",
        "top_operations.json",
    ]
    for step in (1, 2):
        made = folder / f"step_{step:05d}"
        assert sorted(path.name for path in made.iterdir()) == [
            "rank_0.trace.json.gz",
            "rank_0.txt",
        ]
        events = events_of(made / "rank_0.trace.json.gz")
        names = {event.get("name") for event in events}
        assert {"phase: generate", "phase: reward_wait", "phase: train_time", "aten::mm"} <= names
        assert any(event.get("args", {}).get("Input Dims") for event in events)
    steps = top_of(folder)
    assert [(step["step"], step["rank"], step["device"]) for step in steps] == [
        (1, 0, "cpu"),
        (2, 0, "cpu"),
    ]
    for step in steps:
        assert (folder / step["trace"]).is_file()
        longest = step["operations"][0]["name"]
        assert longest[:40] in (folder / step["trace"]).with_name("rank_0.txt").read_text()
        shares = [operation["share"] for operation in step["operations"]]
        assert shares == sorted(shares, reverse=True)
        assert 0.5 < sum(shares) <= 1.0 + 1e-9
        for operation in step["operations"]:
            assert operation["self_seconds"] == pytest.approx(operation["share"] * step["seconds"])

    tables = overview(RunFolder(tmp_path / "profiled" / "run"))["tables"]
    assert len(tables) == 3
    assert [row[0] for row in tables[1]["rows"]] == [
        operation["name"] for operation in steps[0]["operations"][:12]
    ]


class TestOfOneStep:
    def profile(self, folder: Path, messages: list[str], **keys) -> StepProfiler:
        profiler = StepProfiler(
            ProfileConfig(steps=[2], **keys), folder, 0, torch.device("cpu"), messages.append
        )
        for step in (1, 2, 3):
            profiler.start(step)
            for _ in range(step):
                with profiler.phase("generate"):
                    torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.stop()
        return profiler

    def test_calls_are_those_of_the_step_alone(self, tmp_path):
        messages: list[str] = []
        self.profile(tmp_path, messages)
        (step,) = top_of(tmp_path)
        calls = {operation["name"]: operation["calls"] for operation in step["operations"]}
        assert calls["aten::mm"] == 2
        assert calls["phase: generate"] == 2
        assert messages == [f"profile: step 2 is in {tmp_path / 'step_00002'}"]

    def test_no_profiler_is_on_outside_of_the_step(self, tmp_path):
        profiler = StepProfiler(ProfileConfig(steps=[2]), tmp_path, 0, torch.device("cpu"), print)
        profiler.start(1)
        assert not torch.autograd._profiler_enabled()
        profiler.start(2)
        assert torch.autograd._profiler_enabled()
        profiler.stop()
        assert not torch.autograd._profiler_enabled()

    def test_too_many_events_are_not_written(self, tmp_path, monkeypatch):
        monkeypatch.setattr(profiling, "MAX_EVENTS", 3)
        messages: list[str] = []
        self.profile(tmp_path, messages)
        assert len(messages) == 1
        assert "events, too many to be written" in messages[0]
        assert list(tmp_path.rglob("*.gz")) == []

    def test_a_large_trace_is_warned_of(self, tmp_path, monkeypatch):
        monkeypatch.setattr(profiling, "LARGE_BYTES", 10)
        messages: list[str] = []
        self.profile(tmp_path, messages)
        assert any("a viewer may not open it" in text for text in messages)

    def test_one_that_cannot_write_is_given_up(self, tmp_path):
        (tmp_path / "step_00002").write_text("a file")
        messages: list[str] = []
        self.profile(tmp_path, messages)
        assert len(messages) == 1
        assert "given up (FileExistsError" in messages[0]
        assert not torch.autograd._profiler_enabled()

    def test_one_that_cannot_start_does_not_stay_on(self, tmp_path, monkeypatch):
        def refuse(**_):
            raise RuntimeError("no memory history")

        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
        messages: list[str] = []
        cfg = ProfileConfig(steps=[2], memory=True)
        profiler = StepProfiler(cfg, tmp_path, 0, torch.device("cuda"), messages.append)
        profiler.start(2)
        assert messages == [
            "profile: given up (RuntimeError: no memory history); the run continues"
        ]
        assert not torch.autograd._profiler_enabled()
        with profiler.phase("generate"):
            pass
        profiler.stop()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("keys", "artifacts"),
        [({"tool": "nsys"}, "NVTX ranges"), ({"memory": True}, "memory snapshots")],
    )
    def test_a_cpu_says_what_it_does_not_make(self, tmp_path, keys, artifacts):
        messages: list[str] = []
        self.profile(tmp_path, messages, **keys)
        assert messages[0] == f"profile: {artifacts} need CUDA; none are made on a CPU"
        assert any(tmp_path.iterdir()) is (keys.get("tool") != "nsys"), (
            "nsys is the one that records"
        )

    def test_other_ranks_are_left_out(self, tmp_path):
        self.profile(tmp_path, [], ranks=[1])
        assert list(tmp_path.iterdir()) == []


def test_faults_come_in_one_message(tmp_path):
    config = tiny_config(tmp_path, f"{RL}.max_steps=4", "trainer.devices=2")
    config.trainer.profile.steps = [0, 3, 3, 9]
    config.trainer.profile.ranks = [1, 2]
    of_steps, of_ranks = [fault for fault in find_faults(config) if "profile" in fault]
    out_of_range = "config.profile.out_of_range"
    check_fault([of_steps], out_of_range, "trainer.profile.steps", "0, 3, 9", 1, "max_steps", 4)
    check_fault([of_ranks], out_of_range, "trainer.profile.ranks", 2, "0 to 1")
    config.trainer.reinforce.max_steps = -1
    config.trainer.profile.ranks = None
    config.trainer.profile.steps = [9]
    assert [fault for fault in find_faults(config) if "profile" in fault] == []


@pytest.mark.slow
def test_two_ranks_write_a_trace_each_and_one_table(tmp_path):
    keys = [
        *tiny_overrides(tmp_path),
        f"{PROFILE}.steps=[1]",
        f"{RL}.max_steps=1",
        "trainer.devices=2",
    ]
    call_on_ranks(train_on_ranks, 2, keys)
    folder = tmp_path / "run" / "profile"
    for rank in (0, 1):
        names = {
            event.get("name")
            for event in events_of(folder / "step_00001" / f"rank_{rank}.trace.json.gz")
        }
        assert "phase: train_time" in names
    assert [step["rank"] for step in top_of(folder)] == [0]
