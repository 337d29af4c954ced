"""Register with the trainers of placement=disaggregated and generate for them. See docs/disaggregated.md.

python examples/generate.py pretrained_checkpoint.restore_from_path=SFT model.data.data_prefix.train=prompts.jsonl \
    placement=disaggregated exp_manager.explicit_log_dir=RUN

It takes the trainers' keys and finds them by the run's folder.
"""

from reinforce_rl.launch.programs import generate

if __name__ == "__main__":
    generate()
