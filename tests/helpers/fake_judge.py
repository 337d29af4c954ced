"""An OpenAI-compatible server with scripted answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from email.message import Message
from typing import Any

from helpers.fake_http import FakeHttpServer


class FakeJudge(FakeHttpServer):
    """Records each request's body in `asked`, and its headers.

    `answer` maps the user's message to text, (status, JSON), raw bytes, or seconds to wait.
    """

    def __init__(self, answer: Callable[[str], Any]):
        self._answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Message] = []
        super().__init__(self._reply)
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def _reply(self, path: str, headers: Message, body: bytes) -> tuple[int, Any]:
        if not path.endswith("/v1/chat/completions"):
            return 404, {}
        self.asked.append(json.loads(body))
        self.headers.append(headers)
        answer = self._answer(self.asked[-1]["messages"][0]["content"])
        if isinstance(answer, tuple):
            return answer
        if isinstance(answer, bytes):
            return 200, answer
        if isinstance(answer, float):
            time.sleep(answer)
            answer = "Score: 1"
        return 200, {"choices": [{"message": {"role": "assistant", "content": answer}}]}
