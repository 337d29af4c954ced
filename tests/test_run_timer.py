"""How long a run may take."""

from __future__ import annotations

import time

import psutil
import pytest

from reinforce_rl.run_timer import RunTimer, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7), ("0:7", 7), ("30:00", 1800), ("01:00:00", 3600), ("00:03:45:00", 13500), ("2:00:00:01", 172801)],
)
def test_durations_read_from_the_right(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1.5", "-1:00", ":30", "1::2", "1:2:3:4:5", "1:00 ", "½", "00:00:00:00"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"DD:HH:MM:SS|no time at all"):
        parse_duration(text)


def test_the_time_counts_from_the_start_of_the_process():
    age = time.time() - psutil.Process().create_time()
    assert RunTimer().elapsed() == pytest.approx(age, abs=5)
    assert not RunTimer().is_finished()
    assert RunTimer(age / 2).is_finished()
    assert not RunTimer(age + 3600).is_finished()
