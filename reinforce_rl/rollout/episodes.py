"""Episodes of several turns: the policy and an environment answer each other.

An episode is one row of a batch. Its response is answer, environment, answer, ...; `policy_mask`
tells whose each token is. No token of it is decoded and encoded again, see `data.turns`. Where the
chat template rewrites the history, the next answer begins a new context with it, and `history_mask`
says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_OUTSIDE, FINISH_STOP
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import decode_all, pad_id_of
from reinforce_rl.data.tool_calls import Answer, read_answer, tool_format_of
from reinforce_rl.data.turns import next_turn
from reinforce_rl.errors import DataError, ReinforceError
from reinforce_rl.generation.base import (
    ConversingGenerator,
    Generator,
    PartialResponse,
    SamplingParams,
    WeightUpdates,
)
from reinforce_rl.generation.native.sampling import sample_seeds
from reinforce_rl.generation.responses import converse_in_rounds, new_responses
from reinforce_rl.rewards.environment import ENVIRONMENT_FAILED
from reinforce_rl.rewards.environment_pool import EnvironmentPool, Turn

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

T = TypeVar("T")
_POLL_SECONDS = 0.5
_START_OF_PROMPT = (1 << 40) + 1  # beside the numbers of samples, as a key of random numbers
# What a key of a sample is for.
_LATER_TURNS = 1
_ENVIRONMENT = 2


@dataclass(frozen=True)
class Answered:
    """An answer that the environment was given."""

    text: str
    stop_id: int | None  # the token that ended it, which is no part of its text
    parsed: Answer | None  # with its tool calls; None where the environment runs none


@dataclass
class Episode:
    """An episode that is being played; lists have one entry per token of its response."""

    number: int
    prompt: Prompt
    key: int  # noise key, uint64
    conversation: Conversation  # up to the next answer
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # 0 on the environment's tokens
    is_policy: list[bool] = field(default_factory=list)
    is_history: list[bool] = field(default_factory=list)  # rewritten by the template
    turn_rewards: list[float] = field(default_factory=list)  # at the last token of each answer
    # Where the context of the next answer begins in `tokens`; None: with the prompt.
    context_start: int | None = None
    turns: int = 0  # answers so far
    answered: Answered | None = None  # the last answer, on rank 0
    answer_reason: str | None = None  # finish reason of the last answer
    reward: float = 0.0  # of the turns so far
    finish_reason: str | None = None  # None: under way
    fault: str | None = None  # why the environment failed

    def next_answer(self, max_tokens: int) -> PartialResponse:
        """Return the empty answer of the next turn, in an episode of `max_tokens`."""
        key = self.key
        if self.turns:
            key = int(sample_seeds(key, np.array([self.turns]), np.array([_LATER_TURNS]))[0])
        context = (*self.prompt.tokens, *self.tokens)
        if self.context_start is not None:
            context = tuple(self.tokens[self.context_start :])
        history = replace(self.prompt, tokens=context)
        return PartialResponse(history, key, limit=max_tokens - len(self.tokens))

    def add_answer(self, answer: PartialResponse) -> None:
        self.tokens += answer.tokens
        self.log_probs += answer.log_probs
        self.is_policy += [True] * len(answer.tokens)
        self.is_history += [False] * len(answer.tokens)
        self.turn_rewards += [0.0] * len(answer.tokens)
        self.answer_reason = answer.finish_reason
        self.turns += 1

    def add_environment(self, tokens: Sequence[int], history: Sequence[int] = ()) -> None:
        """Add what the environment wrote; in a new context, behind the rewritten `history`."""
        if history:
            self.context_start = len(self.tokens)
        count = len(history) + len(tokens)
        self.tokens += [*history, *tokens]
        self.log_probs += [0.0] * count
        self.is_policy += [False] * count
        self.is_history += [True] * len(history) + [False] * len(tokens)
        self.turn_rewards += [0.0] * count


@dataclass(frozen=True)
class Outcome:
    """What an environment's reply means for an episode."""

    reward: float = 0.0
    fault: str | None = None  # the environment failed: the episode ends and is left out
    tokens: tuple[int, ...] = ()  # between this answer and the next; empty if there is none
    history: tuple[int, ...] = ()  # before `tokens`, where a new context begins
    conversation: Conversation | None = None  # up to the next answer


