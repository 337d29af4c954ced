"""Records of a run's samples: Parquet files such as `rollouts/step_00012.parquet`.

The folders are `rollouts/`, `validation/` and `test/`. docs/debugging.md has the columns and
examples of reading them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

import numpy as np
from pydantic_core import to_jsonable_python

from reinforce_rl.data.finish_reasons import FINISH_STOP
from reinforce_rl.data.tokenizer import decode_all
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.columns import MAX_INTEGER
from reinforce_rl.monitoring.parquet_bounds import read_bounded_file
from reinforce_rl.monitoring.parquet_process import read_in_child
from reinforce_rl.utils.files import encode, plain_number, write_atomically
from reinforce_rl.utils.untrusted_files import check_regular, parse_json

# No torch: the dashboard reads records, and torch takes 200 MB of memory.
if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch

Kind = Literal["rollouts", "validation", "test"]
FORMAT = "reinforce_rl.records"  # key in the file's metadata
VERSION = 4
_ZSTD_LEVEL = 3
_CONTEXT = 40  # characters before a token
_STEP_FILE = re.compile(r"step_([0-9]{1,15})\.parquet")


@dataclass(frozen=True)
class RolloutRow:
    """One scored sample. The file has null for NaN, also in `SampleTokens`."""

    step: int  # sampled before this optimizer step, or validated after it
    # the prompt's index in the data set; with weighted blending, modulo the set's size
    prompt_id: int
    sample_id: int  # 0 .. G-1 within the prompt
    prompt: str  # as given to the tokenizer, chat template applied
    response: str  # without special tokens and rewritten histories
    # of the reward source, or the weighted sum of several; NaN without a score
    reward: float
    # `FINISH_STOP`, `FINISH_LENGTH` or `FINISH_OUTSIDE` of `data/finish_reasons.py`
    finish_reason: str
    response_length: int  # tokens that the policy wrote, including the stop token
    # nats, of the whole response, by kl_estimator and kl_reduction; NaN in validation
    kl: float = math.nan
    reward_with_kl: float = math.nan  # shaped reward, less beta * kl if the KL is in the reward
    baseline: float = math.nan  # subtracted from `reward_with_kl`
    advantage: float = math.nan  # weight of the log-probs in the loss; mean over the tokens
    valid: bool = True  # False if left out of the loss
    # after reward_shaping and truncation_penalty, without the KL; NaN if not valid
    shaped_reward: float = math.nan
    # before weights; empty with one source
    source_rewards: Mapping[str, float] = field(default_factory=dict)
    score_fault: str | None = None  # reason of a failure; None for a scored sample
    set_name: str = ""  # train, validation or test, or the name of a validation set
    record: str | None = None  # the other fields of the prompt's line, as JSON

    @property
    def is_end(self) -> bool:
        return self.finish_reason == FINISH_STOP

    def as_json(self) -> dict[str, Any]:
        """Return the row for a line of JSON: NaN becomes None."""
        return to_jsonable_python(vars(self), inf_nan_mode="null")


@dataclass(frozen=True)
class SampleTokens:
    """The tokens of one sample; None for values that were not recorded."""

    prompt_tokens: list[int] | None  # ids
    response_tokens: list[int] | None  # ids, with the stop token
    token_texts: list[str] | None  # of the response; a part of a character is �
    # by the trainer before the update, at the sampling temperature
    policy_log_probs: list[float] | None
    reference_log_probs: list[float] | None
    generator_log_probs: list[float] | None  # from the generation engine
    token_kl: list[float] | None  # nats, by kl_estimator
    # with credit_assignment=token or turn; otherwise each is `advantage`
    token_advantages: list[float] | None
    # Version of the weights, in steps, for each token; None for step - 1, if the training ranks
    # generate.
    weight_versions: list[int] | None = None
    # False for tokens that an environment wrote; None if the policy wrote them all.
    policy_mask: list[bool] | None = None
    # True for history that the chat template rewrote, with which a context begins; None without an
    # environment.
    history_mask: list[bool] | None = None
    # The environment's reward of each answer at the answer's last token, else 0; None without an
    # environment.
    turn_rewards: list[float] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the tokens for a line of JSON: values that are not finite become None."""
        return to_jsonable_python(vars(self), inf_nan_mode="null")


# Names of the columns, in their order in the file.
SAMPLE_COLUMNS = tuple(column.name for column in fields(RolloutRow))
TOKEN_COLUMNS = tuple(column.name for column in fields(SampleTokens))


