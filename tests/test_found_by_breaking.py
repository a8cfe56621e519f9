"""Faults that somebody who tried to break the library found: each stays impossible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interp import (
    Add,
    AddNoise,
    Freeze,
    Inputs,
    KnockOut,
    Mean,
    ModelConfig,
    Replace,
    Resample,
    Transformer,
    Zero,
    attention_mass,
    fold_norm,
    from_huggingface,
    generate,
    load,
    logit_difference,
    logit_lens,
    loss,
    patch_sweep,
    run,
    save,
    teacher_forced,
    train,
)
from interp.at import SelectionError
from interp.bridges import BridgeError, from_transformer_lens, to_huggingface, to_transformer_lens
from interp.hookable import UnsupportedModelError
from interp.interventions import InterventionError
from interp.model.inputs import InputsError
from interp.sweep import SweepError
from interp.tasks import Dyck, Rewriting, TaskError

SIZES = {"vocab": 20, "n_layers": 2, "n_heads": 4, "d_model": 32, "n_ctx": 20}
TOKENS = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
LEFT = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
COPY = Rewriting("copy")
PAIRS = COPY.pairs(8)


def build(kind="decoder", **choices):
    return Transformer(ModelConfig(kind=kind, **{**SIZES, **choices})).double()


def translator():
    return Transformer(COPY.model_config()).double()


# Wrong numbers


def test_a_change_of_the_pattern_opens_no_edge():
    model, even = build(), Replace("0.pattern", 0.2)
    changed = TOKENS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 20
    a, b = (run(model, tokens, change=even).logits for tokens in (TOKENS, changed))
    assert torch.equal(a[:, :4], b[:, :4]) and not torch.equal(a[:, 4], b[:, 4])
    cached, recomputed = (generate(model, TOKENS, 4, change=even, use_cache=use) for use in (True, False))
    assert torch.allclose(cached.logits, recomputed.logits, atol=1e-10)
    source = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(1))
    inputs = Inputs(TOKENS, source=source, source_mask=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]))
    other = replace(inputs, source=torch.where(inputs.source_mask, source, (source + 1) % 20))
    pair = build("encoder-decoder")
    a, b = (run(pair, x, change=Replace("0.cross_pattern", 0.2)).logits for x in (inputs, other))
    assert torch.equal(a, b)


def test_a_prefix_holds_real_tokens_only():
    model = build("prefix-decoder")
    inputs = Inputs(TOKENS, mask=RIGHT, prefix_length=torch.tensor([5, 4]))
    with pytest.raises(InputsError, match="prefix_length holds 4 for example 1; allowed: at most its real tokens"):
        run(model, inputs)
    inputs = replace(inputs, prefix_length=torch.tensor([5, 3]))
    cached, recomputed = (generate(model, inputs, 4, use_cache=use).logits for use in (True, False))
    assert torch.allclose(cached, recomputed, atol=1e-10)


def test_a_role_belongs_to_the_source_or_to_the_target():
    model, metric = translator(), logit_difference(PAIRS.correct, PAIRS.wrong)
    reverse = Rewriting("reverse").pairs(8)
    for pairs in (PAIRS, reverse):
        sweep = patch_sweep(model, pairs.clean, pairs.corrupted, metric, ["encoder.resid_pre", "decoder.resid_post"],
                            by=("layer", "role"))  # fmt: skip
        assert {site: axes[1] for site, axes in sweep.coordinates.items()} == {
            "encoder.resid_pre": ["source"], "decoder.resid_post": ["final"],
        }  # fmt: skip
    for place, known in (("encoder.0.resid_pre", "source"), ("decoder.0.resid_pre", "final")):
        wrong = {"source": "final", "final": "source"}[known]
        with pytest.raises(SelectionError, match=f"unknown role '{wrong}' .* allowed: '{known}'"):
            run(model, PAIRS.clean, change=Zero(place, at=(wrong,)))
    run(model, PAIRS.clean, change=KnockOut("0.cross_scores", at=(0, "final", "source")))
    with pytest.raises(InputsError, match="source_roles name positions of a source: a; these inputs have none"):
        run(build(), Inputs(TOKENS, source_roles={"a": torch.tensor([0, 0])}))


def test_chance_counts_what_the_mask_admits():
    model = Transformer(COPY.model_config())
    with torch.no_grad():
        for block in model.blocks:
            block.cross_attention.qkv.weight.mul_(12)  # so sharp that small weights round to 0
    batch = COPY.sample(50, torch.Generator().manual_seed(0))
    keys = COPY.alignment(batch.inputs)
    n = batch.inputs.source_mask.sum(1).double()
    for one in (model, model.half()):
        chance = attention_mass(one, batch.inputs, keys, "cross_pattern")["chance"]
        assert chance.to_numpy() == pytest.approx(float(len(n) / n.sum()))


@pytest.mark.parametrize("change", [Mean, Resample, Replace, Freeze])
def test_a_run_with_other_padding_is_refused(change):
    model = build()
    other = run(model, Inputs(TOKENS, mask=LEFT), record="0.resid_post")
    made = change("0.resid_post", reference=other) if change is Resample else change("0.resid_post", other)
    for inputs in (TOKENS, Inputs(TOKENS, mask=RIGHT)):
        with pytest.raises(InterventionError, match=r"padding elsewhere \(mask\)"):
            run(model, inputs, change=replace(made, at=(2,)))
    run(model, Inputs(TOKENS, mask=LEFT), change=replace(made, at=(4,)))
    full = Inputs(TOKENS, mask=torch.ones_like(LEFT))
    run(model, full, change=Replace("0.resid_post", run(model, TOKENS, record="0.resid_post")))  # no mask = all real


def test_noise_does_not_depend_on_how_much_is_generated():
    model, noise = build(), AddNoise("0.resid_post", 1.0)
    short, long = (generate(model, TOKENS, n, change=noise).logits[:, 0] for n in (1, 4))
    assert torch.allclose(short, long, atol=1e-12)
    assert torch.allclose(run(model, TOKENS, change=noise).logits[:, -1], short, atol=1e-12)
    with pytest.raises(InterventionError, match="how long the sequence becomes"):
        generate(model, TOKENS, 2, change=AddNoise("0.scores", 1.0))


def test_the_loss_leaves_out_what_a_prefix_decoder_sees():
    model = build("prefix-decoder")
    inputs = Inputs(TOKENS, prefix_length=torch.tensor([3, 2]))
    logits = run(model, inputs).logits.log_softmax(-1)
    nats = [[-float(logits[row, i - 1, TOKENS[row, i]]) for i in range(start, 5)] for row, start in ((0, 3), (1, 2))]
    found = loss(inputs)(logits)
    assert found.tolist() == pytest.approx([sum(row) / len(row) for row in nats])
    lens = to_transformer_lens(model)
    assert float(lens(inputs, return_type="loss").detach()) == pytest.approx(sum(map(sum, nats)) / 5)
    with pytest.raises(InputsError, match="fewer"):
        loss(Inputs(TOKENS, prefix_length=torch.tensor([5, 2])))
    stream = lens(inputs, stop_at_layer=1)
    with pytest.raises(InputsError, match="prefix decoder needs tokens=Inputs"):
        lens(stream, start_at_layer=1)
    assert torch.equal(lens(stream, start_at_layer=1, tokens=inputs), lens(inputs))


def test_pairs_with_different_masks_are_refused():
    model = build("prefix-decoder")
    clean, corrupted = (Inputs(TOKENS, prefix_length=torch.tensor([n, n])) for n in (4, 1))
    with pytest.raises(SweepError, match="differ in prefix_length"):
        patch_sweep(model, clean, corrupted, logit_difference(1, 2))


def test_every_dyck_word_asks_something():
    task = Dyck(shortest=2, longest=4, share=0.02)
    for step in range(20):
        assert ((task.batch(step, 3, 0).targets >= 0).sum(1) >= 1).all()


# Objects of the wrong kind


def test_each_library_says_what_to_pass_instead(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=None
    )
    source = transformers.GPT2LMHeadModel(config).eval()
    model, lens = build(), to_transformer_lens(build())
    wrapped = from_transformer_lens(source, self_test=False)
    for use in (run, lambda m, x: logit_lens(m, x), lambda m, x: generate(m, x, 1)):
        with pytest.raises(UnsupportedModelError, match=r"allowed: the Transformer behind it, its \.original_model"):
            use(lens, TOKENS)
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot be read or changed here; allowed"):
            use(source, TOKENS)
    for use in (lambda m: save(m, tmp_path / "x"), fold_norm, to_huggingface):
        with pytest.raises(TypeError, match=r"needs an interp\.Transformer, whose weights it knows; got BridgedModel"):
            use(wrapped)
    for use, given in ((from_huggingface, wrapped), (from_transformer_lens, model), (from_transformer_lens, wrapped)):
        with pytest.raises(BridgeError, match="can already be read and changed here"):
            use(given)
    assert not model.training


def test_a_training_folder_says_where_its_model_is(tmp_path):
    train(
        COPY.model_config(d_model=16),
        "copy",
        COPY.train_config(steps=2, batch_size=4),
        tmp_path / "run",
        progress=False,
    )
    with pytest.raises(ValueError, match="training folder; allowed: its model"):
        load(tmp_path / "run")
    load(tmp_path / "run" / "model")
    with pytest.raises(TaskError, match="task 'shuffle' is not allowed; allowed: 'facts', 'induction'"):
        train(None, "shuffle")


# Mistakes that used to end in PyTorch's words


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: teacher_forced([[1, 2]], 0), InputsError, "got list"),
        (lambda m: teacher_forced(TOKENS[0], 0), InputsError, r"\(5,\)"),
        (lambda m: teacher_forced(TOKENS, "<s>"), InputsError, "'<s>'"),
        (lambda m: teacher_forced(TOKENS, 0, mask=TOKENS), InputsError, "mask must be bool"),
        (lambda m: generate(m, TOKENS, 2.0), InputsError, "max_new=2.0"),
        (lambda m: generate(m, TOKENS, 2, top_k=2.5), InputsError, "top_k=2.5"),
        (lambda m: generate(m, TOKENS, 2, temperature=float("nan")), InputsError, "temperature=nan"),
        (lambda m: generate(m, TOKENS, 2, temperature=1e-320), InputsError, "temperature=1e-320"),
        (lambda m: generate(m, TOKENS, 2, stop="</s>"), InputsError, "stop holds '</s>'"),
        (lambda m: generate(m, TOKENS, 2, stop=99), InputsError, r"stop holds 99; allowed: token ids 0 … 19"),
        (
            lambda m: generate(m, TOKENS, 3, change=Add("0.attn_out", 1.0, at=(range(-2, 0),))),
            SelectionError,
            "absolute",
        ),
        (lambda m: run(m, TOKENS, change=Zero("0.attn_out", at=(slice(None, None, -1),))), SelectionError, "backwards"),
        (lambda m: run(m, Inputs([[1, 2]])), InputsError, "tokens must be an int tensor"),
        (lambda m: run(m, TOKENS, record="q").cache.stack("q", "enc"), ValueError, "unknown stack 'enc'"),
        (lambda m: attention_mass(m, TOKENS, TOKENS * 0, "scores"), SelectionError, "allowed: 'pattern'"),
        (lambda m: attention_mass(m, TOKENS, TOKENS > 3), SelectionError, "torch.bool"),
        (
            lambda m: attention_mass(translator(), PAIRS.clean, TOKENS),
            SelectionError,
            "'encoder.pattern', 'decoder.pattern'",
        ),
        (lambda m: KnockOut("0.cross_pattern"), InterventionError, "'L.scores' or 'L.cross_scores'"),
    ],
)
def test_a_mistake_is_answered_in_our_words(call, error, words):
    with pytest.raises(error, match=words):
        call(build())


def test_nothing_and_several_ways_to_say_it():
    model = build()
    assert torch.equal(run(model, TOKENS, record=None, change=None).logits, run(model, TOKENS).logits)
    assert generate(model, TOKENS, stop=None).tokens.shape == (2, 16)  # as many as fit
    stopped = [generate(model, TOKENS, 3, stop=stop).tokens for stop in (4, [4], torch.tensor(4), torch.tensor([4]))]
    assert all(torch.equal(stopped[0], other) for other in stopped)
    pair = run(translator(), PAIRS.clean, record="resid_post").cache
    assert torch.equal(pair.stack("encoder.resid_post"), pair.stack("resid_post", "encoder"))
