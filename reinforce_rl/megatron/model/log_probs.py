"""Log-probs and entropies of response tokens, computed in chunks without the full logits.

The backward pass recomputes each chunk's logits, as Liger kernel and Cut Cross-Entropy do
(arXiv:2410.10989, arXiv:2411.09009), here with entropy and tensor parallelism.

Notation: N sequences, T response tokens, n positions, h hidden, V vocabulary, tp tensor-parallel
ranks, z logits / temperature, p softmax(z).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.function import once_differentiable

from reinforce_rl.megatron.model.attention import sum_of_shares
from reinforce_rl.megatron.model.layers import buffer_of, vocabulary_logits, was_added
from reinforce_rl.megatron.model.model import CausalLM, VocabShard
from reinforce_rl.megatron.model.sequences import SequenceLayout


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(target) [n], and entropies in nats [n] or None, with gradient on every rank.

    p = softmax(hidden weight^T / temperature), in at least float32; on a CPU logits keep the dtype
    of `hidden`. A collective call over `shard.group`, also in the backward pass.

    hidden [n, h], equal on every tensor-parallel rank; weight [V / tp, h], this rank's rows;
    targets int64 [n], ids in the whole vocabulary. Memory is proportional to `chunk_tokens`
    positions, and twice as much with entropy.
    """
    # The backward pass sums the gradient of `hidden` over the ranks' vocabulary shards.
    hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=shard.group)
    outputs: Any = _ChunkedHead.apply(
        hidden, weight, targets, (shard, temperature, chunk_tokens), with_entropy
    )
    return outputs


class _ChunkedHead(torch.autograd.Function):
    """Saves a log-sum-exp and an entropy per position, and the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: tuple[Any, ...],
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logits = _ShardLogits(hidden, weight, targets, *options)
        group = options[0].group
        dtype = logits.dtype
        # A rank without tokens keeps these neutral values.
        highest = torch.full(
            targets.shape, torch.finfo(dtype).min, dtype=dtype, device=hidden.device
        )
        sums = highest.new_zeros((3, *targets.shape))
        exponentials = logits.new_buffer() if with_entropy else None
        for chunk, z in logits.chunks():
            rows, columns, mine = logits.targets_of(chunk)
            sums[0, chunk] = z[rows, columns].masked_fill(~mine, 0.0)
            highest[chunk] = z.amax(dim=-1)
            z.sub_(highest[chunk, None])
            e = torch.exp(z, out=z if exponentials is None else exponentials[: len(z)])
            sums[1, chunk] = e.sum(dim=-1)
            if with_entropy:
                sums[2, chunk] = z.mul_(e).sum(dim=-1)
        # So far sums are relative to each rank's own maximum, so two collectives suffice for all
        # chunks.
        local = highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shift = local - highest
        sums[2] = shift.exp() * (sums[2] + shift * sums[1])
        sums[1] *= shift.exp()
        dist.all_reduce(sums, group=group)
        target_z, sum_exp, sum_exp_z = sums  # sum_exp_z is the sum of exp(z - max) (z - max)
        log_sum = sum_exp.log()
        log_probs = target_z - highest - log_sum
        entropy = log_sum - sum_exp_z / sum_exp if with_entropy else None

        ctx.save_for_backward(hidden, weight, targets, highest + log_sum, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, log_probs_grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """d log p(target) / dz = onehot - p, and dH / dz = -p (log p + H)."""
        hidden, weight, targets, log_sum_exp, entropy = ctx.saved_tensors
        shard, temperature, _ = ctx.options
        logits = _ShardLogits(hidden, weight, targets, *ctx.options)
        if log_probs_grad is None:
            log_probs_grad = torch.zeros_like(log_sum_exp)
        to_targets = log_probs_grad / temperature
        to_entropies = None if entropy_grad is None else entropy_grad / temperature
        probabilities = None if entropy_grad is None else logits.new_buffer()
        grad_hidden = hidden.new_zeros(hidden.shape) if ctx.needs_input_grad[0] else None
        # Accumulate over chunks in full precision.
        buffer = buffer_of(weight) if ctx.needs_input_grad[1] else None
        grad_weight = buffer
        if ctx.needs_input_grad[1] and buffer is None:
            grad_weight = weight.new_zeros(weight.shape, dtype=logits.dtype)
        for chunk, z in logits.chunks():
            to_target = to_targets[chunk]
            log_p = z.sub_(log_sum_exp[chunk, None])
            if probabilities is None or to_entropies is None:
                grad_z = log_p.exp_().mul_(-to_target[:, None])
            else:
                p = torch.exp(log_p, out=probabilities[: len(z)])
                to_entropy = to_entropies[chunk]
                constant = to_entropy * entropy[chunk] + to_target
                grad_z = log_p.mul_(-to_entropy[:, None]).sub_(constant[:, None]).mul_(p)
            rows, columns, mine = logits.targets_of(chunk)
            grad_z[rows, columns] += to_target * mine
            grad_z = grad_z.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_z, logits.weight, out=grad_hidden[chunk])
            if grad_weight is not None and grad_weight.dtype == hidden.dtype:
                grad_weight[: shard.size].addmm_(grad_z.t(), hidden[chunk])
            elif grad_weight is not None:
                grad_weight[: shard.size].add_(grad_z.t() @ hidden[chunk])
        if buffer is not None:
            grad_weight = was_added(weight)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
        )


class _ShardLogits:
    """Computes z for one rank's tokens, a chunk of positions at a time."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
    ):
        # A view: masking padded columns with -inf would cost a pass, and give 0 x inf in the
        # entropy.
        self.weight = weight[: shard.size]
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._hidden = hidden
        self._targets = targets
        self._shard = shard
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def new_buffer(self) -> Tensor:
        """Allocate a reusable chunk buffer; a new one per chunk costs page faults on a CPU."""
        rows = min(self._chunk_tokens, len(self._hidden))
        return torch.empty((rows, self._shard.size), dtype=self.dtype, device=self._hidden.device)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the positions, z [positions, shard.size]); the next step overwrites z."""
        if self._shard.size == 0:
            return
        buffer = self.new_buffer()
        for start in range(0, len(self._hidden), self._chunk_tokens):
            hidden = self._hidden[start : start + self._chunk_tokens]
            z = vocabulary_logits(hidden, self.weight, out=buffer[: len(hidden)])
            if self._temperature != 1.0:
                z.div_(self._temperature)
            yield slice(start, start + len(hidden)), z

    def targets_of(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows, columns, mine): indices of the targets in z, valid where `mine`."""
        columns = self._targets[chunk] - self._shard.start
        mine = (columns >= 0) & (columns < self._shard.size)
        return (
            torch.arange(len(columns), device=columns.device),
            columns.clamp(0, self._shard.size - 1),
            mine,
        )


