"""Wire format shared by reward server and client, KServe v2 over HTTP; docs/reward-models.md lists
what travels.

Neither side's code is imported here. An answer bears the digest of its request in REQUEST_DIGEST,
so that one to another or a corrupted request is never accepted. The server's description is the
answer of a second model, INFO_MODEL: its fixed name lets the server correct a client that asks for
a wrong reward model.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from reinforce_rl.data.jsonl import check_messages
from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.rewards import base
from reinforce_rl.rewards.base import RewardRequest, TextSample
from reinforce_rl.utils.control_characters import quoted
from reinforce_rl.utils.net import Address
from reinforce_rl.utils.untrusted_files import parse_json

PROTOCOL_VERSION = 2  # 1 had no digests
DEFAULT_NAME = "reward_model"
DEFAULT_PORT = 5555

TOKENS_FORM = "tokens"
TEXT_FORM = "text"
AUTO_FORM = "auto"
TOKENS = "tokens"
SEQUENCE_LENGTHS = "sequence_lengths"
SENTENCES = "sentences"
PROMPTS = "prompts"
RESPONSES = "responses"
MESSAGES = "messages"
METADATA = "metadata"
FINISHED = "finished"
REWARDS = "rewards"
STATUS = "status"
ATTRIBUTES = "attributes"

# Inputs by name: datatype, and elements per sample (-1: the request's own width).
INPUTS = {name: ("BYTES", 1) for name in (SENTENCES, PROMPTS, RESPONSES, MESSAGES, METADATA)}
INPUTS |= {TOKENS: ("INT64", -1), SEQUENCE_LENGTHS: ("INT64", 1), FINISHED: ("INT64", 1)}
TEXT_REQUIRED = frozenset({PROMPTS, RESPONSES})
TEXT_OPTIONAL = frozenset({MESSAGES, METADATA, FINISHED})

INFO_MODEL = "reward_server_info"
INFO_OUTPUT = "info"

HEADER_LENGTH = "Inference-Header-Content-Length"  # of the JSON before binary tensors
REQUEST_ID = "X-Request-ID"  # appears in both sides' logs
# in an answer: hex SHA-256 of the body that the server received
REQUEST_DIGEST = "X-Request-Digest"
TOKEN_HEADER = "Authorization"
TOKEN_SCHEME = "Bearer "
TOKEN_VARIABLE = "REINFORCE_REWARD_TOKEN"
MIN_TOKEN_LETTERS = 16

MAX_RETRY_SECONDS = 60  # longest Retry-After that a server sends and a client accepts
MAX_ATTRIBUTES = 1024
MAX_DEPTH = 64  # of nested JSON; the processes of reward functions write and read it again
ENVELOPE_BYTES = 4096  # of a request's JSON: names, types and shapes of at most six inputs
TEXT_LENGTH_BYTES = 4  # before each text


class OtherVersion(ValueError):
    """The peer speaks another version of the protocol."""


@dataclass(frozen=True)
class ServerInfo:
    """A reward server's description of itself."""

    name: str  # the reward model's name in URLs
    max_batch_size: int  # samples per request
    max_length: int | None  # tokens per sample; None, like the next two, for a reward function
    vocab_size: int | None  # token ids are 0 .. vocab_size-1
    tokenizer: TokenizerInfo | None
    deterministic: bool  # each request is scored apart from those of other clients
    add_special_tokens: bool  # to `sentences`
    # other traits of the model (trunk, head, pooling ...)
    details: dict[str, Any] = field(default_factory=dict)
    # K names, in the order of the output `attributes`
    attributes: list[str] = field(default_factory=list)
    protocol: int = PROTOCOL_VERSION
    input_forms: tuple[str, ...] = (TOKENS_FORM,)  # the server's preference first
    max_request_bytes: int | None = None  # per request body; None if the server sends none

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ServerInfo:
        """Inverse of `to_json`; ignores unknown keys, which a later release may send.

        Raises ValueError if it is no description, OtherVersion if it is one in another version of
        the protocol.
        """
        values = parse_json(text)
        if not isinstance(values, dict) or "protocol" not in values:
            raise ValueError("no reward server's description")
        if values["protocol"] != PROTOCOL_VERSION:
            version = quoted(values["protocol"], 40)
            versions = f"version {version} of the protocol, this client version {PROTOCOL_VERSION}"
            raise OtherVersion(
                f"speaks {versions}: use a server and a client of the same release of reinforce_rl"
            )
        try:
            info = _description().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"a wrong description: {where}: {first['msg']}") from error
        info._check()
        return info

    def _check(self) -> None:
        """Raise ValueError if a client cannot use the values."""
        wrong = "a wrong description"
        if self.max_batch_size < 1:
            raise ValueError(
                f"{wrong}: max_batch_size is {self.max_batch_size}, expected at least 1"
            )
        if not self.input_forms or not set(self.input_forms) <= {TOKENS_FORM, TEXT_FORM}:
            forms = ", ".join(self.input_forms) or "none"
            expected = f"expected {TOKENS_FORM} or {TEXT_FORM}"
            raise ValueError(f"{wrong}: input_forms are {quoted(forms)}, {expected}")
        if len(self.attributes) > MAX_ATTRIBUTES:
            count = len(self.attributes)
            raise ValueError(f"{wrong}: {count} attributes, expected at most {MAX_ATTRIBUTES}")

    def differences(self, other: ServerInfo, here: str, there: str) -> list[str]:
        """Return one sentence per differing field; `here` and `there` say where or when each was
        seen.
        """
        mine = asdict(self)
        theirs = asdict(other)
        return [
            f"{key}: {quoted(mine[key])} {here}, {quoted(theirs[key])} {there}"
            for key in mine
            if mine[key] != theirs[key]
        ]


