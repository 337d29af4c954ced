"""The native engine: decoding on the megatron actor itself with a KV cache, for any parallel layout.

All samples of a prompt share its keys and values; finished samples leave the batch at once and waiting ones take their
place. The engine reads the actor's own weights, so there is nothing to refit.

Notation: R samples in flight, b sequences per pass, s positions, h hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reinforce_rl.data.batches import Completions, Prompt, join_completions
from reinforce_rl.data.tokenizer import pad_id_of
from reinforce_rl.errors import DataError
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.decoding import Decoding, Responses
from reinforce_rl.generation.native.static_decoding import StaticDecoding, can_decode_statically
from reinforce_rl.megatron.model.model import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NativeGenerator:
    """A `Generator` on the actor's own weights.

    Args:
        max_tokens: bound on each rank's KV cache; None for all sequences of a call.
        is_lean: decode within `CausalLM.fast_decoding`; False: through megatron's own layers.
        is_static: use `StaticDecoding` if also `is_lean`, on a GPU in bf16.
        use_graphs: replay its steps as CUDA graphs.
    """

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | None = None,
        *,
        is_lean: bool = True,
        is_static: bool = False,
        use_graphs: bool = False,
    ):
        self._lm, self._max_tokens, self._is_lean = lm, max_tokens, is_lean
        self._is_static, self._use_graphs = is_lean and is_static, use_graphs
        self._tokenizer = tokenizer
        self._pad_id = pad_id_of(tokenizer)

    @property
    def is_exact(self) -> bool:
        """False in bf16, where incremental decoding rounds differently from a full pass."""
        return self._lm.config.params_dtype != torch.bfloat16

    def awake(self) -> AbstractContextManager[None]:
        """Do nothing: each call frees its cache."""
        return contextlib.nullcontext()

    def refit(self) -> None:
        """Do nothing: the engine decodes with the weights in training."""

    def close(self) -> None:
        """Nothing to end."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int) -> Completions:
        """See `Generator.generate`. The result is on the CPU.

        Context-parallel ranks split the prompts; keyed noise keeps the results the same.
        """
        self._check_lengths(prompts, params)
        mesh, was_training = self._lm.mesh, self._lm.training
        per_rank = -(-len(prompts) // mesh.cp_size)
        own = prompts[mesh.cp_rank * per_rank : (mesh.cp_rank + 1) * per_rank]
        self._lm.eval()
        try:
            lean = self._lm.fast_decoding() if self._is_lean else contextlib.nullcontext()
            with self._lm.whole_sequences(), lean:
                found = self._generate(own, num_samples, params, seed) if own else None
        finally:
            self._lm.train(was_training)
        if mesh.cp_size == 1 and found is not None:
            return found
        return join_completions([part for part in mesh.gather_over_cp(found) if part is not None], self._pad_id)

    def _check_lengths(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        limit = self._lm.architecture.max_positions
        if longest + params.max_length > limit:
            raise DataError(
                f"a prompt of {longest} tokens and {params.max_length} response tokens "
                f"exceed the model's {limit} positions; lower model.reinforce.length_params.max_length "
                "or model.encoder_seq_length"
            )

    def _generate(self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int) -> Completions:
        longest = max(len(prompt.tokens) for prompt in prompts) + params.max_length
        static = self._is_static and can_decode_statically(self._lm, longest)
        responses = Responses(
            prompts, num_samples, params, self._tokenizer, self._pad_id, self._lm.mesh.device, spare=static
        )
        call = (responses, prompts, num_samples, params, seed, self._max_tokens, self._pad_id)
        if static:
            StaticDecoding(self._lm, *call, use_graphs=self._use_graphs).run()
        else:
            decoding = _Decoding(self._lm, *call)
            while decoding.admit():
                decoding.advance(decoding.draw())
        return responses.finish()


class _Decoding(Decoding):
    """Decode one token per unfinished row at a time; row state is on the device."""

    def __init__(self, lm: CausalLM, *call: Any):
        super().__init__(lm, *call)
        self._cache = lm.new_cache(*self._sizes)
        # Hidden states for the next tokens, on the last stage, by row.
        self._hidden = self._of_prompts[:0]

    def admit(self) -> bool:
        """Fill free rows with waiting samples; return False when none is left."""
        before = len(self._schedule.running)
        unread = self._schedule.admit()
        if unread:
            self._cache.read([self._schedule.slot_of(number) for number in unread])
            self._prefill(unread, self._cache)
        if len(self._schedule.running) > before:
            self._place()
            self._hidden = torch.cat((self._hidden, self._of_prompts[self._slots[before:]]))
        return bool(self._schedule.running)

    def _place(self) -> None:
        running = self._schedule.running
        self._samples, self._slots, self._lengths, self._written = torch.tensor(
            [(one.sample, one.slot, len(self._prompts[one.prompt]), one.written) for one in running],
            device=self._device,
        ).unbind(dim=1)
        self._cache.place([one.slot for one in running])

    def draw(self) -> Tensor:
        """Draw, record and return each row's next token, int64 [R]."""
        tokens, log_probs = self._next_tokens(self._hidden, self._samples, self._written)
        ended = self._responses.append(self._samples, self._written, tokens, log_probs)
        order = self._schedule.advance(ended)
        if order is None:
            self._written = self._written + 1
            return tokens
        if order:
            self._cache.keep(order)
            self._place()
        return tokens[order]

    def advance(self, tokens: Tensor) -> None:
        """Feed the drawn tokens int64 [R] to the model."""
        if not len(tokens):
            self._hidden = self._hidden[:0]
            return
        stored = self._written - 1  # this pass computes the last token's keys
        self._cache.at(self._lengths, stored, self._schedule.longest)
        hidden = self._through_stages(tokens[:, None], (self._lengths + stored)[:, None], self._cache)
        if hidden is not None:
            self._hidden = hidden[:, 0]
