"""Where a reward server listens, as configurations and messages write it, and which model is asked there."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        host: a name or an address, an IPv6 one without brackets.
        port: of TCP.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Inverse of `str`.

        Raises:
            ValueError: it is not HOST:PORT with a port of 1 to 65535.
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
    """A reward model at a server, and what opens its door.

    Attributes:
        place: where the server listens.
        name: of the model.
        token: the access token, where the server asks for one.
    """

    place: Address
    name: str
    token: str | None
