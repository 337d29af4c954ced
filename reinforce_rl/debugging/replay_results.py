"""Results of a replay by phase: as a table, a sentence with the likely cause, and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reinforce_rl.debugging.differences import Bounds, FirstDifference

Verdict = Literal["same", "differs", "not replayed"]
_UNKNOWN = "No difference of code, data, settings, reward source or machine was found"
_CAUSES = {
    "prompts": "the record was changed",
    "weights": (
        "the checkpoint or the initial model was changed, or an earlier step is not deterministic"
    ),
    "score": (
        "the reward depends on time, chance or a service besides its inputs, or the record was "
        "changed"
    ),
    "advantages": "the record was changed",
}
_OF_KERNELS = "the record was changed, or a kernel is not deterministic"


@dataclass(frozen=True)
class PhaseResult:
    name: str
    verdict: Verdict
    differences: list[FirstDifference] = field(default_factory=list)
    note: str = ""

    @classmethod
    def of(cls, name: str, differences: list[FirstDifference], note: str = "") -> PhaseResult:
        return cls(name, "differs" if differences else "same", differences, note)


@dataclass(frozen=True)
class Replay:
    run: str
    step: int
    start: int  # step of the checkpoint at the start; 0 for the initial model
    phases: list[PhaseResult]  # empty except on the first rank
    # differences of code, machine, settings, data and reward source from the record
    facts: list[str]
    bounds: Bounds

    @property
    def is_empty(self) -> bool:
        return not self.phases

    @property
    def exit_code(self) -> int:
        """Return 0 for no difference, 1 for a difference.

        2 if nothing differs, but not every phase was replayed.
        """
        verdicts = {phase.verdict for phase in self.phases}
        return 1 if "differs" in verdicts else 2 if "not replayed" in verdicts else 0

    @property
    def sentence(self) -> str:
        """Describe the first difference and its likely cause."""
        skipped = ", ".join(phase.name for phase in self.phases if phase.verdict == "not replayed")
        phase = next((phase for phase in self.phases if phase.differences), None)
        if phase is None:
            return "Nothing differs" + (f"; not replayed: {skipped}." if skipped else ".")
        text = f"The first difference is in {phase.name}, recorded and now: {phase.differences[0]}"
        if self.facts:
            return "\n".join(
                [text, "Different from the record:", *(f"  {fact}" for fact in self.facts)]
            )
        return f"{text}\n{_UNKNOWN}: {_CAUSES.get(phase.name.split()[0], _OF_KERNELS)}."

    def table(self) -> RenderableType:
        table = Table("phase", "verdict", "", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for phase in self.phases:
            table.add_row(
                phase.name,
                phase.verdict,
                Text("\n".join([*map(str, phase.differences), phase.note]).strip()),
            )
        begin = f"the checkpoint of step {self.start}" if self.start else "the initial model"
        head = f"Step {self.step} of {self.run}, from {begin}; compared {self.bounds}"
        return Group(Text(head), "", table, "", Text(self.sentence))

    def as_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            **asdict(self),
            "sentence": self.sentence,
            "exit_code": self.exit_code,
        }
