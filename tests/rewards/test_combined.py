"""Several reward sources as one."""

from __future__ import annotations

import math

import pytest
import torch

from reinforce_rl.errors import ConfigError, RewardServerError
from reinforce_rl.rewards.base import STATUS_BAD_TEXT, STATUS_EMPTY, STATUS_OK, RewardRequest, Rewards, WeightedSource
from reinforce_rl.rewards.sources import CombinedRewards

REQUEST = RewardRequest(torch.zeros(3, 1).long(), torch.ones(3).long(), ("",) * 3, ("",) * 3)


class Known:
    """Answers with what it was given, and writes down what is asked of it."""

    def __init__(self, name: str, values: list[float], log: list[str], status: list[int] | None = None):
        self.name, self.log = name, log
        self.rewards = Rewards(torch.tensor(values), torch.tensor(status or [STATUS_OK] * len(values)).int())

    def infer_rm(self, request: RewardRequest) -> Known:
        assert request is REQUEST
        self.log.append(f"ask {self.name}")
        return self

    def result(self) -> Rewards:
        self.log.append(f"wait {self.name}")
        return self.rewards

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def combined(*sources: tuple[Known, float]) -> CombinedRewards:
    return CombinedRewards([WeightedSource(source.name, source, weight) for source, weight in sources])


def test_the_weighted_sum_with_every_part_kept():
    log: list[str] = []
    one, two = Known("one", [1.0, 2.0, 3.0], log), Known("two", [10.0, 20.0, -30.0], log)
    found = combined((one, 2.0), (two, -0.5)).infer_rm(REQUEST).result()
    assert found.values.tolist() == [-3.0, -6.0, 21.0] and found.values.dtype == torch.float32
    assert found.status.tolist() == [STATUS_OK] * 3 and found.status.dtype == torch.int32
    assert {name: values.tolist() for name, values in found.by_source.items()} == {
        "one": [1.0, 2.0, 3.0],
        "two": [10.0, 20.0, -30.0],
    }


def test_all_are_asked_before_any_is_waited_for():
    log: list[str] = []
    rm = combined((Known("one", [1.0] * 3, log), 1.0), (Known("two", [1.0] * 3, log), 1.0))
    future = rm.infer_rm(REQUEST)
    assert log == ["ask one", "ask two"]
    future.result()
    rm.close()
    assert log[2:] == ["wait one", "wait two", "close one", "close two"]


@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("made_up", [math.nan, 0.0, 5.0])
def test_a_sample_that_one_cannot_score_has_failed(weight, made_up):
    """Whatever stands in its place, and however little it weighs: never a reward without that part."""
    log: list[str] = []
    one = Known("one", [1.0, 2.0, made_up], log, [STATUS_OK, STATUS_OK, STATUS_EMPTY])
    two = Known("two", [1.0, made_up, made_up], log, [STATUS_OK, STATUS_BAD_TEXT, STATUS_BAD_TEXT])
    found = combined((one, 1.0), (two, weight)).infer_rm(REQUEST).result()
    assert found.values[0] == 1.0 + weight and found.values[1:].isnan().all()
    assert found.status.tolist() == [STATUS_OK, STATUS_BAD_TEXT, STATUS_EMPTY], "the first that failed says why"


def test_one_source_is_that_source():
    one = Known("one", [0.25, math.nan, -4.0], [], [STATUS_OK, STATUS_EMPTY, STATUS_OK])
    found = combined((one, 1.0)).infer_rm(REQUEST).result()
    torch.testing.assert_close(found.values, one.rewards.values, equal_nan=True)
    assert torch.equal(found.status, one.rewards.status)


def test_a_server_that_does_not_answer_is_not_left_out_of_the_sum():
    class Silent(Known):
        def result(self) -> Rewards:
            raise RewardServerError("no answer within 3 s")

    log: list[str] = []
    future = combined((Known("one", [1.0] * 3, log), 1.0), (Silent("two", [], log), 1.0)).infer_rm(REQUEST)
    with pytest.raises(RewardServerError, match="no answer"):
        future.result()


def test_two_of_one_name_are_refused():
    source = Known("same", [], [])
    with pytest.raises(ConfigError, match="same, same; expected different names"):
        combined((source, 1.0), (source, 2.0))


def test_they_nest():
    log: list[str] = []
    inner = combined((Known("one", [1.0, 2.0, 3.0], log), 2.0))
    rm = CombinedRewards(
        [WeightedSource("inner", inner, 3.0), WeightedSource("two", Known("two", [1.0] * 3, log), 1.0)]
    )
    assert rm.infer_rm(REQUEST).result().values.tolist() == [7.0, 13.0, 19.0]


def test_all_are_closed_also_after_one_that_cannot_be():
    log: list[str] = []

    class Stuck(Known):
        def close(self) -> None:
            super().close()
            raise OSError("cannot be closed")

    rm = combined((Known("one", [], log), 1.0), (Stuck("two", [], log), 1.0), (Known("three", [], log), 1.0))
    with pytest.raises(OSError, match="cannot be closed"):
        rm.close()
    assert log == ["close one", "close two", "close three"]