# pyarrow is imported when a file is read or written: a run starts without its libraries.
@functools.cache
def column_types(row: type[RolloutRow] | type[SampleTokens]) -> dict[str, pa.DataType]:
    """Return Arrow's type of each column by name."""
    import pyarrow as pa

    arrow_types: dict[Any, pa.DataType] = {
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
        str | None: pa.string(),
        bool: pa.bool_(),
        list[int] | None: pa.list_(pa.int32()),
        list[bool] | None: pa.list_(pa.bool_()),
        list[str] | None: pa.list_(pa.string()),
        list[float] | None: pa.list_(pa.float32()),
        Mapping[str, float]: pa.map_(pa.string(), pa.float64()),
    }
    return {name: arrow_types[hint] for name, hint in get_type_hints(row).items()}


@dataclass(frozen=True)
class TokenColumns:
    """Values of each token of N samples, flat, without columns that were not computed."""

    lengths: dict[str, np.ndarray]  # int64 [N] each, of "prompt" and "response"
    values: dict[str, np.ndarray]  # by the names of `TOKEN_COLUMNS`
    texts: dict[int, str] = field(default_factory=dict)  # of the ids in the responses


@dataclass(frozen=True)
class Samples:
    """The samples of a step on one rank, or on all."""

    rows: list[RolloutRow]
    tokens: TokenColumns | None = None  # None if not recorded at this step


def sample_rows(
    step: int,
    prompts: Sequence[Prompt],
    batch: RolloutBatch,
    tokenizer: PreTrainedTokenizerBase,
    data: ReinforceBatch | None = None,
    set_name: str = "train",
    *,
    skip_special_tokens: bool = True,
) -> list[RolloutRow]:
    """Return one row per sample; `prompts` are those of the batch, `data` is None in validation."""
    prompt_of = {prompt.id: prompt for prompt in prompts}
    starts = batch.prompt_lengths.tolist()
    lengths = batch.response_lengths.tolist()
    written = batch.policy_lengths.tolist()
    rows = zip(batch.sequences.tolist(), starts, lengths, strict=True)
    responses = [row[start : start + n] for row, start, n in rows]
    if batch.history_mask is not None:
        # The text has every message once.
        responses = [
            [token for token, is_history in zip(row, history, strict=False) if not is_history]
            for row, history in zip(responses, batch.history_mask.tolist(), strict=True)
        ]
    texts = decode_all(tokenizer, responses, skip_special_tokens=skip_special_tokens)
    trained: dict[str, Tensor] = {}
    if data is not None:
        trained = {"kl": data.kl, "reward_with_kl": data.rewards_with_kl, "baseline": data.baseline}
        trained["advantage"] = data.sequence_advantages
        if data.shaped_rewards is not None:
            trained["shaped_reward"] = data.shaped_rewards.where(batch.valid, math.nan)
    return [
        RolloutRow(
            step=step,
            prompt_id=prompt_id,
            sample_id=int(batch.sample_ids[i]),
            prompt=prompt_of[prompt_id].text,
            response=texts[i],
            reward=float(batch.rewards[i]),
            finish_reason=batch.finish_reasons[i],
            response_length=written[i],
            **{name: float(values[i]) for name, values in trained.items()},
            valid=bool(batch.valid[i]),
            source_rewards={
                name: float(values[i]) for name, values in batch.source_rewards.items()
            },
            score_fault=batch.score_faults[i] if batch.score_faults else None,
            set_name=prompt_of[prompt_id].set_name or set_name,
            record=json.dumps(dict(prompt_of[prompt_id].metadata), ensure_ascii=False),
        )
        for i, prompt_id in enumerate(batch.group_ids.tolist())
    ]


