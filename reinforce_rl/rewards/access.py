"""The access token that a reward server may ask for: where both sides get it, and how it is sent and compared."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from reinforce_rl.errors import ConfigError

TOKEN_VARIABLE = "REINFORCE_REWARD_TOKEN"
MIN_TOKEN_LETTERS = 16
HEADER = "Authorization"
SCHEME = "Bearer "


def read_token(token_file: str | Path | None, key: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The token of a file, or else of the environment variable REINFORCE_REWARD_TOKEN, or else None.

    Args:
        token_file: a text file that only its owner may read; None: look at the environment.
        key: of the configuration, for the error's text.
        environment: None: this process's.

    Raises:
        ConfigError: the file is not there, others may read it, or what it holds cannot be a token.
    """
    if token_file is None:
        token = (os.environ if environment is None else environment).get(TOKEN_VARIABLE)
        if token is None or not token.strip():
            return None
        return _checked(token.strip(), f"the environment variable {TOKEN_VARIABLE}")
    path = Path(token_file)
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError([f"{key}: cannot read the token in {path} ({reason.lower()})"]) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            [f"{key}: others may use {path} (mode {stat.S_IMODE(mode):04o}); make it yours alone: chmod 600 {path}"]
        )
    return _checked(token, f"{key}: {path}")


def bearer(token: str | None) -> dict[str, str]:
    """The header that carries the token; none where there is no token."""
    return {} if token is None else {HEADER: SCHEME + token}


def is_authorised(header: str | None, token: str | None) -> bool:
    """Whether a request's Authorization header carries the token; the time does not depend on where they differ."""
    if token is None:
        return True
    given = header[len(SCHEME) :] if header and header[: len(SCHEME)].lower() == SCHEME.lower() else ""
    return hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())


def _checked(token: str, where: str) -> str:
    if len(token) < MIN_TOKEN_LETTERS or not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(
            [
                f"{where} holds no token: expected at least {MIN_TOKEN_LETTERS} visible ASCII characters and no space "
                "(python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one)"
            ]
        )
    return token
