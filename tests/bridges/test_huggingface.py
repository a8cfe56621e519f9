"""transformers models in: random ones of every supported kind, built offline from their configs."""

from __future__ import annotations

import copy
import dataclasses
import socket
import sys

import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, run
from interp.bridges import BridgeError, from_huggingface, to_huggingface
from interp.bridges.huggingface import optional
from interp.model.checkpoint import CheckpointError

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
}  # fmt: skip
GPT2 = {"vocab_size": 37, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-3}
BERT = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "layer_norm_eps": 1e-3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 3000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}

CASES = {
    "llama": ("Llama", {}),
    "llama, one head per key, tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama, one key for all, biases": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama, attention bias": ("Llama", {"attention_bias": True}),
    "llama, mlp bias": ("Llama", {"mlp_bias": True}),
    "llama, head_dim": ("Llama", {"head_dim": 10}),
    "llama, rotary base": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0}}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, a window it ignores": ("Llama", {"sliding_window": 3}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", WINDOWS),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3, windows, bias": ("Qwen3", {"head_dim": 8, "attention_bias": True, **WINDOWS}),
    "gpt2": ("GPT2", {}),
    "gpt2, untied, n_inner": ("GPT2", {"tie_word_embeddings": False, "n_inner": 50}),
    "gpt2, exact gelu": ("GPT2", {"activation_function": "gelu"}),
    "gpt2, relu": ("GPT2", {"activation_function": "relu"}),
    "bert": ("Bert", {}),
    "bert, three segments, relu": ("Bert", {"type_vocab_size": 3, "hidden_act": "relu"}),
    "bert, gelu_new": ("Bert", {"hidden_act": "gelu_new"}),
}
CLASSES = {
    "Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM", "Qwen2": "Qwen2ForCausalLM",
    "Qwen3": "Qwen3ForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertModel",
}  # fmt: skip


def build(family: str, options: dict, dtype: torch.dtype = torch.float32):
    """A transformers model with every parameter random, biases and norm gains too; eager attention."""
    sizes = {"GPT2": GPT2, "Bert": BERT}.get(family, LLAMA)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options}, attn_implementation="eager")
    model = getattr(transformers, CLASSES[family])(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0  # a norm's gain
            parameter.copy_(centre + 0.3 * noise)
    return model


def case(name: str, dtype: torch.dtype = torch.float32):
    return build(*CASES[name], dtype)


def left_padded(vocab: int = 37) -> Inputs:
    """Three sequences of 12, 9 and 5 real tokens, padded on the left."""
    tokens = torch.randint(0, vocab, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12)[None] >= torch.tensor([[0], [3], [7]])
    return Inputs(tokens, mask=mask)


def output(found):
    """Logits, or the last states of a model without a head."""
    return found.logits if "logits" in found else found.last_hidden_state


def theirs(model, inputs: Inputs, **options):
    """transformers' output, with the position ids that its own generate() gives padded prompts."""
    if inputs.segments is not None:
        options["token_type_ids"] = inputs.segments
    mask = torch.ones_like(inputs.tokens) if inputs.mask is None else inputs.mask.long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(input_ids=inputs.tokens, attention_mask=mask, position_ids=positions, **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_equal_transformers(name, padded):
    source, inputs = case(name), left_padded()
    inputs = inputs if padded else Inputs(inputs.tokens)
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    wanted = output(theirs(source, inputs))[real]
    assert wanted.std() > 0.5  # a comparison that can fail
    model = from_huggingface(source)
    assert not model.training and model.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model(inputs)[real], wanted, atol=1e-4, rtol=0)
        every = model(inputs, lambda site, value: value)  # attention, norms and heads spelled out
    torch.testing.assert_close(every[real], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_float64_is_exact(name, monkeypatch):
    """transformers computes norms, angles and softmax in float32 whatever the model's type; lifted to float64 here."""
    inputs = left_padded()
    with monkeypatch.context() as lifted:
        lifted.setattr(torch, "float32", torch.float64)
        lifted.setattr(torch, "float", torch.float64)
        source = case(name, torch.float64)
        wanted = output(theirs(source, inputs))[inputs.mask]
    with torch.no_grad():
        found = from_huggingface(source)(inputs)[inputs.mask]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["llama, llama3", "qwen3, windows, bias", "gpt2"])
def test_hidden_states_are_the_stream(name):
    source, inputs = case(name), left_padded()
    hidden = theirs(source, inputs, output_hidden_states=True).hidden_states
    read = run(from_huggingface(source), inputs, record=["resid_pre", "final"]).cache
    ours = [*(read[f"{layer}.resid_pre"] for layer in range(3)), read["final"]]
    assert len(hidden) == len(ours)
    for mine, given in zip(ours, hidden, strict=True):
        mine, given = mine[inputs.mask], given[inputs.mask]
        assert (mine - given).abs().max() < 1e-4 * given.abs().max()


@pytest.mark.parametrize("name", ["llama, llama3", "gpt2"])
def test_long_text(name):
    """The whole context window, where an error in the angles would have grown."""
    source = case(name)
    inputs = Inputs(torch.randint(0, 37, (1, 64), generator=torch.Generator().manual_seed(2)))
    with torch.no_grad():
        found = from_huggingface(source)(inputs)
    torch.testing.assert_close(found, output(theirs(source, inputs)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama, one head per key, tied", "llama, one key for all, biases", "gpt2"])
def test_the_given_model_is_left_alone(name):
    source, inputs = case(name).train(), left_padded()
    before = {key: value.clone() for key, value in source.state_dict().items()}
    addresses = {key: value.data_ptr() for key, value in source.state_dict().items()}
    config = copy.deepcopy(source.config.to_dict())
    model = from_huggingface(source)
    with torch.no_grad():
        model(inputs)
        for parameter in model.parameters():
            parameter.fill_(7.0)  # ours shares no memory with it
    after = source.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert {key: value.data_ptr() for key, value in after.items()} == addresses
    assert source.config.to_dict() == config and source.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in source.modules())


def test_dtype_is_the_sources_unless_given():
    source = case("llama", torch.bfloat16)
    assert from_huggingface(source).dtype == torch.bfloat16
    wide = from_huggingface(source, dtype=torch.float64)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.W_E, source.model.embed_tokens.weight.double())
    assert source.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama, one head per key, tied", "gpt2"])
def test_a_saved_folder_gives_the_same_model(name, tmp_path):
    source, inputs = case(name), left_padded()
    source.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path / "saved", str(tmp_path / "saved")):
        with torch.no_grad():
            assert torch.equal(from_huggingface(folder)(inputs), from_huggingface(source)(inputs))


