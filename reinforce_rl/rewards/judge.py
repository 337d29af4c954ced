"""A language model as judge, over the OpenAI protocol: a score as a reward function, and the better
of two answers.

Any server of `POST /v1/chat/completions` will do, such as vLLM. docs/evaluation.md has the
commands.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from yarl import URL

from reinforce_rl.data.jsonl import text_of
from reinforce_rl.rewards import transport
from reinforce_rl.rewards.base import checked_by, takes_up_to
from reinforce_rl.rewards.transport import RETRIED_CODES, Backoff, FailedAttempt
from reinforce_rl.utils.control_characters import quoted
from reinforce_rl.utils.untrusted_files import parse_json

PATH = "chat/completions"
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 8.0  # even where the judge asks for more
CONCURRENCY = 16  # requests of `preferences` in flight
MAX_ANSWER_BYTES = 4 << 20  # a hundred times a long answer
SCORE_TEMPLATE = """\
Rate the answer to the question for how correct, helpful and clear it is, $low (worst) to $high
(best). Say why in at most two sentences, then end with a line of this form: Score: NUMBER

[Question]
$prompt

[Answer]
$response
"""
PAIR_TEMPLATE = """\
Which answer to the question is better: more correct, helpful, clear? Order and length do not count.
Say why in at most two sentences, then end with [[A]] or [[B]], or with [[C]] if they are equally \
good.

[Question]
$prompt

[Answer A]
$first

