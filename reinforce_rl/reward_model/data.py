"""Preference pairs and rated answers (HelpSteer, arXiv:2311.09528): read JSONL, tokenise, split by prompt."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reinforce_rl.data.jsonl import LineFaults, describe_type, read_jsonl
from reinforce_rl.data.prepare import check_encodable, messages_of_text
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.reward_model.template import encode_answer, encode_conversation, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.config.reward_model import PairsConfig, TrainRewardModelConfig

Message = dict[str, str]

SKIP_SAME = "chosen and rejected are the same"
SKIP_UNRATED = "no attribute is rated"
SKIP_MULTI_TURN = "more than one user turn"
SKIP_LIMIT = "over data.max_pairs"
_WARN_ABOVE = 0.1  # share of lines skipped without a config key asking for it

_PAIR_ADVICE = (
    'Correct or remove these lines; a line is {"prompt": text or messages, "chosen": text, "rejected": text}.'
)
_RATING_ADVICE = (
    'Correct or remove these lines; a line is {"prompt": text or messages, "response": text, "attributes": '
    "{NAME: number, ...}}, or has the names as keys of its own; an attribute may be null or missing."
)


@dataclass(frozen=True)
class PromptLine:
    """A prompt (the last message is not the assistant's) and its place in the file, for error messages."""

    path: Path
    number: int
    messages: tuple[Message, ...]

    @property
    def user_turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)


@dataclass(frozen=True)
class PreferencePair(PromptLine):
    chosen: str
    rejected: str


@dataclass(frozen=True)
class RatedAnswer(PromptLine):
    response: str
    ratings: tuple[float, ...]  # one per requested attribute; NaN if missing


@dataclass(frozen=True)
class EncodedPair:
    """A tokenised pair. Its repr is part of a checkpoint's `data_digest`."""

    prompt_key: str  # see `prompt_key()`
    prompt: tuple[int, ...]  # up to where the answer begins
    chosen: tuple[int, ...]  # includes the end-of-turn token unless the answer was cut; so does `rejected`
    rejected: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True)
class EncodedRating:
    """A tokenised rated answer. Its repr is part of a checkpoint's `data_digest`."""

    prompt_key: str
    tokens: tuple[int, ...]  # prompt and answer
    ratings: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


Line = TypeVar("Line", bound=PromptLine)
Encoded = TypeVar("Encoded", EncodedPair, EncodedRating)


@dataclass(frozen=True)
class Examples(Generic[Encoded]):
    used: list[Encoded]  # in file order
    train_rows: list[int]  # indices into `used`; no prompt is on both sides
    held_out_rows: list[int]
    num_lines: int  # lines in the file
    skipped: dict[str, int]  # reason to number of lines

    @property
    def train(self) -> list[Encoded]:
        return [self.used[row] for row in self.train_rows]

    @property
    def held_out(self) -> list[Encoded]:
        return [self.used[row] for row in self.held_out_rows]

    @property
    def skipped_lines(self) -> list[str]:
        return describe_skipped(self.skipped, self.num_lines)


def longest_example(cfg: TrainRewardModelConfig) -> int:
    """Return `data.max_length`, or the trunk's maximum sequence length."""
    return cfg.data.max_length or Architecture.from_folder(cfg.model.restore_from_path).max_positions


