"""A run whose generator is off by noise that its tokens key. Usage: gap.py OVERRIDE...; see `tiny_run`."""

from __future__ import annotations

import sys

from helpers import tiny_run

from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

infer = MegatronGPTReinforceActorModel.infer


def disturbed(self, *args, **kwargs):
    found = infer(self, *args, **kwargs)
    noise = (37 * found.tokens % 101) / 1000
    return type(found)(found.tokens, found.lengths, found.finish_reasons, found.log_probs + noise)


def main() -> None:
    MegatronGPTReinforceActorModel.infer = disturbed  # type: ignore[method-assign]
    config = load_config(tiny_run.compose(*sys.argv[1:]))
    sizes = config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size
    with parallel_mesh(*sizes) as mesh, tiny_run.tiny_trainer(config, mesh) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main()
