"""`reinforce-rl chat`: talk with a model, or with two side by side.

Answers are streamed, and scored on request.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from reinforce_rl.config.engines import ENGINES
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.finish_reasons import FINISH_LENGTH
from reinforce_rl.data.rendering import DEFAULT_OPTIONS, ChatRenderer, TemplateOptions
from reinforce_rl.data.tokenizer import decode_all, encode_plain, load_tokenizer
from reinforce_rl.errors import DataError, ReinforceError, RewardServerError
from reinforce_rl.evaluation.evaluate import short_names
from reinforce_rl.evaluation.model import inference_config, load_actor
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.policy.build import configured_mesh
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.rewards.base import STATUS_OK, STATUS_TEXT, RewardSource
from reinforce_rl.rewards.overrides import reward_overrides
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.scoring import reward_request
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.control_characters import show_control_characters
from reinforce_rl.utils.files import write_json_lines

HELP = """/reset        forget the conversation
/system TEXT  set the system message, none without TEXT, and forget the conversation
/regenerate   answer the last question once more
/save FILE    write the conversation as JSONL, which `prepare` and training read
/quit         end, as Ctrl-D does; Ctrl-C ends an answer"""
MIN_COLUMNS = 60  # of a terminal that shows two models side by side
REWARD_SECONDS = 20.0  # to wait for a server, and for a score


@dataclass
class Speaker:
    """A model with its side of a conversation."""

    name: str
    actor: MegatronGPTReinforceActorModel
    messages: list[dict[str, Any]] = field(default_factory=list)
    limit: int | None = None  # tokens of prompt and answer; None for the model's own
    template: TemplateOptions = DEFAULT_OPTIONS
    add_bos: bool | None = None  # to plain text; None as the tokenizer does

    def __post_init__(self) -> None:
        self.renderer = ChatRenderer(self.actor.tokenizer, self.template)

    def prompt(self, number: int, longest: int) -> tuple[Prompt, int]:
        """Return the conversation as a prompt, and the number of tokens left for an answer.

        The answer has at most `longest` tokens. The oldest turns are dropped until a quarter of
        the context, or `longest`, is free. Without a chat template the last message is the prompt.

        Raises:
            DataError: the last question alone fills the context.
        """
        tokenizer = self.actor.tokenizer
        limit = self.limit or self.actor.lm.architecture.max_positions
        messages = list(self.messages)
        is_chat = bool(self.actor.tokenizer.chat_template)
        first = int(messages[0]["role"] == "system")
        while True:
            if is_chat:
                conversation = Conversation(tuple(messages))
                text = self.renderer.prompt_text(conversation)
                tokens = self.renderer.prompt(conversation)
            else:
                text = messages[-1]["content"]
                tokens = encode_plain(tokenizer, [text], self.add_bos)[0]
            room = limit - len(tokens)
            if room >= min(longest, limit // 4) or len(messages) <= first + 2:
                break
            del messages[first : first + 2]
        if room < 1:
            raise DataError(
                f"this question needs {len(tokens)} tokens, but the context of {self.name} has "
                f"only {limit}; ask a shorter one",
                key="chat.question.too_long",
            )
        return Prompt(number, text, tuple(tokens), {}, tuple(messages) if is_chat else ()), min(
            longest, room
        )

    def answer(
        self, prompt: Prompt, params: SamplingParams, seed: int, show: Callable[[str], None]
    ) -> Completions:
        """Generate a response.

        `show` is called with pieces of the text, or with all of it if an engine generates. An
        exception that `show` raises ends the generation.
        """
        generator = self.actor.generator
        shown = 0

        def watch(tokens: list[list[int]], is_whole: bool = False) -> None:
            nonlocal shown
            ids = (
                tokens[0][:-1]
                if tokens[0][-1:] and tokens[0][-1] in params.stop_token_ids
                else tokens[0]
            )
            skips = self.actor.settings.reinforce.skip_special_tokens
            text = decode_all(self.actor.tokenizer, [ids], skip_special_tokens=skips)[0]
            # a character may be spread over tokens
            text = text if is_whole else text.rstrip("\ufffd")
            show(text[shown:])
            shown = max(shown, len(text))

        options = {"watch": watch} if isinstance(generator, NativeGenerator) else {}
        completions = generator.generate([prompt], 1, params, seed, **options)
        watch(completions.tokens.tolist(), True)
        return completions


@dataclass
class Chat:
    speakers: Sequence[Speaker]
    params: SamplingParams
    seed: int = 0
    system: str = ""
    # Returns the sentence about an answer's reward; None: answers are not scored.
    score: Callable[[Speaker, Prompt, Completions], str] | None = None
    console: Console = field(default_factory=lambda: Console(highlight=False))
    _answered: int = 0  # keys the sampling noise: a repeated question gets another answer
    _stop: bool = False  # Ctrl-C was typed during this answer

    def __post_init__(self) -> None:
        self._reset()

    def talk(self, lines: Iterator[str]) -> None:
        """Answer questions and obey commands until the lines end."""
        for line in map(str.strip, lines):
            before = [list(speaker.messages) for speaker in self.speakers]
            try:
                if line == "/quit":
                    return
                if line.startswith("/"):
                    self._obey(*line.partition(" ")[::2])
                elif line:
                    for speaker in self.speakers:
                        speaker.messages.append({"role": "user", "content": line})
                    self._answer()
            except (ReinforceError, OSError, KeyboardInterrupt) as error:
                self._write(f"({error or 'stopped'})\n")
                for speaker, messages in zip(self.speakers, before, strict=True):
                    # A question without an answer would be part of the next prompt.
                    speaker.messages = messages

    def _obey(self, command: str, value: str) -> None:
        if command in ("/reset", "/system"):
            self.system = value.strip() if command == "/system" else self.system
            self._reset()
        elif command == "/regenerate" and len(self.speakers[0].messages) > bool(self.system):
            for speaker in self.speakers:
                del speaker.messages[-1]
            self._answer()
        elif command == "/save" and value:
            rows = [
                {"messages": speaker.messages, "model": speaker.name} for speaker in self.speakers
            ]
            write_json_lines(Path(value.strip()), rows)
        else:
            self._write(f"{HELP}\n")

    def _reset(self) -> None:
        for speaker in self.speakers:
            speaker.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _answer(self) -> None:
        self._answered += 1
        console = self.console
        several = len(self.speakers) > 1
        names = (Column(speaker.name, ratio=1) for speaker in self.speakers)
        columns = Table(*names, box=None, expand=True, padding=(0, 2, 0, 0))
        texts = [Text() for _ in self.speakers]
        columns.add_row(*texts)
        screen = contextlib.nullcontext()
        if several and console.is_terminal and console.width >= MIN_COLUMNS:
            # A refreshing thread could read half of a text.
            screen = Live(columns, console=console, auto_refresh=False)
        with self._stoppable(), screen as live:
            for speaker, text in zip(self.speakers, texts, strict=True):
                if several and not live:
                    self._write(f"[{speaker.name}]\n")

                pieces: list[str] = []

                def show(piece: str, text: Text = text, pieces: list[str] = pieces) -> None:
                    pieces.append(piece)
                    if live is None:
                        self._write(piece)
                    else:
                        text.append(show_control_characters(piece))
                        live.refresh()

                notes = self._answer_of(speaker, show)
                speaker.messages.append({"role": "assistant", "content": "".join(pieces)})
                show("".join(f"\n({note})" for note in notes))
                if live is None:
                    self._write("\n")

    def _answer_of(self, speaker: Speaker, show: Callable[[str], None]) -> list[str]:
        """Stream an answer, and return notes about it."""

        def show_or_stop(piece: str) -> None:
            show(piece)
            if self._stop:
                raise KeyboardInterrupt

        prompt, room = speaker.prompt(self._answered, self.params.max_length)
        left_out = len(speaker.messages) - len(prompt.messages) if prompt.messages else 0
        notes = (
            [f"without the first {left_out} messages: there is no room for them"]
            if left_out
            else []
        )
        try:
            completions = speaker.answer(
                prompt, replace(self.params, max_length=room), self.seed, show_or_stop
            )
        except KeyboardInterrupt:
            return [*notes, "stopped"]
        if completions.finish_reasons[0] == FINISH_LENGTH:
            notes.append(f"cut at {room} tokens")
        return notes if self.score is None else [*notes, self.score(speaker, prompt, completions)]

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Have Ctrl-C end an answer at its next token, and a second Ctrl-C at once."""

        def stop(*_: object) -> None:
            if self._stop:
                raise KeyboardInterrupt
            self._stop = True

        self._stop = False
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _write(self, text: str) -> None:
        # rich writes to the stream that `shown_streams` wraps, so nothing else shows control
        # characters here.
        self.console.file.write(show_control_characters(text))
        self.console.file.flush()


