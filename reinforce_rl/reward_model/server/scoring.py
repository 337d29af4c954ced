"""Turns the arrays of merged requests into rewards and statuses. Independent of PyTriton."""

from __future__ import annotations

import json
import logging
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from reinforce_rl.data.rendering import DEFAULT_OPTIONS, ChatRenderer, TemplateOptions
from reinforce_rl.errors import RankLostError
from reinforce_rl.reward_model.data import encode_sample
from reinforce_rl.reward_model.server.health import Progress
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.function_pool import PING, FunctionPool, PendingScores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Request = Mapping[str, np.ndarray]  # by input name
Answer = dict[str, np.ndarray]  # by output name


@dataclass(frozen=True)
class Samples:
    sequences: list[list[int]]  # empty where status is not STATUS_OK
    status: np.ndarray  # int32 [N]
    # of a request of texts; None only where status is not STATUS_OK
    texts: Sequence[base.TextSample | None] = ()


class RequestScorer:
    """Scores the requests that were merged into one batch.

    A bad sample gets a status and NaN without affecting its neighbours: a failed call is retried in
    halves, down to single samples. Raises only if no request of a batch could be answered.

    Args:
        tokenizer: for `sentences`, and, with its chat template, for requests of texts.
        deterministic: one call per request, so that concurrent ones do not change its last bits;
            else one per batch.
        add_special_tokens: to `sentences`; False for text with the chat template applied, which
            holds them already.
        template: options of the chat template.
    """

    def __init__(
        self,
        scorer: base.Scorer | None,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        deterministic: bool = True,
        add_special_tokens: bool = False,
        template: TemplateOptions = DEFAULT_OPTIONS,
    ):
        self._scorer = cast(base.Scorer, scorer)
        self._tokenizer = cast("PreTrainedTokenizerBase", tokenizer)
        self._attributes = scorer.attributes if isinstance(scorer, base.AttributeScorer) else ()
        self.attributes = self._attributes  # names of the scores that are sent besides the reward
        self._renderer = None if tokenizer is None else ChatRenderer(tokenizer, template)
        self._deterministic = deterministic
        self._add_special_tokens = add_special_tokens
        self.progress = Progress()

    @property
    def input_forms(self) -> tuple[str, ...]:
        """Accepted forms: tokens, and texts if the tokenizer has a chat template."""
        return (
            (wire.TOKENS_FORM, wire.TEXT_FORM)
            if self._tokenizer.chat_template
            else (wire.TOKENS_FORM,)
        )

    def canary_inputs(self, length: int = 1) -> list[dict[str, Any]]:
        """Return one sample of `length` tokens as JSON inputs, for health checks and warm-up."""
        return [
            {"name": wire.TOKENS, "datatype": "INT64", "shape": [1, length], "data": [0] * length},
            {"name": wire.SEQUENCE_LENGTHS, "datatype": "INT64", "shape": [1, 1], "data": [length]},
        ]

    def __call__(self, requests: Sequence[Request]) -> list[Answer]:
        """Return `rewards` float32 [N, 1], `status` int32 [N, 1] and any `attributes` float32 [N,
        K] of each request.

        Raises RankLostError, as no call can succeed any more, and ValueError if no request's inputs
        make a form.
        """
        self.progress.begin()
        start = time.monotonic()
        try:
            samples, answers = self._answer(requests)
            self._count(samples, answers, time.monotonic() - start)
            return answers
        finally:
            self.progress.end()

    def _answer(self, requests: Sequence[Request]) -> tuple[list[Samples], list[Answer]]:
        """Score requests together, or one by one if that fails; raise if none succeeds: clients try
        another server.
        """
        try:
            samples = [self._read(request) for request in requests]
            return samples, self._score_requests(samples)
        except Exception as error:
            if isinstance(error, RankLostError) or len(requests) == 1:
                raise
        samples = []
        answers = []
        failures = []
        for request in requests:
            try:
                (read,), (answer,) = self._answer([request])
            except RankLostError:
                raise
            except Exception as error:
                logger.error("event=request_failed error=%s", type(error).__name__)
                failures.append(error)
                count = max(len(array) for array in request.values())
                read = Samples([[]] * count, np.full(count, base.STATUS_INTERNAL, np.int32))
                answer = self._score(read)
            samples.append(read)
            answers.append(answer)
        if len(failures) == len(requests):
            raise failures[-1]
        return samples, answers

    def _read(self, request: Request) -> Samples:
        names = set(request.keys())
        wire.check_inputs(names, self.input_forms)
        if wire.SENTENCES in names:
            rows = request[wire.SENTENCES].reshape(-1).tolist()
            return self._read_each(rows, self._tokenize, base.STATUS_BAD_TEXT)
        if wire.TOKENS in names:
            tokens = request[wire.TOKENS]
            lengths = request[wire.SEQUENCE_LENGTHS].reshape(-1).tolist()
            pairs = zip(tokens, lengths, strict=True)
            rows = [row[:length] if 0 <= length <= len(row) else None for row, length in pairs]
            return self._read_each(rows, lambda row: row[:], base.STATUS_BAD_LENGTH)
        texts, status = wire.read_samples(request)
        assert self._renderer is not None  # there is a model, which has a tokenizer
        samples = self._read_each(
            texts, partial(encode_sample, self._renderer), base.STATUS_BAD_PROMPT
        )
        return Samples(
            samples.sequences, np.where(status == base.STATUS_OK, samples.status, status), texts
        )

    def _read_each(self, rows: Iterable[Any], read: Callable[[Any], Any], fault: int) -> Samples:
        """Apply `read` per row; if it raises, the row gets status `fault`, or STATUS_BAD_TEXT for
        bad UTF-8.
        """
        sequences = []
        status = []
        for row in rows:
            try:
                sequence = np.asarray(read(row), np.int64)
                status.append(self._check(sequence))
            except UnicodeError:
                status.append(base.STATUS_BAD_TEXT)
            except Exception:  # chat templates and tokenizers may raise anything on client input
                status.append(fault)
            sequences.append(sequence.tolist() if status[-1] == base.STATUS_OK else [])
        return Samples(sequences, np.array(status, np.int32))

    def _tokenize(self, raw: str | bytes) -> list[int]:
        text = raw if isinstance(raw, str) else bytes(raw).decode("utf-8")
        encoded: Any = self._tokenizer(
            text, add_special_tokens=self._add_special_tokens, verbose=False
        )
        return list(encoded["input_ids"]) if text else []

    def _check(self, sequence: np.ndarray) -> int:
        if sequence.size == 0:
            return base.STATUS_EMPTY
        if sequence.size > self._scorer.max_length:
            return base.STATUS_TOO_LONG
        if int(sequence.min()) < 0 or int(sequence.max()) >= self._scorer.vocab_size:
            return base.STATUS_BAD_TOKEN
        return base.STATUS_OK

    def _score_requests(self, samples: list[Samples]) -> list[Answer]:
        if self._deterministic or len(samples) == 1:
            return [self._score(part) for part in samples]
        sequences = [sequence for part in samples for sequence in part.sequences]
        merged = self._score(Samples(sequences, np.concatenate([part.status for part in samples])))
        cuts = np.cumsum([len(part.status) for part in samples])[:-1]
        parts = {key: np.split(value, cuts) for key, value in merged.items()}
        return [{key: values[row] for key, values in parts.items()} for row in range(len(samples))]

    def _score(self, samples: Samples) -> Answer:
        status = samples.status.copy()
        scores = np.full((len(status), 1 + len(self._attributes)), np.nan, np.float32)
        good = np.flatnonzero(status == base.STATUS_OK)
        if good.size:
            with np.errstate(over="ignore"):  # overflow becomes inf, which is rejected below
                status[good], scores[good] = self._call_in_parts(
                    [samples.sequences[row] for row in good]
                )
        bad = ~np.isfinite(scores).all(axis=1)
        status[bad & (status == base.STATUS_OK)] = base.STATUS_NOT_FINITE
        scores[bad] = np.nan
        answer = {wire.REWARDS: scores[:, :1], wire.STATUS: status[:, None]}
        if self._attributes:
            answer[wire.ATTRIBUTES] = scores[:, 1:]
        return answer

    def _call_in_parts(
        self, sequences: list[list[int]], level: int = logging.ERROR
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return status [n] and scores [n, 1 + K].

        If the model raises, retry each half by itself.
        """
        self.progress.beat()
        try:
            return np.zeros(len(sequences), np.int32), self._call_model(sequences)
        except RankLostError:
            raise  # becomes an HTTP error, which clients retry at the restarted server
        except BaseException as error:  # SystemExit too: it would end this thread for good
            # The error's own text may quote a sample, so only its traceback is logged.
            where = "".join(traceback.format_tb(error.__traceback__))
            kind = type(error).__name__
            count = len(sequences)
            logger.log(level, "event=scoring_failed samples=%d error=%s\n%s", count, kind, where)
            logger.debug("event=scoring_failed_details", exc_info=True)
        if len(sequences) == 1:
            return np.array([base.STATUS_INTERNAL], np.int32), np.full(
                (1, 1 + len(self._attributes)), np.nan
            )
        middle = len(sequences) // 2
        halves = [
            self._call_in_parts(half, logging.DEBUG)
            for half in (sequences[:middle], sequences[middle:])
        ]
        status, scores = zip(*halves, strict=True)
        return np.concatenate(status), np.concatenate(scores)

    def _call_model(self, sequences: list[list[int]]) -> np.ndarray:
        count = len(sequences)
        if not self._attributes:
            return np.asarray(self._scorer.score(sequences), np.float64).reshape(count, 1)
        scored = cast(base.AttributeScorer, self._scorer).score_attributes(sequences)
        attributes = np.asarray(scored.attributes, np.float64).reshape(count, len(self._attributes))
        return np.column_stack([np.asarray(scored.rewards, np.float64).reshape(count), attributes])

    def _count(self, samples: list[Samples], answers: list[Answer], seconds: float) -> None:
        by_status = Counter(
            code for answer in answers for code in answer[wire.STATUS][:, 0].tolist()
        )
        failed = {
            base.STATUS_TEXT[code]: n for code, n in by_status.items() if code != base.STATUS_OK
        }
        tokens = sum(len(sequence) for part in samples for sequence in part.sequences)
        text = "event=scored requests=%d samples=%d tokens=%d seconds=%.3f failed=%s"
        level = logging.WARNING if failed else logging.DEBUG
        logger.log(level, text, len(samples), by_status.total(), tokens, seconds, failed)
        self.progress.count(len(samples), by_status, tokens, seconds)


@dataclass(frozen=True)
class FunctionScorer:
    """Functions, with or without a reward model beside them, in the place of a reward model in a
    `RewardServer`.
    """

    pool: FunctionPool  # already started
    weights: Mapping[str, float]  # of the functions, by their names in the pool
    model: base.Scorer | None = None
    model_name: str = wire.DEFAULT_NAME
    model_weight: float = 1.0
    vocab_size: None = None  # texts are read, no tokens

    @property
    def max_length(self) -> int | None:
        return None if self.model is None else self.model.max_length


class FunctionRequestScorer(RequestScorer):
    """Scores requests of texts with functions, all requests of a merged batch concurrently, while
    any model runs.

    With several scores the reward is their weighted sum, and each is an attribute.
    """

    def __init__(
        self,
        scorer: FunctionScorer,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ):
        super().__init__(scorer.model, tokenizer, **options)
        self._functions = scorer
        # no client's sample is answered without the function
        self._canary = {"canary": secrets.token_hex(16)}
        model = scorer.model_name
        if scorer.model is not None:
            self.attributes = (
                model,
                *(f"{model}/{name}" for name in self._attributes),
                *scorer.weights,
            )
        elif [*scorer.weights.values()] != [1.0]:
            self.attributes = tuple(scorer.weights)

    @property
    def input_forms(self) -> tuple[str, ...]:
        return (wire.TEXT_FORM,)

    def canary_inputs(self, length: int = 1) -> list[dict[str, Any]]:
        """Return a sample that a worker answers without calling the function, which may reject
        made-up ones.
        """
        texts = {wire.PROMPTS: "", wire.RESPONSES: "", wire.METADATA: json.dumps(self._canary)}
        return [
            {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}
            for name, text in texts.items()
        ]

    def _read(self, request: Request) -> Samples:
        if self._functions.model is not None:
            return super()._read(request)
        wire.check_inputs(set(request.keys()), self.input_forms)
        texts, status = wire.read_samples(request)
        return Samples([], status, texts)

    def _score_requests(self, samples: list[Samples]) -> list[Answer]:
        pending = [self._submit(part) for part in samples]
        answers = (
            [{} for _ in samples]
            if self._functions.model is None
            else super()._score_requests(samples)
        )
        return [self._sum(*parts) for parts in zip(samples, answers, pending, strict=True)]

    def _submit(self, part: Samples) -> dict[str, PendingScores]:
        good = part.status == base.STATUS_OK
        texts = [
            text
            for text, is_good in zip(part.texts, good, strict=True)
            if text is not None and is_good
        ]
        is_canary = all(dict(text.record) == self._canary for text in texts)
        submit = self._functions.pool.submit
        return {
            name: submit(PING if is_canary else name, texts, self.progress.beat)
            for name in self._functions.weights
        }

    def _sum(self, part: Samples, answer: Answer, pending: Mapping[str, PendingScores]) -> Answer:
        """Add the functions' scores to any answer of the model; a sample has the status of the
        first that failed.
        """
        functions = self._functions
        good = part.status == base.STATUS_OK
        status = answer[wire.STATUS][:, 0] if answer else part.status.copy()
        columns = [answer[key] for key in (wire.REWARDS, wire.ATTRIBUTES) if key in answer]
        rewards = (
            functions.model_weight * columns[0][:, 0]
            if answer
            else np.zeros(len(status), np.float32)
        )
        for name, scores in pending.items():
            values = np.full(len(status), np.nan, np.float32)
            of_function = status.copy()
            result = scores.result()
            if result.faults:
                faults = dict(Counter(result.faults.values()))
                logger.warning("event=function_failed function=%s faults=%s", name, faults)
            values[good] = result.values
            of_function[good] = result.status
            status = np.where(status == base.STATUS_OK, of_function, status)
            rewards = rewards + np.float32(functions.weights[name]) * values
            columns.append(values[:, None])
        failed = status != base.STATUS_OK
        taken = {wire.REWARDS: rewards[:, None].astype(np.float32), wire.STATUS: status[:, None]}
        if self.attributes:
            taken[wire.ATTRIBUTES] = np.concatenate(columns, axis=1)
        for key in taken.keys() - {wire.STATUS}:
            taken[key][failed] = np.nan
        return taken
