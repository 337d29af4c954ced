"""Whether two sides did the same, and how their times and memory compare."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rloo_step.reward import vowels
from rloo_step.workload import PHASES, SideReport, Workload

STEP = "whole step"
# of a phase that has a ratio; the clock around nothing takes some microseconds
LEAST_SECONDS = 0.01
REWARD_TOLERANCE = 1e-6  # both sides keep rewards in float32


class NotTheSame(Exception):
    """The two sides did different things, so their times say nothing."""


@dataclass(frozen=True)
class Pair:
    """Both sides on one workload, one after the other."""

    ours: SideReport
    peer: SideReport


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: of the phase.
        ours, peer: medians over all steps that count, in seconds.
        ratio: the peer's time over ours, the median over pairs; None where a side spends nothing in the phase.
    """

    name: str
    ours: float
    peer: float
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        rows: the phases, and the whole step as the last.
        pair_speedups: the peer's step time over ours, of each pair.
        ours_bytes, peer_bytes: peaks of resident memory, medians over pairs.
    """

    rows: list[Row]
    pair_speedups: list[float]
    ours_bytes: float
    peer_bytes: float

    @property
    def speedup(self) -> float:
        """The median over pairs."""
        return statistics.median(self.pair_speedups)

    @property
    def memory(self) -> float:
        """Our share of the peer's memory."""
        return self.ours_bytes / self.peer_bytes


def check_same(workload: Workload, pair: Pair) -> None:
    """Both sides did what the workload says, with the same model, prompts, token counts, threads and rewards.

    Raises:
        NotTheSame: the text says what differs.
    """
    for name in ("threads", "parameters", "dtype"):
        values = [getattr(side, name) for side in (pair.ours, pair.peer)]
        if values[0] != values[1]:
            raise NotTheSame(
                f"{name}: {pair.ours.side} had {values[0]}, {pair.peer.side} {values[1]}"
            )
    if pair.ours.threads != workload.threads:
        raise NotTheSame(
            f"threads: both sides had {pair.ours.threads}, expected {workload.threads}"
        )
    for side in (pair.ours, pair.peer):
        if len(side.steps) != len(workload.prompts):
            raise NotTheSame(
                f"{side.side} made {len(side.steps)} steps, expected {len(workload.prompts)}"
            )
    for number, steps in enumerate(zip(pair.ours.steps, pair.peer.steps, strict=True), 1):
        for side, step in zip((pair.ours, pair.peer), steps, strict=True):
            where = f"step {number} of {side.side}"
            if len(step.samples) != workload.sequences:
                raise NotTheSame(
                    f"{where} has {len(step.samples)} samples, expected {workload.sequences}"
                )
            lengths = Counter(sample.response_tokens for sample in step.samples)
            if set(lengths) != {workload.response_tokens}:
                lengths_text = ", ".join(
                    f"{count} of {length}" for length, count in sorted(lengths.items())
                )
                raise NotTheSame(
                    f"{where}: responses have {lengths_text} tokens, expected all of {workload.response_tokens}"
                )
            lengths = {len(sample.prompt) for sample in step.samples}
            if lengths != {workload.prompt_tokens}:
                raise NotTheSame(
                    f"{where}: prompts have {sorted(lengths)} tokens, expected {workload.prompt_tokens} in each"
                )
            for sample in step.samples:
                expected = vowels("", sample.response, {})
                # A NaN is a sample that was not scored.
                if not math.isclose(sample.reward, expected, abs_tol=REWARD_TOLERANCE):
                    raise NotTheSame(
                        f"{where}: {sample.response!r} has reward {sample.reward}, expected {expected}"
                    )
        counts = [Counter(tuple(sample.prompt) for sample in step.samples) for step in steps]
        if counts[0] != counts[1]:
            raise NotTheSame(
                f"step {number}: the sides had different prompts, or not equally many samples of each"
            )


def compare(pairs: Sequence[Pair], warm_up_steps: int) -> Comparison:
    """
    Args:
        pairs: at least one.
        warm_up_steps: of each side, which do not count.
    """

    def seconds(side: SideReport, name: str) -> list[float]:
        steps = side.steps[warm_up_steps:]
        return [step.seconds if name == STEP else step.phases[name] for step in steps]

    def all_of(pick: Callable[[Pair], SideReport], name: str) -> float:
        return statistics.median(value for pair in pairs for value in seconds(pick(pair), name))

    def ratios(name: str) -> list[float | None]:
        medians = [
            (
                statistics.median(seconds(pair.ours, name)),
                statistics.median(seconds(pair.peer, name)),
            )
            for pair in pairs
        ]
        least = 0.0 if name == STEP else LEAST_SECONDS
        return [peer / ours if min(ours, peer) > least else None for ours, peer in medians]

    rows = []
    for name in (*PHASES, STEP):
        known = [ratio for ratio in ratios(name) if ratio is not None]
        ratio = statistics.median(known) if known else None
        rows.append(
            Row(
                name,
                all_of(lambda pair: pair.ours, name),
                all_of(lambda pair: pair.peer, name),
                ratio,
            )
        )
    return Comparison(
        rows=rows,
        pair_speedups=[ratio for ratio in ratios(STEP) if ratio is not None],
        ours_bytes=statistics.median(pair.ours.peak_bytes for pair in pairs),
        peer_bytes=statistics.median(pair.peer.peak_bytes for pair in pairs),
    )
