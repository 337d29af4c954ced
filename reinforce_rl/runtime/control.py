"""Context of a run on one rank: signals, `status.json`, the watchdog, and the current phase."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, ConfigError, LostRankError, ReinforceError, StoppedEarly
from reinforce_rl.runtime.links import host_of_rank_0
from reinforce_rl.runtime.phases import Activity
from reinforce_rl.runtime.status import StatusFile, read_status
from reinforce_rl.runtime.stop import StopNow, StopRequest
from reinforce_rl.runtime.watchdog import Verdict, Watchdog

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh

EXIT_INTERRUPTED = 130  # as of a shell after Ctrl-C


class RunControl:
    def __init__(self, folder: str | Path, stop: StopRequest):
        self.activity = Activity()
        self.stop = stop
        self.status = StatusFile(Path(folder), enabled=os.environ.get("RANK", "0") == "0")
        self._watchdog: Watchdog | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep `status.json` up to date during the block, which is the whole run.

        Raises:
            StoppedEarly: a signal came before there was anything to save.
            ConfigError: another process on this machine works in this run's folder.
        """
        if self.status.enabled:
            refuse_second_run(self.status.path.parent)
        self.status.begin()
        try:
            yield
        except StopNow:
            error = StoppedEarly(f"stopped by {self.stop.reason} before the first step; nothing was to be saved")
            self.status.end(error.exit_code, str(error))
            raise error from None
        except BaseException as error:
            self.status.end(*_outcome(error))
            raise
        self.status.end(EXIT_FINISHED)

    @contextlib.contextmanager
    def watching(self, mesh: Mesh, *, silence_seconds: float, hang_seconds: float) -> Iterator[None]:
        """Watch the other ranks during the block; no-op with one rank.

        Raises:
            LostRankError: this rank failed because another was lost.
        """
        from reinforce_rl.megatron.mesh import before_the_watch  # imports torch and megatron

        if mesh.world_size == 1:
            yield
            return
        watchdog = self._watchdog = Watchdog(
            mesh.rank,
            mesh.world_size,
            self.activity,
            self.stop,
            silence_seconds=silence_seconds,
            hang_seconds=hang_seconds,
            leave=self._leave,
        )
        invitation = watchdog.open(host_of_rank_0()) if mesh.is_main else None
        failure: Exception | None = None
        with before_the_watch(mesh.rank, mesh.world_size):
            invitation = mesh.from_main(invitation)
            try:
                if not mesh.is_main:
                    watchdog.join(invitation)
            except ReinforceError as error:
                failure = error
            mesh.check_together(failure)
        try:
            watchdog.start()
            with self.ending():
                yield
            watchdog.end(EXIT_FINISHED)
        finally:
            watchdog.close()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Send an error of the block to the other ranks at once, before any cleanup.

        Raises:
            LostRankError: the error was caused by the loss of another rank.
            StoppedEarly: the other rank was stopped by a signal.
        """
        try:
            yield
        except BaseException as error:
            watchdog = self._watchdog
            if watchdog is None or watchdog.is_ending:
                raise
            code, text = _outcome(error)
            # All ranks raise our own errors together; any other error may be caused by another rank's end.
            may_be_echo = isinstance(error, Exception) and not isinstance(error, ReinforceError)
            verdict = watchdog.explain(timed_out=_time_out_of(error)) if may_be_echo else None
            watchdog.end(code, text)
            if verdict is not None:
                self._take_over(verdict)
                kind = StoppedEarly if verdict.exit_code == StoppedEarly.exit_code else LostRankError
                raise kind(verdict.text) from error
            raise

    def _take_over(self, verdict: Verdict) -> None:
        if verdict.of_first:
            with contextlib.suppress(OSError, ValueError):
                self.status.speak_for_first()

    def _leave(self, verdict: Verdict) -> None:
        """Exit from the watchdog's thread while the main thread is stuck."""
        self._take_over(verdict)
        with contextlib.suppress(OSError):
            self.status.end(verdict.exit_code, verdict.text)
        with contextlib.suppress(OSError, ValueError):
            show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # hidden by the live display
            kind = "" if verdict.exit_code == StoppedEarly.exit_code else "error: "
            print(f"{show_cursor}{kind}{verdict.text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(verdict.exit_code)


def _time_out_of(error: BaseException) -> str:
    """Return the text of a collective's timeout error; empty for any other error."""
    text = str(error)
    return text if isinstance(error, RuntimeError) and re.search(r"tim(ed|ing) out|timeout", text, re.I) else ""


def _outcome(error: BaseException) -> tuple[int, str]:
    if isinstance(error, ReinforceError):
        return error.exit_code, str(error)
    if isinstance(error, StopNow):
        return StoppedEarly.exit_code, "stopped by a signal to another rank"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted by Ctrl-C"
    return EXIT_ERROR, f"{type(error).__name__}: {error}"


def refuse_second_run(folder: Path) -> None:
    """Raise ConfigError if the process that last wrote `status.json` still runs on this machine."""
    with contextlib.suppress(OSError, ValueError, TypeError, psutil.Error):
        status = read_status(folder)
        if status is None or (status.state, status.host) != ("running", socket.gethostname()):
            return
        process = psutil.Process(status.pid)
        is_other = status.pid != os.getpid() and process.create_time() < status.time
        if not is_other or process.status() == psutil.STATUS_ZOMBIE:
            return
        raise ConfigError(
            [
                f"{folder} has a run that is still going on (process {status.pid} of this machine). Wait for its end "
                "or end it, or choose another folder (exp_manager.explicit_log_dir)"
            ]
        )
