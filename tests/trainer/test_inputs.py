"""The inputs of a run that are checked before anything is built."""

from __future__ import annotations

from helpers.errors import check_fault

from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.trainer.inputs import Inputs


def test_faults_keep_their_keys_when_they_are_reported_together():
    errors = (
        DataError("line 3\nis wrong", key="data.line.not_json"),
        ConfigError([Fault("lr is -1", key="config.out_of_range")]),
    )
    faults = Inputs(None, None, None, None, None, errors).faults
    check_fault(faults, "data.line.not_json", "line 3", "is wrong")
    check_fault(faults, "config.out_of_range", "lr is -1")
    assert len(faults) == 2
