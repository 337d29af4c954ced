"""The README of a reward model whose every weight was trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import reinforce_rl

if TYPE_CHECKING:
    from reinforce_rl.reward_model.config import TrainRewardModelConfig
    from reinforce_rl.reward_model.full.training import Best


@dataclass(frozen=True)
class FullCard:
    """What is known before the run.

    Attributes:
        source: name of the folder that the run began with.
        config: of the run.
        names: of the scores; none for a single one.
        train, held_out: examples.
        command: how the run was started.
    """

    source: str
    config: TrainRewardModelConfig
    names: tuple[str, ...]
    train: int
    held_out: int
    command: str

    def text(self, best: Best) -> str:
        """The whole README."""
        cfg, metrics = self.config, best.evaluation.metrics
        path = cfg.data.ratings_path if self.names else cfg.data.pairs_path
        kind = "rated answers, by squared error" if self.names else "preference pairs, by Bradley-Terry loss"
        rows = "\n".join(f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in metrics.items())
        if self.names:
            scores = f"Its scores are {', '.join(self.names)}, in the units of the ratings."
            serving = f"python examples/serve_reward_model.py {self._serving()} \\\n    '{self._weights()}'"
        else:
            scores = (
                "Its score has the scale of log-odds: sigmoid of a difference of two is the probability that the "
                "first answer is preferred."
            )
            mean, deviation = metrics["score_mean"], metrics["score_deviation"]
            serving = (
                f"python examples/serve_reward_model.py {self._serving()} \\\n"
                f"    reward_model.mean={mean:.4f} reward_model.deviation={deviation:.4f}"
            )
        if cfg.full.pooling == "last":
            pooling = "The score is read from the last token that is no padding, as transformers does."
        else:
            pooling = (
                "**The score is read from the mean of all hidden states** (`reward_pooling` in config.json), which "
                "this project's server knows and transformers does not: there the scores are other ones."
            )
        return f"""# Reward model from {self.source}

All weights and a linear head, trained on {self.train} {kind}, from `{Path(path or "").name}`.
{scores} {pooling}

Best on {self.held_out} held-out examples after step {best.step}: loss {best.evaluation.loss:.4f}. No prompt is on both
sides.

| | held out |
|---|---|
{rows}

Serve it:

```
{serving}
```

Made by reinforce_rl {reinforce_rl.__version__}:

```
{self.command}
```
"""

    def _serving(self) -> str:
        return "reward_model.restore_from_path=FOLDER"

    def _weights(self) -> str:
        weights = ", ".join(f"{name}: 1.0" for name in self.names)
        return f"reward_model.attribute_weights={{{weights}}}"
