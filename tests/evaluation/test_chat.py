"""Chat: streaming, turns and commands, a full context, Ctrl-C, rewards and the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.tiny_tokenizer import write_tiny_tokenizer
from rich.console import Console

from reinforce_rl.data.batches import Completions
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.data.jsonl import LineFaults
from reinforce_rl.data.readers import read_records
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.evaluation import chat as module
from reinforce_rl.evaluation.chat import Chat, Speaker, chat
from reinforce_rl.evaluation.model import inference_config, load_actor
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.policy.build import configured_mesh
from reinforce_rl.utils.control_characters import shown_streams
from reinforce_rl.utils.net import free_port

EOS = 2
PARAMS = SamplingParams(max_length=20, stop_token_ids=(EOS,))


class Scripted(NativeGenerator):
    """Returns the same answers for any prompt."""

    def __init__(self, *answers: list[int]):
        self.answers = list(answers)
        self.asked = []

    def generate(self, prompts, num_samples, params, seed, watch=None):
        self.asked.append(prompts[0])
        ids = self.answers.pop(0)
        is_whole = len(ids) <= params.max_length
        ids = ids[: params.max_length]
        for count in range(len(ids)):
            watch([ids[: count + 1]])
        return Completions(
            torch.tensor([ids]),
            torch.tensor([len(ids)]),
            (FINISH_STOP if is_whole else FINISH_LENGTH,),
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(
        tmp_path_factory.mktemp("chat") / "model", vocab_size=63, max_positions=64
    )


def speaker_of(
    tokenizer: Any, *answers: str | list[int], name: str = "one", limit: int = 200
) -> Speaker:
    ids = [[*tokenizer.encode(text), EOS] if isinstance(text, str) else text for text in answers]
    lm = SimpleNamespace(architecture=SimpleNamespace(max_positions=limit))
    settings = SimpleNamespace(reinforce=SimpleNamespace(skip_special_tokens=True))
    actor = SimpleNamespace(tokenizer=tokenizer, generator=Scripted(*ids), lm=lm, settings=settings)
    return Speaker(name, actor)  # type: ignore[arg-type]


def said(
    speakers: list[Speaker], *lines: str, console: Console | None = None, **options: Any
) -> str:
    """Return the output of a chat."""
    console = console or Console(file=io.StringIO())
    Chat(speakers, PARAMS, console=console, **options).talk(iter(lines))
    return console.file.getvalue()  # type: ignore[union-attr]


def asked(speaker: Speaker) -> list[str]:
    return [prompt.text for prompt in speaker.actor.generator.asked]  # type: ignore[attr-defined]


def test_what_is_streamed_is_what_is_generated(folder):
    cfg = inference_config(folder, ["model.reinforce.length_params.max_length=9", "model.seed=4"])
    with configured_mesh(cfg) as mesh:
        actor = load_actor(cfg, mesh)
        with contextlib.closing(actor.generator):
            speaker = Speaker("one", actor, [{"role": "user", "content": "hi"}])
            prompt, room = speaker.prompt(7, 9)
            assert prompt.text == "U: hi<eos>A:"
            assert room == 9
            pieces: list[str] = []
            completions = speaker.answer(prompt, actor.sampling, 4, pieces.append)
            expected = actor.generator.generate([prompt], 1, actor.sampling, 4)
    assert torch.equal(completions.tokens, expected.tokens)
    assert "".join(pieces) == actor.tokenizer.decode(expected.tokens[0], skip_special_tokens=True)
    assert len([piece for piece in pieces if piece]) > 1, "not all at once"


class Bytes:
    """One token per byte, like a tokenizer's fallback for rare characters."""

    chat_template = None
    bos_token_id = None

    def __call__(self, text: str | list[str], **options: Any) -> dict[str, Any]:
        ids = self.encode(text) if isinstance(text, str) else [self.encode(line) for line in text]
        return {"input_ids": ids, "special_tokens_mask": [0] * len(ids)}

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return [bytes(ids).decode(errors="replace") for ids in rows]


def test_no_character_is_shown_by_halves_and_no_space_is_lost():
    text = "  é😀 a\n\n b—"
    speaker = speaker_of(Bytes(), list(text.encode()))
    pieces = []
    speaker.messages = [{"role": "user", "content": "x"}]
    speaker.answer(speaker.prompt(0, 99)[0], PARAMS, 0, pieces.append)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    cut = speaker_of(Bytes(), "a😀".encode()[:-1])
    cut.actor.generator.answers = [list("a😀".encode())[:-1]]  # type: ignore[attr-defined]
    cut.messages = speaker.messages
    pieces.clear()
    cut.answer(cut.prompt(0, 99)[0], PARAMS, 0, pieces.append)
    assert pieces[-1] == "\ufffd", "what stays half at the end is not hidden"


