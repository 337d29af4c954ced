"""Two tensor-parallel ranks: the chunked head on shares of one weight. Usage: chunked_head_tp2.py OUT TOKENS...

Writes {tokens: (log-probs, entropies, gradient of hidden, gradient of the whole weight)}.
"""

from __future__ import annotations

import sys

import torch
from helpers.full_head import head_inputs

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.log_probs import VocabShard, chunked_log_probs


def main() -> None:
    out, *vocabularies = sys.argv[1:]
    results = {}
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for tokens in map(int, vocabularies):
            hidden, weight, targets = head_inputs(7, tokens, 16, scale=30.0)
            mine = weight.detach().chunk(2)[mesh.tp_rank].clone().requires_grad_()
            start = 8 * mesh.tp_rank
            shard = VocabShard(start, min(tokens - start, 8), mesh.tp_group)
            log_probs, entropy = chunked_log_probs(
                hidden, mine, targets, shard, temperature=0.6, chunk_tokens=3, with_entropy=True
            )
            assert entropy is not None
            gradients = torch.autograd.grad(log_probs.sum() - 0.3 * entropy.sum(), (hidden, mine))
            parts = [torch.empty_like(mine) for _ in range(2)]
            torch.distributed.all_gather(parts, gradients[1], group=mesh.tp_group)
            results[tokens] = (log_probs.detach(), entropy.detach(), gradients[0], torch.cat(parts).detach())
        if mesh.is_main:
            torch.save(results, out)


if __name__ == "__main__":
    main()
