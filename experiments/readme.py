"""Write the generated parts of README.md and docs/sites.md: block and site table come from the code, so they cannot drift.

python experiments/readme.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from interp.model.block import PreNormBlock
from interp.sites import symbol_table

ROOT = Path(__file__).parents[1]
PARTS = {"README.md": ("block",), "docs/sites.md": ("sites",)}


def parts() -> dict[str, str]:
    """Name of each marked part -> its text."""
    halves = [textwrap.dedent(inspect.getsource(half)).strip() for half in (PreNormBlock.mix, PreNormBlock.feed)]
    block = "\n\n\n".join(halves)
    return {"block": f"```python\n{block}\n```", "sites": symbol_table()}


def filled(file: str) -> str:
    """The file's text with every marked part replaced. ValueError when a part is not marked."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for name in PARTS[file]:
        part = parts()[name]
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{file} marks the part {name!r} {count} times; it must once")
    return text


if __name__ == "__main__":
    for file in PARTS:
        (ROOT / file).write_text(filled(file), encoding="utf-8")
