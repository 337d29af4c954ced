"""A run whose generator reports noisy log-probs: the noise is a function of the token.

Usage: noisy_log_probs.py OVERRIDE...; see `tiny_run`.
"""

from __future__ import annotations

import sys

from helpers import tiny_run

from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

infer = MegatronGPTReinforceActorModel.infer


def disturbed(self, *args, **kwargs):
    completions = infer(self, *args, **kwargs)
    noise = (37 * completions.tokens % 101) / 1000
    noisy = completions.log_probs + noise
    return type(completions)(
        completions.tokens, completions.lengths, completions.finish_reasons, noisy
    )


def main() -> None:
    MegatronGPTReinforceActorModel.infer = disturbed  # type: ignore[method-assign]
    config = load_config(tiny_run.compose(*sys.argv[1:]))
    sizes = config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size
    with parallel_mesh(*sizes) as mesh, tiny_run.tiny_trainer(config, mesh) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main()
