"""Files of exported rows: JSON lines and Parquet. A file appears whole or not at all.

The same rows give byte-identical JSON lines. Parquet holds the same rows; its bytes also depend on pyarrow's version.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from odradek.streams.replay.export import CHUNK, Row


class _WholeFile:
    """A file that is renamed into place when all of it is written; an error leaves nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._close(complete=error is None)
            if error is None:
                self._partial.replace(self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._partial.unlink()

    def _close(self, *, complete: bool) -> None:
        raise NotImplementedError


class JsonlWriter(_WholeFile):
    """One JSON object a line, keys in the order of `Row`'s fields."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = self._partial.open("wb")
        self._encoder = msgspec.json.Encoder(order="deterministic")

    def write(self, row: Row) -> None:
        """See `RowWriter`."""
        self._file.write(self._encoder.encode(row) + b"\n")

    def _close(self, *, complete: bool) -> None:
        self._file.close()


class ParquetWriter(_WholeFile):
    """Zstandard-compressed Parquet with the schema of `parquet_schema`."""

    def __init__(self, path: Path, filter_json: bytes = b"{}") -> None:
        import pyarrow.parquet as parquet

        super().__init__(path)
        self._schema = parquet_schema().with_metadata({b"odradek.filter": filter_json})
        self._rows: list[dict[str, Any]] = []
        self._sink = self._partial.open("wb")  # pyarrow's own error would not name the place
        self._file = parquet.ParquetWriter(self._sink, self._schema, compression="zstd")

    def write(self, row: Row) -> None:
        """See `RowWriter`."""
        self._rows.append(msgspec.to_builtins(row))
        if len(self._rows) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        for row in self._rows:
            row["labels"], row["reward_components"] = (
                list(row["labels"].items()),
                list(row["reward_components"].items()),
            )
        if self._rows:
            self._file.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []

    def _close(self, *, complete: bool) -> None:
        if complete:
            self._flush()
        self._file.close()
        self._sink.close()


def parquet_schema() -> Any:
    """The Arrow schema: `Row`, field for field, with the narrowest exact types of the token arrays."""
    import pyarrow as pa

    texts = [(name, pa.string()) for name in ("name", "text")]
    part = pa.struct([("kind", pa.string()), ("turn", pa.int32()), *texts, ("is_error", pa.bool_())])
    special = {
        "labels": pa.map_(pa.string(), pa.string()),
        "reward_components": pa.map_(pa.string(), pa.float64()),
        "tokens": pa.list_(pa.int32()),
        "mask": pa.list_(pa.uint8()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "segment_starts": pa.list_(pa.int32()),
        "tests_passed": pa.list_(pa.string()),
        "tests_failed": pa.list_(pa.string()),
        "transcript": pa.list_(part),
    }
    plain = {"str": pa.string(), "int": pa.int64(), "bool": pa.bool_(), "float | None": pa.float64()}
    return pa.schema([(name, special.get(name, plain.get(str(kind)))) for name, kind in Row.__annotations__.items()])
