"""Plan, check and submit a Slurm job of reward servers and actor.

Documentation: docs/operations.md.

python slurm/submit.py --time 04:00:00 --partition gpu pretrained_checkpoint.restore_from_path=SFT \
    model.data.data_prefix.train=prompts.jsonl trainer.num_nodes=2 trainer.devices=8 \
    exp_manager.explicit_log_dir=/shared/results/one -- \
    reward_model.restore_from_path=TRUNK reward_model.head_path=HEAD.safetensors devices=8
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from reinforce_rl.launch.slurm.submit import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
