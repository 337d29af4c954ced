"""Prompt data sets, tokenised when they are loaded, and each rank's batches of prompts."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Dataset

from reinforce_rl.data import jsonl, readers
from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.conversation import KWARGS_KEY, TOOLS_KEY, Conversation, read_tools
from reinforce_rl.data.data_prefix import SPLITS, resolve_data_prefix
from reinforce_rl.data.jsonl import LineFaults, Record
from reinforce_rl.data.nemo_aligner import is_nemo_text
from reinforce_rl.data.readers import AS_NAMED, ColumnMissing, Columns, WrongForm
from reinforce_rl.data.rendering import DEFAULT_OPTIONS, ChatRenderer, TemplateOptions
from reinforce_rl.data.sampler import Blend, PromptSampler, shard
from reinforce_rl.data.tokenizer import encode_plain
from reinforce_rl.errors import CheckpointError, ConfigError, DataError, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TooLong = Literal["refuse", "skip"]
PROMPT_KEYS = ("prompt", "text", "messages")
SHAREGPT_KEY = "conversations"  # used if a record has none of `PROMPT_KEYS`
ROLES = jsonl.ROLES
TOKENISE_AT_ONCE = 1024  # prompts; bounds the memory of a batch in the tokenizer


class PromptDataset(Dataset[Prompt]):
    """Prompts in file and line order; `dataset[i].id == i`.

    Args:
        skipped: number of over-long prompts that were left out when loading.
        blend: draws of each file per epoch; None draws each prompt once.

    Raises:
        DataError: there is no prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], *, skipped: int = 0, blend: Blend | None = None):
        if not prompts:
            left_out = (
                f" ({skipped} over-long ones were skipped; raise model.encoder_seq_length)"
                if skipped
                else ""
            )
            raise DataError(
                f"the data set has no prompts{left_out}",
                key="data.prompts.none",
            )
        self._prompts = list(prompts)
        self.skipped = skipped
        self.blend = blend

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    @property
    def texts(self) -> Iterator[str]:
        return (prompt.text for prompt in self._prompts)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the texts in order, to detect a resume on other data."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            text = prompt.text.encode("utf-8")
            # The length makes joined texts unambiguous.
            digest.update(len(text).to_bytes(8, "big") + text)
        return digest.hexdigest()

    @classmethod
    def of_sets(cls, sets: Mapping[str, PromptDataset]) -> PromptDataset:
        """Join data sets. Each prompt gets its set's name, and a number over all sets."""
        prompts = [
            replace(prompt, set_name=name)
            for name, dataset in sets.items()
            for prompt in dataset._prompts
        ]
        numbered = [replace(prompt, id=number) for number, prompt in enumerate(prompts)]
        return cls(numbered, skipped=sum(dataset.skipped for dataset in sets.values()))

    @classmethod
    def from_files(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        files: str | Path | Iterable[str | Path],
        *,
        max_prompt_tokens: int | None,
        too_long: TooLong = "refuse",
        apply_chat_template: bool = False,
        add_bos: bool | None = None,
        weights: Sequence[float] | None = None,
        columns: Columns = AS_NAMED,
        system_prompt: str | None = None,
        split: str = "train",
        template: TemplateOptions = DEFAULT_OPTIONS,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PromptDataset:
        """Load prompts from any source that `readers` reads.

        A record holds exactly one of `prompt`, `text` and `messages`, or else `conversations`: a
        string, or a list of `{"role", "content"}` that does not end with an assistant's message.
        The chat template renders a list with its generation prompt and the record's `tools` and
        `chat_template_kwargs`. All other fields become the prompt's metadata. Blank lines are
        ignored.

        Args:
            max_prompt_tokens: None for no limit.
            too_long: "refuse" raises for a longer prompt, "skip" drops it and counts it in
                `skipped`. No prompt is cut.
            apply_chat_template: render a string as a single user message.
            add_bos: prepend the begin-of-sequence id to prompts that no chat template rendered, in
                `tokens` only. None does what the tokenizer does by itself.
            weights: one per entry of `files`, as in `Blend`; None draws each prompt once per epoch.
            columns: a column `prompt` is the prompt, whatever else a record holds; `system` is a
                system message.
            system_prompt: for conversations without a system message.
            split: of an entry that has several splits.
            template: options of the chat template.
            tools: for conversations without tools, in OpenAI's form.

        Raises:
            ConfigError: the tokenizer lacks what an option needs, or `weights` cannot be met.
            DataError: a file cannot be read, lines are invalid (all are counted, the first are
                listed), or no prompt is left.
        """
        if add_bos and tokenizer.bos_token_id is None:
            sentence = "add_bos is true, but the tokenizer has no begin-of-sequence token; omit it"
            raise ConfigError([Fault(sentence, key="tokenizer.bos.missing")])
        paths = [files] if isinstance(files, (str, Path)) else list(files)
        faults = LineFaults()
        advice = "Correct or remove these lines."
        renderer = ChatRenderer(tokenizer, template)
        unread: Counter[str] = Counter()
        render = partial(
            _render, renderer, columns, apply_chat_template, system_prompt, tools, unread
        )
        prompts: list[Prompt] = []
        sizes: list[int] = []
        skipped: list[tuple[str, int]] = []
        for path in paths:
            before = len(prompts)
            records = readers.read_records(path, render, faults, columns, split)
            for where, prompt in _tokenise(records, renderer, add_bos):
                length = len(prompt.tokens)
                if not length:
                    sentence = "the tokenizer returns no tokens for this prompt"
                    faults.add(where, Fault(sentence, key="data.prompt.no_token"))
                elif max_prompt_tokens is None or length <= max_prompt_tokens:
                    prompts.append(replace(prompt, id=len(prompts)))
                elif too_long == "skip":
                    skipped.append((where, length))
                else:
                    sentence = (
                        f"prompt of {length} tokens; expected at most {max_prompt_tokens}, "
                        "which leave room for a response"
                    )
                    faults.add(where, Fault(sentence, key="data.prompt.too_long"))
                    advice = (
                        "Correct or remove these lines. For over-long prompts, raise "
                        "model.encoder_seq_length, lower "
                        "model.reinforce.length_params.max_length, or set "
                        "model.data.too_long=skip to leave them out."
                    )
            sizes.append(len(prompts) - before)
        faults.raise_if_any(advice)
        for name, count in unread.items():
            logger.warning(
                f"{KWARGS_KEY}.{name} of {count} records has no effect: "
                "the chat template does not read it"
            )
        if skipped:
            where, length = skipped[0]
            logger.warning(
                f"skipped {len(skipped)} of {len(prompts) + len(skipped)} prompts, "
                f"longer than {max_prompt_tokens} tokens; the first is {where} with {length} tokens"
            )
        if not prompts and not skipped:
            raise DataError(
                f"no prompt in {', '.join(map(str, paths))}: every line is blank",
                key="data.prompts.all_blank",
            )
        blend = None if weights is None else Blend(tuple(sizes), tuple(weights))
        return cls(prompts, skipped=len(skipped), blend=blend)


@dataclass(eq=False)
class PromptLoader:
    """Yields this rank's share of the sampler's batches, possibly empty.

    Sampler states agree on all ranks.
    """

    dataset: PromptDataset
    sampler: PromptSampler
    dp_rank: int = 0
    dp_size: int = 1
    collate_fn: Callable[[list[Prompt]], Any] = list

    @property
    def prompts_per_step(self) -> int:
        """Prompts of a batch over all ranks; the last batch of an epoch may have fewer."""
        return self.sampler.prompts_per_step

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    @property
    def finished(self) -> bool:
        return self.sampler.finished

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.share(next(self.sampler))

    def share(self, numbers: Sequence[int]) -> Any:
        """Return this rank's share of the prompts with these ids."""
        local_numbers = shard(numbers, self.dp_rank, self.dp_size)
        # A number beyond the data set belongs to a later pass of a blend over a file.
        return self.collate_fn(
            [replace(self.dataset[n % len(self.dataset)], id=n) for n in local_numbers]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state and the data's fingerprint, equal on every rank."""
        return {**self.sampler.state_dict(), "fingerprint": self.dataset.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position.

        Raises:
            CheckpointError: the state belongs to other data, or the sampler refuses it.
        """
        saved_fingerprint = str(state.get("fingerprint"))
        fingerprint = self.dataset.fingerprint
        if state.get("num_prompts") == len(self.dataset) and saved_fingerprint != fingerprint:
            raise CheckpointError(
                "the checkpoint was saved on other prompts: fingerprint "
                f"{saved_fingerprint[:12]} there, {fingerprint[:12]} here. Give the same files and "
                "chat template as before, or start a new run in another folder",
                key="checkpoint.data.other_prompts",
            )
        self.sampler.load_state_dict(state)


class DefaultBatchIterator:
    """Yields consecutive prompts in batches of `micro_batch_size`.

    In a validation the batches have `val_micro_batch_size` prompts.
    """

    def __init__(
        self,
        micro_batch_size: int,
        val_micro_batch_size: int,
        prompts: Sequence[Prompt],
        validation: bool,
    ):
        self._prompts = prompts
        self._size = val_micro_batch_size if validation else micro_batch_size

    def __iter__(self) -> Iterator[Sequence[Prompt]]:
        for start in range(0, len(self._prompts), self._size):
            yield self._prompts[start : start + self._size]


def fixed_prompts(
    dataset: PromptDataset,
    num_val_samples: int | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
    collate_fn: Callable[[list[Prompt]], Any] = list,
) -> list[Any]:
    """Return one batch: this rank's share of the first `num_val_samples` prompts of each set.

    The share may be empty.

    Raises:
        ConfigError: `num_val_samples` is larger than a set.
    """
    sets: dict[str, list[Prompt]] = {}
    for index in range(len(dataset)):
        sets.setdefault(dataset[index].set_name, []).append(dataset[index])
    chosen: list[Prompt] = []
    for name, prompts in sets.items():
        count = len(prompts) if num_val_samples is None else num_val_samples
        if not 1 <= count <= len(prompts):
            which = f"validation set {name}" if name else "validation data set"
            sentence = (
                f"model.reinforce.num_val_samples is {num_val_samples}, but the {which} has "
                f"{len(prompts)} prompts; expected 1 to {len(prompts)}, or null for all"
            )
            raise ConfigError([Fault(sentence, key="data.validation.too_few_prompts")])
        chosen += prompts[:count]
    return [collate_fn(shard(chosen, dp_rank, dp_size))]


@dataclass(frozen=True)
class RLHFDatasets:
    """Data sets of a run; `validation` and `test` are None if not configured."""

    train: PromptDataset
    validation: PromptDataset | None = None
    test: PromptDataset | None = None


def build_train_valid_test_rlhf_datasets(
    tokenizer: PreTrainedTokenizerBase,
    data_prefix: Mapping[str, Any],
    *,
    splits: Sequence[str] = SPLITS,
    **options: Any,
) -> RLHFDatasets:
    """Load the train, validation and test prompts.

    Args:
        data_prefix: a path or list of paths for train, validation and test; the last two are
            optional. Train may have a weight before each path, validation a name for each of
            several sets.
        splits: the splits to load; without train, validation takes its place.
        options: of `PromptDataset.from_files`.

    Raises:
        ConfigError: weights, names of sets or files are wrong; all faults together, before any file
            is read. Keys and types are checked by the configuration.
        DataError: the errors of `PromptDataset.from_files`, for all splits together.
    """
    files, weights = resolve_data_prefix(data_prefix)
    datasets: dict[str, PromptDataset] = {}
    errors: list[DataError] = []
    for split, sets in files.items():
        if split not in splits or not any(sets.values()):
            continue
        load = partial(PromptDataset.from_files, tokenizer, split=split, **options)
        try:
            loaded = {
                name: load(paths, weights=weights if split == "train" else None)
                for name, paths in sets.items()
            }
            datasets[split] = loaded[""] if "" in loaded else PromptDataset.of_sets(loaded)
        except DataError as error:  # go on: the next split may have faults of its own
            errors.append(error)
    if errors:
        raise DataError("\n".join(map(str, errors)), key=errors[0].key)
    train = datasets["train" if "train" in splits else "validation"]
    return RLHFDatasets(train, datasets.get("validation"), datasets.get("test"))


def _render(
    renderer: ChatRenderer,
    columns: Columns,
    apply_chat_template: bool,
    system_prompt: str | None,
    tools: Sequence[Mapping[str, Any]],
    unread: Counter[str],
    record: Record,
) -> tuple[str, Prompt]:
    """Return the location of a prompt, and the prompt without an id.

    It has tokens only if they differ from the tokens of its text.

    `unread` counts the template arguments of records that have no effect.
    """
    value = record.value
    key = _prompt_key(value, columns)
    content = value[key]
    if key == "prompt":
        column = columns.names.get(key, key)
        rename = f"+{columns.key}rename"
        advice = (
            f"messages are read with {rename}.messages={column}, "
            f"a plain text with {rename}.text={column}"
        )
        jsonl.refuse_messages_as_text(content, key, advice)
    elif key != "text":
        content = jsonl.messages_of_json(content, key)
    messages: list[dict[str, Any]] = []
    if isinstance(content, list) or key in ("messages", SHAREGPT_KEY):
        messages = jsonl.check_messages(content, key, ROLES, "a list of messages", texts_only=False)
        jsonl.check_prompt(messages, key)
    elif not jsonl.check_text(content, key).strip():
        raise DataError(f"{key} is empty; expected a question", key="data.prompt.empty")
    elif apply_chat_template:
        if is_nemo_text(content):
            raise WrongForm(
                f"{key} has NeMo-Aligner's markers (<extra_id_0>System), and "
                "model.data.apply_chat_template=true would render them as the text of a user. Set "
                "it to false to use the text unchanged, or convert it to messages for the model's "
                "own template: reinforce-rl prepare FILE --output FOLDER",
                key="data.prompt.nemo_markers",
            )
        messages = [{"role": "user", "content": content}]
    system = (value.get("system") if "system" in columns.names else None) or system_prompt
    if system and not messages:
        advice = "set model.data.apply_chat_template=true"
        sentence = f"a plain prompt has no place for a system message; {advice}"
        raise ConfigError([Fault(sentence, key="data.system.plain_prompt")])
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": jsonl.check_text(system, "system")}, *messages]
    absent = [
        name
        for name in (*PROMPT_KEYS, SHAREGPT_KEY)
        if name not in columns.names and value.get(name) is None
    ]
    metadata = {name: item for name, item in value.items() if name not in (key, *absent)}
    if not messages:
        return record.where, Prompt(-1, str(content), (), metadata)
    if tools and not read_tools(metadata.get(TOOLS_KEY)):
        metadata[TOOLS_KEY] = [dict(tool) for tool in tools]
    conversation = Conversation.of_record(messages, metadata)
    unread.update(renderer.unread(conversation.kwargs))
    text = jsonl.check_text(renderer.prompt_text(conversation), key)
    tokens: tuple[int, ...] = ()
    if renderer.options.sanitize_control_tokens:
        tokens = tuple(renderer.prompt(conversation))
    return record.where, Prompt(-1, text, tokens, metadata, tuple(messages))


def _prompt_key(value: Mapping[str, Any], columns: Columns) -> str:
    """Return the column that holds a record's prompt.

    Null means no prompt: data sets that were joined have every column in every record.
    """
    if "prompt" in columns.names:
        return "prompt"
    present = [key for key in (*PROMPT_KEYS, SHAREGPT_KEY) if key in value]
    if not present:
        raise ColumnMissing(
            value, "exactly one of prompt, text and messages", f"{columns.key}prompt"
        )
    keys = [key for key in PROMPT_KEYS if value.get(key) is not None]
    if len(keys) > 1:
        raise DataError(
            f"found {' and '.join(keys)}; expected exactly one of prompt, text and messages",
            key="data.prompt.several",
        )
    if keys:
        return keys[0]
    if value.get(SHAREGPT_KEY) is not None:
        return SHAREGPT_KEY
    if len(present) > 1:
        raise DataError(
            f"null in {' and '.join(present)}; expected a prompt in one of them",
            key="data.prompt.null",
        )
    return present[0]


def _tokenise(
    rendered: Iterator[tuple[str, Prompt]], renderer: ChatRenderer, add_bos: bool | None
) -> Iterator[tuple[str, Prompt]]:
    """Tokenise prompts without tokens, `TOKENISE_AT_ONCE` at a time."""
    while items := list(islice(rendered, TOKENISE_AT_ONCE)):
        prompts = [prompt for _, prompt in items]
        plain = [row for row, prompt in enumerate(prompts) if not prompt.messages]
        chats = [row for row, prompt in enumerate(prompts) if prompt.messages and not prompt.tokens]
        tokens = [prompt.tokens for prompt in prompts]
        if plain:
            encoded = encode_plain(
                renderer.tokenizer, [prompts[row].text for row in plain], add_bos
            )
            for row, ids in zip(plain, encoded, strict=True):
                tokens[row] = tuple(ids)
        if chats:
            for row, ids in zip(
                chats, renderer.encode_all([prompts[row].text for row in chats]), strict=True
            ):
                tokens[row] = tuple(ids)
        for (where, prompt), ids in zip(items, tokens, strict=True):
            yield where, replace(prompt, tokens=ids)
