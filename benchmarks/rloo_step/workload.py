"""What both sides are asked to do, and what they say they did.

Notation: P prompts a step, G samples a prompt, N = P * G.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

GENERATION = "generation"
LOG_PROBS = "log-probs"
REFERENCE = "reference log-probs"
REWARDS = "rewards"
TRAINING = "loss and gradient"
OPTIMIZER = "optimizer"
OTHER = "other"
PHASES = (GENERATION, LOG_PROBS, REFERENCE, REWARDS, TRAINING, OPTIMIZER, OTHER)


@dataclass(frozen=True)
class Workload:
    """What a side is asked to do.

    Attributes:
        model: Hugging Face folder.
        prompts: texts of the P prompts of each step.
        warm_up_steps: the first steps that are made and not counted: the optimizer's moments are made in the first.
        group: G.
        prompt_tokens: of each prompt.
        response_tokens: of each response: none may end before, and none goes on.
        beta: what a nat of KL costs.
        lr: learning rate.
        seed: of the sampling.
        threads: that torch may use.
        batch: sequences in one pass of the peer's log-probs and training.
        own_batch: of this project's; None for the shipped setting.
        overrides: Hydra overrides of this project's side.
    """

    model: str
    prompts: list[list[str]]
    warm_up_steps: int
    group: int
    prompt_tokens: int
    response_tokens: int
    beta: float
    lr: float
    seed: int
    threads: int
    batch: int
    own_batch: int | None
    overrides: list[str]

    @property
    def sequences(self) -> int:
        """N."""
        return len(self.prompts[0]) * self.group


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        prompt: token ids, as the side tokenised it.
        response_tokens: how many.
        response: its text, which was scored.
        reward: the score.
    """

    prompt: list[int]
    response_tokens: int
    response: str
    reward: float


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        seconds: of the whole step.
        phases: seconds of each of `PHASES`.
        samples: N.
    """

    seconds: float
    phases: dict[str, float]
    samples: list[Sample]


@dataclass(frozen=True)
class SideReport:
    """What a side did.

    Attributes:
        side: its name and version.
        versions: of the libraries that it computes with.
        threads: of torch.
        parameters: that are trained.
        dtype: of the weights.
        steps: all, those that do not count included.
        peak_bytes: resident memory of its processes, the sum of each one's highest.
    """

    side: str
    versions: dict[str, str]
    threads: int
    parameters: int
    dtype: str
    steps: list[Step]
    peak_bytes: int


def with_other(seconds: float, phases: dict[str, float]) -> dict[str, float]:
    """All of `PHASES`: those that did not occur took no time, and what no phase has is `OTHER`."""
    known = {name: phases.get(name, 0.0) for name in PHASES}
    return {**known, OTHER: max(seconds - sum(known.values()), 0.0)}


def peak_resident_bytes(process_ids: Sequence[int]) -> int:
    """The sum of the highest resident memory of each of these processes so far; one that has ended counts nothing."""
    total = 0
    for process_id in process_ids:
        try:
            # Not getrusage: what it says of a process that was forked begins with its parent's
            # memory.
            status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")
        )
    return total


def write(path: Path, content: Workload | SideReport) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(content)), encoding="utf-8")


def read_workload(path: Path) -> Workload:
    """What `write` wrote."""
    return Workload(**json.loads(path.read_text(encoding="utf-8")))


def read_report(path: Path) -> SideReport:
    """What `write` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    steps = [
        Step(**{**step, "samples": [Sample(**sample) for sample in step["samples"]]})
        for step in content["steps"]
    ]
    return SideReport(**{**content, "steps": steps})
