"""What both sides are asked to do.

Notation: P prompts, G samples a prompt, N = P * G sequences, S prompt plus response, T response
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GENERATION = "generation"
TRAINING = "training"
STEP = "step"
PHASES = (GENERATION, TRAINING, STEP)

OURS = "reinforce_rl"
PLAIN = "transformers"
PHASES_OF = {OURS: PHASES, PLAIN: (GENERATION, TRAINING)}

# Of Adam.
LEARNING_RATE = 1e-6
BETAS = (0.9, 0.999)
EPSILON = 1e-8
CLIP_GRAD = 1.0


@dataclass(frozen=True)
class Workload:
    """All prompts have one length and all responses another, so nobody pads.

    Attributes:
        prompts: P.
        group: G.
        prompt_tokens: of each prompt.
        response_tokens: of each response, T: none may end before.
        micro_batch: sequences in one forward and backward pass.
    """

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int
    micro_batch: int

    @property
    def sequences(self) -> int:
        """N."""
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Of all sequences, N * S."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)

    def prompt_ids(self, vocab_size: int) -> Tensor:
        """int64 [P, prompt_tokens], random."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(4, vocab_size, (self.prompts, self.prompt_tokens), generator=generator)

    def sequences_of(self, vocab_size: int) -> Tensor:
        """int64 [N, S], prompt-major: each prompt with G random responses. What is trained on."""
        generator = torch.Generator().manual_seed(1)
        responses = torch.randint(
            4,
            vocab_size,
            (self.sequences, self.response_tokens),
            generator=generator,
        )
        return torch.cat(
            [self.prompt_ids(vocab_size).repeat_interleave(self.group, dim=0), responses],
            dim=1,
        )

    def rewards(self) -> Tensor:
        """float32 [N], random."""
        return torch.randn(self.sequences, generator=torch.Generator().manual_seed(2))
