"""Preference pairs and rated answers (HelpSteer, arXiv:2311.09528): read, tokenise, split by prompt.

The reward server gets the actor's own tokens: the prompt, rendered by the chat template with its generation prompt
(see `reinforce_rl.data.prompts`); the answer; and the end-of-turn token (`<|im_end|>` for SmolLM2) if the answer is
complete, not cut at the actor's `max_length`. The newline that the template would add after it is left out: the actor
stops there. If the reward model's tokenizer differs from the actor's, `encode_sample` renders texts alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from reinforce_rl.data import jsonl
from reinforce_rl.data.jsonl import LineFaults, Message, Record
from reinforce_rl.data.nemo_aligner import is_nemo_text
from reinforce_rl.data.readers import ColumnMissing, Columns, WrongForm, read_records
from reinforce_rl.data.tokenizer import render_prompt
from reinforce_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from reinforce_rl.config.reward_model import PairsConfig, TrainRewardModelConfig
    from reinforce_rl.rewards.base import TextSample

SKIP_SAME = "chosen and rejected are the same"
SKIP_UNRATED = "no attribute is rated"
SKIP_MULTI_TURN = "more than one user turn"
SKIP_LIMIT = "over data.max_pairs"
_WARN_ABOVE = 0.1  # share of lines skipped without a config key asking for it

_PAIR_ADVICE = (
    'Correct or remove these lines; a line is {"prompt": text or messages, "chosen": text, "rejected": text}, or has '
    "whole conversations in chosen and rejected."
)
_RATING_ADVICE = (
    'Correct or remove these lines; a line is {"prompt": text or messages, "response": text, "attributes": '
    "{NAME: number, ...}}, or has the names as keys of its own; an attribute may be null or missing."
)


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
    ratings: tuple[float, ...]  # one per requested attribute; NaN if missing

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


Example = TypeVar("Example", EncodedPair, EncodedRating)


@dataclass(frozen=True)
class Examples(Generic[Example]):
    used: list[Example]  # in file order
    train_rows: list[int]  # indices into `used`; no prompt is on both sides
    held_out_rows: list[int]
    num_lines: int  # lines in the file
    skipped: dict[str, int]  # reason to number of lines

    @property
    def train(self) -> list[Example]:
        return [self.used[row] for row in self.train_rows]

    @property
    def held_out(self) -> list[Example]:
        return [self.used[row] for row in self.held_out_rows]

    @property
    def skipped_lines(self) -> list[str]:
        """One line per reason; a warning if many lines are skipped for a reason that no config key asks for."""
        lines, total = [], self.num_lines
        for reason, count in self.skipped.items():
            much = count > _WARN_ABOVE * total and reason not in (SKIP_LIMIT, SKIP_MULTI_TURN)
            lines.append(f"{'WARNING:' if much else ' '} {count} of {total} ({count / total:.0%}) left out: {reason}")
        return lines


def longest_example(cfg: TrainRewardModelConfig) -> int:
    """Return `data.max_length`, or the trunk's maximum sequence length."""
    from reinforce_rl.megatron.architecture import Architecture  # takes seconds, and a reward server needs the rest

    return cfg.data.max_length or Architecture.from_folder(cfg.model.restore_from_path).max_positions


def load_examples(cfg: TrainRewardModelConfig, tokenizer: Tokenizer) -> Examples[Any]:
    """Read, tokenise and split pairs, or ratings if the objective is regression.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: as `read_examples`, or too few prompts to split.
    """
    used, skipped, num_lines = read_examples(cfg, tokenizer)
    split = split_by_prompt([example.prompt_key for example in used], cfg.data.held_out_fraction, cfg.seed)
    return Examples(used, *split, num_lines, skipped)