def test_turns_and_commands(tokenizer, tmp_path):
    speaker = speaker_of(tokenizer, *"abcde")
    lines = ["one\n", "\n", "two\n", "/regenerate\n", f"/save {tmp_path}/s.jsonl\n", "/what\n"]
    output = said(
        [speaker],
        *lines,
        "/system be brief",
        "three",
        "/reset",
        "/regenerate",
        "four",
        "/quit",
        "five",
    )
    assert output == f"a\nb\nc\n{module.HELP}\nd\n{module.HELP}\ne\n", (
        "without an answer there is none to repeat"
    )
    assert asked(speaker) == [
        "U: one<eos>A:",
        "U: one<eos>A: a<eos>U: two<eos>A:",
        "U: one<eos>A: a<eos>U: two<eos>A:",
        "S: be brief<eos>U: three<eos>A:",
        "S: be brief<eos>U: four<eos>A:",
    ]
    ids = [prompt.id for prompt in speaker.actor.generator.asked]  # type: ignore[attr-defined]
    assert len(set(ids)) == 5, "a new answer has noise of its own"
    (saved,) = read_records(tmp_path / "s.jsonl", lambda record: record.value, LineFaults())
    contents = [message["content"] for message in saved["messages"]]
    assert contents == ["one", "a", "two", "c"]


def test_a_question_that_cannot_be_answered_is_forgotten(tokenizer, tmp_path):
    speaker = speaker_of(tokenizer, "a", "b", limit=40)
    (tmp_path / "file").touch()
    output = said([speaker], "one", "x" * 99, "two", f"/save {tmp_path}/file/s")
    (refusal,) = [line for line in output.splitlines() if "105 tokens" in line]
    assert " 40;" in refusal
    assert " one " in refusal
    assert asked(speaker)[-1] == "U: one<eos>A: a<eos>U: two<eos>A:"
    assert "File exists" in output.splitlines()[-1] or "Not a directory" in output.splitlines()[-1]
    speaker.messages = [{"role": "user", "content": "x" * 99}]
    with raises_error("chat.question.too_long", 105, "one", 40):
        speaker.prompt(0, PARAMS.max_length)


def test_the_oldest_turns_give_way_but_not_the_system_message(tokenizer):
    speaker = speaker_of(tokenizer, *"abc", limit=72)
    output = said([speaker], "1" * 15, "2" * 15, "3" * 15, system="S" * 5)
    assert asked(speaker)[2] == f"S: SSSSS<eos>U: {'2' * 15}<eos>A: b<eos>U: {'3' * 15}<eos>A:"
    assert output.splitlines()[-2:] == [
        "c",
        "(without the first 2 messages: there is no room for them)",
    ]


def test_an_answer_without_an_end_is_cut_and_says_so(tokenizer):
    assert said([speaker_of(tokenizer, "a" * 50)], "x") == "a" * 20 + "\n(cut at 20 tokens)\n"
    speakers = [speaker_of(tokenizer, "a" * 50, limit=20)]
    assert said(speakers, "x").endswith("\n(cut at 13 tokens)\n")


