"""Progress of a run: a live panel on a terminal, one line per step in a log file."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reinforce_rl.utils.console import Console
from reinforce_rl.utils.control_characters import show_control_characters
from reinforce_rl.utils.statistics import finite_mean

PHASES = ("generate", "logprobs", "init_logprobs", "reward_wait", "train_time")
# A metric's name, its name in the panel, its name in a line of the log, and its number's format.
Shown = tuple[str, str, str, str]
_SHOWN: tuple[Shown, ...] = (
    ("rewards", "reward", "reward", ".3f"),
    ("rewards_with_kl", "reward with KL", "with_kl", ".3f"),
    ("init_policy_kl", "KL, nats a response", "kl", ".3f"),
    ("fraction_of_samples_properly_ended", "not truncated", "ended", ".0%"),
    ("response_lengths", "response length, tokens", "length", ".1f"),
    ("grad_norm", "gradient norm", "grad", ".3g"),
)
_RECENT = 20  # window of steps for the time left and the middle column


class TrainingProgress:
    """Context manager that shows progress and restores the terminal on exit.

    On a terminal: a live panel. Elsewhere (a Slurm log, a pipe): one plain line per step, flushed,
    never wrapped.

    Args:
        start_step: number of steps before the resume.
        enabled: False on every rank but 0.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        enabled: bool = True,
        console: Console | None = None,
        *,
        title: str = "REINFORCE",
        shown: Sequence[Shown] = _SHOWN,
        phases: Sequence[str] = PHASES,
    ):
        self._title = title
        self._shown = shown
        self._phases = phases
        self.total_steps = total_steps
        self.enabled = enabled
        self.console = console or Console()
        self._step = start_step
        self._skipped = 0
        self._phase = ""
        self._phase_start = time.monotonic()
        self._last_update = self._phase_start
        self._waiting = ""
        self._next_wait = 0.0
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._timings: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {
            name: deque(maxlen=_RECENT) for name, *_ in self._shown
        }
        self._live: Live | None = None

    def __enter__(self) -> TrainingProgress:
        self._last_update = time.monotonic()
        if self.enabled and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                console=self.console, get_renderable=self._render, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.phase("")
        live = self._live
        self._live = None
        if live is not None:
            live.stop()

    def phase(self, name: str) -> None:
        """Set the current phase, e.g. "generate"; an empty name ends it."""
        self._phase = name
        self._phase_start = time.monotonic()
        self._waiting = ""
        self._next_wait = 0.0

    def note(self, text: str, transient: bool = False) -> None:
        """Show a message.

        A transient message is shown until the next one or the phase's end, and in a log file at
        growing intervals.
        """
        now = time.monotonic()
        if not self.enabled or (transient and self._live is None and now < self._next_wait):
            return
        if transient:
            self._waiting = text
            self._next_wait = now + 2 * (now - self._phase_start)
        if self._live is None:
            self._print(text)
        elif not transient:
            self.console.print(Text(text))

    def update(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Report a finished step, counted from 1.

        Args:
            metrics: NeMo-Aligner's names, without prefix; missing ones show as "-".
            timings: seconds of `generate`, `logprobs`, `init_logprobs`, `reward_wait`,
                `train_time`, `step_time`.
        """
        now = time.monotonic()
        self._durations.append(now - self._last_update)  # includes validation and checkpoints
        self._last_update = now
        self._step = step
        self._skipped += metrics.get("skipped_step", 0) > 0
        self._timings = {name: float(value) for name, value in timings.items()}
        for name, history in self._history.items():
            value = float(metrics.get(name, math.nan))
            history.append(value)
            if math.isfinite(value):
                self._first.setdefault(name, value)
        self.phase("")
        if self.enabled and self._live is None:
            self._print(self._line())

    def validation(self, step: int, metrics: Mapping[str, float], kind: str = "validation") -> None:
        """Report a finished validation or test; for the metrics' names see `update`."""
        numbers = [
            (short, formatted(form, metrics[name]))
            for name, _, short, form in self._shown
            if name in metrics
        ]
        sets = {
            name.removesuffix("/rewards"): value
            for name, value in metrics.items()
            if name.endswith("/rewards")
        }
        numbers += [(name, formatted(".3f", value)) for name, value in sets.items()]
        self.note("  ".join([f"{kind} after step {step}:", *map(" ".join, numbers)]))

    @property
    def seconds_left(self) -> float:
        """Estimate the run's remaining seconds from the last steps; NaN before the first."""
        if not self._durations:
            return math.nan
        return max(0, self.total_steps - self._step) * sum(self._durations) / len(self._durations)

    def _print(self, text: str) -> None:
        # console.print would wrap at 80 columns without a terminal. The terminal may be gone or the
        # log full; the files have everything.
        with contextlib.suppress(OSError):
            print(show_control_characters(text), file=self.console.file, flush=True)

    def _seconds_a_step(self) -> float:
        return self._timings.get("step_time", self._durations[-1] if self._durations else math.nan)

    def _line(self) -> str:
        width = len(str(self.total_steps))
        numbers = [
            f"{short} {formatted(form, self._history[name][-1])}"
            for name, _, short, form in self._shown
        ]
        times = [
            f"{name} {self._timings[name]:.1f}" for name in self._phases if name in self._timings
        ]
        rest = [f"{self._seconds_a_step():.1f} s a step, {clock(self.seconds_left)} left"]
        if self._skipped > 0:
            rest.append(f"{self._skipped} steps skipped")
        return "  ".join(
            [f"step {self._step:>{width}}/{self.total_steps}", *numbers, "|", *times, "|", *rest]
        )

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self._step}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=self._step, width=24),
            Text(f"{formatted('.1f', self._seconds_a_step())} s a step"),
            Text(f"{clock(self.seconds_left)} left"),
            Text(f"{self._skipped} steps skipped" if self._skipped else "", style="bold red"),
        )
        times = [
            f"{name} {formatted('.1f', self._timings.get(name, math.nan))}" for name in self._phases
        ]
        phase = (
            f"{self._phase} … {time.monotonic() - self._phase_start:.0f} s" if self._phase else " "
        )
        now = Text(self._waiting, style="yellow") if self._waiting else Text(phase, style="cyan")
        # The panel has a fixed number of lines, so that the display does not jump during a step.
        lines = Group(head, self._numbers(), Text("seconds: " + "  ".join(times), style="dim"), now)
        return Panel(lines, title=Text(self._title), expand=False)

    def _numbers(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("")
        for title in ("now", f"mean, last {_RECENT}", "first"):
            table.add_column(title, justify="right", min_width=10)
        for name, title, _, form in self._shown:
            now = self._history[name][-1] if self._history[name] else math.nan
            values = (
                now,
                finite_mean(self._history[name]),
                self._first.get(name, math.nan),
            )
            table.add_row(title, *[formatted(form, value) for value in values])
        return table


def clock(seconds: float) -> str:
    """Format seconds as 0:07, 12:34 or 1:02:03; "-" if unknown."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def formatted(form: str, value: float) -> str:
    """Format a number by a format specification such as ".3f"; "-" if it is not finite."""
    return format(value, form) if math.isfinite(value) else "-"
