"""Addresses of reward servers and of the models that they serve."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Address:
    host: str  # name or address; IPv6 without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse HOST:PORT, the inverse of `str`.

        Raises:
            ValueError: not HOST:PORT with a port of 1 to 65535.
        """
        try:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.netloc != text or "@" in text:
            raise ValueError(f"{text!r} is no HOST:PORT with a port of 1 to 65535")
        return cls(host, port)


@dataclass(frozen=True)
class ModelAddress:
    place: Address  # of the server
    name: str  # of the model
    token: str | None  # None if the server needs none
