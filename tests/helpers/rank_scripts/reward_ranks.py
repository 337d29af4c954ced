"""A reward model on several ranks scores what it is given. Usage: reward_ranks.py FOLDER "TP PP SP"...

Reads FOLDER/sequences.json and writes FOLDER/scores_TP_PP_SP_POOLING.json: the scores, and those of the same call
once more after one in which every rank of a block failed.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from reinforce_rl.errors import RewardServerError
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.reward_head import POOLINGS, RewardHead
from reinforce_rl.reward_model.scorer import Batching, MegatronRewardModel, MicroBatch, load_trunk
from reinforce_rl.reward_model.server.ranks import follow_rank_0, lead_ranks

FAILING_TOKEN = 63


class Failing(MegatronRewardModel):
    def score_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
        if any((one.tokens == FAILING_TOKEN).any() for one in micro_batches):
            raise MemoryError("no memory for this one")
        return super().score_micro_batches(micro_batches)


def main() -> None:
    folder = Path(sys.argv[1])
    sequences = json.loads((folder / "sequences.json").read_text())
    # torchrun's store serves one process group, so all layouts have the same one.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    for layout, pooling in itertools.product(sys.argv[2:], POOLINGS):
        tp, pp, sp = map(int, layout.split())
        with parallel_mesh(tp, pp, sequence_parallel=bool(sp)) as mesh:

            def load(mesh=mesh, pooling=pooling) -> Failing:
                head = RewardHead.load(folder / f"{pooling}.safetensors")
                return Failing(
                    load_trunk(folder / "trunk", mesh),
                    head,
                    batching=Batching(tokens_per_micro_batch=64),
                )

            if not mesh.is_main:
                follow_rank_0(mesh, load, rank_timeout=30)
                continue
            with lead_ranks(mesh, load, rank_timeout=30, call_timeout=60) as scorer:
                first = scorer.score(sequences)
                try:
                    scorer.score([[FAILING_TOKEN], *sequences])
                    error = ""
                except RewardServerError as caught:
                    error = str(caught)
                found = {"first": first, "error": error, "second": scorer.score(sequences)}
            (folder / f"scores_{tp}_{pp}_{sp}_{pooling}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