@cache
def _description() -> TypeAdapter[ServerInfo]:
    return TypeAdapter(ServerInfo)


def unlike(first: Address, second: Address, differences: Sequence[str]) -> Fault:
    """Return the error for two servers that should serve the same model and do not."""
    return Fault(
        f"the reward servers at {first} and {second} do not serve the same model with the same "
        f"limits ({'; '.join(differences)}). Replicas must be identical: restart one of them, or "
        "remove it from remote_rm.reward_model.replicas.",
        key="reward_server.replicas.differ",
    )


# Requests: what the client encodes and the server reads.


def request_arrays(
    request: RewardRequest, form: str, pad_to_length: int | None, pad_id: int
) -> dict[str, np.ndarray]:
    """Encode N samples as inputs [N, ...] by name, with tokens padded with `pad_id` to
    `pad_to_length`, if given.
    """
    if form == TEXT_FORM:
        return text_arrays(request.samples)
    tokens = request.tokens.detach().cpu().numpy().astype(np.int64, copy=True)
    lengths = request.lengths.detach().cpu().numpy().astype(np.int64, copy=True)
    width = max(pad_to_length or 0, tokens.shape[1], 1)  # Triton cannot carry a width of 0
    tokens = np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=pad_id)
    return {TOKENS: tokens, SEQUENCE_LENGTHS: lengths[:, None]}


def text_arrays(samples: Sequence[TextSample]) -> dict[str, np.ndarray]:
    """Encode samples as texts, each input [N, 1]; always the same inputs, so that Triton can merge
    requests.
    """
    columns = {
        PROMPTS: [sample.prompt for sample in samples],
        RESPONSES: [sample.response for sample in samples],
        MESSAGES: [
            json.dumps(list(sample.messages)) if sample.messages else "" for sample in samples
        ],
        METADATA: [json.dumps(dict(sample.record)) for sample in samples],
    }
    # Half of a surrogate pair becomes bytes that the server refuses, for this sample alone.
    arrays = {
        name: np.array([text.encode("utf-8", "surrogatepass") for text in texts], object).reshape(
            -1, 1
        )
        for name, texts in columns.items()
    }
    arrays[FINISHED] = np.array([int(sample.finished) for sample in samples], np.int64).reshape(
        -1, 1
    )
    return arrays


