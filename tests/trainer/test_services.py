"""The trainer's arguments beyond NeMo-Aligner's."""

from __future__ import annotations

import dataclasses

import pytest

from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.trainer.services import TrainerServices


def test_the_defaults_are_a_run_without_services():
    services = TrainerServices()
    assert services.prompts_per_update is None
    assert services.best.keep == 0
    assert services.test_dataloader_builder is None
    assert services.stop.reason is None
    assert services.profiler is None
    assert services.make_rollout_source is LocalRollouts
    assert services.max_staleness == 0
    assert services.recorder is None


def test_two_trainers_share_no_state_by_default():
    first = TrainerServices()
    second = TrainerServices()
    first.best.keep = 1
    first.phases.step = 7
    first.stop.reason = "SIGTERM"
    assert second.best.keep == 0
    assert second.phases.step == 0
    assert second.stop.reason is None


def test_services_cannot_be_changed_after_the_trainer_has_read_them():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainerServices().max_staleness = 2  # type: ignore[misc]
