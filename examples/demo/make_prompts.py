"""Writes the demo's prompts: questions about everyday things, each with a form that its answer must have.

python examples/demo/make_prompts.py [FOLDER]

Training and held-out questions have no topic in common. The reward function
`reinforce_rl.rewards.functions.instructions` checks the fields `keys`, `min_words`, `max_words` and `keyword`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Questions of a kind, the topics that train, and those held out.
KINDS = [
    (
        [
            "What can I cook with {}?",
            "Why do people like {}?",
            "What goes well with {}?",
            "How do I store {}?",
        ],
        "bread rice cheese soup honey garlic butter pasta salmon spinach chocolate coffee yogurt tofu pepper corn "
        "cabbage vinegar mustard oatmeal",
        "tea salad lentils ginger cinnamon broccoli",
    ),
    (
        [
            "What does a {} eat?",
            "Where does a {} live?",
            "Why is a {} special?",
            "How can I draw a {}?",
        ],
        "cat dog horse whale rabbit lion penguin spider goat camel shark frog bat swan bear turtle wolf crab parrot "
        "fox",
        "dolphin tiger hen beaver squirrel eagle",
    ),
    (
        [
            "How do I start {}?",
            "Why is {} good for me?",
            "What do I need for {}?",
            "When is the best time for {}?",
        ],
        "swimming running reading painting gardening knitting hiking cycling singing dancing baking skiing fishing "
        "sailing writing climbing camping drawing yoga chess",
        "cooking skating tennis surfing juggling pottery",
    ),
    (
        [
            "What can I do at a {}?",
            "Why do families visit a {}?",
            "What should I take to a {}?",
            "Who works at a {}?",
        ],
        "museum beach library park market farm hospital school zoo theater castle bakery stadium forest lake hotel "
        "restaurant airport church factory",
        "garden harbor cinema bank station circus",
    ),
]
KEYS = [
    ["answer"],
    ["tip"],
    ["answer", "reason"],
    ["tip", "why"],
    ["idea", "reason"],
    ["fact", "why"],
]
MIN_WORDS = 5  # different ones, or a single word, said twice, would do
MAX_WORDS = [12, 15, 20]


def records(seed: int, *, held_out: bool) -> list[dict[str, object]]:
    """Return one record for each question and topic, in an order of the seed's."""
    draw = random.Random(seed)
    rows = []
    for questions, training, held in KINDS:
        for topic in (held if held_out else training).split():
            for question in questions:
                keys, words = draw.choice(KEYS), draw.choice(MAX_WORDS)
                form = ", ".join(f'"{key}": "..."' for key in keys)
                asked = f'{question.format(topic)} Use the word "{topic}" and {MIN_WORDS} to {words} words.'
                prompt = f"{asked}\nAnswer as JSON: {{{form}}}"
                limits = {"min_words": MIN_WORDS, "max_words": words}
                rows.append({"prompt": prompt, "keys": keys, **limits, "keyword": topic})
    draw.shuffle(rows)
    return rows


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, held_out in (("train", False), ("validation", True)):
        lines = [json.dumps(record) + "\n" for record in records(20, held_out=held_out)]
        (folder / f"prompts_{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / f'prompts_{name}.jsonl'}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
