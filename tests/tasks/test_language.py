"""The language task: its text, its splits, its tokenizer, its cache."""

from __future__ import annotations

import dataclasses
import math
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from interp.bridges import packages
from interp.tasks import Language, TaskError
from interp.tasks import language as module

OPTIONS = {"size": "small", "vocab": 300, "context": 32, "limit": 500_000}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("INTERP_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def task(cache):
    return Language(**OPTIONS)


def test_the_library_is_its_own_modules_up_to_the_limit():
    files, root = module.library(500_000), Path(sysconfig.get_path("stdlib"))
    assert sum(len(text.encode()) for text in files.values()) <= 500_000
    assert len(set(files.values())) == len(files)
    for path, text in files.items():
        assert (root / path).read_bytes().decode() == text
        assert not {"site-packages", "test", "tests", "lib2to3"} & set(path.split("/")[:-1])
    assert list(module.library(1_000_000))[: len(files)] == list(files)
    assert {"ast.py", "email/message.py"} <= set(module.library())


def test_the_splits_are_whole_files(task):
    vocabulary = task.vocabulary
    for split, wanted in (("train", False), ("held_out", True)):
        texts = [text for path, text in module.library(500_000).items() if module.is_held_out(path) == wanted]
        said = vocabulary.tokenizer.decode(task.tokens[split].tolist(), skip_special_tokens=False)
        assert said == "".join("<|file|>" + text for text in texts) and texts
        assert int((task.tokens[split] == module.BOF).sum()) == len(texts)
    paths = list(module.library())
    assert 0.03 < sum(map(module.is_held_out, paths)) / len(paths) < 0.07


def test_windows_are_pieces_and_every_next_token_is_asked_for(task):
    for batch, split in ((task.batch(5, 20, 1), "train"), (task.evaluation["held_out"], "held_out")):
        text = task.tokens[split].tolist()
        for tokens, targets, positions in zip(
            batch.inputs.tokens.tolist()[:20], batch.targets.tolist(), batch.positions.tolist(), strict=False
        ):
            piece = [*tokens, targets[-1]]
            assert tokens[1:] == targets[:-1] and positions == list(range(32))
            assert any(text[i : i + 33] == piece for i in range(len(text)) if text[i] == piece[0])
    places = task.evaluation["held_out"].inputs.tokens
    assert 1 < len(places) <= 256 and len(places) * 32 <= len(task.tokens["held_out"])


def test_any_text_comes_back(task):
    vocabulary = task.vocabulary
    assert len(vocabulary) == 300
    for text in ("def f(x):\n\treturn x  # é 日本 🙂\r\n", " ", "\0"):
        ids = vocabulary.ids(text)
        assert vocabulary.tokenizer.decode(ids) == text and max(ids) < 300 and module.BOF not in ids
    assert vocabulary.text(vocabulary.ids("e")[0]) == "e" and vocabulary.text(module.BOF) == "<|file|>"


def test_bits_per_byte_spread_the_nats_over_the_bytes(task):
    texts = [text for path, text in module.library(500_000).items() if module.is_held_out(path)]
    n_bytes = sum(len(text.encode("utf-8")) for text in texts)
    nats = math.log(300)
    total = nats * len(task.tokens["held_out"])
    assert task.bits_per_byte(nats) == pytest.approx(total / math.log(2) / n_bytes)


def test_the_cache_is_read_without_tokenizers_and_made_again_when_damaged(task, cache, monkeypatch):
    wanted = {split: tokens.clone() for split, tokens in task.tokens.items()}
    (path,) = cache.iterdir()  # one file, whole: nothing temporary is left
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        again = Language(**OPTIONS)
        assert all(torch.equal(again.tokens[split], wanted[split]) for split in wanted)
        with pytest.raises(ImportError, match=r"tokenizers, which is not installed: pip install 'interp\[hf\]'"):
            _ = again.vocabulary
        with pytest.raises(ImportError, match="tokenizers"):
            _ = Language(**{**OPTIONS, "vocab": 301}).tokens
    path.write_bytes(path.read_bytes()[:1000])
    made = Language(**OPTIONS)
    assert all(torch.equal(made.tokens[split], wanted[split]) for split in wanted)  # learned twice, the same twice
    assert made.vocabulary.tokenizer.to_str() == task.vocabulary.tokenizer.to_str()
    assert list(cache.iterdir()) == [path]


def test_the_task_names_its_text(task):
    stored = dataclasses.asdict(task)
    assert len(stored["text"]) == 64 and Language(**stored) == task == Language(**OPTIONS)
    assert Language(**{**OPTIONS, "limit": 600_000}).text != task.text
    with pytest.raises(TaskError, match=f"text='0123' is not allowed; allowed: '{task.text}', this Python's library"):
        Language(**{**OPTIONS, "text": "0123"})


def test_the_cache_folder_is_that_of_the_weights(monkeypatch):
    for name, value in (("INTERP_CACHE", "/a"), ("INTERP_CACHE", ""), ("XDG_CACHE_HOME", "/b"), ("XDG_CACHE_HOME", "")):
        monkeypatch.setenv(name, value)
        assert module.cache_folder() == packages.cache_folder()


def test_pairs_repeat_random_tokens(task):
    pairs = task.pairs(30, seed=1)
    for row in range(30):
        tokens = pairs.clean.tokens[row].tolist()
        r = tokens[1:17]
        assert tokens == [module.BOF, *r, *r[:9]] and len(set(r)) == 16 and module.BOF not in r
        assert int(pairs.correct[row]) == r[9] and int(pairs.wrong[row]) == int(pairs.corrupted.tokens[row, 10])
        assert int(pairs.wrong[row]) not in r
        places = {name: int(place[row]) for name, place in pairs.clean.roles.items()}
        assert places == {"first": 9, "after": 10, "final": 25} and tokens[9] == tokens[25]


def test_sizes():
    for size, layers, width in (("small", 4, 64), ("medium", 4, 128), ("large", 6, 256)):
        config = Language(size).model_config()
        assert (config.n_layers, config.d_model, config.vocab, config.n_ctx) == (layers, width, 2048, 128)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": "huge"}, "size='huge' is not allowed; allowed: 'small', 'medium', 'large'"),
        ({"vocab": 256}, "vocab=256"),
        ({"context": 4}, "context=4"),
        ({"limit": 1000}, "limit=1000"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(TaskError, match=words):
        Language(**options)


def test_pairs_out_of_range_are_refused(task):
    for options in ({"length": 1}, {"at": 15}, {"length": 24, "at": 10}):
        with pytest.raises(TaskError, match="length="):
            task.pairs(3, **options)