FACTOR = {"rope_theta": 1e4, "factor": 2.0}
REFUSED = {
    "activation": ("Llama", {"hidden_act": "gelu"}, "LlamaForCausalLM with hidden_act='gelu' is not supported"),
    "yarn": ("Llama", {"rope_parameters": {**FACTOR, "rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
    "dynamic": ("Llama", {"rope_parameters": {**FACTOR, "rope_type": "dynamic"}}, "rope_type='dynamic'"),
    "bidirectional": ("Llama", {"is_causal": False}, "is_causal=False is not supported; allowed: True"),
    "mixed layers": ("Qwen2", {**WINDOWS, "max_window_layers": 1}, "layer_types .* not supported; allowed: the same"),
    "gpt2 activation": ("GPT2", {"activation_function": "silu"}, "='silu' is not supported; allowed: gelu_new"),
    "scale by layer": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    "unscaled": ("GPT2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    "cross-attention": ("GPT2", {"add_cross_attention": True}, "add_cross_attention=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_ours_cannot_express_is_refused_by_name(name):
    family, options, message = REFUSED[name]
    with pytest.raises(BridgeError, match=message):
        from_huggingface(build(family, options))


def test_partial_rotary_is_refused():
    source = case("llama")
    source.config.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(BridgeError, match=r"partial_rotary_factor=0\.5 is not supported; allowed: 1\.0"):
        from_huggingface(source)


MISFITS = {
    "T5ForConditionalGeneration": ("T5Config", "relative position bias"),
    "MixtralForCausalLM": ("MixtralConfig", "a mixture of experts"),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", "a mixture of experts"),
    "Gemma2ForCausalLM": ("Gemma2Config", "soft caps on logits"),
    "GemmaForCausalLM": ("GemmaConfig", "scaled embeddings and norms"),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", "parallel attention and FFN"),
    "GPTJForCausalLM": ("GPTJConfig", "parallel attention and FFN"),
    "FalconForCausalLM": ("FalconConfig", "parallel attention and FFN"),
    "PhiForCausalLM": ("PhiConfig", "parallel attention and FFN"),
    "BloomForCausalLM": ("BloomConfig", "ALiBi"),
    "GraniteForCausalLM": ("GraniteConfig", "multipliers on embeddings"),
    "MambaForCausalLM": ("MambaConfig", "state-space layers"),
    "BertForMaskedLM": ("BertConfig", "a prediction head with its own layer"),
    "LlamaModel": ("LlamaConfig", "no unembedding"),
    "OPTForCausalLM": ("OPTConfig", "no converter for model_type 'opt'"),
}


@pytest.mark.parametrize("architecture", MISFITS)
def test_other_architectures_are_refused_with_the_first_feature_that_does_not_fit(architecture):
    """The class's name and its default config are all that is asked; no weights are made."""
    config_class, feature = MISFITS[architecture]
    Model = type(architecture, (), {"config": getattr(transformers, config_class)()})
    words = rf"{architecture} is not supported; allowed: LlamaForCausalLM.*{feature}.*from_transformer_lens\(model\)"
    with pytest.raises(BridgeError, match=words):
        from_huggingface(Model())


def test_segments_reach_the_bert_body():
    source, inputs = case("bert, three segments, relu"), left_padded()
    inputs = dataclasses.replace(
        inputs, segments=torch.randint(0, 3, (3, 12), generator=torch.Generator().manual_seed(4))
    )
    with torch.no_grad():
        found = from_huggingface(source)(inputs)[inputs.mask]
    torch.testing.assert_close(found, output(theirs(source, inputs))[inputs.mask], atol=1e-4, rtol=0)
    assert (found - from_huggingface(source)(left_padded())[inputs.mask]).abs().max() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name):
    """to_huggingface inverts from_huggingface: same class, same weights, same config for every field that ours reads."""
    source, inputs = case(name), left_padded()
    ours = from_huggingface(source)
    seed = torch.random.get_rng_state()
    back = to_huggingface(ours)
    assert torch.equal(seed, torch.random.get_rng_state())
    assert isinstance(back, type(source)) or "Mistral" in CLASSES[CASES[name][0]]  # a Mistral without window is a Llama
    given = source.state_dict()
    assert all(torch.equal(value, given[key]) for key, value in back.state_dict().items())
    assert set(given) - set(back.state_dict()) <= {"pooler.dense.weight", "pooler.dense.bias"}
    assert from_huggingface(back).config == ours.config and not back.training
    back.set_attn_implementation("eager")
    torch.testing.assert_close(output(theirs(back, inputs)), output(theirs(source, inputs)), atol=1e-5, rtol=0)
    with torch.no_grad():
        next(back.parameters()).fill_(7.0)
    assert not torch.equal(next(ours.parameters()), next(back.parameters()))  # no shared memory


def test_a_saved_export_is_an_ordinary_transformers_folder(tmp_path):
    ours = from_huggingface(case("gpt2"), dtype=torch.float64)
    to_huggingface(ours).save_pretrained(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    with torch.no_grad():
        inputs = Inputs(left_padded().tokens)
        torch.testing.assert_close(output(theirs(again, inputs)), ours(inputs), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"window": 3}, r"the nearest, GPT2LMHeadModel, differs in window=3 \(it has None\)"),
        ({"kind": "prefix-decoder"}, "kind='prefix-decoder'"),
        ({"norm": "rmsnorm", "positions": "rotary", "ffn": "geglu", "bias": False}, "ffn='geglu'"),
        (
            {"kind": "encoder", "norm_position": "post", "embedding_norm": True, "head": False},
            r"BertModel, differs in n_segments=0 \(it has 1\)",
        ),
        ({"d_head": 5}, "d_head=5"),
    ],
)
def test_what_no_family_expresses_is_refused_by_field(choices, words):
    sizes = {"vocab": 11, "n_layers": 1, "n_heads": 2, "d_model": 8, "n_ctx": 8, "ffn": "gelu", "tied_embeddings": True}
    sizes |= {"tied_embeddings": choices.get("head", True)}
    with pytest.raises(BridgeError, match=words):
        to_huggingface(Transformer(ModelConfig(**{**sizes, **choices})))


def test_weights_that_do_not_match_the_config_are_refused():
    extra = case("llama")
    extra.model.layers[1].adapter = torch.nn.Linear(2, 2)
    with pytest.raises(BridgeError, match=r"weights that ours has no place for: .*layers\.1\.adapter"):
        from_huggingface(extra)

    missing = case("llama")
    missing.model.layers[1].self_attn.q_proj = torch.nn.Identity()
    with pytest.raises(BridgeError, match=r"lacks the weight 'model\.layers.1.self_attn.q_proj.weight'"):
        from_huggingface(missing)

    shape = case("gpt2")
    shape.transformer.h[1].ln_1.weight = torch.nn.Parameter(torch.ones(31))
    with pytest.raises(CheckpointError, match=r"blocks.1.norm1.weight has shape \(31,\), the config asks for \(32,\)"):
        from_huggingface(shape)

    untied = case("llama, one head per key, tied")
    untied.lm_head.weight = torch.nn.Parameter(torch.ones(37, 32))
    with pytest.raises(BridgeError, match=r"lm_head\.weight differs from the token embedding"):
        from_huggingface(untied)


def test_quantised_offloaded_and_broken_weights_are_refused():
    quantised = case("llama")
    integers = torch.ones(44, 32, dtype=torch.int8)
    quantised.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(integers, requires_grad=False)
    with pytest.raises(BridgeError, match=r"up_proj\.weight is of type torch.int8"):
        from_huggingface(quantised)
    with pytest.raises(BridgeError, match="on the meta device"):
        from_huggingface(case("llama").to("meta"))
    broken = case("llama")
    broken.model.norm.weight.data[0] = torch.nan
    with pytest.raises(CheckpointError, match=r"final_norm\.weight has 1 NaN or infinite entries"):
        from_huggingface(broken)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers, which is not installed: pip install 'interp\[hf\]'"):
        from_huggingface("anything")
    with pytest.raises(ImportError, match=r"pip install 'interp\[lens\]'"):
        optional("no_such_module", "lens")


def test_a_given_model_needs_no_network(monkeypatch):
    source = case("bert")

    def refuse(*_, **__):
        raise AssertionError("the network was used")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    assert to_huggingface(from_huggingface(source)).config.hidden_size == 32
