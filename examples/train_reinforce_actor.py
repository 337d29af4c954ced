"""Train an actor with REINFORCE/RLOO. Settings: conf/train_reinforce_actor.yaml; documentation: docs/configuration.md.

python examples/train_reinforce_actor.py pretrained_checkpoint.restore_from_path=SFT \
    model.data.data_prefix.train=prompts.jsonl remote_rm.reward_model.ip=HOST trainer.devices=2

With preflight=true it prints the plan of the run and everything that is wrong with it, and starts nothing; with
preflight=deep it predicts besides what a step takes on GPUs that are not there.
"""

from __future__ import annotations

from omegaconf import DictConfig

from reinforce_rl.launch.cli import start_ranks, with_config
from reinforce_rl.runtime.stop import StopRequest


@with_config("train_reinforce_actor")
def main(cfg: DictConfig) -> None:
    from reinforce_rl.config.load import load_config
    from reinforce_rl.runtime.settings import may_start

    if cfg.preflight in (True, "deep"):
        from reinforce_rl.preflight.run import preflight

        preflight(cfg)
        return
    config = load_config(cfg)
    if not may_start(config):
        return
    start_ranks(config.trainer.devices, config.trainer.num_nodes)
    stop = StopRequest.on_signals()
    # Only now: torch and megatron take seconds to import, and a wrong configuration should not cost them.
    from reinforce_rl.run import train

    train(config, stop)


if __name__ == "__main__":
    main()
