"""What a unit is: a name that is safe as a file name, and a config that can be written down and compared."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from interp.engines.errors import EngineError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+@-]{0,149}")
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Unit:
    """One piece of work: its name, its config as given, the same as JSON values, and the function's name."""

    name: str
    config: Any
    document: dict[str, Any]
    function: str

    @property
    def mark(self) -> str:
        """Short hash of config and function, so that no unit resumes from the scratch files of another config."""
        text = json.dumps([self.function, self.document], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def make_units(function: Callable[..., Any], units: Mapping[str, Any]) -> list[Unit]:
    """Checked units in the order given. Raises EngineError for names, configs or a function that cannot be used."""
    if not callable(function):
        raise EngineError(f"function={function!r} is not allowed; allowed: a function of (config, scratch)")
    if not isinstance(units, Mapping):
        raise EngineError(f"units is a {type(units).__name__}; allowed: a mapping from names to configs")
    if not units:
        raise EngineError("units is empty; allowed: a mapping with at least one name and config")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise EngineError(f"{function_name(function)} cannot be called with (config, scratch): {error}") from None
    except ValueError:  # some builtins have no signature to look at
        pass
    taken: dict[str, str] = {}
    for name in units:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise EngineError(f"the unit name {name!r} is not allowed; allowed: up to 150 of letters, digits and _.,=+@-, "
                              "the first a letter, a digit or _")  # fmt: skip
        other = taken.setdefault(name.lower(), name)
        if other != name:
            raise EngineError(f"the unit names {other!r} and {name!r} differ only in case, which some file systems "
                              "cannot tell apart; rename one")  # fmt: skip
    named = function_name(function)
    return [Unit(name, config, document(name, config), named) for name, config in units.items()]


def function_name(function: Callable[..., Any]) -> str:
    """`module.qualified_name` with the last part of the module: the same from a script and from an import of it."""
    if isinstance(function, functools.partial):
        bound = [repr(value) for value in function.args] + [f"{k}={v!r}" for k, v in function.keywords.items()]
        return f"{function_name(function.func)}({', '.join(bound)})"
    owner = function if hasattr(function, "__qualname__") else type(function)
    module = owner.__module__ or ""
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").stem
    return f"{module.rpartition('.')[2]}.{owner.__qualname__}"


def document(name: str, config: Any) -> dict[str, Any]:
    """A config as JSON values: dataclasses become mappings, tuples lists, paths strings. Raises EngineError."""
    if not isinstance(config, Mapping) and not (dataclasses.is_dataclass(config) and not isinstance(config, type)):
        raise EngineError(
            f"the config of unit {name!r} is a {type(config).__name__}; allowed: a mapping or a dataclass"
        )
    return _plain(config, f"unit {name!r}: config")


def _plain(value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), f"{place}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise EngineError(f"{place} has the key {wrong[0]!r}; allowed: strings")
        return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        return _plain(value.item(), place)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Path):
        return str(value)
    raise EngineError(f"{place} is a {type(value).__name__}, which has no JSON form; allowed: numbers, strings, None, "
                      "lists, mappings with string keys, paths, dataclasses of these")  # fmt: skip


def differences(old: Any, new: Any) -> list[str]:
    """Which fields differ, with both values; nested fields are named with dots."""
    was, now = dict(_fields(old, "")), dict(_fields(new, ""))
    return [
        f"{field}: {was.get(field, _ABSENT)} there, {now.get(field, _ABSENT)} asked for"
        for field in dict.fromkeys([*now, *was])
        if was.get(field) != now.get(field)
    ]


def _fields(value: Any, place: str):
    if isinstance(value, dict) and (value or not place):
        for key, item in value.items():
            yield from _fields(item, f"{place}.{key}" if place else key)
    else:
        yield place, json.dumps(value)  # text, so that 1, 1.0 and True differ and NaN equals itself
