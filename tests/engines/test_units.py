"""Names that are safe as file names, configs that can be written down, and what a difference between two looks like."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from interp.engines.errors import EngineError, UnitsFailedError
from interp.engines.units import differences, document, function_name, make_units


@dataclass(frozen=True)
class Inner:
    width: int = 8
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True)
class Config:
    seed: int
    inner: Inner = Inner()
    path: Path = Path("a/b")


def work(config, scratch): ...


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "..", "-x", "ä", "x" * 151, 3, None, "a\n", "con:"])
def test_names_that_are_no_file_names_are_refused(name):
    with pytest.raises(EngineError, match=r"unit name .* is not allowed; allowed: up to 150"):
        make_units(work, {name: {}})


def test_names_that_differ_only_in_case_are_refused():
    with pytest.raises(EngineError, match="'seed=A' and 'seed=a' differ only in case"):
        make_units(work, {"seed=A": {}, "seed=a": {}})


@pytest.mark.parametrize(
    ("units", "message"),
    [({}, "units is empty"), ([("a", {})], "units is a list; allowed: a mapping"),
     ({"a": 3}, "config of unit 'a' is a int; allowed: a mapping or a dataclass"),
     ({"a": Config}, "config of unit 'a' is a type"),
     ({"a": {"f": {"g": object()}}}, "unit 'a': config.f.g is a object, which has no JSON form"),
     ({"a": {"f": [1, {2}]}}, r"unit 'a': config.f\[1\] is a set"),
     ({"a": {1: 2}}, "unit 'a': config has the key 1; allowed: strings")],
)  # fmt: skip
def test_what_cannot_be_written_down_is_refused_by_its_place(units, message):
    with pytest.raises(EngineError, match=message):
        make_units(work, units)


def test_a_function_of_something_else_is_refused():
    with pytest.raises(EngineError, match=r"cannot be called with \(config, scratch\)"):
        make_units(lambda config: None, {"a": {}})
    with pytest.raises(EngineError, match="function='work' is not allowed"):
        make_units("work", {"a": {}})  # type: ignore[arg-type]


def test_configs_become_json_values_and_are_handed_over_as_given():
    config = Config(3)
    (unit,) = make_units(work, {"a": config})
    assert unit.config is config
    assert unit.document == {"seed": 3, "inner": {"width": 8, "betas": [0.9, 0.99]}, "path": "a/b"}
    assert document("a", {"n": np.int64(3), "x": np.float64(0.5), "b": np.bool_(True)}) == {"n": 3, "x": 0.5, "b": True}


def test_differences_name_the_field_and_both_values():
    old, new = {"a": {"b": 1, "c": 2}, "gone": None}, {"a": {"b": 1.0, "c": 2}, "come": [1]}
    assert differences(old, new) == [
        "a.b: 1 there, 1.0 asked for",
        "come: (absent) there, [1] asked for",
        "gone: null there, (absent) asked for",
    ]
    assert differences({"x": math.nan, "e": {}}, {"x": math.nan, "e": {}}) == []
    assert differences({"x": 1}, {"x": True}) and differences({"x": {}}, {"x": []})


def test_the_mark_depends_on_config_and_function():
    def mark(function, config):
        return make_units(function, {"a": config})[0].mark

    assert mark(work, {"x": 1, "y": 2}) == mark(work, {"y": 2, "x": 1})
    assert len({mark(work, {"x": 1}), mark(work, {"x": 2}), mark(lambda config, scratch: None, {"x": 1})}) == 3


def test_a_function_has_the_same_name_from_a_script_and_from_an_import(monkeypatch):
    assert function_name(work) == "test_units.work"
    assert function_name(functools.partial(work, scratch=3)) == "test_units.work(scratch=3)"
    monkeypatch.setattr(work, "__module__", "__main__")
    monkeypatch.setattr("__main__.__file__", "somewhere/test_units.py", raising=False)
    assert function_name(work) == "test_units.work"


def test_the_failure_names_ten_units_and_counts_the_others():
    error = UnitsFailedError(Path("runs"), {f"u{i}": "E: no" for i in range(12)}, 30)
    assert str(error).startswith("12 of 30 units failed: 'u0' (E: no), ") and "'u9' (E: no) and 2 more" in str(error)
    assert "u10" not in str(error) and error.failures["u11"] == "E: no"