class EpisodeGenerator:
    """A `Generator` whose completions are whole episodes.

    Args:
        generator: draws the answers.
        environment: started on model-parallel rank 0, which alone asks it.
        vocab_size: of the model.
        is_continuous: continue an episode as soon as its reply arrives. Otherwise all wait for the
            slowest, so that no number depends on the times of the replies.
    """

    def __init__(
        self,
        generator: Generator,
        environment: EnvironmentPool,
        renderer: ChatRenderer,
        mesh: Mesh,
        *,
        vocab_size: int,
        max_turns: int,
        max_tokens: int,
        skip_special_tokens: bool = True,
        tool_format: str = "auto",
        is_continuous: bool = False,
    ):
        self._generator = generator
        self._environment = environment
        self._renderer = renderer
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._skip_special_tokens = skip_special_tokens
        self._tool_format = tool_format
        self._is_continuous = is_continuous
        self._numbers = count()

    @property
    def is_exact(self) -> bool:
        return self._generator.is_exact

    def awake(self) -> AbstractContextManager[None]:
        return self._generator.awake()

    def refit(self) -> None:
        self._generator.refit()

    def close(self) -> None:
        self._generator.close()

    def resume(
        self, responses: Sequence[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> list[PartialResponse]:
        """Extend single answers, as the generator itself does."""
        return self._generator.resume(responses, params, updates)

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int
    ) -> Completions:
        """See `Generator.generate`; a completion is an episode.

        Answers and the environment's random numbers are keyed by (seed, prompt id, sample, turn).

        Raises:
            EnvironmentProcessError: no process of the environment could be started.
        """
        episodes = self._begin(prompts, num_samples, seed)
        responses = [episode.next_answer(self._max_tokens) for episode in episodes]
        partner = partial(self._exchange, episodes, params.stop_token_ids)
        try:
            if isinstance(self._generator, ConversingGenerator):
                self._generator.converse(responses, params, partner)
            else:
                converse_in_rounds(self._generator, responses, params, partner)
        finally:
            for episode in episodes:
                if episode.finish_reason is None:
                    self._environment.end(episode.number)
        return _completions_of(episodes, pad_id_of(self._renderer.tokenizer))

    def _begin(self, prompts: Sequence[Prompt], num_samples: int, seed: int) -> list[Episode]:
        responses = new_responses(prompts, num_samples, seed)
        episodes = [
            Episode(
                next(self._numbers),
                response.prompt,
                response.key,
                Conversation.of_record(response.prompt.messages, response.prompt.metadata),
            )
            for response in responses
        ]

        def begin() -> None:
            for episode in episodes:
                prompt = episode.prompt
                start = sample_seeds(seed, np.array([prompt.id]), np.array([_START_OF_PROMPT]))
                later = sample_seeds(episode.key, np.array([0]), np.array([_ENVIRONMENT]))
                self._environment.begin(
                    episode.number,
                    {"messages": prompt.messages, **prompt.metadata},
                    prompt_key=int(start[0]),
                    sample_key=int(later[0]),
                )

        self._on_rank_0(begin)
        return episodes

    def _exchange(
        self,
        episodes: Sequence[Episode],
        stop_token_ids: Sequence[int],
        answers: Mapping[int, PartialResponse],
        *,
        waits: bool,
    ) -> dict[int, PartialResponse | None]:
        """Add answers to their episodes, and the environment's replies; see `Partner`."""
        asked = []
        changed = []
        for row, answer in answers.items():
            episode = episodes[row]
            episode.add_answer(answer)
            if all(0 <= token < self._vocab_size for token in answer.tokens):
                asked.append((episode, answer))
            else:
                episode.finish_reason = FINISH_OUTSIDE
                changed.append(row)
        first = episodes[0].number  # they count up

        def ask_and_listen() -> list[tuple[int, Outcome]]:
            self._ask(asked, stop_token_ids)
            turns = self._replies(waits=waits, has_others=bool(changed))
            return [
                (turn.episode - first, self._outcome(episodes[turn.episode - first], turn))
                for turn in turns
            ]

        for row, outcome in self._on_rank_0(ask_and_listen):
            self._take_outcome(episodes[row], outcome)
            changed.append(row)
        replies: dict[int, PartialResponse | None] = {}
        for row in changed:
            episode = episodes[row]
            if episode.finish_reason is None:
                replies[row] = episode.next_answer(self._max_tokens)
            else:
                self._environment.end(episode.number)
                replies[row] = None
        return replies

    def _replies(self, *, waits: bool, has_others: bool) -> list[Turn]:
        """Return the environment's replies that are there; in rounds all, or none before the end.

        Args:
            waits: until there is one, unless other rows continue already (`has_others`).
        """
        environment = self._environment
        if not self._is_continuous:
            turns: list[Turn] = []
            while waits and environment.under_way:
                turns += environment.replies(_POLL_SECONDS)
            # in an order that does not depend on the times of the replies
            return sorted(turns, key=lambda turn: turn.episode)
        turns = environment.replies(0)
        while waits and not turns and not has_others and environment.under_way:
            turns = environment.replies(_POLL_SECONDS)
        return turns

    def _ask(
        self, asked: Sequence[tuple[Episode, PartialResponse]], stop_token_ids: Sequence[int]
    ) -> None:
        """Give the answers to the environment."""
        stop_ids = [
            answer.tokens[-1] if answer.tokens and answer.tokens[-1] in stop_token_ids else None
            for _, answer in asked
        ]
        written = [
            answer.tokens if stop_id is None else answer.tokens[:-1]
            for (_, answer), stop_id in zip(asked, stop_ids, strict=True)
        ]
        texts = decode_all(
            self._renderer.tokenizer, written, skip_special_tokens=self._skip_special_tokens
        )
        parsed = self._parsed(asked, written)
        for (episode, _), text, stop_id, read in zip(asked, texts, stop_ids, parsed, strict=True):
            episode.answered = Answered(text, stop_id, read)
            calls = () if read is None else read.calls
            faults = None if read is None else read.faults
            if read is not None and read.has_channels:
                text = read.content  # without thoughts, and names of channels
            self._environment.answer(episode.number, text, calls, faults)

    def _parsed(
        self,
        asked: Sequence[tuple[Episode, PartialResponse]],
        written: Sequence[Sequence[int]],
    ) -> list[Answer | None]:
        """Return the answers with their tool calls; None where the environment runs none."""
        if self._environment.tools is None:
            return [None] * len(asked)
        tool_format = tool_format_of(self._renderer, self._tool_format)
        # Special tokens, which the environment does not read, mark the calls of some models.
        texts = decode_all(self._renderer.tokenizer, written)
        return [
            read_answer(text, tool_format, answer.key)
            for (_, answer), text in zip(asked, texts, strict=True)
        ]

    def _outcome(self, episode: Episode, turn: Turn) -> Outcome:
        """Return what a reply to the last answer means."""
        if turn.fault:
            quoted = f": {' '.join(turn.text.split())}" if turn.text else ""
            return Outcome(fault=f"{ENVIRONMENT_FAILED}{turn.fault}{quoted}")
        is_last = episode.answer_reason != FINISH_STOP or episode.turns == self._max_turns
        if turn.is_end or is_last:
            return Outcome(turn.reward)
        answered = episode.answered
        assert answered is not None
        try:
            following = next_turn(
                self._renderer,
                episode.conversation,
                answered.text,
                turn.messages,
                stop_id=answered.stop_id,
                parsed=answered.parsed,
            )
        except DataError as error:
            return Outcome(fault=f"{ENVIRONMENT_FAILED}its messages cannot be used: {error}")
        return Outcome(
            turn.reward,
            tokens=tuple(following.tokens),
            history=tuple(following.history),
            conversation=following.conversation,
        )

    def _take_outcome(self, episode: Episode, outcome: Outcome) -> None:
        episode.reward += outcome.reward
        if episode.turn_rewards:
            episode.turn_rewards[-1] += outcome.reward
        episode.fault = outcome.fault
        length = len(episode.tokens) + len(outcome.history) + len(outcome.tokens)
        if outcome.conversation is None:
            episode.finish_reason = episode.answer_reason
        elif length >= self._max_tokens:
            # No room for a further answer, so nobody would read what the environment wrote.
            episode.finish_reason = FINISH_LENGTH
        else:
            episode.conversation = outcome.conversation
            episode.add_environment(outcome.tokens, outcome.history)

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Run `action` on model-parallel rank 0; all ranks of the block return or raise alike."""
        result: T | None = None
        failure: ReinforceError | None = None
        if self._mesh.is_model_parallel_rank_0:
            try:
                result = action()
            except ReinforceError as error:
                failure = error
        result, failure = self._mesh.from_model_parallel_rank_0((result, failure))
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]


def _completions_of(episodes: Sequence[Episode], pad_id: int) -> Completions:
    rewards = [episode.reward if episode.fault is None else math.nan for episode in episodes]

    def padded(rows: Iterable[Sequence[Any]], dtype: torch.dtype, value: float) -> Tensor:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        if not tensors:
            return torch.zeros((0, 0), dtype=dtype)
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    log_probs = None  # of a generator that reports none
    if all(len(episode.log_probs) == len(episode.tokens) for episode in episodes):
        log_probs = padded((episode.log_probs for episode in episodes), torch.float32, 0.0)
    return Completions(
        tokens=padded((episode.tokens for episode in episodes), torch.long, pad_id),
        lengths=torch.tensor([len(episode.tokens) for episode in episodes], dtype=torch.long),
        finish_reasons=tuple(episode.finish_reason or FINISH_LENGTH for episode in episodes),
        log_probs=log_probs,
        policy_mask=padded((episode.is_policy for episode in episodes), torch.bool, False),
        history_mask=padded((episode.is_history for episode in episodes), torch.bool, False),
        turn_rewards=padded((episode.turn_rewards for episode in episodes), torch.float32, 0.0),
        environment_rewards=torch.tensor(rewards, dtype=torch.float32),
        environment_faults=tuple(episode.fault for episode in episodes),
    )


@contextlib.contextmanager
def started_environment(cfg: TrainConfig, mesh: Mesh) -> Iterator[EnvironmentPool | None]:
    """Start the environment that a configuration names on model-parallel rank 0; None without one.

    Raises:
        ConfigError: the environment cannot be loaded; on all ranks.
    """
    if not cfg.has_environment:
        yield None
        return
    environment = EnvironmentPool(cfg.environment)
    with contextlib.closing(environment):
        with mesh.raise_on_all_ranks():
            if mesh.is_model_parallel_rank_0:
                environment.start()
        yield environment


def play_episodes(
    model: MegatronGPTReinforceActorModel, environment: EnvironmentPool | None, cfg: TrainConfig
) -> None:
    """Let an environment answer what the model generates; without one, do nothing."""
    if environment is None:
        return
    is_continuous = cfg.environment.continuous
    if is_continuous is None:
        is_continuous = cfg.generation != "native"
    model.generator = EpisodeGenerator(
        model.generator,
        environment,
        ChatRenderer(model.tokenizer, cfg.model.data.template_options("model.data.")),
        model.mesh,
        vocab_size=model.lm.architecture.vocab_size,
        max_turns=cfg.environment.max_turns,
        max_tokens=cfg.environment.max_episode_tokens,
        skip_special_tokens=cfg.model.reinforce.skip_special_tokens,
        tool_format=cfg.environment.tool_format,
        is_continuous=is_continuous,
    )
