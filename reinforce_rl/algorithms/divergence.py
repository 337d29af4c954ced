"""When a policy cannot be trained any more, and when it is not worth saving."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from reinforce_rl.errors import DivergedError

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh
    from reinforce_rl.megatron.optimizer import OptimizerUpdate


class Divergence:
    """Counts the optimizer steps that had no finite gradient.

    Args:
        max_skipped: so many in a row end the run.

    Attributes:
        is_sound: False while the last loss was not finite. The weights may be finite then, but their forward pass is
            not: they are not saved.
    """

    def __init__(self, max_skipped: int):
        self._max_skipped = max_skipped
        self._in_a_row = 0
        self.is_sound = True

    def check(
        self, step: int, updates: Sequence[OptimizerUpdate], loss: float, mesh: Mesh, note: Callable[[str], None]
    ) -> None:
        """Take in the optimizer steps on one rollout batch; a collective call.

        Raises:
            DivergedError: on all ranks, where weights of one rank are not finite, or too many steps were skipped.
        """
        self.is_sound = math.isfinite(loss)
        for update in updates:
            self._in_a_row = self._in_a_row + 1 if update.skipped else 0
        if mesh.any_rank(not all(math.isfinite(update.weight_norm) for update in updates)):
            raise DivergedError(f"the policy's weights were not finite when step {step} was to update them")
        if self._in_a_row >= self._max_skipped:
            raise DivergedError(
                f"no gradient of {self._in_a_row} optimizer steps in a row, up to step {step}, was finite "
                "(trainer.reinforce.max_skipped_steps)"
            )
        if self._in_a_row:
            note(
                f"step {step} was skipped: its gradient is not finite ({self._in_a_row} of at most "
                f"{self._max_skipped} in a row{'' if self.is_sound else '; nothing is saved meanwhile'})"
            )

    def check_end(self, step: int) -> None:
        """At the end of the training.

        Raises:
            DivergedError: nobody knows what the weights after the last step are worth.
        """
        if not self.is_sound:
            raise DivergedError(f"the loss of step {step}, the last one, is not finite")
