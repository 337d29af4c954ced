"""Start the reward server and the actor on this machine, and stop both together.

python examples/launch_local.py --run-dir runs/one \
    --server-args reward_model.restore_from_path=TRUNK \
    reward_model.head_path=HEAD.safetensors \
    --actor-args pretrained_checkpoint.restore_from_path=POLICY \
    model.data.data_prefix.train=PROMPTS.jsonl exp_manager.explicit_log_dir=runs/one

The words after --server-args and --actor-args are Hydra overrides of examples/serve_reward_model.py
and examples/train_reinforce_actor.py. Both get the same free port, unless the server gets
inference.port=N.
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("launch")
