"""Every toy task: the ground truth is true, splits are fresh, contrast pairs differ where they say, batches are functions."""

from __future__ import annotations

import itertools

import pytest
import torch

from interp import Transformer, generate, run
from interp.model import Inputs
from interp.tasks import TASKS, Dyck, Goal, Induction, Language, Lookahead, Rewriting, TaskError
from interp.tasks.dyck import MASK, WORDS
from interp.tasks.lookahead import FIRST as FIRST_SYMBOL
from interp.tasks.rewriting import EOS, FIRST
from interp.tasks.task import NOT_ASKED, held_out
from interp.training import judge

LARGER = (
    "facts-4096",
    "modular-addition-113",
    "language-small",
    "language-large",
)  # other sizes of tasks that are here
NAMES = [name for name in TASKS if name not in LARGER]
TOY = [name for name in NAMES if name != "facts"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def make(name):
    """The task with its default options; of a language less text, which is read in a second."""
    return Language("small", vocab=300, context=32, limit=500_000) if name == "language" else TASKS[name]()


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip((a.inputs.tokens, a.targets), (b.inputs.tokens, b.targets), strict=True)
    )


def test_the_sizes_left_out_here_are_of_tasks_that_are_not():
    assert {type(TASKS[name]()).__name__ for name in LARGER} == {"ToyFacts", "ModularAddition", "Language"}
    assert all(TASKS[name]() != TASKS[TASKS[name]().name]() for name in LARGER)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "modular-addition"])  # which has one batch
def test_a_batch_is_a_function_of_step_size_and_seed(name):
    task = make(name)
    first = task.batch(3, 8, 1)
    assert same(first, task.batch(3, 8, 1))
    assert not same(first, task.batch(4, 8, 1)) and not same(first, task.batch(3, 8, 2))
    assert first.inputs.batch == 8 and first.positions.shape == first.targets.shape
    assert (first.targets != NOT_ASKED).any()


@pytest.mark.parametrize("name", TOY)
def test_evaluation_is_fresh_and_within_the_vocabulary(name):
    task = make(name)
    seen = {tuple(row) for step in range(4) for row in task.batch(step, 64, 0).inputs.tokens.tolist()}
    for split, batch in task.evaluation.items():
        assert {goal.split for goal in task.goals} <= set(task.evaluation), split
        source = batch.inputs.source if batch.inputs.source is not None else batch.inputs.tokens
        assert int(source.max()) < len(task.vocabulary) and int(batch.targets.max()) < len(task.vocabulary)
        if batch.inputs.source is None and split != "train":
            assert not seen & {tuple(row) for row in batch.inputs.tokens.tolist()}


@pytest.mark.parametrize("name", NAMES)
def test_the_default_model_takes_its_batches(name):
    task = make(name)
    model = Transformer(task.model_config(n_layers=1, d_model=16, n_heads=2))
    batch = task.batch(0, 4, 0).select(slice(4))
    logits = run(model, batch.inputs).logits  # checks the inputs against the model
    assert logits.shape[-1] == len(task.vocabulary)
    found = judge(model, batch)
    assert 0 <= found["exact"] <= 1 and 0 <= found["accuracy"] <= 1 and found["nats"] > 0 and 1 <= found["n"] <= 4


@pytest.mark.parametrize("name", TOY)
def test_contrast_pairs_differ_where_they_say(name):
    task = make(name)
    pairs = task.pairs(40, seed=2)
    model = Transformer(task.model_config(n_layers=1, d_model=16, n_heads=2))
    assert len(pairs) == 40 and (pairs.correct != pairs.wrong).all()
    places = {"induction": "after", "dyck": "partner", "lookahead": "again", "lookahead-causal": "again"}
    places |= {"modular-addition": "b", "facts-in-context": "stated_value", "language": "after"}
    place = places.get(name, "source")
    for inputs in (pairs.clean, pairs.corrupted):
        run(model, inputs)
    on_source = pairs.clean.source is not None
    sides = [x.encoder if on_source else x for x in (pairs.clean, pairs.corrupted)]
    a, b = (x.tokens for x in sides)
    assert torch.equal(sides[0].roles[place], sides[1].roles[place])
    differs = torch.zeros_like(a, dtype=torch.bool).scatter_(1, sides[0].roles[place][:, None], True)
    assert torch.equal(a != b, differs)
    assert torch.equal(pairs.clean.tokens, pairs.corrupted.tokens) == on_source
    again = task.pairs(40, seed=2)
    assert torch.equal(again.clean.tokens, pairs.clean.tokens) and torch.equal(again.wrong, pairs.wrong)
    assert not torch.equal(task.pairs(40, seed=3).correct, pairs.correct)


def test_goals():
    assert Goal("x", "nats", 0.1).met(0.05) and not Goal("x", "nats", 0.1).met(0.2)
    assert Goal("x", "accuracy", 0.9).met(0.95) and not Goal("x", "exact", 0.9).met(0.85)
    assert str(Goal("held_out", "exact", 0.99)) == "held_out exact at least 0.99"
    assert str(Goal("second_copy", "nats", 0.1)) == "second_copy nats at most 0.1"


