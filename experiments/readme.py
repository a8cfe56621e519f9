"""Write the generated parts of README.md: the block and the site table come from the code, so they cannot drift.

python experiments/readme.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from interp.model.block import PreNormBlock
from interp.sites import symbol_table

README = Path(__file__).parents[1] / "README.md"


def parts() -> dict[str, str]:
    """Name of each marked part -> its text."""
    block = textwrap.dedent("".join(inspect.getsourcelines(PreNormBlock.forward)[0])).strip()
    return {"block": f"```python\n{block}\n```", "sites": symbol_table()}


def filled(text: str) -> str:
    """The README's text with every marked part replaced. ValueError when a part is not marked."""
    for name, part in parts().items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md marks the part {name!r} {count} times; it must once")
    return text


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