def chat(
    model: str | Path,
    compare: str | Path | None = None,
    *,
    rewards: Sequence[str] = (),
    system: str = "",
    temperature: float = 0.7,
    max_tokens: int = 512,
    overrides: Sequence[str] = (),
    lines: Iterator[str] | None = None,
) -> None:
    """Talk with a model, or with two side by side.

    Args:
        model, compare: Hugging Face folders, or folders of runs that have exported one.
        rewards: see `evaluate`; while a server is down, each answer shows an error in place of its
            reward.
        temperature: 0 for greedy answers.
        overrides: KEY=VALUE of `train`.
        lines: questions and commands; None for the terminal or standard input.

    Raises:
        ConfigError: a model, a reward function or a setting cannot be used.
    """
    folders = [Path(path) for path in (model, compare) if path is not None]
    # The length of answers is set below; a small context must not be refused for the default one.
    options = [
        "model.reinforce.length_params.max_length=1",
        *reward_overrides(rewards, has_base=False),
        *overrides,
    ]
    cfgs = dict(
        zip(
            short_names(folders),
            [inference_config(folder, options) for folder in folders],
            strict=True,
        )
    )
    first = next(iter(cfgs.values()))
    with configured_mesh(first) as mesh, contextlib.ExitStack() as stack:

        @functools.cache
        def connect(name: str) -> RewardSource:
            cfg = cfgs[name]
            tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
            cfg.remote_rm.ready_timeout_seconds = REWARD_SECONDS / 4
            cfg.remote_rm.deadline_seconds = REWARD_SECONDS
            silent = SilentMonitor(cfg.exp_manager.explicit_log_dir)
            return stack.enter_context(
                contextlib.closing(connect_to_reward_servers(cfg, mesh, tokenizer, silent))
            )

        def score(speaker: Speaker, prompt: Prompt, completions: Completions) -> str:
            try:
                scored = (
                    connect(speaker.name)
                    .infer_rm(reward_request(speaker.actor, [prompt], completions))
                    .result()
                )
            except RewardServerError as error:
                return f"no reward: {error}"
            if (status := int(scored.status[0])) == STATUS_OK:
                return f"reward {float(scored.values[0]):.3f}"
            fault = scored.faults.get(0, STATUS_TEXT[status])
            why = (
                "; the record of a chat has no columns of a data file, only messages"
                if "KeyError" in fault
                else ""
            )
            return f"no reward: {fault}{why}"

        for name in cfgs if rewards else ():
            # An unknown function is an error. A server may still start.
            with contextlib.suppress(RewardServerError):
                connect(name)
        speakers = []
        for name, cfg in cfgs.items():
            limit = cfg.model.encoder_seq_length if cfg.generation in ENGINES else None
            data = cfg.model.data
            actor = load_actor(cfg, mesh)
            speakers.append(
                Speaker(
                    name,
                    actor,
                    limit=limit,
                    template=data.template_options("model.data."),
                    add_bos=data.add_bos,
                )
            )
            stack.enter_context(contextlib.closing(speakers[-1].actor.generator))
            stack.enter_context(speakers[-1].actor.generator.awake())
        params = replace(
            speakers[0].actor.val_sampling,
            max_length=max_tokens,
            use_greedy=temperature == 0,
            temperature=temperature or 1.0,
        )
        Chat(speakers, params, first.model.seed, system, score if rewards else None).talk(
            lines or typed_lines()
        )


def typed_lines() -> Iterator[str]:
    """Yield the lines of standard input.

    A terminal gets a prompt and a history, and Ctrl-C does not end the lines.
    """
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, `input` edits lines with it
    print(f"{HELP}\n")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