def test_judging_counts_only_what_is_asked():
    """Against a count written out, on a model that always says token 3."""
    task = Lookahead()
    model = Transformer(task.model_config(n_layers=1, d_model=16, n_heads=2))
    with torch.no_grad():
        model.unembedding.weight.zero_()
    batch = task.evaluation["look_ahead"]
    asked = batch.targets != NOT_ASKED
    found = judge(model, batch, batch_size=100)
    assert found["nats"] == pytest.approx(torch.tensor(len(task.vocabulary)).log().item(), abs=1e-5)
    assert found["accuracy"] == 0.0  # argmax of equal logits is token 0, never a value
    assert found["n"] == int(asked.any(1).sum())


# Induction


def test_the_second_copy_repeats_the_first_and_lengths_vary():
    task = Induction()
    batch = task.evaluation["second_copy"]
    lengths = set()
    for row in range(200):
        tokens = batch.inputs.tokens[row][batch.inputs.mask[row]].tolist()
        n = (len(tokens) - 1) // 2
        lengths.add(n)
        r = tokens[1 : n + 1]
        assert tokens == [0, *r, *r] and len(set(r)) == n and 0 not in r
        asked = batch.targets[row] != NOT_ASKED
        assert batch.positions[row][asked].tolist() == list(range(n + 1, 2 * n))
        assert batch.targets[row][asked].tolist() == r[1:]
        target = task.induction_target(batch)[row]
        for position in range(n + 1, 2 * n):  # the token after the earlier occurrence of the current one
            assert tokens[target[position]] == tokens[position + 1] and tokens[target[position] - 1] == tokens[position]
        assert (target[[p for p in range(len(target)) if not n < p < 2 * n]] == -1).all()
    assert lengths == set(range(16, 25))
    whole = task.batch(0, 16, 0)
    assert ((whole.targets != NOT_ASKED).sum(1) == whole.inputs.mask.sum(1) - 1).all()


# Copy, reverse, sort


@pytest.mark.parametrize("name", ["copy", "reverse", "sort"])
def test_targets_and_alignment_are_true(name):
    task = Rewriting(name)
    batch = task.evaluation["held_out"]
    alignment = task.alignment(batch.inputs)
    for row in range(100):
        source = batch.inputs.source[row][batch.inputs.source_mask[row]].tolist()
        wanted = {"copy": source, "reverse": source[::-1], "sort": sorted(source)}[name]
        asked = batch.targets[row] != NOT_ASKED
        assert batch.targets[row][asked].tolist() == [*wanted, EOS]
        assert batch.inputs.tokens[row][asked].tolist() == [0, *wanted]  # shifted right, BOS first
        assert batch.inputs.mask[row].tolist() == asked.tolist()
        places = alignment[row][: len(source)].tolist()
        assert [source[p] for p in places] == wanted and (alignment[row][len(source) :] == -1).all()
    assert {int(n) for n in batch.inputs.source_mask.sum(1)} == set(range(8, 13))


