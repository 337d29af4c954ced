"""Read, tokenise and split preference pairs and rated answers (HelpSteer, arXiv:2311.09528).

As in transformers and TRL, a reward model reads the chat template's text of the whole conversation,
with the answer as its last message:
`apply_chat_template([*prompt, {"role": "assistant", "content": answer}])`. An answer that was cut,
for example by an actor's `max_length`, has no end of turn. `encode_sample` does the same for the
reward server.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reinforce_rl.data import jsonl
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.jsonl import LineFaults, Record
from reinforce_rl.data.nemo_aligner import is_nemo_text
from reinforce_rl.data.readers import ColumnMissing, Columns, WrongForm, read_records
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from reinforce_rl.config.reward_model import PairsConfig, TrainRewardModelConfig
    from reinforce_rl.rewards.base import TextSample

SKIP_SAME = "chosen and rejected are the same"
SKIP_UNRATED = "no attribute is rated"
SKIP_MULTI_TURN = "more than one user turn"
SKIP_LIMIT = "over data.max_pairs"
_WARN_ABOVE = 0.1  # share of lines skipped without a config key asking for it

_AS_LIST = (
    'write messages as a list, and a plain text into a message, {"role": ..., "content": TEXT}'
)

_PAIR_ADVICE = (
    'Correct or remove these lines; a line is {"prompt": text or messages, "chosen": text, '
    '"rejected": text}, or has whole conversations in chosen and rejected.'
)
_RATING_ADVICE = (
    'Correct or remove these lines; a line is {"prompt": text or messages, "response": text, '
    '"attributes": {NAME: number, ...}}, or has the names as keys of its own; an attribute may be '
    "null or missing."
)


@dataclass(frozen=True)
class EncodedPair:
    """A tokenised pair. Its repr is part of a checkpoint's `data_digest`."""

    prompt_key: str  # see `prompt_key()`
    prompt: tuple[int, ...]  # tokens that both answers share at the start
    # `chosen` and `rejected` include the end of the turn unless the answer was cut.
    chosen: tuple[int, ...]
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
        """One line per reason.

        It is a warning if many lines are skipped for a reason that no config key sets.
        """
        lines = []
        total = self.num_lines
        for reason, count in self.skipped.items():
            much = count > _WARN_ABOVE * total and reason not in (SKIP_LIMIT, SKIP_MULTI_TURN)
            prefix = "WARNING:" if much else " "
            lines.append(f"{prefix} {count} of {total} ({count / total:.0%}) left out: {reason}")
        return lines


def longest_example(cfg: TrainRewardModelConfig) -> int:
    """Return `data.max_length`, or the trunk's maximum sequence length."""
    # This import takes seconds; a reward server needs only the rest of this module.
    from reinforce_rl.megatron.architecture import Architecture

    return (
        cfg.data.max_length or Architecture.from_folder(cfg.model.restore_from_path).max_positions
    )


def load_examples(cfg: TrainRewardModelConfig, tokenizer: Tokenizer) -> Examples[Any]:
    """Read, tokenise and split pairs, or ratings if the objective is regression.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: see `read_examples`, or there are too few prompts to split.
    """
    used, skipped, num_lines = read_examples(cfg, tokenizer)
    split = split_by_prompt(
        [example.prompt_key for example in used], cfg.data.held_out_fraction, cfg.seed
    )
    return Examples(used, *split, num_lines, skipped)


