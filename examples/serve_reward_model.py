"""Serve a reward model over HTTP.

python examples/serve_reward_model.py reward_model.restore_from_path=TRUNK \
    reward_model.head_path=HEAD.safetensors
python examples/serve_reward_model.py reward_function.name=reinforce_rl.rewards.functions.gsm8k
python examples/serve_reward_model.py reward_model.restore_from_path=CLASSIFIER

Settings: conf/serve_reward_model.yaml; documentation: docs/reward-models.md.
"""

from reinforce_rl.launch.programs import serve

if __name__ == "__main__":
    serve()
