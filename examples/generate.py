"""Register with the trainers of placement=disaggregated and generate for them.

python examples/generate.py pretrained_checkpoint.restore_from_path=SFT \
    model.data.data_prefix.train=prompts.jsonl placement=disaggregated \
    exp_manager.explicit_log_dir=RUN

It takes the trainers' keys and finds the trainers by the run's folder. See docs/generation.md.
"""

from reinforce_rl.launch.programs import generate

if __name__ == "__main__":
    generate()
