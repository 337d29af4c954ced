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
    """Ends a run that has diverged.

    Args:
        most: optimizer steps in a row that may lack a finite gradient, less one.

    Attributes:
        is_sound: False while the loss is not finite. Weights that are finite may have a forward pass that is not.
    """

    def __init__(self, most: int):
        self._most, self._skipped, self.is_sound = most, 0, True

    def check(
        self, step: int, updates: Sequence[OptimizerUpdate], loss: float, mesh: Mesh, note: Callable[[str], None]
    ) -> None:
        """Take in the optimizer steps on one rollout batch; a collective call.

        Raises:
            DivergedError: on all ranks.
        """
        self.is_sound = math.isfinite(loss)
        for update in updates:
            self._skipped = self._skipped + 1 if update.skipped else 0
        if mesh.any_rank(any(update.weights_lost for update in updates)):
            raise DivergedError(f"the policy's weights were not finite when step {step} was to update them")
        if self._skipped >= self._most:
            raise DivergedError(f"up to step {step}, {self._skipped} optimizer steps in a row had no finite gradient")
        if self._skipped:
            note(f"step {step}: a gradient is not finite, skipped ({self._skipped} of at most {self._most} in a row)")

    def check_end(self, step: int) -> None:
        """Raise DivergedError where nobody knows what the weights after the last step are worth."""
        if not self.is_sound:
            raise DivergedError(f"the loss of step {step}, the last one, is not finite")
