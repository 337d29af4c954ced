"""The policy that every run starts from: a Llama of about 1M parameters, trained on reviews."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from findings.language import all_prompts, vocabulary, write_review

MAX_RESPONSE = 16  # tokens
MAX_POSITIONS = 24
NUM_VALIDATION = 96  # prompts; never trained on
STEPS = 500
BATCH = 64
LEARNING_RATE = 2e-3
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]  # ids 0, 1, 2, 3


def prepare(folder: Path, steps: int = STEPS) -> Path:
    """Write the model, `train.jsonl` and `validation.jsonl` to `folder`, unless they exist.

    Returns:
        the Hugging Face folder of the model.
    """
    model = folder / "model"
    if (folder / "done").exists():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    prompts = all_prompts()
    for name, part in (
        ("validation", prompts[:NUM_VALIDATION]),
        ("train", prompts[NUM_VALIDATION:]),
    ):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in part), encoding="utf-8"
        )
    tokenizer = write_tokenizer(model)
    pretrained(tokenizer, steps).save_pretrained(model)
    (folder / "done").touch()
    return model


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token a word."""
    words = {word: index for index, word in enumerate([*SPECIAL, *vocabulary()])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def pretrained(tokenizer: PreTrainedTokenizerFast, steps: int) -> LlamaForCausalLM:
    """Train on the next token of fresh reviews of all prompts.

    The same number of steps gives the same weights.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    texts = random.Random(0)
    prompts = all_prompts()
    for _ in range(steps):
        chosen = [texts.choice(prompts) for _ in range(BATCH)]
        rows = [f"{prompt} {write_review(prompt, texts)} <eos>" for prompt in chosen]
        batch = tokenizer(rows, padding=True, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model
