"""Train an actor with REINFORCE/RLOO. Settings: conf/train_reinforce_actor.yaml; documentation: docs/configuration.md.

python examples/train_reinforce_actor.py pretrained_checkpoint.restore_from_path=SFT \
    model.data.data_prefix.train=prompts.jsonl remote_rm.reward_model.ip=HOST trainer.devices=2

With preflight=true it prints the plan of the run and everything that is wrong with it, and starts nothing; with
preflight=deep it also runs ranks on GPUs that are not there: memory, and the least time of a step.
"""

from reinforce_rl.launch.programs import train

if __name__ == "__main__":
    train()
