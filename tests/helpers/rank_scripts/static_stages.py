"""Two ranks decode statically and as on a CPU, in float64. Usage: static_stages.py FOLDER TP PP"""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from helpers.flash import decode_statically
from helpers.policies import megatron_model, random_tokens

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator, StaticDecoding
from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
    folder = sys.argv[1]
    tp = int(sys.argv[2])
    pp = int(sys.argv[3])
    prompts = [
        Prompt(i, "", tuple(row[: 3 + 3 * i]))
        for i, row in enumerate(random_tokens(61, 3, 9).tolist())
    ]
    stops = SamplingParams(
        max_length=16, stop_token_ids=(2, 5, 6, 7, 8, 9, 10, 11), repetition_penalty=1.2
    )
    plain = SamplingParams(max_length=11)
    with parallel_mesh(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, timeout_seconds=60
    ) as mesh:
        lm = megatron_model(folder, mesh, torch.float64)
        tokenizer = load_tokenizer(folder)
        passes = []
        whole = StaticDecoding._read
        for params, samples, max_tokens in (
            (stops, 4, None),
            (stops, 4, 60),
            (plain, 5, None),
            (stops, 1, 30),
        ):
            engine = NativeGenerator(lm, tokenizer, max_tokens, use_graphs=False)
            expected = engine.generate(prompts, samples, params, seed=3)
            passes.clear()
            with pytest.MonkeyPatch.context() as patch:
                decode_statically(patch)
                patch.setattr(
                    StaticDecoding,
                    "_read",
                    lambda self, group: (passes.append(group), whole(self, group))[1],
                )
                completions = engine.generate(prompts, samples, params, seed=3)
            assert torch.equal(completions.tokens, expected.tokens)
            assert torch.equal(completions.lengths, expected.lengths)
            assert completions.finish_reasons == expected.finish_reasons
            torch.testing.assert_close(completions.log_probs, expected.log_probs, atol=1e-6, rtol=0)
            # Stages alternate between groups, so they never work on the same group at once.
            assert len({id(group) for group in passes}) == pp
            assert (
                all(previous is not following for previous, following in itertools.pairwise(passes))
                or pp == 1
            )


if __name__ == "__main__":
    main()