def token_columns(
    batch: RolloutBatch, *, kl_estimator: str = "", advantages: Tensor | None = None
) -> TokenColumns:
    """Flatten the known values of each token; computes no log-probs.

    Args:
        kl_estimator: "" for no KL.
        advantages: [N, T], if they differ within a response.
    """
    import torch

    from reinforce_rl.algorithm.kl import token_kl
    from reinforce_rl.data.batches import length_mask

    types = {
        "weight_versions": torch.int32,
        "policy_mask": torch.bool,
        "history_mask": torch.bool,
    }
    starts = batch.prompt_lengths[:, None]
    width = batch.width
    mask = length_mask(batch.response_lengths, width)
    place = torch.arange(batch.sequences.shape[1])[None, :]
    responses = (place >= starts) & (place < starts + batch.response_lengths[:, None])
    known: dict[str, Tensor | None] = {
        "policy_log_probs": batch.log_probs,
        "reference_log_probs": batch.init_log_probs,
        "generator_log_probs": batch.generator_log_probs,
        "token_advantages": advantages,
        "weight_versions": batch.weight_versions,
        "policy_mask": batch.policy_mask,
        "history_mask": batch.history_mask,
        "turn_rewards": batch.turn_rewards,
    }
    if kl_estimator and batch.log_probs is not None and batch.init_log_probs is not None:
        known["token_kl"] = token_kl(
            batch.log_probs, batch.init_log_probs, batch.response_mask, estimator=kl_estimator
        )
    computed = {name: column for name, column in known.items() if column is not None}
    values = {}
    for name, column in computed.items():
        of_tokens = column[:, :width][mask].cpu()
        values[name] = of_tokens.to(types.get(name, torch.float32)).numpy()
    values["prompt_tokens"] = batch.sequences[place < starts].int().numpy()
    values["response_tokens"] = batch.sequences[responses].int().numpy()
    return TokenColumns(
        {"prompt": batch.prompt_lengths.numpy(), "response": batch.response_lengths.numpy()}, values
    )


def join_samples(parts: Sequence[Samples], tokenizer: PreTrainedTokenizerBase) -> Samples:
    """Concatenate the ranks' samples, and add the texts of their tokens."""
    rows = [row for part in parts for row in part.rows]
    tokens_of_parts = [part.tokens for part in parts if part.tokens is not None and part.rows]
    if not tokens_of_parts:
        return Samples(rows)
    # A rank without samples has no log-probs. The other ranks all have them, or none has.
    names = [
        name
        for name in tokens_of_parts[0].values
        if all(name in part.values for part in tokens_of_parts)
    ]
    lengths = {
        kind: np.concatenate([part.lengths[kind] for part in tokens_of_parts])
        for kind in tokens_of_parts[0].lengths
    }
    values = {
        name: np.concatenate([part.values[name] for part in tokens_of_parts]) for name in names
    }
    texts = _texts(tokenizer, np.unique(values["response_tokens"]).tolist())
    return Samples(rows, TokenColumns(lengths, values, texts))


def _texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> dict[int, str]:
    texts = decode_all(tokenizer, [[token_id] for token_id in ids])
    pieces = tokenizer.convert_ids_to_tokens(ids)
    # SentencePiece leaves the first token's space out.
    pairs = zip(map(str, pieces), texts, strict=True)
    spaced = [
        " " + text if piece.startswith("▁") and not text.startswith(" ") else text
        for piece, text in pairs
    ]
    return dict(zip(ids, spaced, strict=True))


def drop_later_samples(folder: str | Path, resume_step: int) -> None:
    """Remove a run's samples of steps after the checkpoint's, and partly written files."""
    for path in Path(folder).glob("*/*step_*"):
        match = _STEP_FILE.fullmatch(path.name)
        is_partial = path.name.startswith(".step_")  # killed before the move
        if path.parent.name in get_args(Kind) and (
            is_partial or (match and int(match[1]) > resume_step)
        ):
            path.unlink()


def write_samples(folder: str | Path, step: int, samples: Samples, kind: Kind = "rollouts") -> None:
    """Write the samples of a step below a run's folder; an existing file is replaced."""
    write_records(Path(folder) / kind / f"step_{step:05d}.parquet", samples)