def test_ctrl_c_ends_an_answer_and_not_the_chat(tokenizer):
    class Interrupted(Console):
        def __init__(self):
            super().__init__(file=io.StringIO())
            self.file.write = self._write  # type: ignore[method-assign]
            self.written = ""

        def _write(self, text: str) -> int:
            self.written += text
            if self.written == "abc":
                os.kill(os.getpid(), signal.SIGINT)
            return len(text)

    console = Interrupted()
    before = signal.getsignal(signal.SIGINT)
    speaker = speaker_of(tokenizer, "abcdef", "xyz")
    Chat([speaker], PARAMS, console=console).talk(iter(["one", "two"]))
    assert console.written in ("abc\n(stopped)\nxyz\n", "abcd\n(stopped)\nxyz\n"), (
        "at its next token"
    )
    assert speaker.messages[1]["content"] in ("abc", "abcd"), (
        "what was said is part of the conversation"
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_two_models_one_after_the_other_or_side_by_side(tokenizer):
    def two() -> list[Speaker]:
        return [
            speaker_of(tokenizer, "yes", name="new"),
            speaker_of(tokenizer, "no \x1b[31m", name="old"),
        ]

    score = {"new": "reward 1.000", "old": "no reward: it is down"}
    options: Any = {"score": lambda speaker, prompt, completions: score[speaker.name]}
    plain = said(two(), "x", **options)
    assert plain == "[new]\nyes\n(reward 1.000)\n[old]\nno [31m\n(no reward: it is down)\n"
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    shown = re.sub(
        r"\x1b\[[0-9;?]*[A-Za-z]", "", said(two(), "x", console=terminal, **options)
    ).splitlines()
    assert any(re.search(r"yes {30,}no", line) for line in shown)
    assert any(re.search(r"\(reward 1.000\) {20,}\(no reward", line) for line in shown)
    narrow = Console(file=io.StringIO(), force_terminal=True, width=50)
    assert said(two(), "x", console=narrow, **options) == plain


def test_a_model_cannot_drive_the_terminal():
    speaker = speaker_of(Bytes(), list(b"a\x1b[2J\x07b\tc\r\n"))
    assert said([speaker], "x") == "a\\x1b[2J\\x07b\tc\\x0d\n\n"
    assert speaker.messages[1]["content"] == "a\x1b[2J\x07b\tc\r\n", (
        "the conversation keeps what was said"
    )
    speaker = speaker_of(Bytes(), list("a\u202eb".encode()))
    assert said([speaker], "x") == "a\\u202eb\n"


def test_an_error_or_a_reward_cannot_drive_the_terminal(monkeypatch):
    """A chat template may raise any text, and a server may return any text."""

    def refuse(*_: object) -> None:
        raise DataError("the chat template refuses these messages: \x1b]0;title\x07\u202e")

    speaker = speaker_of(Bytes(), list(b"a"), list(b"a"))
    score = {"score": lambda *_: "no reward: \x1b[2J\u2028"}
    assert said([speaker], "x", **score) == "a\n(no reward: \\x1b[2J\\u2028)\n"
    monkeypatch.setattr(speaker, "prompt", refuse)
    # As a program: rich writes around the streams that escape control characters.
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), shown_streams():
        Chat([speaker], PARAMS).talk(iter(["x"]))
    expected = "(the chat template refuses these messages: \\x1b]0;title\\x07\\u202e)\n"
    assert stream.getvalue() == expected


@pytest.mark.more
def test_a_function_scores_and_an_unreachable_server_is_reported(
    folder, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "REWARD_SECONDS", 2.0)
    how = [
        f"+reward_function.kwargs.{setting}"
        for setting in ("target=3", "tolerance=100", "unit=characters")
    ]
    chat(
        folder,
        folder,
        rewards=["length"],
        max_tokens=6,
        temperature=0,
        overrides=how,
        lines=iter(["hi"]),
    )
    first = capsys.readouterr().out
    assert "[model]\n" in first
    assert "[model-2]\n" in first
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", first)]
    assert len(rewards) == 2, first
    assert all(0.9 <= reward <= 1 for reward in rewards), first
    chat(
        folder,
        rewards=[f"http://127.0.0.1:{free_port('127.0.0.1')}"],
        max_tokens=4,
        lines=iter(["hi", "ho"]),
    )
    assert capsys.readouterr().out.count("(cut at 4 tokens)\n(no reward: ") == 2
    chat(folder, rewards=["gsm8k"], max_tokens=4, lines=iter(["hi"]))
    captured = capsys.readouterr()
    why = r"functions\.gsm8k: KeyError at .*\.py:\d+: 'answer'; the record of a chat has no columns"
    assert re.search(rf"\n\(no reward: reinforce_rl\.rewards\.{why}", captured.out)
    assert "function_failed" not in captured.err
    with pytest.raises(ConfigError, match="lenght"):
        chat(folder, rewards=["lenght"], lines=iter(["hi"]))
    assert list(tmp_path.iterdir()) == [], "a chat leaves nothing behind"


@pytest.mark.slow
def test_questions_from_a_pipe(folder):
    command = [
        sys.executable,
        "-m",
        "reinforce_rl",
        "chat",
        str(folder),
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    ]
    done = subprocess.run(
        command, input="hi\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 1
    assert "\x1b" not in done.stdout
    assert ">" not in done.stdout[:2]
    command += ["model.sede=1"]
    done = subprocess.run(
        command, input="", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "model.seed?" in done.stderr
    assert "Traceback" not in done.stderr
