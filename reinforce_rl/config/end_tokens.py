"""The tokens that end a response, as a model's folder names them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.config.model_folder import model_values
from reinforce_rl.errors import ConfigError, Fault, key_of
from reinforce_rl.utils.untrusted_files import read_model_json

GENERATION_CONFIG = "generation_config.json"
EOS = "eos_token_id"
TOKENIZER = "the tokenizer"


@dataclass(frozen=True)
class EndTokens:
    """Ids that end a response: all that the folder names anywhere."""

    # generation_config.json if there is one, config.json, the tokenizer
    by_place: dict[str, tuple[int, ...]]
    vocab_size: int | None  # of the model; larger ids are never generated

    @property
    def ids(self) -> tuple[int, ...]:
        every = {token for tokens in self.by_place.values() for token in tokens}
        return tuple(
            sorted(token for token in every if self.vocab_size is None or token < self.vocab_size)
        )

    @property
    def of_generate(self) -> tuple[int, ...]:
        """Return the ids at which transformers' `generate` ends a response of this folder."""
        place = GENERATION_CONFIG if GENERATION_CONFIG in self.by_place else "config.json"
        return tuple(sorted(set(self.by_place[place])))

    def difference(self, folder: Path) -> str | None:
        """Return a sentence if `generate` ends responses at other tokens."""
        if self.ids == self.of_generate:
            return None
        places = [
            f"{_listed(tokens)} ({place})" for place, tokens in self.by_place.items() if tokens
        ]
        return (
            f"the model in {folder} names several end tokens: {', '.join(places)}. Each of "
            f"{_listed(self.ids)} ends a response here, while `generate` of transformers ends at "
            f"{_listed(self.of_generate)}. To have the same, write {EOS} in {GENERATION_CONFIG}"
        )


def read_end_tokens(folder: str | Path, tokenizer_eos: int | None) -> EndTokens:
    """Read the end tokens of a folder, and add the tokenizer's.

    Raises ConfigError: generation_config.json cannot be read, or a value is not an id.
    """
    folder = Path(folder)
    config = model_values(str(folder))
    by_place: dict[str, tuple[int, ...]] = {}
    generation = folder / GENERATION_CONFIG
    if generation.is_file():
        by_place[GENERATION_CONFIG] = _ids(_values_of(generation), generation)
    by_place["config.json"] = _ids(config, folder / "config.json")
    by_place[TOKENIZER] = () if tokenizer_eos is None else (tokenizer_eos,)
    vocab_size = config.get("vocab_size")
    return EndTokens(by_place, vocab_size if isinstance(vocab_size, int) else None)


def with_end_tokens(folder: Path, end_tokens: EndTokens) -> dict[str, Any]:
    """Return a generation_config.json for the folder that ends responses at all of these."""
    generation = folder / GENERATION_CONFIG
    if generation.is_file():
        values = _values_of(generation)
    else:
        config = model_values(str(folder))
        values = {
            key: config[key]
            for key in ("bos_token_id", "pad_token_id")
            if config.get(key) is not None
        }
    ids = list(end_tokens.ids)
    return {**values, EOS: ids if len(ids) > 1 else next(iter(ids), None)}


def _values_of(path: Path) -> dict[str, Any]:
    try:
        values = read_model_json(path)
    except (OSError, ValueError) as error:
        sentence = f"{path} cannot be read as JSON: {error}; correct it, or delete it"
        fault = Fault(sentence, key=key_of(error, "model.generation_config.not_json"))
        raise ConfigError([fault]) from error
    if not isinstance(values, dict):
        sentence = f"{path} is not a JSON object; correct it, or delete it"
        raise ConfigError([Fault(sentence, key="model.generation_config.no_object")])
    return values


def _ids(values: dict[str, Any], path: Path) -> tuple[int, ...]:
    configured = values.get(EOS)
    if configured is None:
        return ()
    several = configured if isinstance(configured, list) else [configured]
    if not all(type(token) is int and token >= 0 for token in several):
        # neither -1 nor true is an id
        sentence = f"{path}: {EOS} is {configured!r}; expected a token id, a list of them, or null"
        raise ConfigError([Fault(sentence, key="model.eos_token_id.invalid")])
    return tuple(several)


def _listed(tokens: tuple[int, ...]) -> str:
    return " and ".join(map(str, tokens)) or "none"
