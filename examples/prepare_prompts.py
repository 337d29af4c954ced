"""Turn preference pairs or conversations into prompt-only train.jsonl and validation.jsonl.

Example:
    python examples/prepare_prompts.py hh_pairs.jsonl --output data/hh --max-turns 1 \
        --num-validation 128
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("prepare")