def test_exact_match_under_teacher_forcing_is_that_of_greedy_generation():
    task = Rewriting("copy", n_symbols=4, shortest=2, longest=3)
    model = Transformer(task.model_config(d_model=32, n_heads=2), seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(25):  # half learned, so that some are right and some wrong
        batch = task.batch(step, 32, 0)
        loss = torch.nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batch = task.sample(200, held_out(7))
    with torch.no_grad():
        right = model(batch.inputs).argmax(-1) == batch.targets
    forced = (right | (batch.targets == NOT_ASKED)).all(1)
    source = Inputs(batch.inputs.tokens[:, :1], source=batch.inputs.source, source_mask=batch.inputs.source_mask)
    made = generate(model.eval(), source, 4, stop=EOS).tokens
    made = torch.nn.functional.pad(made, (0, 4 - made.shape[1]), value=EOS)
    free = ((made == batch.targets) | (batch.targets == NOT_ASKED)).all(1)
    assert torch.equal(forced, free) and 0.05 < free.float().mean() < 0.95


# Dyck


def all_words(length, depth):
    """Every balanced word, by trying all."""
    found = []
    for word in itertools.product(range(4), repeat=length):
        stack: list[int] = []
        for bracket in word:
            if bracket < 2:
                stack.append(bracket)
                if len(stack) > depth:
                    break
            elif not stack or stack.pop() != bracket - 2:
                break
        else:
            if not stack:
                found.append(word)
    return found


def test_words_are_uniform_and_partners_match():
    task = Dyck(shortest=6, longest=6, depth=2)
    words, partner = task.words(torch.full((16_000,), 6), torch.Generator().manual_seed(0), 6)
    every = all_words(6, 2)
    counts = dict.fromkeys(every, 0)
    for word in words.tolist():
        counts[tuple(word)] += 1
    expected = 16_000 / len(every)
    chi = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi < len(every) - 1 + 4 * (2 * (len(every) - 1)) ** 0.5  # four standard deviations of chi-squared
    assert torch.equal(partner.gather(1, partner), torch.arange(6).expand(16_000, 6))
    first = torch.minimum(partner, torch.arange(6))
    assert torch.equal(words % 2, words.gather(1, first) % 2) and (words.gather(1, first) < 2).all()


def test_the_posterior_is_that_of_all_words_tried():
    task = Dyck(shortest=4, longest=8, depth=2, share=0.4)
    words, mask, chosen = task.sample(60, torch.Generator().manual_seed(1))
    shown = torch.where(chosen, MASK, words)
    found = task.posterior(shown, mask)
    every = {n: all_words(n, 2) for n in (4, 6, 8)}
    for row in range(60):
        n = int(mask[row].sum())
        fitting = [w for w in every[n] if all(s in (MASK, b) for s, b in zip(shown[row].tolist(), w, strict=False))]
        for position in range(n):
            wanted = torch.tensor([sum(w[position] == b for w in fitting) / len(fitting) for b in range(4)])
            torch.testing.assert_close(found[row, position], wanted.double(), atol=1e-7, rtol=0)


def test_certain_positions_are_certain_and_training_masks_as_bert_does():
    task = Dyck()
    certain, masked = task.evaluation["certain"], task.evaluation["masked"]
    asked = masked.targets != NOT_ASKED
    assert ((certain.targets == masked.targets) | (certain.targets == NOT_ASKED)).all()
    assert (masked.inputs.tokens[asked] == MASK).all() and (masked.inputs.tokens[~asked] != MASK).all()
    share = float(asked.sum() / masked.inputs.mask.sum())
    assert 0.13 < share < 0.17 and 0.5 < task.best_accuracy < 1
    batch = task.batch(0, 512, 0)
    chosen = batch.targets != NOT_ASKED
    shown, wanted = batch.inputs.tokens[chosen], batch.targets[chosen]
    hidden, kept = float((shown == MASK).float().mean()), float((shown == wanted).float().mean())
    assert 0.77 < hidden < 0.83 and 0.10 < kept < 0.15  # 10% stay, and a random bracket is the same one in four times
    assert not (batch.inputs.tokens[batch.inputs.mask & ~chosen] == MASK).any()
    pairs = task.pairs(30)
    for inputs, answer in ((pairs.clean, pairs.correct), (pairs.corrupted, pairs.wrong)):
        known = task.posterior(inputs.tokens, torch.ones_like(inputs.tokens, dtype=torch.bool))
        at = known[torch.arange(30), inputs.roles["masked"]]
        assert torch.equal(at.argmax(-1), answer) and (at.amax(-1) > 1 - 1e-9).all()
    assert WORDS[MASK] == "<mask>"


# Lookahead


def test_marks_say_what_comes_again_and_what_came_before():
    task = Lookahead()
    words = task.vocabulary.words
    for split, batch in task.evaluation.items():
        for row in range(100):
            tokens, asked = batch.inputs.tokens[row].tolist(), batch.targets[row] != NOT_ASKED
            assert int(batch.inputs.prefix_length[row]) == task.prefix_length == 13 and words[tokens[13]] == "="
            symbols = [words[token] for token in tokens[1:13]]
            for i, symbol in enumerate(symbols):
                before, again = symbol in symbols[:i], symbol in symbols[i + 1 :]
                assert bool(asked[i]) == (again if split == "look_ahead" else before)
                marked = symbol[1:] + ("<" * before + ">" * again or ".")
                assert not asked[i] or words[batch.targets[row, i]] == marked
                assert i == 11 or words[tokens[14 + i]] == marked
    assert Lookahead(causal=True).model_config().kind == "decoder"
    assert Lookahead(causal=True).evaluation["look_ahead"].inputs.prefix_length is None
    pairs = task.pairs(20)
    first = FIRST_SYMBOL + 16
    assert ((pairs.correct - first) % 4 == 2).all() and ((pairs.wrong - first) % 4 == 0).all()
    assert ((pairs.correct - first) // 4 == (pairs.wrong - first) // 4).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Induction(shortest=1), "shortest=1"),
        (lambda: Induction(longest=64), "longest=64"),
        (lambda: Rewriting("shuffle"), "name='shuffle' is not allowed; allowed: 'copy', 'reverse', 'sort'"),
        (lambda: Rewriting(longest=40), "longest=40"),
        (lambda: Dyck(shortest=15), "shortest=15"),
        (lambda: Dyck(depth=0), "depth=0"),
        (lambda: Lookahead(length=1), "length=1 is not allowed; allowed: 2 or more"),
        (lambda: Lookahead().pairs(at=11), "at=11"),
        (lambda: Induction().pairs(length=20, at=19), "at=19"),
        (lambda: Rewriting().pairs(length=13), "length=13"),
        (lambda: Dyck().pairs(length=7), "length=7"),
    ],
)
def test_options_out_of_range_are_refused(make, words):
    with pytest.raises(TaskError, match=words):
        make()


def test_symbols_sort_in_vocabulary_order():
    words = Rewriting("sort").vocabulary.words
    assert words[FIRST:] == sorted(words[FIRST:])
