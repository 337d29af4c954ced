"""Durations, and the times of a Slurm job."""

from __future__ import annotations

import pytest
from helpers.errors import raises_error

from reinforce_rl.errors import ConfigError
from reinforce_rl.utils.job_time import JobTimes, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("0:7", 7),
        ("30:00", 1800),
        ("01:00:00", 3600),
        ("00:03:45:00", 13500),
        ("2:00:00:01", 172801),
    ],
)
def test_durations_read_from_the_right(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "4h", "1.5", "-1:00", ":30", "1::2", "1:2:3:4:5", "1:00 ", "½", "00:00:00:00"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"DD:HH:MM:SS|no time at all"):
        parse_duration(text)


def test_it_is_what_the_environment_says():
    environment = {"SLURM_JOB_START_TIME": "1795274402", "SLURM_JOB_END_TIME": "1795278002"}
    assert JobTimes.of(environment) == JobTimes(1795274402.0, 1795278002.0)
    assert JobTimes.of({"SLURM_JOB_START_TIME": ""}) == JobTimes.of({}) == JobTimes()


@pytest.mark.parametrize("name", ["SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"])
@pytest.mark.parametrize(
    "text", ["Unknown", "2026-11-21T18:00:00", "-5", "1e9", "17952.5", " 5", "٣", "9" * 13]
)
def test_a_garbled_time_is_named(name, text):
    with raises_error("slurm.job_time.not_unix_seconds", name, repr(text)):
        JobTimes.of({name: text})


def test_both_faults_are_reported_and_an_end_before_the_start_is_one():
    with pytest.raises(ConfigError) as caught:
        JobTimes.of({"SLURM_JOB_START_TIME": "x", "SLURM_JOB_END_TIME": "y"})
    assert caught.value.keys == ["slurm.job_time.not_unix_seconds"] * 2
    names = ("SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME")
    with raises_error("slurm.job_time.end_before_start", 20, *names):
        JobTimes.of({"SLURM_JOB_START_TIME": "20", "SLURM_JOB_END_TIME": "20"})
