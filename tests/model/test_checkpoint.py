"""A saved model comes back bit for bit; a folder that is not a whole checkpoint is refused with one clear error."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from strategies import Case, random_model, small

from interp.model import CheckpointError, load, save
from interp.model.checkpoint import read_document

MODELS = {
    "textbook": small(),
    "gated, tied": small(ffn="swiglu", swish_beta="learned", tied_embeddings=True, norm="rmsnorm"),
    "rotary": small(positions="rotary", rotary_scaling={"type": "linear", "factor": 2.0}, n_kv_heads=1, bias=False),
    "everything": small(embedding_norm=True, n_segments=2, qk_norm=True, bias={"qkv", "unembed"}, window=3),
    "bare": small(norm="none", ffn="none", head=False, positions="none"),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint, to be damaged."""
    return save(random_model(small(), dtype=torch.float32), tmp_path / "model")


def rewrite(folder, change):
    """Apply `change` to the weights on disk."""
    weights = load_file(folder / "weights.safetensors")
    change(weights)
    save_file(weights, folder / "weights.safetensors")


def edit_json(folder, change):
    """Apply `change` to the JSON on disk."""
    document = json.loads((folder / "config.json").read_text())
    change(document)
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bitwise(name, dtype, tmp_path):
    model, inputs = Case(MODELS[name], dtype=dtype).build()
    again = load(save(model, tmp_path / "model"))
    assert again.config == model.config
    assert again.dtype == dtype
    weights, kept = model.state_dict(), again.state_dict()
    assert list(weights) == list(kept)
    assert all(torch.equal(weights[key], kept[key]) for key in weights)
    # Logits to rounding only: matrix products take other kernels where memory is aligned otherwise.
    close = {"rtol": 0.0, "atol": 0.2 if dtype == torch.bfloat16 else 1e-12 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(model(inputs), again(inputs), **close)


def test_a_loaded_model_owns_its_weights(folder):
    """Writing to it changes neither the file nor a second model loaded from it, and it trains."""
    before = (folder / "weights.safetensors").read_bytes()
    model, other = load(folder), load(folder)
    model(torch.arange(5)[None]).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.requires_grad
            parameter += 1.0
    assert (folder / "weights.safetensors").read_bytes() == before
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(load(folder).parameters(), other.parameters(), strict=True))


def test_saving_changes_nothing_and_keeps_extra(tmp_path):
    model = random_model(small(tied_embeddings=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    extra = {"task": "copy", "words": ["a", "b"]}
    folder = save(model, str(tmp_path / "deep" / "er" / "model"), extra)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert read_document(folder)["extra"] == extra
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "weights.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # no temporary folder is left


def test_loading_leaves_the_global_generator_alone(folder):
    state = torch.get_rng_state()
    load(folder)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_existing_folder_is_not_overwritten(folder):
    before = (folder / "weights.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="never overwritten"):
        save(random_model(small(), seed=5), folder)
    assert (folder / "weights.safetensors").read_bytes() == before


def test_a_failed_save_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        save(random_model(small()), tmp_path / "model", {"extra": object()})
    assert list(tmp_path.iterdir()) == []


def truncated(folder):
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_to_nothing(folder):
    (folder / "weights.safetensors").write_bytes(b"")


def pickled(folder):
    torch.save({"a": torch.zeros(2)}, folder / "weights.safetensors")


def no_weights(folder):
    (folder / "weights.safetensors").unlink()


def no_config(folder):
    (folder / "config.json").unlink()


def not_json(folder):
    (folder / "config.json").write_text("{")


def a_list(folder):
    (folder / "config.json").write_text("[]")


def of_transformers(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))


def newer_format(folder):
    edit_json(folder, lambda document: document.update(format="interp-99"))


def no_config_entry(folder):
    edit_json(folder, lambda document: document.pop("config"))


def unknown_field(folder):
    edit_json(folder, lambda document: document["config"].update(colour="red"))


def forbidden_value(folder):
    edit_json(folder, lambda document: document["config"].update(norm="batchnorm"))


def unknown_dtype(folder):
    edit_json(folder, lambda document: document.update(dtype="float99"))


def missing_key(folder):
    rewrite(folder, lambda weights: weights.pop("blocks.1.attention.qkv.weight"))


def extra_key(folder):
    rewrite(folder, lambda weights: weights.update(stranger=torch.zeros(2)))


def wrong_shape(folder):
    rewrite(folder, lambda weights: weights.update(W_pos=torch.zeros(3, 8)))


def config_of_another_size(folder):
    edit_json(folder, lambda document: document["config"].update(d_ff=9))


def nan_weights(folder):
    rewrite(folder, lambda weights: weights["blocks.0.ffn.up.weight"].view(-1)[:3].fill_(torch.nan))


def infinite_weights(folder):
    rewrite(folder, lambda weights: weights["embedding.weight"].view(-1)[:1].fill_(torch.inf))


DAMAGE = [
    (truncated, "truncated or not safetensors"),
    (cut_to_nothing, "truncated or not safetensors"),
    (pickled, "truncated or not safetensors"),
    (no_weights, "weights.safetensors is missing"),
    (no_config, "config.json is missing"),
    (not_json, "is not JSON"),
    (a_list, "format 'list'"),
    (of_transformers, "format None; allowed: 'interp-1'"),
    (newer_format, "format 'interp-99'"),
    (no_config_entry, "config"),
    (unknown_field, "colour"),
    (forbidden_value, "norm='batchnorm'"),
    (unknown_dtype, "float99"),
    (missing_key, "missing weights ['blocks.1.attention.qkv.weight']"),
    (extra_key, "unknown weights ['stranger']"),
    (wrong_shape, "W_pos has shape (3, 8), the config asks for (8, 8)"),
    (config_of_another_size, "blocks.0.ffn.down.weight has shape (8, 7), the config asks for (8, 9)"),
    (nan_weights, "blocks.0.ffn.up.weight has 3 NaN or infinite"),
    (infinite_weights, "embedding.weight has 1 NaN or infinite"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_checkpoint_is_refused(damage, said, folder):
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert said in str(caught.value)
    assert folder.name in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(tmp_path / "nowhere")
