"""The decoder for any device, and what it shares with a GPU's: schedule, response buffers, pipeline passes, sampling.

Notation: R rows of a step, b sequences per pass, s positions, h hidden, V vocabulary, N responses, T maximum response
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from reinforce_rl.data.batches import FINISH_LENGTH, FINISH_STOP, Completions, Prompt
from reinforce_rl.data.tokenizer import pad_id_of
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.sampling import (
    Workspace,
    choose_tokens,
    noise_keys,
    penalise_repetition,
    token_log_probs,
)
from reinforce_rl.megatron.model.model import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Watch = Callable[[list[list[int]]], None]


@dataclass
class Running:
    """A sequence in flight."""

    sample: int  # index among all responses
    prompt: int  # index of the prompt
    slot: int  # location of the prompt's keys and values
    written: int = 0  # response tokens so far


class Schedule:
    """Queue of sequences; one that ends makes room for the next.

    Args:
        num_samples: sequences per prompt.
        max_length: maximum response tokens.
        max_tokens: bound on the tokens of all slots and rows; None for no bound. One sequence always fits.
    """

    def __init__(self, prompt_lengths: Sequence[int], num_samples: int, max_length: int, max_tokens: int | None):
        self._num_samples, self._max_length, longest = num_samples, max_length, max(prompt_lengths)
        total = len(prompt_lengths) * num_samples

        def slots_of(rows: int) -> int:
            """Return the maximum number of prompts that `rows` consecutive samples span."""
            return min(math.ceil((rows - 1) / num_samples) + 1, len(prompt_lengths))

        def fits(rows: int) -> bool:
            return max_tokens is None or rows * max_length + slots_of(rows) * longest <= max_tokens

        self.rows = next((rows for rows in range(total, 1, -1) if fits(rows)), 1)  # maximum in flight
        self.slots = slots_of(self.rows)  # maximum prompts in memory
        self.running: list[Running] = []
        self._begun, self._total = 0, total
        self._free = list(range(self.slots))
        self.slot_of: dict[int, int] = {}  # of the prompts in memory
        self._left = dict.fromkeys(range(len(prompt_lengths)), num_samples)

    def admit(self) -> list[int]:
        """Start as many waiting sequences as fit; return the prompts to prefill."""
        unread = []
        while self._begun < self._total and len(self.running) < self.rows:
            prompt = self._begun // self._num_samples
            if prompt not in self.slot_of:
                if not self._free:
                    break
                self.slot_of[prompt] = self._free.pop(0)
                unread.append(prompt)
            self.running.append(Running(self._begun, prompt, self.slot_of[prompt]))
            self._begun += 1
        return unread

    def advance(self, stopped: Iterable[int], tokens: int = 1) -> list[int] | None:
        """Advance every row by `tokens`; end the rows in `stopped` and those at full length.

        The last rows fill the gaps. `written` of a stopped row may be too high.

        Returns:
            For each remaining row, its former index; None if no row ended.
        """
        for one in self.running:
            one.written += tokens
        ended = {*stopped, *(row for row, one in enumerate(self.running) if one.written == self._max_length)}
        if not ended:
            return None
        for row in sorted(ended):
            prompt = self.running[row].prompt
            self._left[prompt] -= 1
            if not self._left[prompt]:
                self._free.append(self.slot_of.pop(prompt))
        count = len(self.running) - len(ended)
        fillers = iter([row for row in range(count, len(self.running)) if row not in ended])
        order = [next(fillers) if row in ended else row for row in range(count)]
        self.running = [self.running[row] for row in order]
        return order

    @property
    def longest(self) -> int:
        """Tokens of the longest response in flight."""
        return max((one.written for one in self.running), default=0)


class Responses:
    """Response buffers of a call, by the prompt of each, and history-dependent sampling rules; `spare` adds one."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        spare: bool,
    ):
        self._count, rows = len(prompts), len(prompts) + spare
        self._params, self._tokenizer = params, tokenizer
        self._stops = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        self._tokens = torch.full((rows, params.max_length), pad_id_of(tokenizer), dtype=torch.long, device=device)
        self._log_probs = torch.zeros((rows, params.max_length), dtype=torch.float32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self._prompts = [list(prompt.tokens) for prompt in prompts]
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
        stopped = self.record(samples, written, tokens, log_probs)
        if not self._stops.numel() and not self._params.end_strings:
            return []  # skips a device sync
        if self._params.end_strings:
            stopped = stopped | self.stop_at_end_strings(samples)
        return stopped.nonzero()[:, 0].tolist()

    def record(self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Like `append`, without device sync and end strings; return bool [R], True where a response ended."""
        self._tokens[samples, written] = tokens
        self._log_probs[samples, written] = log_probs
        self._lengths[samples] = written + 1
        if self._seen is not None:
            # A device tensor: a Python scalar would be copied to the device, which a CUDA graph forbids.
            self._seen[samples, tokens] = torch.ones_like(tokens, dtype=torch.bool)
        self._stopped[samples] = stopped = (tokens[:, None] == self._stops).any(dim=1)
        return stopped

    def stop_at_end_strings(self, samples: Tensor) -> Tensor:
        """Mark responses that contain an end string as stopped; return them as bool [R]."""
        lengths = self._lengths[samples]
        rows = zip(self._tokens[samples].tolist(), lengths.tolist(), strict=True)
        texts = self._tokenizer.batch_decode([tokens[:length] for tokens, length in rows])
        hits = [any(end in text for end in self._params.end_strings) for text in texts]
        found = torch.tensor(hits, device=lengths.device) & (lengths >= self._params.min_length)
        self._stopped[samples] |= found
        return found

    def so_far(self) -> list[list[int]]:
        """Return the tokens of every response as of now, which waits for the device."""
        lengths = self._lengths[: self._count].tolist()
        return [row[:length] for row, length in zip(self._tokens[: self._count].tolist(), lengths, strict=True)]

    def last_tokens(self, samples: Tensor, written: Tensor) -> Tensor:
        """Return int64 [R], the token before `written`."""
        return self._tokens[samples, written - 1]

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
        watch: called after each step with the tokens of all responses so far; what it raises ends the call.
    """

    has_spare = False  # whether the responses have a scratch row

    def __init__(
        self,
        lm: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | None,
        prompts: Sequence[Prompt],
        num_samples: int,
        params: SamplingParams,
        seed: int,
        watch: Watch | None = None,
    ):
        self._watch = watch
        self._lm, self._params, self._pad_id, self._device = lm, params, pad_id_of(tokenizer), lm.mesh.device
        of_rows = [prompt for prompt in prompts for _ in range(num_samples)]
        self._responses = Responses(of_rows, params, tokenizer, self._device, self.has_spare)
        self._prompts = [prompt.tokens for prompt in prompts]
        lengths = [len(tokens) for tokens in self._prompts]
        self._schedule = Schedule(lengths, num_samples, params.max_length, max_tokens)
        self._sizes = self._schedule.slots, max(lengths), self._schedule.rows, params.max_length
        ids, samples = np.array([prompt.id for prompt in of_rows]), np.tile(np.arange(num_samples), len(prompts))
        self._keys = noise_keys(seed, ids, samples, params.max_length).to(self._device)
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
            slots = [self._schedule.slot_of[number] for number in numbers]
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


class PlainDecoding(Decoding):
    """Decode one token per unfinished row at a time; row state is on the device."""

    def __init__(self, *call: Any):
        super().__init__(*call)
        self._cache = self._lm.new_cache(*self._sizes)
        # Hidden states for the next tokens, on the last stage, by row.
        self._hidden = self._of_prompts[:0]

    def run(self) -> Completions:
        while self._admit():
            tokens = self._draw()
            if self._watch is not None:
                self._watch(self._responses.so_far())
            self._advance(tokens)
        return self._responses.finish()

    def _admit(self) -> bool:
        """Fill free rows with waiting samples; return False when none is left."""
        before = len(self._schedule.running)
        unread = self._schedule.admit()
        if unread:
            self._cache.read([self._schedule.slot_of[number] for number in unread])
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

    def _draw(self) -> Tensor:
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

    def _advance(self, tokens: Tensor) -> None:
        """Feed the drawn tokens int64 [R] to the model."""
        if not len(tokens):
            self._hidden = self._hidden[:0]
            return
        stored = self._written - 1  # this pass computes the last token's keys
        self._cache.at(self._lengths, stored, self._schedule.longest)
        hidden = self._through_stages(tokens[:, None], (self._lengths + stored)[:, None], self._cache)
        if hidden is not None:
            self._hidden = hidden[:, 0]
