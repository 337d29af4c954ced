"""A fake Triton behind a real front door process; answers can be delayed."""

from __future__ import annotations

import json
import tempfile
import threading

from helpers.fake_http import FakeHttpServer
from helpers.http_call import call
from helpers.wire_requests import int_tensor

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.reward_model.server.admission import FrontSettings
from reinforce_rl.reward_model.server.front import READY
from reinforce_rl.reward_model.server.front_process import FrontProcess
from reinforce_rl.reward_model.server.health import Progress
from reinforce_rl.rewards.transport import HttpAnswer
from reinforce_rl.utils.net import free_port, open_port


def infer_body(*rows: list[int]) -> bytes:
    """Return a JSON request; all rows have one width."""
    lengths = int_tensor("sequence_lengths", [[len(row)] for row in rows])
    return json.dumps({"inputs": [int_tensor("tokens", list(rows)), lengths]}).encode()


class FakeTriton(FakeHttpServer):
    """Answer each inference with the request's size as soon as `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.holds_canaries_only = False
        self.code = 200
        self.error = "Traceback: a secret"
        self.dead = False
        self.status = 0
        self.seen: list[tuple[str, bytes]] = []
        self._folder = tempfile.TemporaryDirectory()
        self.path = f"{self._folder.name}/triton.sock"
        super().__init__(self._reply, socket_path=self.path)

    def _reply(self, path: str, _: object, body: bytes) -> tuple[int, dict] | None:
        self.seen.append((path, body))
        if not path.endswith("/infer"):
            return 200, {"name": "triton", "extensions": []}
        if b'"data": [0]' in body or not self.holds_canaries_only:
            self.go.wait(60)
        if self.dead:
            return None
        if self.code != 200:
            return self.code, {"error": self.error}
        rewards = {"name": "rewards", "data": [len(body)]}
        return 200, {"outputs": [rewards, {"name": "status", "data": [self.status]}]}

    @property
    def inferences(self) -> int:
        return sum(path.endswith("/infer") for path, _ in self.seen)

    def close(self) -> None:
        self.go.set()
        super().close()
        self._folder.cleanup()


CANARY = '{"inputs": [{"name": "tokens", "datatype": "INT64", "shape": [1, 1], "data": [0]}]}'


class FrontBeforeFake:
    """A front door process before a FakeTriton, with small default limits.

    `limits` are keys of `InferenceConfig` or `FrontSettings`.
    """

    def __init__(self, *, ready: bool = True, **limits):
        self.backend = FakeTriton()
        self.progress = Progress()
        front_settings = {
            "max_request_bytes": 10_000,
            "max_sequence_length": 64,
            "canary": CANARY,
            "backend": self.backend.path,
        }
        front_settings |= {
            key: limits.pop(key) for key in list(limits) if key in FrontSettings.model_fields
        }
        inference = InferenceConfig(
            name="rm", max_batch_size=8, **{"health_timeout_seconds": 0.5, **limits}
        )
        settings = FrontSettings(inference=inference, **front_settings)
        self.port = free_port("127.0.0.1")
        self.process = FrontProcess(open_port("127.0.0.1", self.port), settings, self.progress)
        self.process.wait_until_up()
        if ready:
            self.process.set_state(READY)
            while self.get("/v2/health/ready").code != 200:
                pass

    def get(self, path: str, **headers: str) -> HttpAnswer:
        return call(self.port, path, headers=headers)

    def infer(self, body: bytes, **headers: str) -> HttpAnswer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return call(self.port, "/v2/models/rm/infer", body=body, headers=named)

    def health(self) -> tuple[int, dict]:
        answer = self.get("/health")
        return answer.code, json.loads(answer.body)

    def close(self) -> None:
        self.process.close()
        self.backend.close()
