"""Several reward sources as one."""

from __future__ import annotations

import pytest
import torch
from helpers.rewards import ReadyRewards

from reinforce_rl.errors import ConfigError, RewardServerError
from reinforce_rl.reward.base import STATUS_OK, STATUS_TOO_LONG, RewardRequest, Rewards
from reinforce_rl.reward.combined import CombinedRewards, WeightedSource

REQUEST = RewardRequest(torch.zeros(3, 2, dtype=torch.long), torch.full((3,), 2), ("p",) * 3, ("r",) * 3)


class Source:
    """Answers with what it was given, or raises it."""

    def __init__(self, values: list[float], status: list[int] | None = None, error: Exception | None = None):
        self.answer = Rewards(torch.tensor(values), torch.tensor(status or [STATUS_OK] * 3, dtype=torch.int32))
        self.error = error
        self.closed = 0

    def infer_rm(self, request: RewardRequest):
        assert request is REQUEST
        return self if self.error else ReadyRewards(self.answer)

    def result(self) -> Rewards:
        assert self.error
        raise self.error

    def close(self) -> None:
        self.closed += 1


def combined(*sources: Source) -> CombinedRewards:
    weights = (1.0, -0.5, 2.0)
    return CombinedRewards([WeightedSource(f"s{i}", s, weights[i]) for i, s in enumerate(sources)])


def test_the_weighted_sum_and_each_source_by_name():
    found = combined(Source([1.0, 2.0, 3.0]), Source([4.0, 0.0, -2.0])).infer_rm(REQUEST).result()
    assert found.values.tolist() == [-1.0, 2.0, 4.0]
    assert {name: values.tolist() for name, values in found.by_source.items()} == {
        "s0": [1.0, 2.0, 3.0],
        "s1": [4.0, 0.0, -2.0],
    }


def test_a_sample_that_one_source_cannot_score_has_failed():
    second = Source([float("nan"), 5.0, 0.0], [STATUS_TOO_LONG, STATUS_OK, STATUS_OK])
    found = combined(Source([1.0, 2.0, 3.0]), second).infer_rm(REQUEST).result()
    assert found.status.tolist() == [STATUS_TOO_LONG, STATUS_OK, STATUS_OK]
    assert found.values[0].isnan() and found.values[1:].tolist() == [-0.5, 3.0]


def test_a_source_that_does_not_answer_is_an_error_of_all():
    with pytest.raises(RewardServerError, match="gone"):
        combined(Source([1.0] * 3), Source([0.0] * 3, error=RewardServerError("gone"))).infer_rm(REQUEST).result()


def test_names_are_different_and_all_are_closed():
    source = Source([0.0] * 3)
    with pytest.raises(ConfigError, match="named a, a"):
        CombinedRewards([WeightedSource("a", source, 1.0), WeightedSource("a", source, 1.0)])
    several = Source([0.0] * 3), Source([0.0] * 3)
    combined(*several).close()
    assert [s.closed for s in several] == [1, 1]
