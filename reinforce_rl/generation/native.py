"""The native engine: decoding on the megatron actor itself, with a KV cache, on any layout of ranks.

A batch of prompts is read once; the cache of each prompt then serves all its samples. Samples that have ended leave
the batch at once. The engine reads the actor's own weights, so there is nothing to refit.

Notation: P prompts, G samples a prompt, R unfinished samples, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from reinforce_rl.errors import DataError
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.sampling import choose_tokens, noise_keys, penalise_repetition, token_log_probs
from reinforce_rl.megatron.attention import KVCache
from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.megatron.packed_weights import packed_weights
from reinforce_rl.rollout import FINISH_LENGTH, FINISH_STOP, Completions, Prompt, join_completions
from reinforce_rl.tokenizer import pad_id_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NativeGenerator:
    """A `Generator` on the actor's own weights.

    Args:
        lm: the actor.
        tokenizer: decodes text for `end_strings`; its pad id fills the right of the responses.
    """

    def __init__(self, lm: CausalLM, tokenizer: PreTrainedTokenizerBase):
        self._lm = lm
        self._tokenizer = tokenizer
        self._pad_id = pad_id_of(tokenizer)

    def awake(self) -> AbstractContextManager[None]:
        """Nothing to wake: the cache of a call is freed after it."""
        return contextlib.nullcontext()

    def refit(self) -> None:
        """Nothing to do: this engine decodes with the weights that the optimizer updates."""

    def close(self) -> None:
        """Nothing to end."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int) -> Completions:
        """See `Generator.generate`. All prompts are decoded together; the result lies on the CPU.

        Context-parallel ranks decode some of the prompts each: the keyed noise makes that the same.
        """
        self._check_lengths(prompts, params)
        mesh, was_training = self._lm.mesh, self._lm.training
        per_rank = -(-len(prompts) // mesh.cp_size)
        own = prompts[mesh.cp_rank * per_rank : (mesh.cp_rank + 1) * per_rank]
        self._lm.eval()
        try:
            with self._lm.whole_sequences(), packed_weights(self._lm):
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
        device = self._lm.mesh.device
        lengths = torch.tensor([len(p.tokens) for p in prompts], device=device)
        rows = len(prompts) * num_samples
        responses = _Responses(prompts, num_samples, params, self._tokenizer, self._pad_id, device)
        keys = noise_keys(
            seed,
            np.repeat([p.id for p in prompts], num_samples),
            np.tile(np.arange(num_samples), len(prompts)),
            params.max_length,
        ).to(device)

        cache = self._lm.new_cache(len(prompts), slots=int(lengths.max()) + params.max_length)
        logits = self._read_prompts(prompts, lengths, cache)
        if logits is not None:
            logits = logits.repeat_interleave(num_samples, dim=0)
        cache.begin_decoding(lengths, num_samples)
        positions = lengths.repeat_interleave(num_samples)
        active = torch.arange(rows, device=device)
        for step in range(params.max_length):
            tokens = torch.empty(len(active), dtype=torch.long, device=device)
            log_probs = torch.empty(len(active), dtype=torch.float32, device=device)
            if logits is not None:
                adjusted = responses.adjust(logits, active, step)
                tokens = choose_tokens(adjusted, keys[active, step], params)
                log_probs = token_log_probs(logits, tokens, params.temperature).float()
            self._lm.mesh.copy_from_last_stage(tokens)
            self._lm.mesh.copy_from_last_stage(log_probs)
            ended = responses.append(active, step, tokens, log_probs)
            if bool(ended.any()):
                rest = (~ended).nonzero()[:, 0]
                active, tokens, positions = active[rest], tokens[rest], positions[rest]
                if rest.numel() == 0:
                    break
                cache.keep(rest)
            if step + 1 == params.max_length:
                break
            cache.at(positions)
            hidden = self._through_stages(tokens[:, None], positions[:, None], cache)
            logits = None if hidden is None else self._lm.full_logits(hidden[:, 0])
            positions = positions + 1
        return responses.finish()

    def _read_prompts(self, prompts: Sequence[Prompt], lengths: Tensor, cache: KVCache) -> Tensor | None:
        """Prefill; logits float32 [P, V] of each prompt's last position, on the last stage."""
        tokens = torch.full((len(prompts), int(lengths.max())), self._pad_id, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.tokens)] = torch.tensor(prompt.tokens)
        hidden = self._through_stages(tokens.to(lengths.device), None, cache)
        if hidden is None:
            return None
        return self._lm.full_logits(hidden[torch.arange(len(prompts), device=lengths.device), lengths - 1])

    def _through_stages(self, tokens: Tensor, positions: Tensor | None, cache: KVCache) -> Tensor | None:
        """Hidden states [b, s, h] on the last stage, None on the others, which wait for each other in turn."""
        lm, mesh = self._lm, self._lm.mesh
        if mesh.pp_rank > 0:
            shape = (tokens.shape[1], tokens.shape[0], lm.architecture.hidden_size)
            received = torch.empty(shape, dtype=lm.config.pipeline_dtype, device=mesh.device)
            mesh.receive_from_stage(received, mesh.pp_rank - 1)
            lm.set_input_tensor(received)
        hidden = lm(tokens, positions, cache)
        if mesh.is_last_stage:
            return hidden
        mesh.send_to_stage(hidden.contiguous(), mesh.pp_rank + 1)
        return None