def write_records(path: Path, samples: Samples) -> None:
    """Write the samples of a step, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns_of: dict[pa.DataType, list[str]] = {}
    for name, kind in column_types(SampleTokens).items():
        columns_of.setdefault(kind.value_type, []).append(f"{name}.list.element")
    floats = columns_of[pa.float32()]
    others = [*columns_of[pa.int32()], *columns_of[pa.string()]]
    encodings: dict[str, Any] = {
        "use_dictionary": ["prompt", "finish_reason", "score_fault", "set_name", "record", *others],
        # A third smaller: exponents and mantissas are stored separately.
        "use_byte_stream_split": floats,
    }
    file = io.BytesIO()
    pq.write_table(
        samples_table(samples), file, compression="zstd", compression_level=_ZSTD_LEVEL, **encodings
    )
    write_atomically(path, file.getvalue())


def samples_table(samples: Samples) -> pa.Table:
    """Return the table that is written: all columns, with null for unknown values."""
    import pyarrow as pa

    rows = samples.rows
    tokens = samples.tokens
    arrays = {}
    for name, kind in column_types(RolloutRow).items():
        values = [getattr(row, name) for row in rows]
        if kind == pa.float64():
            values = [plain_number(value) for value in values]
        elif kind == pa.string():
            # Arrow refuses lone surrogates.
            values = [None if value is None else encode(value).decode() for value in values]
        elif name == "source_rewards":
            values = [
                [(source, plain_number(reward)) for source, reward in value.items()]
                for value in values
            ]
        arrays[name] = pa.array(values, kind)
    for name, kind in column_types(SampleTokens).items():
        flat_values = None
        if tokens is not None and name == "token_texts":
            ids, places = np.unique(tokens.values["response_tokens"], return_inverse=True)
            flat_values = pa.array(
                [encode(tokens.texts[token_id]).decode() for token_id in ids.tolist()], pa.string()
            ).take(places)
        elif tokens is not None and name in tokens.values:
            flat_values = pa.array(tokens.values[name], kind.value_type)
        if tokens is None or flat_values is None:
            arrays[name] = pa.nulls(len(rows), kind)
        else:
            ends = tokens.lengths["prompt" if name == "prompt_tokens" else "response"].cumsum()
            arrays[name] = pa.ListArray.from_arrays(
                pa.array([0, *ends.tolist()], pa.int32()), flat_values
            )
    return pa.table(arrays).replace_schema_metadata({FORMAT: json.dumps({"version": VERSION})})


def rollout_files(folder: str | Path, kind: Kind = "rollouts") -> dict[int, Path]:
    """Return a run's sample files by step, in ascending order."""
    files: dict[int, Path] = {}
    for path in (Path(folder) / kind).glob("step_*"):
        match = _STEP_FILE.fullmatch(path.name)
        if match:
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def read_table(
    path: str | Path,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    *,
    is_own: bool = False,
) -> pa.Table:
    """Read columns of a file of `write_records`.

    Args:
        columns: names; None for all.
        filters: see `pyarrow.parquet.read_table`.
        is_own: whether the file belongs to this process's run; other files are read in a child
            process.

    Raises:
        DataError: the file is missing, damaged, of another version, or takes far more memory than
            its size.
    """
    try:
        check_regular(Path(path), within=Path(path).absolute().parents[1])
        read = read_bounded_file if is_own else read_in_child
        table = read(path, columns, filters)
        _check_version(table.schema.metadata or {})
        _check_columns(table, columns or (*SAMPLE_COLUMNS, *TOKEN_COLUMNS))
    except DataError as error:
        raise DataError(f"{path}: {error}", key=error.key) from error
    except OSError as error:
        raise DataError(f"{path}: {error}", key="samples.file.not_readable") from error
    return table


def _check_version(metadata: Mapping[bytes, bytes]) -> None:
    version = None
    with contextlib.suppress(ValueError, TypeError, KeyError):
        version = parse_json(metadata[FORMAT.encode()])["version"]
    if version != VERSION:
        raise DataError(
            f"its records have version {version!r:.40}; this reinforce_rl reads version {VERSION}. "
            "Read them with the reinforce_rl that wrote them, or as they are with "
            "pyarrow.parquet.read_table",
            key="samples.file.other_version",
        )


def _check_columns(table: pa.Table, expected: Sequence[str]) -> None:
    """Raise DataError if columns are missing, or have values that `write_records` never writes."""
    missing = [name for name in expected if name not in table.column_names]
    if missing:
        raise DataError(
            f"it lacks the columns {missing}; docs/debugging.md has all. Restore the file",
            key="samples.columns.missing",
        )
    kinds = {**column_types(RolloutRow), **column_types(SampleTokens)}
    for name in table.column_names:
        values = table.column(name)
        kind = kinds.get(name, values.type)
        if values.type != kind:
            raise DataError(
                f"the column {name} is {values.type!s:.100}; expected {kind}. Restore the file",
                key="samples.column.wrong_type",
            )
        fault = _fault_within(name, values)
        if fault:
            raise DataError(
                f"the column {name} holds {fault}. Restore the file",
                key="samples.column.wrong_value",
            )
    _check_lengths(table)


def _fault_within(name: str, values: pa.ChunkedArray) -> str:
    """Describe an invalid value of a column of samples or tokens; "" without one."""
    import pyarrow.compute as pc

    hint = _row_hints().get(name)
    if hint in (int, str, bool, Mapping[str, float]) and values.null_count:
        return "a null"
    if hint is int and len(values):
        ends = pc.call_function("min_max", [values]).as_py()
        if ends["min"] < 0 or ends["max"] >= MAX_INTEGER:
            return f"{ends['min']} to {ends['max']}, expected 0 to {MAX_INTEGER - 1}"
    if name in TOKEN_COLUMNS and pc.call_function("list_flatten", [values]).null_count:
        return "a null within a list"
    return ""