def read_examples(
    cfg: TrainRewardModelConfig, tokenizer: Tokenizer
) -> tuple[list[Any], dict[str, int], int]:
    """Return the examples to use, the number of skipped lines by reason, and of all lines.

    Pairs are lines of `{"prompt", "chosen", "rejected"}`. `prompt`, alias `messages`, is a list of
    messages, a text in HH form ("\\n\\nHuman: ...\\n\\nAssistant:"), or any other text. Other texts
    become one user message. Ratings are `{"prompt", "response", "attributes": {...}}`; attributes
    may also be top-level keys. `tools` and `chat_template_kwargs` are for the chat template. Other
    keys are ignored.

    `data.max_answer_tokens` cuts answers. Then examples above `longest_example` are skipped (of a
    pair, the longer answer counts), and `data.max_pairs` are drawn with the seed.

    Raises:
        DataError: the file cannot be read, lines are malformed (all counted, the first ten listed),
            an attribute is never rated, or no example is left.
    """
    data = cfg.data
    names = cfg.full.attributes
    max_length = longest_example(cfg)
    rated: set[str] = set()
    if cfg.mode == "full" and cfg.full.objective == "regression":
        path = data.ratings_path
        noun = "rated answers"
        advice = _RATING_ADVICE
        encode = partial(_rating_of, names=names, rated=rated)
    else:
        path = data.pairs_path
        noun = "pairs"
        advice = _PAIR_ADVICE
        encode = _pair_of
    assert path is not None  # the configuration's rules check it
    faults = LineFaults()
    columns = Columns(
        {name: column for name, column in vars(data.fields).items() if column}, "data.fields."
    )
    renderer = ChatRenderer(tokenizer, data.template_options("data."))
    examples = list(
        read_records(path, partial(encode, renderer=renderer, data=data), faults, columns)
    )
    faults.raise_if_any(advice)
    if not examples:
        raise DataError(
            f"{path} holds no line; expected {noun}. {advice}",
            key="reward_model.data.empty",
        )
    unrated = [name for name in names if name not in rated]
    if noun == "rated answers" and unrated:
        raise DataError(
            f"no line of {path} rates {', '.join(unrated)}; set full.attributes to names that it "
            "has",
            key="reward_model.data.attribute_not_rated",
        )

    skipped = dict(Counter(reason for reason in examples if isinstance(reason, str)))
    encoded = [example for example in examples if not isinstance(example, str)]
    used = [example for example in encoded if example.num_tokens <= max_length]
    if too_long := [example.num_tokens for example in encoded if example.num_tokens > max_length]:
        reason = f"{min(too_long)} to {max(too_long)} tokens, above data.max_length={max_length}"
        skipped[f"{reason}; data.max_length={max(too_long)} keeps all"] = len(too_long)
    if data.max_pairs is not None and len(used) > data.max_pairs:
        skipped[SKIP_LIMIT] = len(used) - data.max_pairs
        used = [
            used[i]
            for i in sorted(random.Random(cfg.seed).sample(range(len(used)), data.max_pairs))
        ]
    if not used:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in skipped.items())
        raise DataError(
            f"none of {len(examples)} {noun} can be used ({reasons}); loosen the limits",
            key="reward_model.data.nothing_left",
        )
    return used, skipped, len(examples)


