"""From the scores of a head to one reward: attributes merged with weights, then standardised.

Notation: N sequences, K attributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.errors import ConfigError


@dataclass(frozen=True)
class Merging:
    """reward = (sum over attributes of weight * score - mean) / deviation.

    Attributes:
        weights: of each of the K attributes; one of 1.0 for a head with one score.
        mean, deviation: of merged scores; 0 and 1 leave them as they are.
    """

    weights: tuple[float, ...] = (1.0,)
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        weights: Mapping[str, float] | None,
        mean: float = 0.0,
        deviation: float = 1.0,
    ) -> Merging:
        """From what a user gave.

        Args:
            names: of the head's attributes; none for a head with one score.
            weights: by name; an attribute that is not named has weight 0. None gives each 1 / K, the mean.
            mean, deviation: as above.

        Raises:
            ConfigError: unknown names, weights that are all 0, or a deviation that is not above 0; all together.
        """
        faults = []
        unknown = sorted(set(weights or {}) - set(names))
        if unknown:
            known = f"the head has {', '.join(names)}" if names else "the head has one score and no attributes"
            faults.append(f"reward_model.attribute_weights names {', '.join(unknown)}; {known}")
        elif weights is not None and not any(weights.values()):
            faults.append("reward_model.attribute_weights has no weight other than 0, so every reward would be 0")
        if not all(math.isfinite(weight) for weight in (weights or {}).values()):
            faults.append(f"reward_model.attribute_weights is {dict(weights or {})}; expected finite numbers")
        if not math.isfinite(mean):
            faults.append(f"reward_model.mean is {mean}; expected a finite number")
        if not (math.isfinite(deviation) and deviation > 0):
            faults.append(f"reward_model.deviation is {deviation}; expected above 0")
        if faults:
            raise ConfigError(faults)
        if not names:
            return cls((1.0,), mean, deviation)
        if weights is None:
            return cls((1 / len(names),) * len(names), mean, deviation)
        return cls(tuple(float(weights.get(name, 0.0)) for name in names), mean, deviation)

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores [N, K] to rewards float64 [N]."""
        merged = scores.double() @ torch.tensor(self.weights, dtype=torch.float64, device=scores.device)
        return (merged - self.mean) / self.deviation
