"""Checksums change with any element, and a step's record holds the state of its moment."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_run import metrics_of, run, tiny_config, tiny_trainer

from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.monitoring.records import read_tokens, rollout_files
from reinforce_rl.monitoring.step_record import RankState, StepRecord, read_record, record_files
from reinforce_rl.trainer import step_recorder
from reinforce_rl.trainer.step_recorder import LOSS, SUM, StepRecorder, checksum

RL = "trainer.reinforce"


@pytest.fixture(scope="module")
def mesh():
    with parallel_mesh() as mesh:
        yield mesh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (64, 65), (300, 256), (2, 20000)])
def test_any_element_changes_the_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = int(checksum(tensor))
    assert int(checksum(tensor.clone())) == whole
    longer = torch.cat((tensor[:1], tensor))
    assert int(checksum(longer[1:])) == whole
    flat = tensor.view(-1)
    generator = torch.Generator().manual_seed(2)
    for place in torch.randint(flat.numel(), (50,), generator=generator).tolist():
        changed = flat.clone()
        changed[place] = 7
        if dtype == torch.float32:
            changed[place] = torch.nextafter(flat[place], torch.tensor(9.0))
        assert int(checksum(changed)) != whole
    swapped = flat.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert int(checksum(swapped)) != whole
    assert int(checksum(torch.zeros(0, dtype=dtype))) == 0


def test_a_record_is_of_its_own_moment(
    tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums run late, while the parameters hold the reference's weights; the next update waits."""
    run(tmp_path / "plain", mesh, f"{RL}.max_steps=2")
    held = threading.Event()
    taken = step_recorder.checksum

    def late(tensor: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert held.wait(60)
        return taken(tensor)

    monkeypatch.setattr(step_recorder, "checksum", late)
    with tiny_trainer(tiny_config(tmp_path / "late", f"{RL}.max_steps=2"), mesh) as trainer:
        reference = trainer.model.get_init_policy_logprobs

        def swapped(*args: Any) -> Any:
            with trainer.model._as_reference():  # type: ignore[misc]
                torch.rand(3)  # moves the random state
                held.set()
                if (pending := trainer.recorder._pending) is not None:  # type: ignore[union-attr]
                    pending[1].result()  # type: ignore[union-attr]
                held.clear()
            return reference(*args)

        monkeypatch.setattr(trainer.model, "get_init_policy_logprobs", swapped)
        recorder = trainer.recorder
        assert recorder is not None
        monkeypatch.setattr(recorder, "finish", _after(held, recorder.finish))
        trainer.fit()
    for step in (1, 2):
        plain_record, late_record = (
            read_record(tmp_path / name / "run", step) for name in ("plain", "late")
        )
        assert plain_record.ranks[0].after == late_record.ranks[0].after
        assert plain_record.ranks[0].optimizer == late_record.ranks[0].optimizer
        assert plain_record.ranks[0].before != plain_record.ranks[0].after
        assert plain_record.updates == late_record.updates


def _after(held: threading.Event, finish: Any) -> Any:
    def set_and_finish() -> None:
        held.set()
        finish()
        held.clear()

    return set_and_finish


@pytest.mark.parametrize(("every", "expected"), [(0, []), (2, [2])])
def test_tokens_are_recorded_every_so_many_steps(
    every: int, expected: list[int], tmp_path: Path, mesh: Mesh
) -> None:
    run(
        tmp_path,
        mesh,
        f"{RL}.max_steps=3",
        f"{RL}.max_epochs=2",
        f"exp_manager.record_tokens_every={every}",
    )
    files = rollout_files(tmp_path / "run")
    assert list(files) == [1, 2, 3]
    steps_with_tokens = [step for step, file in files.items() if read_tokens(file)]
    assert steps_with_tokens == expected


def test_what_is_kept(tmp_path: Path, mesh: Mesh) -> None:
    settings = (f"{RL}.max_epochs=3", f"{RL}.save_interval=2", "exp_manager.record_keep=2")
    run(tmp_path, mesh, *settings, f"{RL}.max_steps=4")
    assert list(record_files(tmp_path / "run")) == [3, 4]
    lines = metrics_of(tmp_path)
    for line in lines:
        if line["step"]:
            assert 0 <= line["timers/record"] < line["timers/step_time"]
    last = read_record(tmp_path / "run", 4)
    earlier = read_record(tmp_path / "run", 3)
    assert last.ranks[0].before == earlier.ranks[0].after
    assert last.updates[0]["grad_norm"] == lines[-1]["train/grad_norm"]
    run(tmp_path, mesh, *settings, f"{RL}.max_steps=5")
    assert list(record_files(tmp_path / "run")) == [4, 5]


@pytest.mark.parametrize(("record", "samples", "records"), [("samples", 2, 0), ("off", 0, 0)])
def test_less_is_recorded_where_that_is_asked_for(
    record: str, samples: int, records: int, tmp_path: Path, mesh: Mesh
) -> None:
    run(tmp_path, mesh, f"{RL}.max_steps=2", f"exp_manager.record={record}")
    assert len(list((tmp_path / "run").glob("rollouts/*.parquet"))) == samples
    assert len(record_files(tmp_path / "run")) == records
    assert len(metrics_of(tmp_path)) == 2
    assert not any("timers/record" in line for line in metrics_of(tmp_path))


class Gathered:
    """The mesh of the first of two data-parallel ranks; the other rank sends `other`."""

    def __init__(self, other: Any, dp_rank: int = 0):
        self.other = other
        self.dp_rank = dp_rank
        self.is_model_parallel_rank_0 = True

    def gather_on_main(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_what_is_recorded_of_an_update_is_of_all_ranks(tmp_path: Path) -> None:
    """The loss and its sums are shares of each rank; gradient norm and learning rate are common."""
    updates = [{LOSS: 0.25, f"{SUM}tokens": 3.0, "grad_norm": 2.0, "lr": 0.1}]
    others = [{LOSS: -1.0, f"{SUM}tokens": 4.0, f"{SUM}entropy": 1.5, "grad_norm": 2.0, "lr": 0.1}]
    state = RankState(0, {}, {}, {}, "")
    recorder: Any = object.__new__(StepRecorder)
    recorder._folder = tmp_path
    recorder._keep = 3
    recorder._mesh = Gathered((RankState(1, {}, {}, {}, ""), others))
    facts: dict[str, Any] = {
        "software": {},
        "machine": {},
        "layout": {},
        "settings": {},
        "files": {},
    }
    record = StepRecord(step=7, past={}, updates=[], data={}, scorer=None, reference=None, **facts)
    recorder._pending = record, lambda: state, updates
    recorder.finish()
    written = read_record(tmp_path, 7)
    assert written.updates == [
        {LOSS: -0.75, f"{SUM}tokens": 7.0, "grad_norm": 2.0, "lr": 0.1, f"{SUM}entropy": 1.5}
    ]
    assert [rank_state.rank for rank_state in written.ranks] == [0, 1]


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_the_checksums_of_a_copy_are_one(dp_rank: int, tmp_path: Path) -> None:
    """Data-parallel ranks hold equal weights: a record has the first rank's, and one sum of each
    other.
    """
    recorder: Any = object.__new__(StepRecorder)
    recorder._mesh = Gathered(None, dp_rank)
    sums = {"embedding": "0a", "head": "0b"}
    kept_sums = recorder._of_copy(sums)
    assert kept_sums == sums if dp_rank == 0 else list(kept_sums) == ["all"]
