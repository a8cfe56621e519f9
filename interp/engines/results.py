"""The folder of a run: one parquet file per finished unit that holds its table and where it came from, in one write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from interp import record
from interp.engines.errors import EngineError
from interp.engines.units import Unit, differences

KEY = b"interp_unit"  # of the parquet file's metadata: JSON with unit, config, function, attempts, seconds, host, ...


def result_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"


def error_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.error.txt"


def scratch_path(folder: Path, unit: Unit) -> Path:
    """The unit's own folder; another config of the same name gets another one."""
    return folder / f"{unit.name}.scratch" / unit.mark


def check_table(table: Any, function: str) -> pd.DataFrame:
    """The table, if a parquet file can hold all of it. Raises EngineError."""
    if not isinstance(table, pd.DataFrame):
        raise EngineError(f"{function} returned a {type(table).__name__}; allowed: a pandas DataFrame")
    if wrong := [column for column in table.columns if not isinstance(column, str) or column == "unit"]:
        raise EngineError(
            f"{function} returned a table with the column {wrong[0]!r}; allowed: strings other than 'unit'"
        )
    if not table.columns.is_unique:
        raise EngineError(
            f"{function} returned a table with two columns {table.columns[table.columns.duplicated()][0]!r}"
        )
    index = table.index
    if isinstance(index, pd.MultiIndex) or index.name is not None or not (index.empty or index.dtype.kind in "iu"):
        raise EngineError(f"{function} returned a table with the index {list(index.names)}, which would be lost; "
                          "allowed: plain rows (reset_index())")  # fmt: skip
    return table


def encode(table: pd.DataFrame, about: dict[str, Any]) -> bytes:
    """A parquet file as bytes: the table's rows, and `about` as JSON in the metadata."""
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    note = json.dumps(about, default=str).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), KEY: note}), sink)
    return sink.getvalue().to_pybytes()


def write(folder: Path, unit: Unit, data: bytes) -> None:
    """The unit is finished from here on; what it left behind on the way is removed."""
    record.write_atomic(result_path(folder, unit.name), lambda temporary: temporary.write_bytes(data))
    error_path(folder, unit.name).unlink(missing_ok=True)
    shutil.rmtree(folder / f"{unit.name}.scratch", ignore_errors=True)


def read_about(path: Path) -> dict[str, Any]:
    """The metadata of a result file. Raises EngineError for a truncated file, or one of somebody else's."""
    try:
        return json.loads((pq.read_schema(path).metadata or {})[KEY])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise EngineError(f"{path} is truncated, or no result of run_units ({type(error).__name__}); move or delete it "
                          "to have its unit done again") from None  # fmt: skip


def is_finished(folder: Path, unit: Unit) -> bool:
    """Whether the unit's result is there. Raises EngineError if it is another config's, another function's or broken."""
    path = result_path(folder, unit.name)
    if not path.exists():
        return False
    about = read_about(path)
    old = {"function": about.get("function"), **{f"config.{k}": v for k, v in about.get("config", {}).items()}}
    new = {"function": unit.function, **{f"config.{k}": v for k, v in unit.document.items()}}
    if found := differences(old, new):
        raise EngineError(f"unit {unit.name!r} is finished in {folder} with another call: {'; '.join(found)}; allowed: the "
                          "same function and config again, another name, or a new folder")  # fmt: skip
    shutil.rmtree(folder / f"{unit.name}.scratch", ignore_errors=True)  # stopped between the last two steps of `write`
    return True


def read_tables(folder: Path, units: Sequence[Unit]) -> pd.DataFrame:
    """All tables below each other in the units' order, with a first column `unit`."""
    tables = []
    for unit in units:
        path = result_path(folder, unit.name)
        try:
            table = pq.read_table(path).to_pandas()
        except (pa.ArrowException, OSError) as error:
            raise EngineError(
                f"{path} cannot be read ({error}); move or delete it to have its unit done again"
            ) from None
        table.insert(0, "unit", unit.name)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a killed holder lets go of it. Raises EngineError if another one works there."""
    try:
        release = record.hold(folder)
    except NotADirectoryError:
        raise EngineError(f"folder={str(folder)!r} is a file; allowed: a folder of results, or a new path") from None
    except BlockingIOError:
        raise EngineError(
            f"another process is running units in {folder}; wait for it, or choose a new folder"
        ) from None
    try:
        for left in folder.glob(".*.parquet"):  # a write that was killed
            left.unlink(missing_ok=True)
        yield
    finally:
        release()
