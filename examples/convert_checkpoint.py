"""Convert a Hugging Face folder to a megatron checkpoint and back. See docs/checkpoints.md.

Any tensor-parallel size is possible.

Examples:
    python examples/convert_checkpoint.py to-megatron Qwen2.5-7B checkpoints/qwen --tp 2
    python examples/convert_checkpoint.py to-hf checkpoints/qwen exported/qwen
    python examples/convert_checkpoint.py to-hf results/my_run exported/my_run --model Qwen2.5-7B
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("convert")
