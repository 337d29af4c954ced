"""Prepares the recipe "reverse text": prompts of our own, and a model that was shown how to answer them.

python recipes/reverse_text.py [--steps 60] [--model FOLDER] [--out results/recipes/reverse_text_data]

Start it in the repository's root. The task is prime-rl's (examples/reverse_text): reverse a short text letter by
letter, between tags; the reward is the ratio of difflib's SequenceMatcher, which it calls the longest common
subsequence. Its texts are paragraphs of Wikipedia. Ours are three to six common words, since SmolLM2-135M is smaller
than its Qwen3-0.6B. The warm-up is supervised: cross-entropy of the right answer's tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
WORDS = """
apple bird blue boat book bread bridge brown cake chair child cloud coat cold corn dance day door dream drum
early east egg farm field fire fish flag floor flower fog fork fruit game garden glass gold grass green hand hat
hill home honey horse house ice ink island jump key king kite lake lamp leaf lemon light lion map milk mirror
moon music needle nest night north ocean old onion paint paper pear pen pepper piano plant pond queen quiet rain
red ring river road rope rose salt sand sea seed ship silver sky sleep small snow song soup south spoon spring
star stone storm sugar summer sun table tea tent tiger tower town train tree valley wagon wall warm water west
white wind window winter wolf wood yellow young
"""
SIZES = {"train": 640, "validation": 64, "warm_up": 2000}


def similarity(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """Compare the text in the response's tags with the record's `answer`, 0 to 1; 0 without tags."""
    match = re.search(r"<reversed_text>(.*?)</reversed_text>", response, re.DOTALL)
    return SequenceMatcher(None, match[1].strip(), record["answer"]).ratio() if match else 0.0


def records(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the parts' records; no text is in two of them."""
    draw = random.Random(seed)
    words = WORDS.split()
    seen = set()
    while len(seen) < sum(SIZES.values()):
        seen.add(" ".join(draw.sample(words, draw.randint(3, 6))))
    texts = sorted(seen)
    draw.shuffle(texts)
    parts = {}
    for name, size in SIZES.items():
        part = texts[:size]
        texts = texts[size:]
        parts[name] = [{"messages": _messages(text), "answer": text[::-1]} for text in part]
    return parts


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def warm_up(
    model: Path, samples: list[dict[str, Any]], out: Path, steps: int, batch: int, lr: float
) -> None:
    """Train all weights on the answers of the samples, and save the model to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    lm.train()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps)
    )
    for step in range(steps):
        chosen = [samples[(step * batch + row) % len(samples)] for row in range(batch)]
        rows = [_encoded(tokenizer, sample) for sample in chosen]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
        places = torch.arange(width)
        starts = torch.tensor([start for _, start in rows])
        ends = torch.tensor([len(ids) for ids, _ in rows])
        is_answer = (places >= starts[:, None]) & (places < ends[:, None])
        mask = (places < ends[:, None]).long()
        loss = lm(
            input_ids=ids, attention_mask=mask, labels=ids.where(is_answer, torch.tensor(-100))
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"warm-up step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)
    lm.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _encoded(tokenizer: Any, sample: Mapping[str, Any]) -> tuple[list[int], int]:
    """Return the tokens of a conversation, and where its answer begins."""
    prompt = tokenizer.apply_chat_template(
        sample["messages"], tokenize=False, add_generation_prompt=True
    )
    answer = f"<reversed_text>{sample['answer']}</reversed_text>{tokenizer.eos_token}"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids + tokenizer(answer, add_special_tokens=False)["input_ids"], len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of the warm-up")
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--model",
        type=Path,
        help="Hugging Face folder; default: SmolLM2-135M-Instruct, made if missing",
    )
    parser.add_argument("--out", type=Path, default=Path("results/recipes/reverse_text_data"))
    args = parser.parse_args()
    if args.model is None:
        from reinforce_rl.launch.smollm2 import prepare_smollm2

        args.model = prepare_smollm2()
    parts = records(seed=20)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        lines = [json.dumps(record) + "\n" for record in parts[name]]
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    warm_up(args.model, parts["warm_up"], args.out / "warm", args.steps, args.batch, args.lr)
    print(
        f"{args.out}: {len(parts['train'])} prompts, {len(parts['validation'])} held out, the model in warm/"
    )


if __name__ == "__main__":
    main()
