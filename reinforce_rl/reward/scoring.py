"""From the arrays of merged requests to rewards and statuses; every sample is checked by itself.

Nothing here knows PyTriton: a request is a mapping from input name to array.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from reinforce_rl.errors import DataError, RankLostError
from reinforce_rl.reward import base, protocol
from reinforce_rl.reward.progress import Progress
from reinforce_rl.reward.template import encode_sample
from reinforce_rl.reward.text_form import is_text_form, read_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.reward.function_scoring import FunctionScorer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoringTotals:
    """Counts since the start."""

    requests: int = 0
    samples: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Samples:
    """The samples of one request: the token ids of the good ones, and a status for each."""

    sequences: list[list[int]]  # empty where status is not STATUS_OK
    status: np.ndarray  # int32 [N]
    texts: Sequence[base.TextSample | None] = ()  # in place of sequences, for a reward function


class RequestScorer:
    """Scores the requests that were merged into one batch.

    A bad sample gets a status and NaN, and its neighbours their scores. A request whose form is wrong raises; Triton
    merges only requests with the same set of inputs, so that can fail no other's.

    Args:
        scorer: the reward model.
        tokenizer: for `sentences`, and with its chat template for requests of texts.
        deterministic: each request is scored in a call of its own, so that its scores do not depend, down to the last
            bit, on what other clients sent at that moment. Else all requests of a batch share one call.
        add_special_tokens: have the tokenizer add its special tokens to `sentences`. A text with the chat template
            applied holds them already.
    """

    def __init__(
        self,
        scorer: base.Scorer | FunctionScorer,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        deterministic: bool = True,
        add_special_tokens: bool = False,
    ):
        self._scorer = cast(base.Scorer, scorer)
        self._attributes = base.attributes_of(scorer)
        self._tokenizer = cast("PreTrainedTokenizerBase", tokenizer)
        self._deterministic = deterministic
        self._add_special_tokens = add_special_tokens
        self._lock = threading.Lock()
        self._totals = ScoringTotals()
        self._busy = 0
        self._idle_since = time.monotonic()
        self._progress: Progress | None = None

    def report_to(self, progress: Progress) -> None:
        """Tell another process, from now on, what is being done."""
        self._progress = progress

    @property
    def input_forms(self) -> tuple[str, ...]:
        """What a trainer may send: tokens, and texts where there is a chat template to render them with."""
        with_template = bool(self._tokenizer.chat_template) and self._tokenizer.eos_token_id is not None
        return (protocol.TOKENS_FORM, protocol.TEXT_FORM) if with_template else (protocol.TOKENS_FORM,)

    def canary_inputs(self, length: int = 1) -> list[dict[str, Any]]:
        """One sample of so many tokens, as JSON, by which a server proves that it can score."""
        return [
            {"name": protocol.TOKENS, "datatype": "INT64", "shape": [1, length], "data": [0] * length},
            {"name": protocol.SEQUENCE_LENGTHS, "datatype": "INT64", "shape": [1, 1], "data": [length]},
        ]

    @property
    def totals(self) -> ScoringTotals:
        """Counts since the start."""
        with self._lock:
            return self._totals

    def idle_seconds(self) -> float:
        """Time since the last batch ended; 0 while one is being scored."""
        with self._lock:
            return 0.0 if self._busy else time.monotonic() - self._idle_since

    def __call__(self, requests: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Outputs `rewards` float32 [N, 1] and `status` int32 [N, 1] for each request, in order.

        Where the scorer has K attributes, `attributes` float32 [N, K] besides.

        Raises:
            ValueError: a request has neither form of input, or both, or misses a part of one.
            RankLostError: a rank of the server is gone, and there will be no scores any more.
        """
        with self._lock:
            self._busy += 1
            if self._progress is not None:
                self._progress.begin()
        start = time.monotonic()
        try:
            samples = [self._read(request) for request in requests]
            answers = self._score_requests(samples)
            self._count(samples, answers, time.monotonic() - start)
            return answers
        finally:
            with self._lock:
                self._busy -= 1
                self._idle_since = time.monotonic()
                if self._progress is not None:
                    self._progress.end()

    def _read(self, request: Mapping[str, np.ndarray]) -> Samples:
        names = set(request.keys())
        if names == {protocol.SENTENCES}:
            return self._read_sentences(request[protocol.SENTENCES])
        if names == {protocol.TOKENS, protocol.SEQUENCE_LENGTHS}:
            return self._read_tokens(request[protocol.TOKENS], request[protocol.SEQUENCE_LENGTHS])
        if is_text_form(names) and protocol.TEXT_FORM in self.input_forms:
            return self._read_texts(request)
        raise ValueError(
            f"a request holds either '{protocol.SENTENCES}', or '{protocol.TOKENS}' with "
            f"'{protocol.SEQUENCE_LENGTHS}', or (of a tokenizer with a chat template) '{protocol.PROMPTS}' with "
            f"'{protocol.RESPONSES}'; this one holds {sorted(names)}"
        )

    def _read_tokens(self, tokens: np.ndarray, lengths: np.ndarray) -> Samples:
        count, width = tokens.shape
        status = np.zeros(count, np.int32)
        sequences: list[list[int]] = []
        for row, length in enumerate(lengths.reshape(count).tolist()):
            sequence = tokens[row, :length] if 0 < length <= width else tokens[row, :0]
            if length < 0 or length > width:
                status[row] = base.STATUS_BAD_LENGTH
            else:
                status[row] = self._check(sequence)
            sequences.append(sequence.tolist() if status[row] == base.STATUS_OK else [])
        return Samples(sequences, status)

    def _read_sentences(self, sentences: np.ndarray) -> Samples:
        status = np.zeros(sentences.shape[0], np.int32)
        sequences: list[list[int]] = []
        for row, raw in enumerate(sentences.reshape(-1).tolist()):
            sequence: list[int] = []
            try:
                sequence = self._tokenize(raw if isinstance(raw, str) else bytes(raw).decode("utf-8"))
                status[row] = self._check(np.asarray(sequence, np.int64))
            except UnicodeDecodeError:
                status[row] = base.STATUS_BAD_TEXT
            sequences.append(sequence if status[row] == base.STATUS_OK else [])
        return Samples(sequences, status)

    def _read_texts(self, request: Mapping[str, np.ndarray]) -> Samples:
        samples, status = read_samples(request)
        sequences: list[list[int]] = []
        for row, sample in enumerate(samples):
            sequence: list[int] = []
            if sample is not None:
                try:
                    sequence = encode_sample(self._tokenizer, sample)
                    status[row] = self._check(np.asarray(sequence, np.int64))
                except DataError:
                    status[row] = base.STATUS_BAD_PROMPT
            sequences.append(sequence if status[row] == base.STATUS_OK else [])
        return Samples(sequences, status)

    def _tokenize(self, text: str) -> list[int]:
        if not text:
            return []
        encoded: Any = self._tokenizer(text, add_special_tokens=self._add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def _check(self, sequence: np.ndarray) -> int:
        if sequence.size == 0:
            return base.STATUS_EMPTY
        if sequence.size > self._scorer.max_length:
            return base.STATUS_TOO_LONG
        if int(sequence.min()) < 0 or int(sequence.max()) >= self._scorer.vocab_size:
            return base.STATUS_BAD_TOKEN
        return base.STATUS_OK

    def _score_requests(self, samples: list[Samples]) -> list[dict[str, np.ndarray]]:
        if not self._deterministic and len(samples) > 1:
            merged = Samples(
                [sequence for one in samples for sequence in one.sequences],
                np.concatenate([one.status for one in samples]),
            )
            answer = self._score(merged)
            if base.STATUS_INTERNAL not in answer[protocol.STATUS]:
                cuts = np.cumsum([len(one.status) for one in samples])[:-1]
                parts = {key: np.split(value, cuts) for key, value in answer.items()}
                return [
                    {key: values[row] for key, values in parts.items()} for row in range(len(samples))
                ]  # else each request by itself, so that one cannot fail the others
        return [self._score(one) for one in samples]

    def _score(self, samples: Samples) -> dict[str, np.ndarray]:
        status = samples.status.copy()
        rewards = np.full(len(status), np.nan, np.float32)
        attributes = np.full((len(status), len(self._attributes)), np.nan, np.float32)
        good = np.flatnonzero(status == base.STATUS_OK)
        if good.size:
            self._beat()
            try:
                sequences = [samples.sequences[row] for row in good]
                with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
                    if self._attributes and isinstance(self._scorer, base.AttributeScorer):
                        found = self._scorer.score_attributes(sequences)
                        scores = found.rewards
                        attributes[good] = np.asarray(found.attributes, np.float64)
                    else:
                        scores = self._scorer.score(sequences)
                    rewards[good] = np.asarray(scores, np.float64).reshape(good.size)
            except RankLostError:
                raise  # an error of HTTP, which clients retry: the server that is started again can score these
            except Exception as error:
                # Whatever the model raised, the caller gets an answer that can never be mistaken for a reward.
                # The error's own text may quote a sample.
                where = "".join(traceback.format_tb(error.__traceback__))
                logger.error("event=scoring_failed samples=%d error=%s\n%s", good.size, type(error).__name__, where)
                logger.debug("event=scoring_failed_details", exc_info=True)
                rewards[good] = np.nan
                status[good] = base.STATUS_INTERNAL
        bad = ~(np.isfinite(rewards) & np.isfinite(attributes).all(axis=1))
        status[bad & (status == base.STATUS_OK)] = base.STATUS_NOT_FINITE
        rewards[bad] = np.nan
        answer = {protocol.REWARDS: rewards[:, None], protocol.STATUS: status[:, None]}
        if self._attributes:
            attributes[bad] = np.nan
            answer[protocol.ATTRIBUTES] = attributes
        return answer

    def _beat(self) -> None:
        if self._progress is not None:
            self._progress.beat()

    def _count(self, samples: list[Samples], answers: list[dict[str, np.ndarray]], seconds: float) -> None:
        by_status: dict[int, int] = {}
        for answer in answers:
            for code in answer[protocol.STATUS][:, 0].tolist():
                by_status[code] = by_status.get(code, 0) + 1
        failed = {base.STATUS_TEXT[code]: n for code, n in by_status.items() if code != base.STATUS_OK}
        count = sum(len(one.status) for one in samples)
        tokens = sum(len(sequence) for one in samples for sequence in one.sequences)
        level = logging.WARNING if failed else logging.DEBUG
        logger.log(
            level,
            "event=scored requests=%d samples=%d tokens=%d seconds=%.3f failed=%s",
            len(samples),
            count,
            tokens,
            seconds,
            failed,
        )
        with self._lock:
            if self._progress is not None:
                self._progress.count(len(samples), by_status, tokens, seconds)
            old = self._totals
            self._totals = ScoringTotals(
                requests=old.requests + len(samples),
                samples=old.samples + count,
                failed=old.failed + sum(failed.values()),
                tokens=old.tokens + tokens,
                seconds=old.seconds + seconds,
            )
