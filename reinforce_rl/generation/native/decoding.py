"""Shared parts of the decoders: response buffers, prefill, pipeline passes and sampling.

Notation: R rows of a step, b sequences per pass, s positions, h hidden, V vocabulary, N responses, T maximum response
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from reinforce_rl.data.batches import FINISH_LENGTH, FINISH_STOP, Completions, Prompt
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.sampling import (
    Workspace,
    choose_tokens,
    noise_keys,
    penalise_repetition,
    token_log_probs,
)
from reinforce_rl.generation.native.schedule import Schedule
from reinforce_rl.megatron.model.model import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Responses:
    """Response buffers of a call and the history-dependent sampling rules.

    Args:
        pad_id: right padding of the responses.
        spare: add a scratch row N.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        pad_id: int,
        device: torch.device,
        *,
        spare: bool = False,
    ):
        self._count = len(prompts) * num_samples
        rows = self._count + spare
        self._params, self._tokenizer = params, tokenizer
        self._stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        self._tokens = torch.full((rows, params.max_length), pad_id, dtype=torch.long, device=device)
        self._log_probs = torch.zeros((rows, params.max_length), dtype=torch.float32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self._prompts = [list(p.tokens) for p in prompts for _ in range(num_samples)]
        self._seen: Tensor | None = None

    def adjust(self, logits: Tensor, samples: Tensor, written: Tensor) -> Tensor:
        """Apply the repetition penalty and ban stop tokens before min_length: [R, V] to [R, V].

        `samples` int64 [R] has the response of each row, `written` int64 [R] its tokens so far.
        """
        if self._params.repetition_penalty != 1.0:
            if self._seen is None:
                self._seen = torch.zeros((len(self._tokens), logits.shape[1]), dtype=torch.bool, device=logits.device)
                for row, prompt in enumerate(self._prompts):
                    self._seen[row, torch.tensor(prompt)] = True
            logits = penalise_repetition(logits, self._seen[samples], self._params.repetition_penalty)
        if self._params.min_length and self._stops.numel():
            early = (written < self._params.min_length)[:, None]
            banned = torch.where(early, float("-inf"), logits.index_select(1, self._stops))
            logits = logits.index_copy(1, self._stops, banned)
        return logits

    def append(self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor) -> list[int]:
        """Write one token per row, int64 [R]; return the rows that ended by a stop token or an end string."""
        self._write(samples, written, tokens, log_probs)
        if not self._stops.numel() and not self._params.end_strings:
            return []  # skips a device sync
        stopped = torch.isin(tokens, self._stops)
        if self._params.end_strings:
            stopped |= self._have_end_strings(samples, written + 1)
        self._stopped[samples] = stopped
        return stopped.nonzero()[:, 0].tolist()

    def record(self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Like `append`, without device sync and end strings; return bool [R], True where a response ended."""
        self._write(samples, written, tokens, log_probs)
        stopped = (tokens[:, None] == self._stops).any(dim=1)
        self._stopped[samples] = stopped
        return stopped

    def stop_at_end_strings(self, samples: Tensor) -> Tensor:
        """Mark responses that contain an end string as stopped; return them as bool [R]."""
        found = self._have_end_strings(samples, self._lengths[samples])
        self._stopped[samples] |= found
        return found

    def last_tokens(self, samples: Tensor, written: Tensor) -> Tensor:
        """Return int64 [R], the token before `written`."""
        return self._tokens[samples, written - 1]

    def _write(self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        self._tokens[samples, written] = tokens
        self._log_probs[samples, written] = log_probs
        self._lengths[samples] = written + 1
        if self._seen is not None:
            # A device tensor: a Python scalar would be copied to the device, which a CUDA graph forbids.
            self._seen[samples, tokens] = torch.ones_like(tokens, dtype=torch.bool)

    def _have_end_strings(self, samples: Tensor, lengths: Tensor) -> Tensor:
        rows = zip(self._tokens[samples].tolist(), lengths.tolist(), strict=True)
        texts = self._tokenizer.batch_decode([tokens[:length] for tokens, length in rows])
        hits = [any(end in text for end in self._params.end_strings) for text in texts]
        return torch.tensor(hits, device=lengths.device) & (lengths >= self._params.min_length)

    def finish(self) -> Completions:
        """Return the responses, cut to the longest."""
        tokens, log_probs, lengths, stopped = (
            values[: self._count] for values in (self._tokens, self._log_probs, self._lengths, self._stopped)
        )
        width = int(lengths.max())
        return Completions(
            tokens=tokens[:, :width].cpu(),
            lengths=lengths.cpu(),
            finish_reasons=tuple(FINISH_STOP if s else FINISH_LENGTH for s in stopped.tolist()),
            log_probs=log_probs[:, :width].cpu(),
        )


class Decoding:
    """Decoding state of one `generate` call.

    Args:
        lm: the actor, within `whole_sequences`.
        max_tokens: bound on the cache; None for no bound.
        pad_id: right padding of the prompts.
    """

    def __init__(
        self,
        lm: CausalLM,
        responses: Responses,
        prompts: Sequence[Prompt],
        num_samples: int,
        params: SamplingParams,
        seed: int,
        max_tokens: int | None,
        pad_id: int,
    ):
        self._lm, self._responses, self._params, self._pad_id = lm, responses, params, pad_id
        self._device, self._prompts = lm.mesh.device, [prompt.tokens for prompt in prompts]
        lengths = [len(tokens) for tokens in self._prompts]
        self._schedule = Schedule(lengths, num_samples, params.max_length, max_tokens)
        self._sizes = self._schedule.slots, max(lengths), self._schedule.rows, params.max_length
        self._keys = noise_keys(
            seed,
            np.repeat([p.id for p in prompts], num_samples),
            np.tile(np.arange(num_samples), len(prompts)),
            params.max_length,
        ).to(self._device)
        # Hidden states for the first tokens, on the last stage, by slot.
        size, dtype = lm.architecture.hidden_size, lm.config.params_dtype
        self._of_prompts = torch.empty((self._schedule.slots, size), dtype=dtype, device=self._device)
        self._most_rows = self._schedule.rows
        self._work: Workspace | None = None

    def _prefill(self, numbers: Sequence[int], cache: Any) -> None:
        """Run the prompts through the model; the cache must be set to `read` them."""
        prompts = [torch.tensor(self._prompts[number]) for number in numbers]
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=self._pad_id)
        hidden = self._through_stages(tokens.to(self._device), None, cache)
        if hidden is not None:
            slots = [self._schedule.slot_of(number) for number in numbers]
            self._of_prompts[slots] = hidden[torch.arange(len(prompts), device=self._device), ends]

    def _through_stages(self, tokens: Tensor, positions: Tensor | None, cache: Any) -> Tensor | None:
        """Return hidden states [b, s, h] on the last stage, None on the others; stages run in turn."""
        lm, mesh = self._lm, self._lm.mesh
        if mesh.pp_rank > 0:
            received = self._room(*tokens.shape)
            mesh.receive_from_stage(received, mesh.pp_rank - 1)
            lm.set_input_tensor(received)
        hidden = lm(tokens, positions, cache)
        if mesh.is_last_stage:
            return hidden
        mesh.send_to_stage(hidden.contiguous(), mesh.pp_rank + 1)
        return None

    def _hand_on(self, hidden: Tensor | None, rows: int) -> Tensor | None:
        """Send [1, R, h] or None to the next stage while receiving `rows` rows (0: nothing) from the one before."""
        mesh, group = self._lm.mesh, self._lm.mesh.pp_group
        received = self._room(rows, 1) if rows else None
        messages = []
        if hidden is not None:
            messages.append(dist.P2POp(dist.isend, hidden.contiguous(), group=group, group_peer=mesh.pp_rank + 1))
        if received is not None:
            messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=mesh.pp_rank - 1))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received

    def _room(self, rows: int, positions: int) -> Tensor:
        shape = (positions, rows, self._lm.architecture.hidden_size)
        return torch.empty(shape, dtype=self._lm.config.pipeline_dtype, device=self._device)

    def _next_tokens(self, hidden: Tensor | None, samples: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token int64 [R] and its log-prob float32 [R] per row; `hidden` is [R, h] on the last stage."""
        mesh, rows = self._lm.mesh, len(samples)
        tokens = torch.empty(rows, dtype=torch.long, device=self._device)
        log_probs = torch.empty(rows, dtype=torch.float32, device=self._device)
        if mesh.is_last_stage:
            assert hidden is not None
            logits = self._lm.full_logits(hidden)
            if self._work is None:
                self._work = Workspace(self._most_rows, logits.shape[1], logits.dtype, self._device)
            adjusted = self._responses.adjust(logits, samples, written)
            tokens = choose_tokens(adjusted, self._keys[samples, written], self._params, self._work)
            log_probs = token_log_probs(logits, tokens, self._params.temperature, self._work)
        mesh.copy_from_last_stage(tokens)
        mesh.copy_from_last_stage(log_probs)
        return tokens, log_probs