@dataclass(frozen=True)
class TokenScores:
    """Scores of each response token, given all tokens before it."""

    log_probs: Tensor  # [N, T], in nats; 0 on padding
    # [N, T], of the distribution at each token, in nats; 0 on padding; None if not requested
    entropy: Tensor | None


def response_scores(
    layout: SequenceLayout,
    hidden: Tensor,
    lm: CausalLM,
    temperature: float,
    width: int,
    *,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Compute log-probs and entropies of response tokens under pi = softmax(logits / temperature).

    A collective call over tensor- and context-parallel ranks, also in the backward pass. The
    result, in at least float32 with T = `width` columns, is equal on every rank. `hidden` is the
    output of `layout.hidden` on the last stage.
    """
    predictions = layout.predictions(hidden)
    shape = (len(layout.response_lengths), width)
    empty = torch.zeros(
        shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
    )
    entropy = None
    if predictions.rows.numel() == 0:
        # Keep the graph connected, so that a rank without tokens joins the collectives of the
        # backward pass.
        log_probs = empty + 0.0 * (hidden.to(empty.dtype).sum() + lm.output_weight[0, 0])
        entropy = log_probs if with_entropy else None
    else:
        positions = (predictions.rows, predictions.columns)
        options: Any = {
            "temperature": temperature,
            "chunk_tokens": chunk_tokens,
            "with_entropy": with_entropy,
        }
        head = (predictions.hidden, lm.output_weight, predictions.targets, lm.vocab_shard)
        values, entropies = chunked_log_probs(*head, **options)
        log_probs = empty.index_put(positions, values)
        entropy = None if entropies is None else empty.index_put(positions, entropies)
    if lm.mesh.cp_size > 1:
        log_probs = sum_of_shares(log_probs, lm.mesh.cp_group)
        entropy = None if entropy is None else sum_of_shares(entropy, lm.mesh.cp_group)
    return TokenScores(log_probs, entropy)