def read_examples(cfg: TrainRewardModelConfig, tokenizer: Tokenizer) -> tuple[list[Any], dict[str, int], int]:
    """Return the examples to use, the number of skipped lines by reason, and the number of all lines.

    Pairs are lines of `{"prompt", "chosen", "rejected"}`; `prompt`, alias `messages`, is a list of messages, a text in
    HH form ("\\n\\nHuman: ...\\n\\nAssistant:"), or any other text, which becomes one user message. Ratings are
    `{"prompt", "response", "attributes": {...}}`; attributes may also be top-level keys. Other keys are ignored.

    `data.max_answer_tokens` cuts answers; then examples above `longest_example` are skipped (of a pair, the longer
    answer counts), and `data.max_pairs` are drawn with the seed.

    Raises:
        DataError: the file cannot be read, lines are malformed (all counted, the first ten listed), an attribute is
            never rated, or no example is left.
    """
    data, names, max_length = cfg.data, cfg.full.attributes, longest_example(cfg)
    rated: set[str] = set()
    if cfg.mode == "full" and cfg.full.objective == "regression":
        path, noun, advice = data.ratings_path, "rated answers", _RATING_ADVICE
        encode = partial(_rating_of, names=names, rated=rated)
    else:
        path, noun, advice = data.pairs_path, "pairs", _PAIR_ADVICE
        encode = _pair_of
    assert path is not None  # checked
    faults = LineFaults()
    columns = Columns({name: column for name, column in vars(data.fields).items() if column}, "data.fields.")
    found = list(read_records(path, partial(encode, tokenizer=tokenizer, data=data), faults, columns))
    faults.raise_if_any(advice)
    if not found:
        raise DataError(f"{path} holds no line; expected {noun}. {advice}")
    unrated = [name for name in names if name not in rated]
    if noun == "rated answers" and unrated:
        raise DataError(f"no line of {path} rates {', '.join(unrated)}; set full.attributes to names that it has")

    skipped = dict(Counter(reason for reason in found if isinstance(reason, str)))
    encoded = [example for example in found if not isinstance(example, str)]
    used = [example for example in encoded if example.num_tokens <= max_length]
    if too_long := [example.num_tokens for example in encoded if example.num_tokens > max_length]:
        reason = f"{min(too_long)} to {max(too_long)} tokens, above data.max_length={max_length}"
        skipped[f"{reason}; data.max_length={max(too_long)} keeps all"] = len(too_long)
    if data.max_pairs is not None and len(used) > data.max_pairs:
        skipped[SKIP_LIMIT] = len(used) - data.max_pairs
        used = [used[i] for i in sorted(random.Random(cfg.seed).sample(range(len(used)), data.max_pairs))]
    if not used:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in skipped.items())
        raise DataError(f"none of {len(found)} {noun} can be used ({reasons}); loosen the limits")
    return used, skipped, len(found)


