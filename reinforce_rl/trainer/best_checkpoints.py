"""Which checkpoints are the best ones by a metric of validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from reinforce_rl.errors import ConfigError


class BestCheckpoints:
    """The steps of the best validations so far, at most `keep`.

    Args:
        keep: how many; 0 for none.
        metric: its name, with `val/`.
        mode: `max` or `min`, which values are the better ones.
    """

    def __init__(self, keep: int = 0, metric: str = "val/rewards", mode: str = "max"):
        self._keep, self._metric, self._mode = keep, metric, mode
        self._found: list[tuple[int, float]] = []  # (step, value), the best first

    @property
    def keeps_some(self) -> bool:
        """False where validations leave no checkpoint behind."""
        return self._keep > 0

    @property
    def steps(self) -> list[int]:
        """The best first."""
        return [step for step, _ in self._found]

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a validation. One that is only as good as the worst of those kept is not among them; NaN never is.

        Args:
            step: after which it was.
            metrics: its means, by their names without `val/`.

        Raises:
            ConfigError: the metric is not among them.
        """
        if self._keep == 0:
            return
        value = metrics.get(self._metric.removeprefix("val/"))
        if value is None:
            known = ", ".join(f"val/{name}" for name in metrics)
            raise ConfigError(
                [
                    f"exp_manager.checkpoint_callback_params.best_metric is {self._metric!r}, which validation does "
                    f"not give; expected one of {known}"
                ]
            )
        if math.isfinite(value):
            self._found.append((step, float(value)))
            self._cut()

    def _cut(self) -> None:
        sign = -1 if self._mode == "max" else 1
        self._found.sort(key=lambda found: sign * found[1])  # stable: of equal ones the earlier stays
        del self._found[self._keep :]

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"metric": self._metric, "mode": self._mode, "found": [list(found) for found in self._found]}

    def load_state_dict(self, state: Mapping[str, Any], is_there: Callable[[int], bool]) -> None:
        """Inverse of `state_dict`. Values of another metric or mode mean nothing, and are left out.

        Args:
            state: as saved.
            is_there: whether there is still a checkpoint of a step.
        """
        same = (state["metric"], state["mode"]) == (self._metric, self._mode)
        self._found = [(step, value) for step, value in state["found"] if same and is_there(step)]
        self._cut()