def load_examples(cfg: TrainRewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> Examples[Any]:
    """Read, tokenise and split pairs, or ratings if the objective is regression.

    Raises:
        ConfigError: the file cannot be read, or the tokenizer has no chat template or no end-of-sequence token.
        DataError: lines are malformed, or too few are left.
    """
    data, limits = cfg.data, {"max_length": longest_example(cfg), "seed": cfg.seed}
    lines: Sequence[PromptLine]
    used: list[Any]
    if cfg.mode == "full" and cfg.full.objective == "regression":
        assert data.ratings_path is not None  # checked
        lines = answers = read_ratings(data.ratings_path, cfg.full.attributes)
        used, skipped = encode_ratings(answers, tokenizer, data, **limits)
    else:
        assert data.pairs_path is not None  # checked
        lines = pairs = read_pairs(data.pairs_path)
        used, skipped = encode_pairs(pairs, tokenizer, data, **limits)
    split = split_by_prompt([example.prompt_key for example in used], data.held_out_fraction, cfg.seed)
    return Examples(used, *split, len(lines), skipped)


def read_pairs(path: str | Path) -> list[PreferencePair]:
    """Read `{"prompt", "chosen", "rejected"}` lines.

    `prompt` is a list of messages, a text in HH form ("\\n\\nHuman: ...\\n\\nAssistant:"), or any other text, which
    becomes one user message. `messages` is an alias of `prompt`. Other keys are ignored.

    Raises:
        ConfigError: the file cannot be read.
        DataError: lines are malformed (all counted, the first ten listed), or there are none.
    """

    def parse(path: Path, number: int, value: dict[str, Any]) -> PreferencePair:
        messages = _prompt_of(value)
        return PreferencePair(path, number, messages, _text_of(value, "chosen"), _text_of(value, "rejected"))

    pairs = _read(path, parse, _PAIR_ADVICE)
    if not pairs:
        raise DataError(f"{path} holds no line; expected preference pairs. {_PAIR_ADVICE}")
    return pairs


def read_ratings(path: str | Path, names: Sequence[str]) -> list[RatedAnswer]:
    """Read `{"prompt", "response", "attributes": {...}}` lines; attributes may also be top-level keys.

    Raises:
        ConfigError: the file cannot be read.
        DataError: lines are malformed (all counted, the first ten listed) or absent, or an attribute is never rated.
    """

    def parse(path: Path, number: int, value: dict[str, Any]) -> RatedAnswer:
        ratings = _ratings_of(value, names)
        return RatedAnswer(path, number, _prompt_of(value), _text_of(value, "response"), ratings)

    answers = _read(path, parse, _RATING_ADVICE)
    unrated = [name for i, name in enumerate(names) if all(math.isnan(answer.ratings[i]) for answer in answers)]
    if unrated:
        raise DataError(f"no line of {path} rates {', '.join(unrated)}; set full.attributes to names that it has")
    return answers


def encode_pairs(
    pairs: Sequence[PreferencePair],
    tokenizer: PreTrainedTokenizerBase,
    data: PairsConfig,
    *,
    max_length: int,
    seed: int = 0,
) -> tuple[list[EncodedPair], dict[str, int]]:
    """Tokenise pairs; return those that fit, and the number of skipped ones by reason.

    Args:
        data: `max_answer_tokens` cuts answers first; `max_pairs` are drawn with the seed.
        max_length: tokens of the prompt and the longer answer; pairs above it are skipped.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the chat template rejects prompts, or nothing is left.
    """

    def encode(pair: PreferencePair) -> EncodedPair | str:
        if data.single_turn_only and pair.user_turns > 1:
            return SKIP_MULTI_TURN
        prompt = tuple(encode_prompt(tokenizer, pair.messages))
        answers = (encode_answer(tokenizer, text, data.max_answer_tokens) for text in (pair.chosen, pair.rejected))
        chosen, rejected = map(tuple, answers)
        return SKIP_SAME if chosen == rejected else EncodedPair(prompt_key(pair.messages), prompt, chosen, rejected)

    return _encode(pairs, encode, "pairs", _PAIR_ADVICE, data.max_pairs, max_length, seed)


def encode_ratings(
    answers: Sequence[RatedAnswer],
    tokenizer: PreTrainedTokenizerBase,
    data: PairsConfig,
    *,
    max_length: int,
    seed: int = 0,
) -> tuple[list[EncodedRating], dict[str, int]]:
    """Tokenise rated answers; skip those without a rating or above `max_length`. See `encode_pairs`."""

    def encode(answer: RatedAnswer) -> EncodedRating | str:
        if all(math.isnan(rating) for rating in answer.ratings):
            return SKIP_UNRATED
        if data.single_turn_only and answer.user_turns > 1:
            return SKIP_MULTI_TURN
        tokens = encode_conversation(
            tokenizer, answer.messages, answer.response, max_answer_tokens=data.max_answer_tokens
        )
        return EncodedRating(prompt_key(answer.messages), tuple(tokens), answer.ratings)

    return _encode(answers, encode, "rated answers", _RATING_ADVICE, data.max_pairs, max_length, seed)


def describe_skipped(skipped: Mapping[str, int], total: int) -> list[str]:
    """Return one line per reason; a warning if many lines are skipped for a reason that no config key asks for."""
    lines = []
    for reason, count in skipped.items():
        much = count > _WARN_ABOVE * total and reason not in (SKIP_LIMIT, SKIP_MULTI_TURN)
        lines.append(f"{'WARNING:' if much else ' '} {count} of {total} ({count / total:.0%}) left out: {reason}")
    return lines


def split_by_prompt(keys: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the held-out examples; equal keys stay on one side.

    `fraction`, in (0, 1), is the share of prompts to hold out. The side is a hash of key and seed: adding lines to the
    file never moves a held-out prompt into training.

    Raises:
        ConfigError: the fraction is out of range.
        DataError: one side would be empty.
    """
    if not 0 < fraction < 1:
        raise ConfigError([f"data.held_out_fraction is {fraction}; expected above 0 and below 1"])
    sides: tuple[list[int], list[int]] = ([], [])
    for index, key in enumerate(keys):
        sides[prompt_position(key, seed) < fraction].append(index)
    if not all(sides):
        raise DataError(
            f"{len(keys)} pairs of {len(set(keys))} prompts cannot be split with data.held_out_fraction={fraction}: "
            "one side would be empty; use more pairs or another fraction"
        )
    return sides


def prompt_key(messages: Sequence[Message]) -> str:
    """Return a key that ignores case and white space."""
    return json.dumps([(m["role"], " ".join(m["content"].casefold().split())) for m in messages])


def prompt_position(key: str, seed: int) -> float:
    """Hash key and seed to a number in [0, 1), uniform over prompts."""
    digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _read(path: str | Path, parse: Callable[[Path, int, dict[str, Any]], Line], advice: str) -> list[Line]:
    faults, found = LineFaults(), []
    for line in read_jsonl(path):
        if line.value is None:
            faults.add(line.path, line.number, line.fault)
            continue
        try:
            found.append(parse(line.path, line.number, line.value))
        except DataError as error:
            faults.add(line.path, line.number, str(error))
    faults.raise_if_any(advice)
    return found


def _encode(
    lines: Sequence[Line],
    encode: Callable[[Line], Encoded | str],  # returns a string, the reason, to skip the line
    noun: str,
    advice: str,
    limit: int | None,
    max_length: int,
    seed: int,
) -> tuple[list[Encoded], dict[str, int]]:
    faults = LineFaults()
    skipped: Counter[str] = Counter()
    too_long: list[int] = []
    used: list[Encoded] = []
    for line in lines:
        try:
            example = encode(line)
        except DataError as error:
            faults.add(line.path, line.number, str(error))
            continue
        if isinstance(example, str):
            skipped[example] += 1
        elif example.num_tokens > max_length:
            too_long.append(example.num_tokens)
        else:
            used.append(example)
    faults.raise_if_any(advice)
    if too_long:
        most = max(too_long)
        found = f"{min(too_long)} to {most} tokens"
        skipped[f"{found}, above data.max_length={max_length}; data.max_length={most} keeps all"] = len(too_long)
    if limit is not None and len(used) > limit:
        skipped[SKIP_LIMIT] = len(used) - limit
        used = [used[i] for i in sorted(random.Random(seed).sample(range(len(used)), limit))]
    if not used:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in skipped.items())
        raise DataError(f"none of {len(lines)} {noun} can be used ({reasons}); loosen the limits")
    return used, dict(skipped)


def _prompt_of(value: dict[str, Any]) -> tuple[Message, ...]:
    key = next((name for name in ("prompt", "messages") if name in value), None)
    if key is None:
        raise DataError(f"the key prompt is missing; found {', '.join(value) or 'no key'}")
    prompt = value[key]
    if isinstance(prompt, str):
        check_encodable(prompt, key)
        messages = messages_of_text(prompt)
    elif isinstance(prompt, list):
        messages = [_message_of(message, f"{key}[{index}]") for index, message in enumerate(prompt)]
    else:
        raise DataError(f"{key} is {describe_type(prompt)}, expected a string or a list of messages")
    if not messages or not messages[-1]["content"].strip():
        raise DataError(f"{key} is empty, or its last message is")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{key} ends with an assistant message; a prompt ends where the assistant is to answer")
    return tuple(messages)


def _message_of(message: object, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise DataError(f"{where} is no message with a role system, user or assistant and a string as content")
    check_encodable(content, where)
    return {"role": str(role), "content": content}  # not stripped, like the actor's prompts


def _text_of(value: dict[str, Any], key: str) -> str:
    if key not in value:
        raise DataError(f"the key {key} is missing; found {', '.join(value) or 'no key'}")
    if not isinstance(value[key], str):
        raise DataError(f"{key} is {describe_type(value[key])}, expected a string")
    check_encodable(value[key], key)
    return value[key]


def _ratings_of(value: dict[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    given = value.get("attributes", value)
    if not isinstance(given, dict):
        raise DataError(f"attributes is {describe_type(given)}, expected an object of names and numbers")
    ratings = []
    for name in names:
        rating = given.get(name)
        if rating is None:
            ratings.append(math.nan)
        elif isinstance(rating, bool) or not isinstance(rating, int | float) or not math.isfinite(rating):
            raise DataError(f"the attribute {name} is {rating!r}, expected a finite number or null")
        else:
            ratings.append(float(rating))
    return tuple(ratings)
