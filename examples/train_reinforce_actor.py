"""Train an actor with REINFORCE/RLOO.

python examples/train_reinforce_actor.py pretrained_checkpoint.restore_from_path=SFT \
    model.data.data_prefix.train=prompts.jsonl remote_rm.reward_model.ip=HOST trainer.devices=2

Settings: conf/train_reinforce_actor.yaml; documentation: docs/configuration.md. preflight=true
prints the plan of the run and every fault in it, and starts nothing. preflight=deep also runs the
ranks on simulated GPUs: memory, and the least time of a step.
"""

from reinforce_rl.launch.programs import train

if __name__ == "__main__":
    train()
