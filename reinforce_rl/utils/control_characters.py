"""Shows control characters of texts that go to a terminal, which would otherwise obey them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

# C0 except line feed and tab, DEL, C1, line separators, marks and overrides of the writing
# direction, lone surrogates.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029"
    "\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def show_control_characters(text: str) -> str:
    r"""Write the control characters of a text as \x1b or, from DEL on, as \u009b.

    Text that is JSON stays JSON with the same values, as JSON holds no raw C0.
    """
    return _CONTROL.sub(_escape, text)


def quoted(text: object, most: int = 300) -> str:
    """Return the output of another program for use in a sentence.

    The result is one line of at most `most` characters and an ellipsis, with control characters
    shown.
    """
    start = str(text)[: 4 * most]  # some of it may be white space, which is collapsed
    line = show_control_characters(" ".join(start.split()))
    if len(line) > most or len(start) < len(str(text)):
        return f"{line[:most]} ..."
    return line


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


class ShownStream:
    """A text stream that shows the control characters written to it.

    rich writes to the underlying stream, as its colours are escape sequences;
    `utils.console.Console` shows the control characters of its texts.
    """

    def __init__(self, stream: TextIO):
        self.rich_proxied_file = stream  # the name that rich looks for
        self._line_is_empty = True
        self._line_is_redrawn = False

    def write(self, text: str) -> int:
        # A progress bar begins each drawing with a carriage return. It may overwrite its own
        # earlier drawings, but nothing that somebody else wrote to the line.
        may_redraw = self._line_is_empty or self._line_is_redrawn
        start = "\r" if text.startswith("\r") and "\n" not in text and may_redraw else ""
        if "\n" in text:
            self._line_is_empty = text.endswith("\n")
            self._line_is_redrawn = False
        elif text:
            self._line_is_empty = False
            self._line_is_redrawn = bool(start)
        self.rich_proxied_file.write(start + show_control_characters(text[len(start) :]))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def shown(stream: TextIO) -> TextIO:
    """Return a stream that shows control characters and writes to `stream`."""
    return stream if isinstance(stream, ShownStream) else cast(TextIO, ShownStream(stream))


@contextlib.contextmanager
def shown_streams() -> Iterator[None]:
    """Let standard output and standard error show control characters within the block.

    Prints, logs and tracebacks are covered.
    """
    with (
        contextlib.redirect_stdout(shown(sys.stdout)),
        contextlib.redirect_stderr(shown(sys.stderr)),
    ):
        yield
