"""The house: what importing costs, what it pulls in, what is exported, and what each layer may know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import interp

PACKAGE = Path(interp.__file__).parent
HEAVY = ("transformers", "transformer_lens", "matplotlib", "tyro", "sklearn", "ray", "wandb")


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_interp_pulls_in_nothing_heavy():
    assert not modules_after("import interp") & set(HEAVY)


def test_the_core_never_imports_the_command_lines_parser():
    core = ("model", "run", "generate", "sweep", "training", "tasks", "analyses", "engines")
    assert "tyro" not in modules_after("; ".join(f"import interp.{module}" for module in core))


def test_everything_exported_exists_and_is_documented():
    for name in interp.__all__:
        thing = getattr(interp, name)
        assert name == "SITES" or thing.__doc__, f"{name} has no docstring"
    assert sorted(interp.__all__) == sorted(set(interp.__all__))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = interp.nonsense


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_only_bridges_know_other_libraries_and_only_plots_and_reports_draw():
    for path in PACKAGE.rglob("*.py"):
        room, names = path.relative_to(PACKAGE).parts[0], imports(path)
        roots = {name.split(".")[0] for name in names}
        if room != "bridges":
            assert not roots & {"transformers", "transformer_lens"}, path
        if room not in ("plots", "report"):
            assert "matplotlib" not in roots, path
        if room in ("plots", "engines"):
            assert "torch" not in roots, path
        if room != "engines":
            assert not roots & {"ray", "joblib"}, path
        if path.name == "record.py" and room == "record.py":
            assert not any(name.startswith("interp") for name in names)


def test_no_pickle_no_hard_coded_device_no_utils():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in imports(path) and "torch.load(" not in text and "torch.save(" not in text, path
        assert ".cuda()" not in text and path.name != "utils.py", path


def test_forward_code_has_no_data_dependent_step():
    """.item() and bool(tensor) stop compilation, vmap and CUDA; they belong into run and the loading code."""
    for name in ("attention", "block", "feedforward", "norms", "positions", "transformer"):
        text = (PACKAGE / "model" / f"{name}.py").read_text()
        assert ".item()" not in text and ".tolist()" not in text and "bool(" not in text, name