def split_by_prompt(keys: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the held-out examples; equal keys stay on one side.

    `fraction`, in (0, 1), is the share of prompts to hold out. The side depends on a hash of key
    and seed: adding lines to the file never moves a held-out prompt into training.

    Raises:
        DataError: one side would be empty.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    for index, key in enumerate(keys):
        sides[prompt_position(key, seed) < fraction].append(index)
    if not all(sides):
        raise DataError(
            f"{len(keys)} pairs of {len(set(keys))} prompts cannot be split with "
            f"data.held_out_fraction={fraction}: one side would be empty; use more pairs or "
            "another fraction",
            key="reward_model.data.cannot_be_split",
        )
    return sides


def prompt_position(key: str, seed: int) -> float:
    """Hash key and seed to a number in [0, 1), uniform over prompts."""
    digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _pair_of(line: Record, renderer: ChatRenderer, data: PairsConfig) -> EncodedPair | str:
    """Return a line's example, or the reason to skip it."""
    _refuse_nemo_format(line.value, "pairs")
    value = _without_conversations(line.value)
    messages = _prompt_of(value)
    answers = [_answer_of(value, key) for key in ("chosen", "rejected")]
    if data.single_turn_only and _turns(messages) > 1:
        return SKIP_MULTI_TURN
    conversation = Conversation.of_record(messages, value)
    encode = partial(
        encode_conversation, renderer, conversation, max_answer_tokens=data.max_answer_tokens
    )
    chosen, rejected = map(encode, answers)
    if chosen == rejected:
        return SKIP_SAME
    shared = _shared_length(_before_answer(renderer, conversation), chosen, rejected)
    return EncodedPair(
        jsonl.prompt_key(messages),
        tuple(chosen[:shared]),
        tuple(chosen[shared:]),
        tuple(rejected[shared:]),
    )


def _rating_of(
    line: Record, renderer: ChatRenderer, data: PairsConfig, names: Sequence[str], rated: set[str]
) -> EncodedRating | str:
    """Return a line's example, or the reason to skip it; add its rated attributes to `rated`."""
    _refuse_nemo_format(line.value, "ratings")
    ratings = _ratings_of(line.value, names)
    messages = _prompt_of(line.value)
    answer = _answer_of(line.value, "response")
    given = {name for name, rating in zip(names, ratings, strict=True) if not math.isnan(rating)}
    rated |= given
    if not given:
        return SKIP_UNRATED
    if data.single_turn_only and _turns(messages) > 1:
        return SKIP_MULTI_TURN
    conversation = Conversation.of_record(messages, line.value)
    tokens = encode_conversation(renderer, conversation, answer, data.max_answer_tokens)
    return EncodedRating(jsonl.prompt_key(messages), tuple(tokens), ratings)


def _refuse_nemo_format(value: dict[str, Any], target_format: str) -> None:
    """Raise WrongForm for a record in NeMo-Aligner's format: its markers would be read as text."""
    of_nemo = [key for key in ("prompt", "text") if is_nemo_text(value.get(key))]
    if "chosen" not in value and "response" not in value:
        of_nemo += [key for key in ("chosen_response", "label", "mask") if key in value]
    if of_nemo:
        keys = ", ".join(value)
        raise WrongForm(
            f"found {keys}, in NeMo-Aligner's format by {of_nemo[0]}; convert the file: "
            f"reinforce-rl prepare FILE --format {target_format} --output FOLDER",
            key="reward_model.line.nemo_form",
        )


def _without_conversations(value: dict[str, Any]) -> dict[str, Any]:
    """Return a pair with texts or single messages as answers, and a separate prompt.

    In TRL and UltraFeedback answers are whole conversations, or the messages after a list `prompt`.
    """
    if not isinstance(value.get("chosen"), list):
        return value
    sides = {
        key: jsonl.check_messages(_given(value, key), key, jsonl.ROLES, texts_only=False)
        for key in ("chosen", "rejected")
    }
    for key, messages in sides.items():
        if messages[-1]["role"] != "assistant":
            raise DataError(
                f"{key} does not end with an assistant message",
                key="reward_model.line.no_answer_at_end",
            )
    prompts = [messages[:-1] for messages in sides.values()]
    if prompts[0] != prompts[1]:
        raise DataError(
            "chosen and rejected answer different prompts; expected the same messages before both",
            key="reward_model.line.different_prompts",
        )
    before = prompts[0]
    given = value.get("prompt")
    if isinstance(given, list) and before[: len(given)] != given:
        before = [*given, *before]
    prompt = {"prompt": before} if before else {}
    return {**value, **prompt, **{key: messages[-1] for key, messages in sides.items()}}


def _turns(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(message["role"] == "user" for message in messages)


def _prompt_of(value: dict[str, Any]) -> list[dict[str, Any]]:
    key = (
        "messages"
        if value.get("messages") is not None and value.get("prompt") is None
        else "prompt"
    )
    prompt = _given(value, key)
    if key == "messages":
        prompt = jsonl.messages_of_json(prompt, key)
    jsonl.refuse_messages_as_text(prompt, key, _AS_LIST)
    if isinstance(prompt, str):
        messages: list[dict[str, Any]] = [*jsonl.messages_of_text(jsonl.check_text(prompt, key))]
    else:
        messages = jsonl.check_messages(prompt, key, jsonl.ROLES, texts_only=False)
    jsonl.check_prompt(messages, key)
    return messages


def _answer_of(value: dict[str, Any], key: str) -> Mapping[str, Any]:
    """Return an answer as a message. White space around a text is removed, as in HH's turns."""
    answer = _given(value, key)
    if isinstance(answer, dict):
        message = {"role": "assistant", **answer}
        (checked,) = jsonl.check_messages([message], key, ("assistant",), texts_only=False)
        return checked
    jsonl.refuse_messages_as_text(answer, key, _AS_LIST)
    return {"role": "assistant", "content": jsonl.check_text(answer, key).strip()}


def _given(value: dict[str, Any], key: str) -> object:
    if key not in value:
        raise ColumnMissing(value, key, f"data.fields.{key}")
    return value[key]


def _ratings_of(value: dict[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    given = value.get("attributes", value)
    if not isinstance(given, dict):
        raise DataError(
            f"attributes is {jsonl.describe_type(given)}, expected an object of names and numbers",
            key="reward_model.line.attributes_no_object",
        )
    return tuple(_rating(name, given.get(name)) for name in names)


def _rating(name: str, value: object) -> float:
    """Parse a number or, as in CSV, its text; NaN for null or an empty text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    with contextlib.suppress(ValueError, OverflowError):
        if (
            isinstance(value, int | float | str)
            and not isinstance(value, bool)
            and math.isfinite(float(value))
        ):
            return float(value)
    raise DataError(
        f"the attribute {name} is {value!r}, expected a finite number or null",
        key="reward_model.line.attribute_no_number",
    )


# The token format


def encode_conversation(
    renderer: ChatRenderer,
    conversation: Conversation,
    answer: Mapping[str, Any],
    max_answer_tokens: int | None = None,
) -> list[int]:
    """Tokenise a conversation and its answer.

    An answer of more than `max_answer_tokens` is cut and has no end of turn. The end of turn counts
    as one token, because an actor stops at its first token.
    """
    whole = renderer.answered(conversation, answer)
    if max_answer_tokens is None:
        return whole
    cut = renderer.answered(conversation, answer, is_finished=False)
    start = _shared_length(_before_answer(renderer, conversation), whole)
    return whole if len(cut) - start < max_answer_tokens else cut[: start + max_answer_tokens]


def _before_answer(renderer: ChatRenderer, conversation: Conversation) -> list[int]:
    """Tokenise the text before an answer.

    It may differ from the generation prompt: Qwen3's has no think block.
    """
    return renderer.answered(conversation, {"role": "assistant", "content": ""}, is_finished=False)


def _shared_length(*rows: Sequence[int]) -> int:
    """Return the number of leading ids that all rows share."""
    columns = zip(*rows, strict=False)  # up to the shortest
    return sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, columns))


def end_of_turn_ids(renderer: ChatRenderer) -> list[int]:
    """Tokenise the chat template's text after an answer."""
    return renderer.encode(renderer.end_of_turn(Conversation(({"role": "user", "content": "hi"},))))


def encode_sample(renderer: ChatRenderer, sample: TextSample) -> list[int]:
    """Tokenise a sample with the chat template. A plain prompt becomes one user message.

    A cut answer gets no end of turn, so that it does not look finished.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the template refuses these messages.
    """
    if sample.messages:
        conversation = Conversation.of_record(sample.messages, sample.record)
        response = sample.response
    else:
        conversation = Conversation(({"role": "user", "content": sample.prompt},))
        response = sample.response.strip()
    return renderer.answered(
        conversation, {"role": "assistant", "content": response}, is_finished=sample.finished
    )
