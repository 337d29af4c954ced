"""Two tensor-parallel ranks generate with float64 models. Usage: native_tp2.py OUT FOLDER...

Writes OUT/NAME.RANK for each folder's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.policies import megatron_model, random_tokens

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    tokens = random_tokens(61, 3, 9).tolist()
    prompts = [Prompt(i, "", tuple(row[: 3 + 3 * i])) for i, row in enumerate(tokens)]
    params = SamplingParams(max_length=16, stop_token_ids=(2, 5, 6, 7, 8, 9, 10, 11))
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for folder in folders:
            lm = megatron_model(folder, mesh, torch.float64)
            tokenizer = load_tokenizer(folder)
            completions = NativeGenerator(lm, tokenizer).generate(prompts, 4, params, seed=3)
            bounded = NativeGenerator(lm, tokenizer, max_tokens=60).generate(
                prompts, 4, params, seed=3
            )
            assert torch.equal(bounded.tokens, completions.tokens)
            assert torch.equal(bounded.lengths, completions.lengths)
            values = {
                "tokens": completions.tokens,
                "lengths": completions.lengths,
                "log_probs": completions.log_probs,
            }
            torch.save(values, out / f"{folder.name}.{mesh.rank}")


if __name__ == "__main__":
    main()
