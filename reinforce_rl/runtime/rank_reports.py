"""What the ranks of a job say of themselves, and what follows from it when one of them dies, falls silent or hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reinforce_rl.errors import EXIT_LOST_RANK, EXIT_STOPPED

_NAMED = 8  # ranks that a message names


@dataclass(frozen=True)
class Report:
    """A rank, as it was a moment ago.

    Attributes:
        rank, host: which one.
        phase, step, number: see `activity.Phase`.
        seconds: in this phase.
        has_deadline: it waits for another program, and gives up by itself.
        line: of this package, where its main thread is.
        in_collective: it waits for other ranks.
        still: seconds for which its main thread has not moved.
    """

    rank: int
    host: str = "?"
    phase: str = "start"
    step: int = 0
    number: int = 0
    seconds: float = 0.0
    has_deadline: bool = False
    line: str = ""
    in_collective: bool = False
    still: float = 0.0

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host})"

    @property
    def where(self) -> str:
        return f"phase {self.phase} of step {self.step}" if self.step else f"phase {self.phase}, before the first step"


@dataclass(frozen=True)
class Verdict:
    """Why the job ends.

    Attributes:
        text: naming rank, host and phase.
        exit_code: of the ranks that end by it.
        of_first: it is the first rank that is lost, which keeps the run's status.
    """

    text: str
    exit_code: int = EXIT_LOST_RANK
    of_first: bool = False


def died(lost: Sequence[Report]) -> Verdict:
    """Their connections have closed without a word."""
    return _verdict(lost, "died in {where}: the process has gone without a word; see its output and the kernel's log")


def silent(lost: Sequence[Report], seconds: float) -> Verdict:
    """Nothing has been heard of them for so long."""
    return _verdict(
        lost, f"was last heard of {seconds:.0f} s ago, in {{where}}: its process is stopped, or its machine is down"
    )


def failed(report: Report, exit_code: int, text: str) -> Verdict:
    """It has said why it ends. One that was stopped stops the others too."""
    if exit_code == EXIT_STOPPED:
        return Verdict(text, EXIT_STOPPED)
    return _verdict([report], f"failed in {{where}}: {text.strip() or f'exit code {exit_code}'}")


def hung(reports: Sequence[Report], limit: float) -> Verdict | None:
    """Whether nobody has moved for `limit` seconds, and whose fault that is; None while somebody moves.

    To blame are those that do not wait for others; where all do, those that have come least far.
    """
    if any(report.still < limit for report in reports):
        return None
    seconds = min(report.still for report in reports)
    return _stuck(reports, f"no rank has got any further for {seconds:.0f} s")


def waited_for(reports: Sequence[Report], timed_out: Mapping[int, str]) -> Verdict | None:
    """Whom the ranks waited for whose collective ran into its time limit; None where that cannot be said.

    Args:
        reports: of all ranks.
        timed_out: the error's text by rank.
    """
    others = [report for report in reports if report.rank not in timed_out]
    if not timed_out or not others:
        return None
    rank = min(timed_out)
    return _stuck(others, f"rank {rank} has waited for longer than torch's own limit ({timed_out[rank].strip()})")


def _stuck(reports: Sequence[Report], why: str) -> Verdict | None:
    """The verdict on ranks of which some wait; None where those they wait for have a deadline of their own."""
    blamed = [report for report in reports if not report.in_collective]
    if any(report.has_deadline for report in blamed):
        return None
    if not blamed:
        least = min(report.number for report in reports)
        blamed = [report for report in reports if report.number == least]
    lines = ", ".join(dict.fromkeys(report.line for report in blamed if report.line))
    return _verdict(
        blamed,
        f"hangs in {{where}}{f' at {lines}' if lines else ''}: {why}",
    )


def _verdict(lost: Sequence[Report], text: str) -> Verdict:
    names = ", ".join(report.name for report in lost[:_NAMED])
    if len(lost) > _NAMED:
        names += f" and {len(lost) - _NAMED} more"
    told = text.replace("{where}", lost[0].where)
    advice = "The other ranks end. The same command goes on from the last checkpoint"
    return Verdict(f"{names} {told}. {advice}", of_first=any(report.rank == 0 for report in lost))
