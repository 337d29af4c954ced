"""Times, memory and GPUs as Slurm's users write them."""

from __future__ import annotations

import pytest

from reinforce_rl.launch.slurm.submission.values import Gpus, parse_memory, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("04:00:00", 14400),
        ("1-6", 108000),
        ("1-6:30", 109800),
        ("2-00:00:01", 172801),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_times(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "4h", "1:2:3:4", "-5", "1-2:3:4:5", "00:00"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="expected MINUTES, HH:MM:SS"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "megabytes"), [("0", 0), ("4000", 4000), ("64G", 65536), ("2t", 2097152), ("1025K", 2), ("16GB", 16384)]
)
def test_memory(text, megabytes):
    assert parse_memory(text) == megabytes


@pytest.mark.parametrize("text", ["", "G", "1.5G", "12X"])
def test_what_is_no_memory(text):
    with pytest.raises(ValueError, match="such as 64G"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("8", Gpus(8)),
        ("h100:8", Gpus(8, "h100")),
        ("1g.10gb:2", Gpus(2, "1g.10gb")),
        ("nvidia_a100-80gb:4", Gpus(4, "nvidia_a100-80gb")),
    ],
)
def test_gpus(text, gpus):
    assert Gpus.parse(text) == gpus
    assert str(gpus) == text


def test_no_gpus():
    assert Gpus.parse("0") is None
    for text in ("h100", "h100:", ":8", "many", "8:h100"):
        with pytest.raises(ValueError, match="such as 8 or h100:8"):
            Gpus.parse(text)
