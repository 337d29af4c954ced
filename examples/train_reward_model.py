"""Train a reward model: a head on a frozen trunk, or all weights.

python examples/train_reward_model.py model.restore_from_path=TRUNK data.pairs_path=PAIRS.jsonl
python examples/train_reward_model.py mode=full model.restore_from_path=SFT \
    data.pairs_path=PAIRS.jsonl trainer.devices=2

Settings: conf/train_reward_model.yaml.
"""

from reinforce_rl.launch.programs import train_rm

if __name__ == "__main__":
    train_rm()
