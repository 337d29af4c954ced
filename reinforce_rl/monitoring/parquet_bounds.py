"""Read untrusted Parquet within bounds: a small file can repeat a value endlessly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData

MAX_ROWS = 1 << 18  # samples of a step
MIN_BYTES = 256 << 20  # memory that the values may take of any file
BYTES_RATIO = 200  # times a file's size: memory that its values may take if that is more
_MAX_FOOTER_BYTES = 64 << 10  # the footer of a step's 27 columns has 8 KiB
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}  # bytes of a value; else 8
_TEXT = "BYTE_ARRAY"
NOT_PARQUET = "not a readable Parquet file ({}); restore or remove it"


def read_bounded_file(path: str | Path, columns: Sequence[str] | None, filters: Any) -> pa.Table:
    """Read a file by `read_bounded_table`; raise DataError also if it is damaged.

    On some damaged files Arrow ends the process: `parquet_process` reads untrusted files.
    """
    from pyarrow import ArrowException, OSFile

    try:
        # Arrow cannot encode every name if the locale is not UTF-8, so it gets bytes. It gets no
        # Python file object: its threads would wait for it at the program's end, and abort.
        with OSFile(os.fsencode(path)) as file:
            return read_bounded_table(file, columns, filters)
    except (ArrowException, OSError, ValueError, RecursionError) as error:
        raise DataError(NOT_PARQUET.format(error), key="parquet.file.not_readable") from error


def read_bounded_table(
    file: pa.NativeFile, columns: Sequence[str] | None, filters: Any
) -> pa.Table:
    """Read a Parquet file by `pyarrow.parquet.read_table`, without columns that the file lacks.

    Raises:
        DataError: the file has more than `MAX_ROWS` rows, or its values take far more memory than
            its size.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_footer(file)
    metadata = pq.read_metadata(file)
    limit = max(MIN_BYTES, BYTES_RATIO * file.size())
    _check_metadata(metadata, columns, limit)
    leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    # Dictionaries store a repeated text once.
    texts = [leaf.path for leaf in leaves if leaf.physical_type == _TEXT]
    plain = pq.read_schema(file)
    known = None if columns is None else [name for name in columns if name in plain.names]
    table = pq.read_table(file, columns=known, filters=filters, read_dictionary=texts)
    # Arrow checks neither UTF-8 nor offsets when it reads; later code may crash on them.
    table.validate(full=True)
    _check_bytes(sum(map(_text_bytes, table.columns)), limit)
    types = pa.schema(
        [plain.field(name) for name in table.column_names], metadata=table.schema.metadata
    )
    return table.cast(types)


def _check_footer(file: pa.NativeFile) -> None:
    # Arrow crashes on a schema of thousands of nested groups. This also bounds the row groups.
    size = file.size()
    file.seek(max(0, size - 8))
    end = file.read(8)
    file.seek(0)
    length = int.from_bytes(end[:4], "little")
    if len(end) == 8 and end.endswith(b"PAR1") and length > _MAX_FOOTER_BYTES:
        raise DataError(
            f"its footer has {length} bytes; expected at most {_MAX_FOOTER_BYTES}",
            key="parquet.footer.too_large",
        )


def _check_metadata(metadata: FileMetaData, columns: Sequence[str] | None, limit: int) -> None:
    if metadata.num_rows > MAX_ROWS:
        raise DataError(
            f"it has {metadata.num_rows} rows; expected at most {MAX_ROWS}",
            key="parquet.rows.too_many",
        )
    size = 0
    stored = 0  # bytes of the decompressed columns
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            if columns is not None and chunk.path_in_schema.partition(".")[0] not in columns:
                continue
            fixed_length = metadata.schema.column(column).length or 0  # of a FIXED_LEN_BYTE_ARRAY
            size += chunk.num_values * max(_WIDTHS.get(chunk.physical_type, 8), fixed_length)
            stored += chunk.total_uncompressed_size
    _check_bytes(max(size, stored), limit)


def _check_bytes(size: int, limit: int) -> None:
    if size > limit:
        raise DataError(
            f"its values take {size} bytes; expected at most {limit} for a file of this size",
            key="parquet.values.too_large",
        )


def _text_bytes(column: pa.ChunkedArray) -> int:
    """Return the bytes of a column's texts if each is stored separately."""
    return sum(_bytes_of(leaf) for chunk in column.chunks for leaf in _leaves(chunk))


def _leaves(array: pa.Array) -> Iterable[pa.Array]:
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        yield from _leaves(array.storage)
    elif isinstance(array, pa.MapArray):
        yield from _leaves(array.keys)
        yield from _leaves(array.items)
    elif isinstance(
        array, pa.StructArray | pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray
    ):
        parts = array.flatten()
        for part in parts if isinstance(parts, list) else [parts]:
            yield from _leaves(part)
    else:
        yield array


def _bytes_of(array: pa.Array) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(
        array, pa.StringArray | pa.BinaryArray | pa.LargeStringArray | pa.LargeBinaryArray
    ):
        return array.nbytes
    if not isinstance(array, pa.DictionaryArray):
        return 0  # `_check_metadata` counts it
    lengths = pc.call_function("binary_length", [array.dictionary]).cast(pa.int64())
    return pc.call_function("sum", [lengths.take(array.indices)]).as_py() or 0
