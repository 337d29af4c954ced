"""Environments of tools: their schemas, the policy's calls, and whose fault a failure is."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.errors import check_fault

from reinforce_rl.config.environment import EnvironmentConfig
from reinforce_rl.errors import ConfigError
from reinforce_rl.rewards.environment import Reply, ToolError, Tools
from reinforce_rl.rewards.environment_pool import EnvironmentPool, environment_tools

KEYS = {"prompt_key": 5, "sample_key": 6}


def multiply(a: int, b: int = 2) -> int:
    """Multiply two integers.

    Args:
        a: the first
        b: the second
    """
    return a * b


LOOK_UP = {"name": "look_up", "description": "Look up a word.", "parameters": {"type": "object"}}


class Several(Tools):
    """Two tools, one of which knows the record."""

    tools: ClassVar = [multiply, LOOK_UP]

    def __init__(self, record: dict, rng: random.Random, *, reward: float = 1.0):
        self.words = record["words"]
        self.reward = reward

    def look_up(self, word: str) -> Any:
        if word == "raise":
            raise KeyError(word)
        if word not in self.words:
            raise ToolError(f"there is no {word}")
        return self.words[word]

    def __call__(self, answer: str) -> Reply:
        return Reply(reward=self.reward, is_end=True)


class Method(Tools):
    """A tool that is a method with a docstring; nothing grades the answer."""

    def echo(self, text: str) -> str:
        """Return a text.

        Args:
            text: what to return
        """
        return text

    tools: ClassVar = [echo]


def untyped(word):
    """Look up a word."""


class WithoutSchema(Tools):
    tools: ClassVar = [untyped]


class WithoutMethod(Tools):
    tools: ClassVar = [LOOK_UP]


class RecordsTools(Tools):
    """Describes none, as its records do."""


def function(answer: str, record: dict, rng: random.Random) -> None:
    """An environment that reads the answer's text."""


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number}", "type": "function", "function": function}


def results(calls: list[dict], faults: dict[str, str] | None = None) -> list[str]:
    environment = Several({"words": {"on": "an", "off": ["aus", "ab"]}}, random.Random(0))
    messages = environment.answer_calls(calls, faults or {})
    assert [message["tool_call_id"] for message in messages] == [each["id"] for each in calls]
    assert {message["role"] for message in messages} == {"tool"}
    return [message["content"] for message in messages]


def test_results_are_texts_or_json_in_the_order_of_the_calls():
    calls = [
        call("multiply", 0, a=3),
        call("look_up", 1, word="on"),
        call("look_up", 2, word="off"),
    ]
    assert results(calls) == ["6", "an", '["aus", "ab"]']
    assert results(calls[::-1]) == ['["aus", "ab"]', "an", "6"]
    assert results([call("multiply", a="3", b=5)]) == ["15"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (call("divide", a=3), ["divide", "multiply, look_up"]),
        (call("__init__"), ["no tool"]),
        (call("multiply", a="many"), ["do not fit", "many"]),
        (call("multiply"), ["do not fit", "'a'"]),
        (call("multiply", a=1, c=2), ["do not fit", "'c'"]),
        (call("look_up", word=3), ["do not fit", "3"]),
        (call("look_up", word="up"), ["there is no up"]),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(wrong, words):
    right, text = results([call("multiply", 1, a=3), wrong])
    assert right == "6"
    for word in words:
        assert word in text


def test_a_call_that_could_not_be_read_is_not_run():
    (text,) = results([call("multiply", a=3)], {"call0": "it is not JSON: x"})
    assert "it is not JSON: x" in text


def test_an_error_of_the_tool_itself_is_not_the_policys():
    with pytest.raises(KeyError):
        results([call("look_up", word="raise")])


def test_definitions():
    multiplying, looking_up = Several.definitions()
    assert looking_up == {"type": "function", "function": LOOK_UP}
    assert multiplying["function"]["name"] == "multiply"
    assert multiplying["function"]["description"] == "Multiply two integers."
    parameters = multiplying["function"]["parameters"]
    assert parameters["properties"]["b"] == {"type": "integer", "description": "the second"}
    assert parameters["required"] == ["a"]
    (echo,) = Method.definitions()
    assert list(echo["function"]["parameters"]["properties"]) == ["text"]
    json.dumps([multiplying, looking_up, echo])


# In a process


@contextlib.contextmanager
def playing(environment: Any, record: dict, **kwargs: Any) -> Iterator[EnvironmentPool]:
    config = EnvironmentConfig(name=f"{__name__}.{environment.__name__}", kwargs=kwargs)
    with contextlib.closing(EnvironmentPool(config)) as pool:
        pool.begin(0, record, **KEYS)
        yield pool


@pytest.fixture(autouse=True)
def this_folder_is_imported_from(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_calls_are_run_and_answers_without_calls_are_graded():
    with playing(Several, {"words": {"on": "an"}}, reward=0.5) as pool:
        assert [tool["function"]["name"] for tool in pool.tools or ()] == ["multiply", "look_up"]
        pool.answer(0, "text", [call("multiply", 1, a=3), call("look_up", 2, word="on")])
        (turn,) = pool.replies(30)
        assert not turn.fault
        assert [(m["tool_call_id"], m["content"]) for m in turn.messages] == [
            ("call1", "6"),
            ("call2", "an"),
        ]
        assert not turn.is_end
        pool.answer(0, "text", [call("multiply", 3, a=3)], {"call3": "it is not JSON"})
        (turn,) = pool.replies(30)
        assert "it is not JSON" in turn.messages[0]["content"]
        pool.answer(0, "text")
        (turn,) = pool.replies(30)
        assert turn.is_end
        assert turn.reward == 0.5


def test_a_tool_that_fails_is_the_environments_fault():
    with playing(Several, {"words": {}}) as pool:
        pool.answer(0, "text", [call("look_up", word="raise")])
        (turn,) = pool.replies(30)
    assert "KeyError" in turn.fault
    assert "test_tools.py" in turn.fault


def test_without_a_grade_an_answer_without_calls_ends_the_episode():
    with playing(Method, {}) as pool:
        pool.answer(0, "text", [call("echo", text="Zürich")])
        (turn,) = pool.replies(30)
        assert turn.messages[0]["content"] == "Zürich"
        pool.answer(0, "text")
        (turn,) = pool.replies(30)
    assert turn.is_end
    assert turn.reward == 0


def test_tools_are_known_before_a_run():
    def tools_of(environment: Any) -> Any:
        return environment_tools(EnvironmentConfig(name=f"{__name__}.{environment.__name__}"))

    assert tools_of(function) is None
    assert [tool["function"]["name"] for tool in tools_of(Method)] == ["echo"]
    assert tools_of(RecordsTools) == ()


@pytest.mark.parametrize(
    ("environment", "words"),
    [(WithoutSchema, ["untyped", "schema"]), (WithoutMethod, ["look_up", "method"])],
)
def test_tools_that_cannot_be_called_are_refused_at_the_start(environment, words):
    with pytest.raises(ConfigError) as raised:
        environment_tools(EnvironmentConfig(name=f"{__name__}.{environment.__name__}"))
    check_fault(raised.value.faults, "environment.name.not_usable", *words)
