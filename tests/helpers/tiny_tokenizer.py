"""A small `transformers` tokenizer for tests: one token a character, as a Hugging Face folder."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]  # ids 0 to 3
# By frequency, so that a small vocabulary still covers most text.
CHARACTERS = " etaoinshrdlucmfwygpbvkxqjz.,?!:'\n\"-" + string.ascii_uppercase + string.digits
CHARACTERS += "".join(c for c in string.punctuation if c not in CHARACTERS)

# Renders [{"role": "user", "content": "hi"}] with a generation prompt as "U: hi<eos>A:".
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'][0] | upper }}: {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def write_tiny_tokenizer(
    folder: str | Path, vocab_size: int = 128, *, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write a character-level tokenizer with exactly `vocab_size` ids and return its folder.

    pad, bos, eos and unk are 0, 1, 2 and 3. Characters beyond `vocab_size` become `<unk>`;
    remaining ids are fillers that no text maps to. Decoding joins characters, so it inverts the
    encoding of known characters.
    """
    folder = Path(folder)
    if vocab_size <= len(SPECIAL):
        raise ValueError(f"vocab_size is {vocab_size}; at least {len(SPECIAL) + 1} are needed")
    words = (SPECIAL + list(CHARACTERS))[:vocab_size]
    words += [f"<extra_{i}>" for i in range(len(words), vocab_size)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


def write_model_without_weights(folder: Path, **options: str | None) -> None:
    """Write a model's folder without its weights, so that loading them fails."""
    write_tiny_tokenizer(folder, vocab_size=32, **options)
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
