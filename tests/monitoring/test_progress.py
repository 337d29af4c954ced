from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from reinforce_rl.monitoring.progress import TrainingProgress, clock

METRICS = {
    "rewards": -0.5,
    "rewards_with_kl": -0.75,
    "init_policy_kl": 2.5,
    "fraction_of_samples_properly_ended": 0.25,
    "response_lengths": 20.0,
    "grad_norm": 1.5,
}
TIMINGS = {
    "generate": 3.0,
    "logprobs": 0.5,
    "init_logprobs": 0.4,
    "reward_wait": 0.1,
    "train_time": 2.0,
    "step_time": 6.5,
}
SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"


class Flushed(io.StringIO):
    """Keeps what a reader of the log sees: the flushed text."""

    seen = ""

    def flush(self) -> None:
        super().flush()
        self.seen = self.getvalue()


def terminal() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=100, height=40, color_system="truecolor"
    )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_file_gets_one_plain_flushed_line_a_step():
    file = Flushed()
    with TrainingProgress(40, console=Console(file=file)) as progress:
        progress.phase("generate")
        progress.update(1, METRICS, TIMINGS)
        assert file.seen.count("\n") == 1
        progress.update(2, {**METRICS, "rewards": float("nan")}, {})
    first, second = file.seen.splitlines()
    assert first.startswith(
        "step  1/40  reward -0.500  with_kl -0.750  kl 2.500  ended 25%  length 20.0  grad 1.5  |  "
        "generate 3.0  logprobs 0.5  init_logprobs 0.4  reward_wait 0.1  train_time 2.0  |  6.5 s "
        "a step, "
    )
    assert first.endswith(" left")
    assert second.startswith("step  2/40  reward -  with_kl -0.750")
    assert "\x1b" not in file.seen


def test_notes_and_validation_in_a_log_file():
    file = Flushed()
    with TrainingProgress(40, console=Console(file=file)) as progress:
        progress.note("waiting for reward server at [::1]:5555, 12 s of 600 s", transient=True)
        progress.validation(10, {"rewards": 0.25, "response_lengths": 18.0})
    assert file.seen.splitlines() == [
        "waiting for reward server at [::1]:5555, 12 s of 600 s",
        "validation after step 10:  reward 0.250  length 18.0",
    ]


def test_a_wait_in_a_log_file_is_reported_at_growing_intervals(monkeypatch):
    seconds = [0.0]
    file = Flushed()
    monkeypatch.setattr(
        "reinforce_rl.monitoring.progress.time", SimpleNamespace(monotonic=lambda: seconds[0])
    )
    with TrainingProgress(40, console=Console(file=file)) as progress:
        for phase in ("reward_wait", "generate"):
            start = seconds[0]
            progress.phase(phase)
            while seconds[0] < start + 600:
                seconds[0] += 5
                progress.note(f"{phase} {seconds[0] - start:.0f}", transient=True)
    notes = [line.split() for line in file.seen.splitlines()]
    expected = [
        [phase, n] for phase in ("reward_wait", "generate") for n in ("5", "15", "45", "135", "405")
    ]
    assert notes == expected


def test_other_ranks_show_nothing():
    console = terminal()
    with TrainingProgress(40, enabled=False, console=console) as progress:
        progress.phase("generate")
        progress.note("hello")
        progress.update(1, METRICS, TIMINGS)
        progress.validation(1, METRICS)
    assert text_of(console) == ""


def test_a_terminal_shows_the_phase_the_numbers_and_the_wait():
    console = terminal()
    with TrainingProgress(40, console=console) as progress:
        progress.update(1, METRICS, TIMINGS)
        progress.update(2, {**METRICS, "rewards": -0.25}, TIMINGS)
        progress.phase("init_logprobs")
        assert progress._live is not None
        progress._live.refresh()
        assert "init_logprobs … 0 s" in text_of(console)
        progress.note("waiting for [server], 3 s of 600 s", transient=True)
        progress._live.refresh()
        progress.note("[bold]kept[/bold] as it is")
    shown = text_of(console)
    for expected in (
        "step 2/40",
        "-0.250",
        "-0.375",
        "-0.500",
        "25%",
        "6.5 s a step",
        "generate 3.0",
    ):
        assert expected in shown
    assert "waiting for [server], 3 s of 600 s" in shown
    assert "[bold]kept[/bold] as it is" in shown


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_terminal_is_given_back(error):
    console = terminal()
    try:
        with TrainingProgress(3, console=console) as progress:
            progress.phase("generate")
            assert HIDE_CURSOR in text_of(console)
            if error is not None:
                raise error()
    except BaseException as raised:
        assert type(raised) is error
    shown = text_of(console)
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)
    progress.note("after the end")
    assert text_of(console).endswith("after the end\n")


def test_time_left_uses_the_whole_time_of_the_last_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("reinforce_rl.monitoring.progress.time.monotonic", lambda: now[0])
    with TrainingProgress(10, start_step=4, console=Console(file=io.StringIO())) as progress:
        now[0] += 6
        progress.update(5, METRICS, {"step_time": 5.0})
        assert progress.seconds_left == 5 * 6.0
        now[0] += 12  # a validation and a checkpoint in between
        progress.update(6, METRICS, {"step_time": 5.0})
        assert progress.seconds_left == 4 * 9.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (float("nan"), "-")],
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_a_log_that_is_full_ends_no_run():
    file = open("/dev/full", "w")  # noqa: SIM115 (closing it fails)
    with TrainingProgress(40, console=Console(file=file)) as progress:
        progress.note("something")
        progress.update(1, METRICS, TIMINGS)
    with pytest.raises(OSError):
        file.close()
