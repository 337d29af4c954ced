"""An OpenAI-compatible server (aiohttp) on a free local port, with scripted answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

TIMEOUT_SECONDS = 30.0
# maps the user's message to text, (status, JSON), raw bytes, or seconds to wait
Reply = Callable[[str], Any]


class FakeJudge:
    """Context manager; records each request's body in `asked`, its API key and its headers."""

    def __init__(self, reply: Reply, path: str = "/v1/chat/completions"):
        self._reply = reply
        self._path = path
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: list[Mapping[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeJudge:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(
            TIMEOUT_SECONDS
        )
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(TIMEOUT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_SECONDS)
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_post(self._path, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        self.keys.append(request.headers.get("Authorization"))
        reply = self._reply(body["messages"][0]["content"])
        if isinstance(reply, float):
            await asyncio.sleep(reply)
            reply = "Score: 1"
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type="application/json")
        if isinstance(reply, tuple):
            return web.json_response(reply[1], status=reply[0])
        return web.json_response(
            {"choices": [{"message": {"role": "assistant", "content": reply}}]}
        )
