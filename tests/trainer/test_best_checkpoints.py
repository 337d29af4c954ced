"""Which validations are the best ones."""

from __future__ import annotations

import json
import math

import pytest

from reinforce_rl.errors import ConfigError
from reinforce_rl.trainer.best_checkpoints import BestCheckpoints

VALUES = {1: 0.3, 2: 0.5, 3: math.nan, 4: 0.5, 5: 0.1, 6: 0.7}


@pytest.mark.parametrize(
    ("keep", "mode", "expected"),
    [(0, "max", []), (1, "max", [6]), (2, "max", [6, 2]), (2, "min", [5, 1]), (9, "max", [6, 2, 4, 1, 5])],
)
def test_best(keep, mode, expected):
    best = BestCheckpoints(keep, "val/rewards", mode)
    for step, value in VALUES.items():
        best.add(step, {"rewards": value, "other": 1.0})
    assert best.steps == expected


def test_resumed():
    best = BestCheckpoints(2, "val/rewards", "max")
    best.add(1, {"rewards": 0.3})
    best.add(2, {"rewards": 0.5})
    state = json.loads(json.dumps(best.state_dict()))

    def steps(other: BestCheckpoints, is_there=lambda step: True) -> list[int]:
        other.load_state_dict(state, is_there)
        return other.steps

    assert steps(BestCheckpoints(2, "val/rewards", "max")) == [2, 1]
    assert steps(BestCheckpoints(1, "val/rewards", "max")) == [2]
    assert steps(BestCheckpoints(2, "val/rewards", "max"), lambda step: step != 2) == [1]
    assert steps(BestCheckpoints(2, "val/rewards", "min")) == []
    assert steps(BestCheckpoints(2, "val/response_lengths", "max")) == []


def test_unknown_metric():
    with pytest.raises(ConfigError, match=r"best_metric is 'val/reward'.*expected one of val/rewards, val/other"):
        BestCheckpoints(1, "val/reward").add(1, {"rewards": 1.0, "other": 2.0})