def _check_lengths(table: pa.Table) -> None:
    """Raise DataError if the lists of a response's tokens differ in length."""
    import pyarrow.compute as pc

    lengths = None
    for name in TOKEN_COLUMNS:
        if name == "prompt_tokens" or name not in table.column_names:
            continue
        lengths_of_column = pc.call_function("list_value_length", [table.column(name)])
        lengths = lengths_of_column if lengths is None else lengths
        # Null if one of the two was not recorded.
        is_equal = pc.call_function("equal", [lengths, lengths_of_column])
        if pc.call_function("all", [is_equal]).as_py() is False:
            raise DataError(
                f"the lists of {name} do not have one value for each token. Restore the file",
                key="samples.tokens.lengths_differ",
            )
        lengths = pc.call_function("coalesce", [lengths, lengths_of_column])


@functools.cache
def _row_hints() -> dict[str, Any]:
    return get_type_hints(RolloutRow)


def read_rows(path: str | Path, *, is_own: bool = False) -> list[RolloutRow]:
    """Read a step's samples without their tokens; for `is_own` see `read_table`.

    Raises:
        DataError: the file is missing, damaged or of another version.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"{path}: no such file; expected the samples of a step",
            key="samples.file.missing",
        )
    float_columns = [name for name, hint in _row_hints().items() if hint is float]
    rows = []
    for values in read_table(path, SAMPLE_COLUMNS, is_own=is_own).to_pylist():
        for name in float_columns:
            values[name] = _nan_if_null(values[name])
        source_rewards = values["source_rewards"]
        values["source_rewards"] = {name: _nan_if_null(reward) for name, reward in source_rewards}
        rows.append(RolloutRow(**values))
    return rows


def _nan_if_null(value: float | None) -> float:
    return math.nan if value is None else value


def worst_tokens(
    path: Path, count: int = 5, above: float = 0.0, *, is_own: bool = False
) -> list[tuple[int, int, int, str, str, float, float]]:
    """Return tokens of valid samples with the largest gaps between trainer and generator.

    They are at most `count` tokens whose log-probs differ by more than `above` nats, largest first.
    Each is (prompt id, sample id, position in the response from 0, text, text before it, log-prob
    of the trainer, log-prob of the generator). The texts are quoted. Empty if the log-probs were
    not recorded.
    """
    both = ["policy_log_probs", "generator_log_probs"]
    table = read_table(
        path, ["prompt_id", "sample_id", "prompt", "valid", "token_texts", *both], is_own=is_own
    )
    table = table.filter(table["valid"])
    if not len(table) or any(table[name].null_count for name in both):
        return []
    policy, generator = (np.concatenate(table[name].to_numpy()) for name in both)
    gaps = np.nan_to_num(np.abs(policy - generator), nan=-1.0, posinf=np.inf)
    worst = []
    starts = np.cumsum([0, *(len(row) for row in table[both[0]].to_numpy())])
    for place in np.argsort(-gaps, kind="stable")[:count].tolist():
        if gaps[place] > above:
            row = int(np.searchsorted(starts, place, side="right")) - 1
            *ids, prompt, _, texts, trainer_log_probs, generator_log_probs = (
                table.slice(row, 1).to_pylist()[0].values()
            )
            at = place - int(starts[row])
            before = (prompt + "".join(texts[:at]))[-_CONTEXT:]
            worst.append(
                (
                    *ids,
                    at,
                    repr(texts[at]),
                    repr(before),
                    trainer_log_probs[at],
                    generator_log_probs[at],
                )
            )
    return worst


def read_tokens(path: Path, filters: Any = None, *, is_own: bool = False) -> list[SampleTokens]:
    """Read the tokens of the samples that pass `filters`; empty if they were not recorded."""
    rows = read_table(path, TOKEN_COLUMNS, filters, is_own=is_own).to_pylist()
    recorded = [row for row in rows if row["response_tokens"] is not None]
    if recorded and len(recorded) < len(rows):
        raise DataError(
            f"{path} has the tokens of {len(recorded)} of {len(rows)} samples; expected the tokens "
            "of all samples or of none. Restore the file",
            key="samples.tokens.of_some",
        )
    return [SampleTokens(**row) for row in recorded]