[Answer B]
$second
"""
_SCORE = re.compile(r"score\W{0,8}?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_NUMBER_ALONE = re.compile(r"\A\s*(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\s*\Z")
_NUMBER_AT_END = re.compile(r"[\d.]\Z")  # which may lack its last digits
_VERDICT = re.compile(r"\[\[([ABC])\]\]")


class JudgeError(Exception):
    """The judge gave no judgement. `public` says why, without any text of the sample."""

    def __init__(self, public: str, details: str = ""):
        super().__init__(f"{public}: {quoted(details, 600)}" if details else public)
        self.public = public


@dataclass(frozen=True)
class Judge:
    """A model behind an OpenAI-compatible server."""

    url: str  # base as OpenAI's clients take it, such as http://HOST:8000/v1
    model: str
    api_key_variable: str | None = None  # environment variable that holds the key
    timeout: float = 30.0  # seconds of one attempt, up to the answer's last byte
    retries: int = 2  # further attempts, where another may succeed
    # of the request; null leaves a default one out
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError if it cannot be asked with these settings."""
        url = URL(self.url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(
                f"url is {self.url!r}; expected the base of an OpenAI API, such as "
                "http://HOST:8000/v1"
            )
        if not self.model:
            raise ValueError("model is empty; expected the model's name at the server")
        if not (self.timeout > 0 and self.retries >= 0):
            raise ValueError(
                f"timeout is {self.timeout} and retries {self.retries}; expected above 0, and at "
                "least 0"
            )
        if self.api_key_variable and not os.environ.get(self.api_key_variable):
            advice = (
                "set it, and name it in reward_function.environment, or functions do not see it"
            )
            raise ValueError(
                f"api_key_variable is {self.api_key_variable!r}, which is not set here; {advice}"
            )
        transport.proxy_of(self.address)  # raises ValueError

    @property
    def address(self) -> URL:
        url = URL(self.url.rstrip("/"))
        return (
            url
            if url.path.endswith(PATH)
            else (url / "v1" if url.path in ("", "/") else url) / PATH
        )

    async def ask(self, text: str) -> str:
        """Return the answer to one user message; raise JudgeError if there is none within the
        attempts.
        """
        defaults = {"temperature": 0.0, "max_tokens": 512}
        options = {
            key: value for key, value in {**defaults, **self.options}.items() if value is not None
        }
        request = {"model": self.model, "messages": [{"role": "user", "content": text}], **options}
        headers = {"Content-Type": "application/json"}
        if self.api_key_variable:
            headers["Authorization"] = f"Bearer {os.environ.get(self.api_key_variable, '')}"
        body = json.dumps(request).encode()
        place = f"the judge at {self.address.host}"
        try:
            proxy = transport.proxy_of(self.address)
        except ValueError as error:
            raise JudgeError(str(error)) from error
        backoff = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        for attempt in range(self.retries + 1):
            try:
                answer = await transport.exchange(
                    self.address,
                    self.timeout,
                    body=body,
                    headers=headers,
                    proxy=proxy,
                    max_bytes=MAX_ANSWER_BYTES,
                )
                if answer.code == 200:
                    return _text_in(answer.body, place)
                failure = answer.failed()
                if answer.code < 500 and answer.code not in RETRIED_CODES:
                    raise JudgeError(f"{place} answers HTTP {answer.code}", str(failure))
            except FailedAttempt as error:
                failure = error
            if attempt < self.retries:
                pause = backoff.next_pause(failure.retry_after)
                await asyncio.sleep(min(pause, MAX_PAUSE_SECONDS))
        # what follows the colon may quote the sample
        public = f"{place} {str(failure).partition(':')[0]}"
        raise JudgeError(f"{public}, {self.retries + 1} times", str(failure))


def _text_in(body: bytes, place: str) -> str:
    """Return the text of a chat completion.

    Raises JudgeError: it has none, or was cut within a number.
    """
    try:
        choice = parse_json(body)["choices"][0]
        text = text_of(choice["message"])
        if not isinstance(text, str):
            raise TypeError(type(text).__name__)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise JudgeError(f"{place} gave no choices[0].message.content") from error
    if choice.get("finish_reason") == "length" and _NUMBER_AT_END.search(text):
        raise JudgeError(
            "the judge's answer was cut within a number; raise options.max_tokens", text
        )
    return text


def score_in(answer: str, low: float, high: float) -> float:
    """Return the last "Score: 7" of an answer, or the number that it is; JudgeError if none, or not
    low .. high.
    """
    numbers = _SCORE.findall(answer) or _NUMBER_ALONE.findall(answer)
    if not numbers:
        raise JudgeError("the judge's answer holds no score", answer)
    score = float(numbers[-1])
    if not low <= score <= high:
        raise JudgeError(f"the judge's score is outside {low:g} .. {high:g}", answer)
    return score


def question_of(prompt: str, record: Mapping[str, Any]) -> str:
    """Return what was asked, without the chat template where the messages are known."""
    messages = record.get("messages") or ()
    if len(messages) == 1:
        return text_of(messages[0])
    return "\n\n".join(f"{message['role']}: {_turn_of(message)}" for message in messages) or prompt


def _turn_of(message: Mapping[str, Any]) -> str:
    """Return a turn's text, with its calls of tools as JSON."""
    calls = [
        json.dumps(call.get("function", call), ensure_ascii=False)
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join(filter(None, [text_of(message), *calls]))


def _template_of(file: str | None) -> Template:
    return Template(SCORE_TEMPLATE if file is None else Path(file).read_text(encoding="utf-8"))


def _check(
    *,
    url: str,
    model: str,
    template_file: str | None = None,
    low: float = 1.0,
    high: float = 10.0,
    **settings: Any,
) -> None:
    Judge(url, model, **settings).check()
    if not low < high:
        raise ValueError(f"low is {low} and high {high}; expected low below high")
    try:
        template = _template_of(template_file)
        template.substitute(defaultdict(str))  # ValueError names line and column of a stray dollar
    except (OSError, ValueError) as error:
        raise ValueError(
            f"template_file is {template_file!r}, which cannot be used: {error}"
        ) from error
    if not re.search(r"\$\{?response\b", template.template):
        raise ValueError(f"template_file is {template_file!r}; expected $response in it")


def _longest_seconds(
    *, timeout: float = Judge.timeout, retries: int = Judge.retries, **others: Any
) -> float:
    """Return the time of all attempts and the pauses between them."""
    return timeout * (retries + 1) + MAX_PAUSE_SECONDS * retries


@takes_up_to(_longest_seconds)
@checked_by(_check)
def llm_judge(
    prompt: str,
    response: str,
    record: Mapping[str, Any],
    *,
    url: str,
    model: str,
    template_file: str | None = None,
    low: float = 1.0,
    high: float = 10.0,
    **settings: Any,
) -> float:
    """Return the score, `low` .. `high`, that a language model gives the response.

    The template may hold any field of the prompt's line, such as $answer. `settings` are `Judge`'s.
    A judge that fails, or gives no such score, fails the sample.
    """
    values = {
        **record,
        "prompt": question_of(prompt, record),
        "response": response,
        "low": f"{low:g}",
    }
    try:
        text = _template_of(template_file).substitute(values, high=f"{high:g}")
    except KeyError as error:
        raise JudgeError(
            f"the template asks for ${error.args[0]}, which the prompt's line has not"
        ) from error
    return score_in(asyncio.run(Judge(url, model, **settings).ask(text)), low, high)


def preferences(judge: Judge, pairs: Sequence[tuple[str, str, str]]) -> list[float | str]:
    """Return which answer the judge prefers of each (question, first, second), or why there is no
    preference.

    1 for the first answer in both orders, 0 for the second in both, else 0.5.
    """
    free = asyncio.Semaphore(CONCURRENCY)

    async def preference(question: str, first: str, second: str) -> float | str:
        orders = ((first, second), (second, first))
        texts = [
            Template(PAIR_TEMPLATE).substitute(prompt=question, first=a, second=b)
            for a, b in orders
        ]
        try:
            async with free:
                verdicts = tuple(
                    map(_VERDICT.findall, await asyncio.gather(*map(judge.ask, texts)))
                )
        except JudgeError as error:
            return str(error)
        if not all(verdicts):
            return "the judge's answer holds no [[A]], [[B]] or [[C]]"
        return {("A", "B"): 1.0, ("B", "A"): 0.0}.get((verdicts[0][-1], verdicts[1][-1]), 0.5)

    async def every() -> list[float | str]:
        return await asyncio.gather(*(preference(*pair) for pair in pairs))

    return transport.wait_for(every())