class _Responses:
    """The responses being written: their tokens, and the rules that depend on what was written before."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        pad_id: int,
        device: torch.device,
    ):
        rows = len(prompts) * num_samples
        self._params, self._tokenizer = params, tokenizer
        self._stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        self._tokens = torch.full((rows, params.max_length), pad_id, dtype=torch.long, device=device)
        self._log_probs = torch.zeros((rows, params.max_length), dtype=torch.float32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self._prompts = [list(p.tokens) for p in prompts for _ in range(num_samples)]
        self._seen: Tensor | None = None

    def adjust(self, logits: Tensor, active: Tensor, step: int) -> Tensor:
        """Apply the repetition penalty and ban stop tokens before min_length: [R, V] to [R, V]."""
        if self._params.repetition_penalty != 1.0:
            if self._seen is None:
                self._seen = torch.zeros((len(self._prompts), logits.shape[1]), dtype=torch.bool, device=logits.device)
                for row, prompt in enumerate(self._prompts):
                    self._seen[row, torch.tensor(prompt)] = True
            logits = penalise_repetition(logits, self._seen[active], self._params.repetition_penalty)
        if step < self._params.min_length and self._stops.numel():
            logits = logits.index_fill(1, self._stops, float("-inf"))
        return logits

    def append(self, active: Tensor, step: int, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Write one token to each active row; bool [R], True where the response ended with it."""
        self._tokens[active, step] = tokens
        self._log_probs[active, step] = log_probs
        self._lengths[active] = step + 1
        if self._seen is not None:
            self._seen[active, tokens] = True
        stopped = torch.isin(tokens, self._stops)
        if self._params.end_strings and step + 1 >= self._params.min_length:
            texts = self._tokenizer.batch_decode(self._tokens[active, : step + 1].tolist())
            hits = [any(end in text for end in self._params.end_strings) for text in texts]
            stopped |= torch.tensor(hits, device=stopped.device)
        self._stopped[active] = stopped
        return stopped

    def finish(self) -> Completions:
        """What was written, cut to the longest response."""
        width = int(self._lengths.max())
        return Completions(
            tokens=self._tokens[:, :width].cpu(),
            lengths=self._lengths.cpu(),
            finish_reasons=tuple(FINISH_STOP if s else FINISH_LENGTH for s in self._stopped.tolist()),
            log_probs=self._log_probs[:, :width].cpu(),
        )
