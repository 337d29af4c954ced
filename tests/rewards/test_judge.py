"""A language model as the judge, behind a server that speaks its protocol well or badly."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_judge import FakeJudge
from helpers.fake_reward_server import FakeRewardServer
from yarl import URL

from reinforce_rl.config.rewards import RewardFunctionConfig
from reinforce_rl.rewards import transport
from reinforce_rl.rewards.base import (
    STATUS_INTERNAL,
    STATUS_OK,
    STATUS_TIMED_OUT,
    FunctionSpec,
    TextSample,
)
from reinforce_rl.rewards.client import RemoteGPTRMClient
from reinforce_rl.rewards.function_host import LoadFault, load_function
from reinforce_rl.rewards.function_pool import FunctionPool, Scores
from reinforce_rl.rewards.judge import (
    Judge,
    JudgeError,
    llm_judge,
    preferences,
    question_of,
    score_in,
)
from reinforce_rl.rewards.user_code import PROXY_VARIABLES

NAME = "reinforce_rl.rewards.judge.llm_judge"
ONCE = {"retries": 0, "timeout": 10.0}


def score_of(
    judge: FakeJudge, response: str = "Paris.", record: dict | None = None, **settings
) -> float:
    return llm_judge(
        "Capital of France?",
        response,
        record or {},
        url=judge.url,
        model="m",
        **{**ONCE, **settings},
    )


def test_the_score_of_the_answer_is_the_reward_and_the_question_has_no_chat_template() -> None:
    with FakeJudge(lambda text: "It is right.\nScore: 9") as judge:
        assert score_of(judge) == 9.0
        messages = [{"role": "user", "content": "Capital?"}]
        assert (
            score_of(judge, record={"messages": messages}, options={"max_tokens": None, "seed": 3})
            == 9.0
        )
    first, second = judge.asked
    assert first["model"] == "m"
    assert first["temperature"] == 0.0
    text = first["messages"][0]["content"]
    assert "Capital of France?" in text
    assert "Paris." in text
    assert "1 (worst) to 10\n(best)" in text
    assert "[Question]\nCapital?\n" in second["messages"][0]["content"]
    assert second["seed"] == 3 and "max_tokens" not in second, (
        "options take the place of the defaults"
    )


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        ([{"role": "user", "content": "Why?"}], "Why?"),
        (
            [{"role": "user", "content": [part("Why"), part("so?")]}],
            "Why\nso?",
        ),
        (
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [part("a")]},
            ],
            "developer: Be brief.\n\nuser: a",
        ),
        (
            [
                {"role": "user", "content": "Rain?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "no"},
            ],
            'user: Rain?\n\nassistant: {"name": "weather", "arguments": {"city": "Köln"}}\n\n'
            "tool: no",
        ),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
            ],
            "user: a\n\nassistant: Let me look.\n"
            '{"name": "weather", "arguments": {"city": "Köln"}}',
        ),
        ([], "the rendered prompt"),
    ],
    ids=["one", "parts", "developer", "calls", "text and calls", "plain"],
)
def test_the_question_of_openais_messages(messages, question) -> None:
    assert question_of("the rendered prompt", {"messages": messages}) == question
    with FakeJudge(lambda text: "Score: 5") as judge:
        assert (
            llm_judge(
                "the rendered prompt", "x", {"messages": messages}, url=judge.url, model="m", **ONCE
            )
            == 5.0
        )
    prompt = judge.asked[0]["messages"][0]["content"]
    assert f"[Question]\n{question}\n" in prompt


@pytest.fixture
def no_proxies(monkeypatch):
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_judge_outside_is_asked_through_the_proxy(variable, monkeypatch, no_proxies) -> None:
    with FakeJudge(lambda text: "Score: 9") as proxy:
        monkeypatch.setenv(variable, proxy.url.removesuffix("/v1"))
        outside = {"url": "http://judge.invalid:8000/v1", "model": "m", **ONCE}
        assert llm_judge("p", "r", {}, **outside) == 9.0
        pool = FunctionPool(
            {"f": FunctionSpec("reward_function", NAME, outside)}, RewardFunctionConfig()
        )
        with contextlib.closing(pool):
            pool.start()
            scores = pool.submit("f", [TextSample("p", "r", {})]).result()
            assert scores.values.tolist() == [9.0]
        monkeypatch.setenv("NO_PROXY", "other.example,.invalid")
        with pytest.raises(JudgeError, match="host name is unknown"):
            llm_judge("p", "r", {}, **outside)
    assert len(proxy.asked) == 2


def test_the_proxy_of_a_server(monkeypatch, no_proxies) -> None:
    """The variables are read as curl and requests read them; this machine is excepted."""
    server = URL("https://judge.invalid:8443/v1")
    assert transport.proxy_of(server) is None
    monkeypatch.setenv("ALL_PROXY", "http://all.invalid:1")
    monkeypatch.setenv("HTTP_PROXY", "http://plain.invalid:2")
    assert transport.proxy_of(server) == "http://all.invalid:1"
    monkeypatch.setenv("HTTPS_PROXY", "proxy.invalid:3128")  # without a scheme
    assert transport.proxy_of(server) == "http://proxy.invalid:3128"
    assert transport.proxy_of(server.with_scheme("http")) == "http://plain.invalid:2"
    for place in ("localhost", "127.0.0.2", "::1"):
        assert transport.proxy_of(URL.build(scheme="https", host=place)) is None
    for exception in ("*", "invalid", "judge.invalid:8443", ".invalid, x"):
        monkeypatch.setenv("NO_PROXY", exception)
        assert transport.proxy_of(server) is None, exception
    monkeypatch.setenv("NO_PROXY", "judge.invalid:80,dge.invalid")
    assert transport.proxy_of(server) == "http://proxy.invalid:3128"


def test_a_proxy_that_is_none_for_http_is_named_before_the_run(monkeypatch, no_proxies) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://user:hidden@proxy.invalid:1080")
    judge = Judge("http://judge.invalid:8000/v1", "m", retries=0)
    with pytest.raises(
        ValueError, match=r"ALL_PROXY .*socks5://.*judge\.invalid.*NO_PROXY"
    ) as caught:
        judge.check()
    assert "hidden" not in str(caught.value)
    with pytest.raises(JudgeError, match="ALL_PROXY"):
        llm_judge("p", "r", {}, url=judge.url, model="m", **ONCE)
    Judge("http://127.0.0.1:8000/v1", "m").check()


def test_the_password_of_a_proxy_is_sent_to_it_alone(monkeypatch, no_proxies) -> None:
    with FakeJudge(lambda text: "Score: 9") as proxy:
        monkeypatch.setenv(
            "HTTP_PROXY", proxy.url.removesuffix("/v1").replace("//", "//user:word@")
        )
        assert llm_judge("p", "r", {}, url="http://judge.invalid:8000/v1", model="m", **ONCE) == 9.0
    assert proxy.headers[0]["Proxy-Authorization"] == "Basic dXNlcjp3b3Jk"
    assert "Authorization" not in proxy.headers[0]


def test_a_judge_of_this_machine_is_asked_directly(monkeypatch, no_proxies) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with FakeJudge(lambda text: "Score: 9") as judge:
        assert score_of(judge) == 9.0


def test_a_reward_server_is_asked_directly(monkeypatch, no_proxies) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with FakeRewardServer() as server:
        client = RemoteGPTRMClient("127.0.0.1", server.port, deadline_seconds=20)
        assert client.wait_until_ready().name == server.info.name
        client.close()


def test_a_template_of_ones_own_has_fields_of_the_prompts_line(tmp_path) -> None:
    file = tmp_path / "template.txt"
    file.write_text("Is $response equal to $answer? It costs $$5. {json} $low-$high")
    with FakeJudge(lambda text: "0.5") as judge:
        assert (
            score_of(judge, record={"answer": 72}, template_file=str(file), low=0.0, high=1.0)
            == 0.5
        )
        with pytest.raises(JudgeError, match=r"asks for \$answer, which the prompt's line has not"):
            score_of(judge, template_file=str(file))
    prompts = [body["messages"][0]["content"] for body in judge.asked]
    assert prompts == ["Is Paris. equal to 72? It costs $5. {json} 0-1"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("**Score:** 7/10", 7.0),
        ('{"score": 2.5}', 2.5),
        ("A score of 3 is for worse ones. Score: 4", 4.0),
        (" 6 \n", 6.0),
        ("8/10", 8.0),
        ("Score: 11", None),
        ("Score: -1", None),
        ("I would give 7", None),
        ("", None),
    ],
)
def test_a_score_is_read_or_there_is_none(answer: str, score: float | None) -> None:
    if score is None:
        with pytest.raises(JudgeError):
            score_in(answer, 1, 10)
    else:
        assert score_in(answer, 1, 10) == score


def completion(content: object, finish_reason: str = "stop") -> bytes:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (completion("Score: 7", "stop"), 7.0),
        (completion("Score: 7, as it is right and", "length"), 7.0),
        (completion([part("It is right."), part("Score: 8")]), 8.0),
    ],
    ids=["whole", "cut behind its score", "of parts"],
)
def test_the_text_of_a_completion_is_read(answer: bytes, score: float) -> None:
    with FakeJudge(lambda text: answer) as judge:
        assert score_of(judge) == score


def test_what_a_judge_answers_is_reported_briefly() -> None:
    answer = completion("no\x1b[2J\ud800 score " * 50_000)
    with FakeJudge(lambda text: answer) as judge, pytest.raises(JudgeError) as raised:
        score_of(judge)
    start = r"the judge's answer holds no score: no\x1b[2J\ud800 score no"
    assert str(raised.value).startswith(start)
    assert len(str(raised.value)) < 700


NO_CONTENT = r"gave no choices\[0\].message.content"
BAD = {
    "wrong JSON": (b"{not json", r"gave no choices\[0\].message.content"),
    "no choice": (b'{"choices": []}', r"gave no choices\[0\].message.content"),
    "a number": (completion(7), NO_CONTENT),
    "an object": (completion({"score": 9}), NO_CONTENT),
    "parts without text": (completion([{"type": "audio"}]), NO_CONTENT),
    "choices by name": (b'{"choices": {"0": 1}}', NO_CONTENT),
    "nested": (b"[" * 100_000, NO_CONTENT),
    "a nested error": ((500, json.loads("[" * 900 + "]" * 900)), "answers HTTP 500, 1 times"),
    "cut in its score": (completion("It is right. Score: 1", "length"), "cut within a number"),
    "without end": (b" " * (5 << 20), "it sends more than 4194304 bytes"),
    "no text": (b'{"choices": [{"message": {"content": null}}]}', "holds no score"),
    "rubbish": ("I cannot say.", "holds no score"),
    "unauthorized": ((401, {"error": {"message": "SECRET"}}), "127.0.0.1 answers HTTP 401$"),
    "failing": ((500, {"error": "SECRET"}), "127.0.0.1 answers HTTP 500, 1 times"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_judge_that_fails_says_why_without_the_samples_text(kind: str) -> None:
    reply, words = BAD[kind]
    with FakeJudge(lambda text: reply) as judge, pytest.raises(JudgeError) as raised:
        score_of(judge)
    assert "SECRET" not in raised.value.public
    assert re.search(words, raised.value.public)


@pytest.mark.more
def test_another_attempt_is_made_where_it_may_succeed() -> None:
    replies: Iterator = iter([(503, {}), 30.0, "Score: 3"])
    with FakeJudge(lambda text: next(replies)) as judge:
        assert score_of(judge, retries=2, timeout=0.5) == 3.0
    assert len(judge.asked) == 3
    with FakeJudge(lambda text: (404, {})) as judge, pytest.raises(JudgeError, match="HTTP 404"):
        score_of(judge, retries=5)
    assert len(judge.asked) == 1, "there is no use in asking again"
    with pytest.raises(JudgeError, match=r"does not answer \(connection refused\), 1 times"):
        score_of(judge)


def pool_scores(samples: list[TextSample], seconds: float, **kwargs) -> Scores:
    spec = FunctionSpec("reward_function", NAME, {"model": "m", **kwargs})
    pool = FunctionPool(
        {"judge": spec},
        RewardFunctionConfig(
            num_workers=4, sample_timeout_seconds=seconds, environment=["JUDGE_KEY"]
        ),
    )
    pool.start()
    try:
        return pool.submit("judge", samples).result()
    finally:
        pool.close()


@pytest.mark.more
def test_in_the_processes_of_reward_functions_a_failed_judgement_fails_its_own_sample(
    monkeypatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "key-123")

    def reply(text: str):
        word = text.split()[-1]
        return {"right": "Score: 10", "wrong": "Score: 1", "slow": 60.0}.get(word, "no idea")

    prompt = ({"role": "user", "content": "What?"},)
    samples = [
        TextSample("<user>What?", word, messages=prompt)
        for word in ("right", "rubbish", "slow", "wrong")
    ]
    with FakeJudge(reply) as judge:
        scores = pool_scores(samples, 4.0, url=judge.url, api_key_variable="JUDGE_KEY", retries=0)
    assert scores.values.tolist()[::3] == [10.0, 1.0]
    for value in scores.values[1:3]:
        assert value != value, "never 0"
    assert scores.status.tolist() == [
        STATUS_OK,
        STATUS_INTERNAL,
        STATUS_TIMED_OUT,
        STATUS_OK,
    ]
    assert "JudgeError: the judge's answer holds no score at" in scores.faults[1]
    assert {headers["Authorization"] for headers in judge.headers} == {"Bearer key-123"}
    for body in judge.asked:
        assert "[Question]\nWhat?\n" in body["messages"][0]["content"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"url": "localhost:8000"},
            "expected the base of an OpenAI API, such as http://HOST:8000/v1",
        ),
        ({"low": 3.0, "high": 3.0}, "expected low below high"),
        ({"low": float("nan")}, "expected low below high"),
        ({"template_file": "Is it good?"}, r"expected \$response in it"),
        ({"template_file": "$response for $ 5"}, "Invalid placeholder"),
        ({"template_file": None}, "cannot be used: .*No such file"),
        (
            {"api_key_variable": "OTHER_KEY"},
            "not set here; set it, and name it in reward_function.environment",
        ),
        ({"timeout": 0.0}, "expected above 0"),
        ({"timout": 1.0}, "unexpected keyword argument 'timout'"),
    ],
)
def test_settings_that_cannot_work_end_the_run_at_its_start(
    settings: dict, words: str, tmp_path: Path
) -> None:
    if "template_file" in settings:
        file = tmp_path / "template.txt"
        if settings["template_file"] is not None:
            file.write_text(settings["template_file"])
        settings = {"template_file": str(file)}
    with pytest.raises(LoadFault, match=words):
        load_function(
            FunctionSpec(
                "reward_function", NAME, {"url": "http://h:1/v1", "model": "m", **settings}
            )
        )


def test_the_base_of_the_api_is_understood_as_openais_clients_do() -> None:
    whole = "http://h:8000/v1/chat/completions"
    for url in ("http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/", whole):
        assert str(Judge(url, "m").address) == whole
    assert str(Judge("https://h/openai/v2", "m").address) == "https://h/openai/v2/chat/completions"


def part_of(text: str, heading: str) -> str:
    _, _, rest = text.partition(f"[{heading}]\n")
    return rest.partition("\n")[0]


def test_a_preference_is_asked_in_both_orders_and_disagreement_is_a_tie() -> None:
    def reply(text: str) -> object:
        first = part_of(text, "Answer A")
        question = part_of(text, "Question")
        if question != "clear":
            return {"biased": "[[A]]", "broken": "neither", "alike": "[[C]]"}[question]
        return "[[A]]" if first == "good" else "Not [[A]], but [[B]]"

    pairs = [(question, "good", "bad") for question in ("clear", "biased", "alike", "broken")]
    with FakeJudge(reply) as judge:
        questions = [*pairs, ("clear", "bad", "good")]
        llm = Judge(judge.url, "m", **ONCE)
        preferred = preferences(llm, questions)
    assert preferred == [1.0, 0.5, 0.5, "the judge's answer holds no [[A]], [[B]] or [[C]]", 0.0]
    assert len(judge.asked) == 2 * 5
    assert preferences(Judge("http://127.0.0.1:1", "m"), []) == []
