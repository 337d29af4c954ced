"""An HTTP server whose answers a function gives."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# maps path, headers and body to a code, JSON or bytes, and optional headers; None hangs up
Reply = Callable[[str, Message, bytes], "tuple[Any, ...] | None"]


class FakeHttpServer:
    """A server on a local port, or on a Unix socket; a context manager."""

    def __init__(
        self, reply: Reply, port: int = 0, host: str = "127.0.0.1", socket_path: str | None = None
    ):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                replied = reply(self.path, self.headers, self.rfile.read(length))
                if replied is None:
                    self.close_connection = True
                    return
                code, content, *headers = replied
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                usual = {"Content-Type": "application/json", "Content-Length": len(body)}
                self.send_response(code)
                for name, value in {**usual, **dict(*headers)}.items():
                    self.send_header(name, str(value))
                with contextlib.suppress(ConnectionError):  # the client has given up
                    self.end_headers()
                    self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            request_queue_size = 128
            daemon_threads = True

        if socket_path is None:
            self._server = Server((host, port), Handler)
            self.port = self._server.server_port
        else:
            self._server = UnixServer(socket_path, Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
