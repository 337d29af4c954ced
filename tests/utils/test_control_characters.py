"""Control characters in untrusted texts are shown on a terminal and have no effect."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest
from rich.table import Table
from rich.text import Text

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.terminal import plain_errors
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.control_characters import (
    quoted,
    show_control_characters,
    shown,
    shown_streams,
)

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9b31mc\u202ed\x7fe\ud800f\rg\x00h\u2066i\u2028j"
SHOWN = r"a\x1b[2J\x1b]0;title\x07b\u009b31mc\u202ed\u007fe\ud800f\x0dg\x00h\u2066i\u2028j"


def test_control_characters_are_shown_and_other_texts_stay():
    assert show_control_characters(HOSTILE) == SHOWN
    for text in ("tab\tand\nline", "ümläut 漢字 🙂 עברית العربية", "a\u200db", "\u00a0\u00ad"):
        assert show_control_characters(text) == text


@pytest.mark.parametrize(
    "code", [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x202E, 0x2066, 0xDC80, 0xDFFF]
)
def test_every_control_character(code):
    text = show_control_characters(chr(code))
    assert text == chr(code) if chr(code) in "\t\n" else text.isprintable() and len(text) in (4, 6)


def test_json_keeps_its_values():
    line = json.dumps({"text": HOSTILE}, ensure_ascii=False)
    assert json.loads(show_control_characters(line)) == {"text": HOSTILE}


def test_prints_logs_tracebacks_and_errors_are_shown(capsys):
    with pytest.raises(SystemExit), plain_errors():
        print(HOSTILE)
        handler = logging.StreamHandler()
        handler.emit(logging.LogRecord("x", logging.WARNING, "", 1, HOSTILE, (), None))
        # Not sys.excepthook: torch.distributed replaces it for the rest of the process.
        sys.__excepthook__(ValueError, ValueError(HOSTILE), None)
        raise ReinforceError(HOSTILE)
    output, errors = capsys.readouterr()
    assert output == f"{SHOWN}\n"
    assert errors.count(SHOWN) == 3
    assert f"error: {SHOWN}\n" in errors
    assert "\x1b" not in errors


def test_streams_are_restored_and_not_wrapped_twice():
    before = sys.stdout
    with shown_streams():
        inner = sys.stdout
        with shown_streams():
            assert sys.stdout is inner
    assert sys.stdout is before


def test_what_a_program_makes_itself_stays():
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    wrapped = shown(stream)
    wrapped.write("\r 10 %")  # a library's progress bar
    wrapped.write("\r 20 %")
    assert stream.getvalue() == "\r 10 %\r 20 %"
    wrapped.write("\n")
    console = Console(file=stream, force_terminal=True, color_system="standard", width=60)
    console.print(Text(HOSTILE, style="red"))
    assert "\x1b[31m" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_a_carriage_return_hides_nothing_of_its_line():
    stream = io.StringIO()
    print("run:", "\rgood", file=shown(stream))
    assert stream.getvalue() == "run: \\x0dgood\n"


def test_a_carriage_return_before_several_lines_is_no_progress_bar():
    stream = io.StringIO()
    shown(stream).write("\rgood\nbad")
    assert stream.getvalue() == "\\x0dgood\nbad"


def test_a_line_that_others_began_may_not_be_drawn_again():
    stream = io.StringIO()
    wrapped = shown(stream)
    wrapped.write("a line\nbad")
    wrapped.write("\rgood")
    assert stream.getvalue() == "a line\nbad\\x0dgood"


def test_tables_show_and_keep_their_width():
    stream = io.StringIO()
    table = Table(title=f"t{HOSTILE[:4]}")
    table.add_column("name\x9b")
    table.add_row("\x1b[31mred\u202e")
    Console(file=stream, width=40).print(table)
    text = stream.getvalue()
    assert r"\x1b" in text
    for line in text.splitlines():
        assert len(line) <= 40
    assert not any(character in text for character in "\x1b\x9b\u202e")


def test_a_console_behind_a_shown_stream_keeps_its_colours(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown(stream))
    Console(force_terminal=True, color_system="standard").print(Text("a\x9b", style="red"))
    assert "\x1b[31m" in stream.getvalue()
    assert "\x9b" not in stream.getvalue()


def test_lines_of_progress_are_shown():
    stream = io.StringIO()
    progress = TrainingProgress(2, console=Console(file=stream))
    progress._print(f"metric {HOSTILE}")
    assert stream.getvalue() == f"metric {SHOWN}\n"


def test_what_another_program_says_is_a_part_of_a_sentence():
    assert quoted("two\nlines\x1b[2J\ud800 ") == r"two lines\x1b[2J\ud800"
    assert quoted(ValueError("no")) == "no"
    assert quoted("a" * 300) == "a" * 300
    assert quoted("a" * 301) == "a" * 300 + " ..."
    assert quoted(" " * 10_000_000 + "late", 5) == " ..."


def test_an_error_of_a_command_shows_a_hostile_name():
    command = [sys.executable, "-m", "reinforce_rl", "report", "no\x1b[2J\u202erun"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert r"no\x1b[2J\u202erun" in done.stderr
    assert "\x1b" not in done.stderr


def test_an_error_of_typers_shows_a_hostile_argument():
    folders = ["prepare", "a", "--output", "b", "--field", "no\x1b]0;t\x9b\u202ename"]
    command = [sys.executable, "-m", "reinforce_rl", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert r"--field is no\x1b]0;t\u009b\u202ename; expected NAME=COLUMN" in done.stderr
    assert not any(character in done.stderr for character in "\x1b\x9b\u202e")


def test_the_traceback_of_a_defect_is_shown():
    """Python prints it when none of this package's code runs any more."""
    program = (
        "import sys\n"
        "from reinforce_rl.launch import main\n"
        "def broken(): raise ValueError('text \\x1b]0;title\\x07')\n"
        "main.app.registered_commands[:] = []\n"
        "main.app.registered_groups[:] = []\n"
        "main.app.command('one')(broken)\n"
        "main.app.command('two')(broken)\n"
        "sys.argv = ['reinforce-rl', 'one']\n"
        "main.main()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: text \\x1b]0;title\\x07\n")
    assert "\x1b" not in done.stderr
