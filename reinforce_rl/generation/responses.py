"""The responses of a call while they are written: their tokens, and the rules that depend on what was written before.

Notation: N responses of the call, R of them in flight, T tokens of a response at most, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reinforce_rl.data.batches import FINISH_LENGTH, FINISH_STOP, Completions, Prompt
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.sampling import penalise_repetition

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Responses:
    """
    Args:
        prompts: of the call.
        num_samples: responses of each.
        params: the rules.
        tokenizer: decodes text for `end_strings`.
        pad_id: fills the right of the responses.
        device: where they are written.
        spare: write also to a row N, which is nobody's.
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

        Args:
            logits: [R, V].
            samples: int64 [R], whose.
            written: int64 [R], tokens of each so far.
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
        """Write one token to each of these responses; which of the R rows ended with it by a token or a text.

        Args:
            samples, written: as for `adjust`.
            tokens: int64 [R].
            log_probs: float32 [R].
        """
        self._write(samples, written, tokens, log_probs)
        if not self._stops.numel() and not self._params.end_strings:
            return []  # without waiting for the device
        stopped = torch.isin(tokens, self._stops)
        if self._params.end_strings:
            stopped |= self._have_end_strings(samples, written + 1)
        self._stopped[samples] = stopped
        return stopped.nonzero()[:, 0].tolist()

    def record(self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """As `append`, without waiting for the device and without end strings: bool [R], which ended."""
        self._write(samples, written, tokens, log_probs)
        stopped = (tokens[:, None] == self._stops).any(dim=1)
        self._stopped[samples] = stopped
        return stopped

    def stop_at_end_strings(self, samples: Tensor) -> Tensor:
        """Which of these responses contain an end string, bool [R]: they end there."""
        found = self._have_end_strings(samples, self._lengths[samples])
        self._stopped[samples] |= found
        return found

    def last_tokens(self, samples: Tensor, written: Tensor) -> Tensor:
        """int64 [R]: the token before `written` of each."""
        return self._tokens[samples, written - 1]

    def _write(self, samples: Tensor, written: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        self._tokens[samples, written] = tokens
        self._log_probs[samples, written] = log_probs
        self._lengths[samples] = written + 1
        if self._seen is not None:
            # A value on the device: a number would be copied there, which no CUDA graph may hold.
            self._seen[samples, tokens] = torch.ones_like(tokens, dtype=torch.bool)

    def _have_end_strings(self, samples: Tensor, lengths: Tensor) -> Tensor:
        rows = zip(self._tokens[samples].tolist(), lengths.tolist(), strict=True)
        texts = self._tokenizer.batch_decode([tokens[:length] for tokens, length in rows])
        hits = [any(end in text for end in self._params.end_strings) for text in texts]
        return torch.tensor(hits, device=lengths.device) & (lengths >= self._params.min_length)

    def finish(self) -> Completions:
        """What was written, cut to the longest response."""
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
