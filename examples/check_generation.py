"""Compare an engine's greedy responses and log-probs with the native engine's, before and after a weight update.

On one GPU, or on two that share the model:
    python examples/check_generation.py MODEL
    torchrun --nproc-per-node 2 examples/check_generation.py MODEL --tensor-parallel 2

The update scales all weights, so that an engine that kept the old ones shows. It ends with code 1 where the log-probs
of common tokens differ by more than the tolerance on average, or where the update changed nothing.
"""

from reinforce_rl.launch.main import run_script

if __name__ == "__main__":
    run_script("check-generation")
