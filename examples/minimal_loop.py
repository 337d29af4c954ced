"""REINFORCE in a visible loop: sample, reward, KL, advantages, update.

python examples/minimal_loop.py
python examples/minimal_loop.py --model MODEL

Without --model, the script makes a tiny random model, which learns in half a minute on a CPU to
answer a letter with more of that letter. `reinforce-rl train` does the same, and adds several GPUs,
reward servers, validation, checkpoints and records.
"""

from __future__ import annotations

import argparse
import string
import tempfile
from pathlib import Path
from typing import Any

import torch

from reinforce_rl import open_policy
from reinforce_rl.algorithm.advantages import rloo
from reinforce_rl.algorithm.kl import sequence_kl

PROMPTS = [f"{letter}:" for letter in "aeioutns"]
SAMPLES = 8  # of each prompt
LETTERS = 8  # in a response of reward 1
BETA = 0.01  # cost of a nat of KL from the initial policy, in reward
SETTINGS: dict[str, Any] = {  # keys of docs/configuration.md
    "trainer.reinforce.initial_policy_kl_penalty": BETA,  # above 0 keeps the initial policy
    "model.encoder_seq_length": 32,
    "model.reinforce.length_params.max_length": 8,  # of a response, in tokens
    "model.optim.lr": 0.01,
}
PRETRAINED_SETTINGS = {
    **SETTINGS,
    "model.encoder_seq_length": 64,
    "model.reinforce.length_params.max_length": 16,
    "model.optim.lr": 1e-5,
}


def reward(prompt: str, response: str) -> float:
    """Return how often the response has the prompt's first letter, as a share of `LETTERS`."""
    return min(1.0, response.count(prompt[0]) / LETTERS)


def main(model: Path, steps: int, settings: dict[str, Any] = SETTINGS) -> list[dict[str, float]]:
    """Train for some steps; return each step's metrics."""
    history = []
    with open_policy(model, PROMPTS, **settings) as policy:
        for step in range(1, steps + 1):
            # Samples of the policy: 8 responses to each of 8 prompts, in prompt-major order.
            batch, texts = policy.generate(policy.prompts, SAMPLES, step)

            # The reward of each response.
            pairs = zip(texts.prompts, texts.responses, strict=True)
            rewards = torch.tensor([reward(prompt, response) for prompt, response in pairs])

            # Each response pays for its divergence from the initial policy.
            kl = sequence_kl(
                policy.log_probs(batch),
                policy.reference_log_probs(batch),
                batch.response_mask,
            )
            penalized = rewards - BETA * kl

            # RLOO: a response's baseline is the mean of the other responses to its prompt.
            advantages = rloo(penalized, batch.group_ids, batch.valid)

            # One step of Adam on the loss -mean(advantage * log-prob of the response).
            update = policy.update(batch, advantages)

            metrics = {
                "reward": float(rewards.mean()),
                "kl": float(kl.mean()),
                "loss": update.loss,
                "grad_norm": update.grad_norm,
            }
            history.append(metrics)
            printed = "  ".join(f"{name} {value:8.4f}" for name, value in metrics.items())
            print(f"step {step:3d}  {printed}  {texts.prompts[0]}{texts.responses[0]!r}")
    return history


def make_tiny_model(folder: Path) -> Path:
    """Write a random Llama of two layers whose tokens are single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", *string.ascii_lowercase, ":", " "]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="REINFORCE in a visible loop.")
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: a tiny one)")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    if arguments.model is not None:
        main(arguments.model, arguments.steps, PRETRAINED_SETTINGS)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(make_tiny_model(Path(folder)), arguments.steps)