def split(arrays: Mapping[str, np.ndarray], info: ServerInfo) -> list[dict[str, np.ndarray]]:
    """Split inputs [N, ...] in order into parts within the server's limits.

    The parts depend on samples and limits only, not on which servers are up: the last bit of a
    score may depend on which samples share a request. A sample above the limit is sent alone, and
    the server refuses it.
    """
    sizes = sum(_sample_bytes(array) for array in arrays.values())
    room = None if info.max_request_bytes is None else info.max_request_bytes - ENVELOPE_BYTES
    starts = []
    filled = 0
    for row, size in enumerate(np.asarray(sizes).tolist()):
        full = bool(starts) and row - starts[-1] == info.max_batch_size
        if not starts or full or (room is not None and filled + size > room):
            starts.append(row)
            filled = 0
        filled += size
    parts = itertools.pairwise([*starts, None])
    return [{name: array[start:end] for name, array in arrays.items()} for start, end in parts]


def _sample_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of each sample on the wire, int64 [N]."""
    if array.dtype == object:
        return np.array(
            [sum(len(text) + TEXT_LENGTH_BYTES for text in row) for row in array.tolist()], np.int64
        )
    return np.full(len(array), array.itemsize * int(np.prod(array.shape[1:])), np.int64)


def check_inputs(names: set[str], input_forms: Sequence[str]) -> None:
    """Raise ValueError unless these inputs make a request in a form that the server reads."""
    is_text = TEXT_REQUIRED <= names <= TEXT_REQUIRED | TEXT_OPTIONAL
    is_tokens = names in ({SENTENCES}, {TOKENS, SEQUENCE_LENGTHS})
    form = TEXT_FORM if is_text else TOKENS_FORM if is_tokens else None
    if form not in input_forms and (names or input_forms):
        read = " or ".join(input_forms) or "no input"
        raise ValueError(
            f"this model reads {read}; this request holds {sorted(names)}, see "
            "docs/reward-models.md"
        )


def read_samples(request: Mapping[str, np.ndarray]) -> tuple[list[TextSample | None], np.ndarray]:
    """Inverse of `text_arrays`: N samples, None where unreadable, and their statuses, int32 [N]."""
    count = request[PROMPTS].shape[0]
    columns = {name: array.reshape(count).tolist() for name, array in request.items()}
    samples: list[TextSample | None] = [None] * count
    status = np.zeros(count, np.int32)
    for row in range(count):
        try:
            samples[row] = _read({name: column[row] for name, column in columns.items()})
        except UnicodeDecodeError:
            status[row] = base.STATUS_BAD_TEXT
        except (ValueError, RecursionError):
            status[row] = base.STATUS_BAD_PROMPT
    return samples, status


def _read(values: Mapping[str, Any]) -> TextSample:
    messages = _json(values.get(MESSAGES), list)
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("a message is not an object with a role")
    if messages:
        roles = {message["role"] for message in messages}
        try:
            check_messages(messages, MESSAGES, sorted(roles), texts_only=False)
        except DataError as error:
            raise ValueError(str(error)) from error
    return TextSample(
        prompt=_text(values[PROMPTS]),
        response=_text(values[RESPONSES]),
        record=_json(values.get(METADATA), dict),
        messages=tuple(messages),
        finished=values.get(FINISHED, 1) != 0,
    )


def _text(raw: Any) -> str:
    return raw if isinstance(raw, str) else bytes(raw).decode("utf-8")


def _json(raw: Any, kind: type) -> Any:
    """Parse a JSON list or object; an empty text gives an empty one."""
    text = "" if raw is None else _text(raw)
    value = json.loads(text) if text else kind()
    if not isinstance(value, kind):
        raise ValueError(f"found JSON of type {type(value).__name__}; expected {kind.__name__}")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"found JSON that is nested deeper than {MAX_DEPTH}")
    return value


def _depth(node: Any) -> int:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return 1 + max(map(_depth, children), default=0)


# Answers: what the client checks.


class Scores(NamedTuple):
    values: np.ndarray  # float32 [N], NaN where a sample failed
    status: np.ndarray  # int32 [N]
    attributes: np.ndarray  # float32 [N, K], NaN where a sample failed


def check_answer(output: Callable[[str], np.ndarray | None], count: int, attributes: int) -> Scores:
    """Return the scores in an answer about N = `count` samples, with K = `attributes`, whose
    outputs `output` gives.

    Raises ValueError if the answer breaks the protocol.
    """
    values = _checked(output, REWARDS, np.float32, (count, 1))[:, 0].copy()
    status = _checked(output, STATUS, np.int32, (count, 1))[:, 0].copy()
    shape = (count, attributes)
    scores = (
        _checked(output, ATTRIBUTES, np.float32, shape)
        if attributes
        else np.zeros(shape, np.float32)
    )
    unknown = sorted(set(status.tolist()) - set(base.STATUS_TEXT))
    if unknown:
        raise ValueError(f"unknown status {unknown}")
    status[(status == base.STATUS_OK) & ~np.isfinite(values)] = base.STATUS_NOT_FINITE
    failed = status != base.STATUS_OK
    values[failed] = np.nan
    return Scores(values, status, np.where(failed[:, None], np.float32(np.nan), scores))


def check_json_numbers(answer: Mapping[str, Any]) -> None:
    """Raise ValueError if an output that came as JSON holds anything but numbers.

    numpy would make numbers of texts and of true.
    """
    for output in answer.get("outputs", ()):
        for value in output.get("data", ()):
            if type(value) not in (int, float):
                name = quoted(output["name"], 100)
                raise ValueError(f"'{name}' holds a JSON {type(value).__name__}, expected numbers")


def _checked(
    output: Callable[[str], np.ndarray | None],
    key: str,
    dtype: type[np.generic],
    shape: tuple[int, int],
) -> np.ndarray:
    array = output(key)
    if array is None or array.dtype != dtype or array.shape != shape:
        given = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"'{key}' is {given}; expected {np.dtype(dtype).name} {list(shape)}")
    return array


# The access token that a server may require.


def read_token(token_file: str | Path | None, key: str) -> str | None:
    """Read the token from a file, or else from the environment variable REINFORCE_REWARD_TOKEN.

    `key` is the configuration key, for messages. Raises ConfigError if the file is missing, others
    may read it, or its content cannot be a token.
    """
    if token_file is None:
        where = f"the environment variable {TOKEN_VARIABLE}"
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            return None
    else:
        path = Path(token_file)
        where = f"{key}: {token_file}"
        try:
            mode = path.stat().st_mode
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            sentence = f"{key}: cannot read the token in {path} ({reason.lower()})"
            raise ConfigError([Fault(sentence, key="reward_server.token.not_readable")]) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            bits = f"{stat.S_IMODE(mode):04o}"
            sentence = (
                f"{key}: others may use {path} (mode {bits}); make it yours alone: chmod 600 {path}"
            )
            raise ConfigError([Fault(sentence, key="reward_server.token.open_to_others")])
    if len(token) < MIN_TOKEN_LETTERS or not all("!" <= letter <= "~" for letter in token):
        expected = f"expected at least {MIN_TOKEN_LETTERS} visible ASCII characters and no space"
        example = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
        sentence = f"{where} holds no token: {expected} ({example})"
        raise ConfigError([Fault(sentence, key="reward_server.token.invalid")])
    return token


def bearer(token: str | None) -> dict[str, str]:
    """Return the header that carries the token, if there is one."""
    return {} if token is None else {TOKEN_HEADER: TOKEN_SCHEME + token}


def is_authorised(header: str | None, token: str | None) -> bool:
    """Compare a request's Authorization header with the token, in constant time."""
    if token is None:
        return True
    length = len(TOKEN_SCHEME)
    given = header[length:] if header and header[:length].lower() == TOKEN_SCHEME.lower() else ""
    return hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