def split_by_prompt(keys: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the held-out examples; equal keys stay on one side.

    `fraction`, in (0, 1), is the share of prompts to hold out. The side is a hash of key and seed: adding lines to the
    file never moves a held-out prompt into training.

    Raises:
        DataError: one side would be empty.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    for index, key in enumerate(keys):
        sides[prompt_position(key, seed) < fraction].append(index)
    if not all(sides):
        raise DataError(
            f"{len(keys)} pairs of {len(set(keys))} prompts cannot be split with data.held_out_fraction={fraction}: "
            "one side would be empty; use more pairs or another fraction"
        )
    return sides


def prompt_position(key: str, seed: int) -> float:
    """Hash key and seed to a number in [0, 1), uniform over prompts."""
    digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _pair_of(line: Record, tokenizer: Tokenizer, data: PairsConfig) -> EncodedPair | str:
    """Return a line's example, or the reason to skip it."""
    _refuse_nemo_form(line.value, "pairs")
    value = _without_conversations(line.value)
    messages, answers = _prompt_of(value), [_text_of(value, key) for key in ("chosen", "rejected")]
    if data.single_turn_only and _turns(messages) > 1:
        return SKIP_MULTI_TURN
    prompt = tuple(encode_prompt(tokenizer, messages))
    chosen, rejected = (tuple(encode_answer(tokenizer, text, data.max_answer_tokens)) for text in answers)
    return SKIP_SAME if chosen == rejected else EncodedPair(jsonl.prompt_key(messages), prompt, chosen, rejected)


def _rating_of(
    line: Record, tokenizer: Tokenizer, data: PairsConfig, names: Sequence[str], rated: set[str]
) -> EncodedRating | str:
    """Like `_pair_of`; the attributes that the line rates are added to `rated`."""
    _refuse_nemo_form(line.value, "ratings")
    ratings, messages = _ratings_of(line.value, names), _prompt_of(line.value)
    response = _text_of(line.value, "response")
    given = {name for name, rating in zip(names, ratings, strict=True) if not math.isnan(rating)}
    rated |= given
    if not given:
        return SKIP_UNRATED
    if data.single_turn_only and _turns(messages) > 1:
        return SKIP_MULTI_TURN
    tokens = encode_prompt(tokenizer, messages) + encode_answer(tokenizer, response, data.max_answer_tokens)
    return EncodedRating(jsonl.prompt_key(messages), tuple(tokens), ratings)


def _refuse_nemo_form(value: dict[str, Any], form: str) -> None:
    """Raise a WrongForm for a record of NeMo-Aligner's, which would be read as a text that holds its markers."""
    of_nemo = [key for key in ("prompt", "text") if is_nemo_text(value.get(key))]
    if "chosen" not in value and "response" not in value:
        of_nemo += [key for key in ("chosen_response", "label", "mask") if key in value]
    if of_nemo:
        keys = ", ".join(value)
        command = f"reinforce-rl prepare FILE --form {form} --output FOLDER"
        raise WrongForm(f"found {keys}, in NeMo-Aligner's form by {of_nemo[0]}; convert the file: {command}")


def _without_conversations(value: dict[str, Any]) -> dict[str, Any]:
    """Return a pair with texts as answers; in TRL and UltraFeedback they are whole conversations, or lists of one."""
    if not isinstance(value.get("chosen"), list):
        return value
    roles = ("system", "user", "assistant")
    sides = {key: jsonl.check_messages(_given(value, key), key, roles) for key in ("chosen", "rejected")}
    for key, messages in sides.items():
        if messages[-1]["role"] != "assistant":
            raise DataError(f"{key} does not end with an assistant message")
    prompts = [messages[:-1] for messages in sides.values()]
    if prompts[0] != prompts[1]:
        raise DataError("chosen and rejected answer different prompts")
    prompt = {"prompt": prompts[0]} if prompts[0] else {}
    return {**value, **prompt, **{key: messages[-1]["content"] for key, messages in sides.items()}}


def _turns(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "user" for message in messages)


def _prompt_of(value: dict[str, Any]) -> list[Message]:
    key = "messages" if "messages" in value and "prompt" not in value else "prompt"
    prompt = _given(value, key)
    if isinstance(prompt, str):
        messages = jsonl.messages_of_text(jsonl.check_text(prompt, key))
    else:
        found = jsonl.check_messages(prompt, key, ("system", "user", "assistant"))
        # Not stripped, like the actor's prompts.
        messages = [{"role": message["role"], "content": message["content"]} for message in found]
    jsonl.check_prompt(messages, key)
    return messages


def _text_of(value: dict[str, Any], key: str) -> str:
    return jsonl.check_text(_given(value, key), key)


def _given(value: dict[str, Any], key: str) -> object:
    if key not in value:
        raise ColumnMissing(value, key, f"data.fields.{key}")
    return value[key]


def _ratings_of(value: dict[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    given = value.get("attributes", value)
    if not isinstance(given, dict):
        raise DataError(f"attributes is {jsonl.describe_type(given)}, expected an object of names and numbers")
    return tuple(_rating(name, given.get(name)) for name in names)


def _rating(name: str, value: object) -> float:
    """Return a number or, as in CSV, its text; NaN for null or an empty text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, int | float | str) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    raise DataError(f"the attribute {name} is {value!r}, expected a finite number or null")


# The token format


def end_of_turn_id(tokenizer: Tokenizer) -> int:
    """Return the end-of-sequence token, at which the actor stops.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(["the tokenizer has no end-of-sequence token, so an answer's end cannot be marked"])
    return cast(int, tokenizer.eos_token_id)


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokenise a conversation up to where the assistant's answer begins; raises as `render_prompt`."""
    return _ids(tokenizer, render_prompt(tokenizer, messages))


def encode_answer(tokenizer: Tokenizer, answer: str, max_tokens: int | None = None) -> list[int]:
    """Tokenise an answer and its end-of-turn token, cut to `max_tokens` as an actor's `max_length` does.

    Surrounding white space is dropped: an actor's answer begins directly after the generation prompt.
    """
    return [*_ids(tokenizer, answer.strip()), end_of_turn_id(tokenizer)][:max_tokens]


def encode_sample(tokenizer: Tokenizer, sample: TextSample) -> list[int]:
    """Tokenise a sample with the chat template. A plain prompt becomes one user message.

    A cut answer gets no end-of-turn token, so that it does not look finished.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the template refuses these messages.
    """
    messages = sample.messages or ({"role": "user", "content": sample.prompt},)
    answer = encode_answer(tokenizer, sample.response)
    return encode_prompt(tokenizer, messages) + (answer if sample.finished else answer[:-1])


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # Special tokens are in the rendered text already. Verbose is off because callers check lengths by their own limit.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # type: ignore[arg-type]
