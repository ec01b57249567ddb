"""Records of Parquet files, read column by column and only as far as they are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhub.errors import AccessDenied, BadInput, NotFound

_COLUMNS = ("text", "messages")
_BATCH = 512


def read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, {"text" or "messages": value}) of a file.

    Errors: `NotFound`, `AccessDenied`; `BadInput` without pyarrow, or for a file that is damaged or has
    neither column.
    """
    try:
        with path.open("rb") as file:
            yield from parquet_records(file, str(path))
    except FileNotFoundError:
        raise NotFound(f"no such text file: {path}", "check the path that --text names") from None
    except PermissionError:
        raise AccessDenied(f"{path} may not be read", "check who owns it") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory, not a text file", "name the files in it") from None


def parquet_records(file: Any, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """`read_parquet` for an open file; a remote one is read in the pieces that are needed."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise BadInput("reading Parquet needs pyarrow", 'pip install "kvhub[data]"') from None
    number = 0
    try:
        table = ParquetFile(file)
        column = next((name for name in _COLUMNS if name in table.schema_arrow.names), None)
        if column is None:
            raise BadInput(
                f'{where} has neither a "text" nor a "messages" column',
                "rename the column that holds the text",
            )
        for batch in table.iter_batches(batch_size=_BATCH, columns=[column]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield number, {column: value if value is not None else ""}
    except (ArrowException, OSError) as error:  # OSError: a damaged page
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{where} cannot be read as Parquet: {reason[:120]}", "fetch or write the file again"
        ) from None
