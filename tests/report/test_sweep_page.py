"""`interp sweep` from options to a folder: the numbers are patch_sweep's, a stopped one goes on, the impossible is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from interp import ModelConfig, Transformer, ablation_sweep, cli, logit_difference, patch_sweep, save
from interp.bridges.packages import cache_folder
from interp.report import sweep as module
from interp.report import sweep_inputs as inputs_module
from interp.report.sweep import Asked, prepare
from interp.report.sweep_figures import figures
from interp.report.sweep_inputs import open_model, task_pairs
from interp.report.sweep_page import peak
from interp.sweep import SweepInterrupted
from interp.sweep.execute import Job
from interp.tasks import Dyck, Induction, Rewriting

TYPED = {"clean": "we know Lalo Mundal by job", "corrupted": "we know Malo Mundal by job", "correct": "brewer",
         "wrong": "pilot"}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(shipped, monkeypatch):
    """The shipped task tokenizes its prompts once, not in every test."""
    monkeypatch.setattr(inputs_module, "shipped", lambda: shipped)


def run(folder, **options):
    return prepare(Asked(model=options.pop("model", "shipped"), folder=folder, **options)).run(progress=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of random models: without a task, and as `interp train` leaves one."""
    base = tmp_path_factory.mktemp("models")
    config = ModelConfig(vocab=13, n_layers=3, n_heads=2, d_model=16, n_ctx=8)
    save(Transformer(config, seed=0), base / "plain")
    for task in (Induction(), Rewriting("copy"), Dyck()):
        model = Transformer(task.model_config(), seed=0)
        save(model, base / task.name / "model", extra={"task": dataclasses.asdict(task)})
        (base / task.name / "config.json").write_text("{}")
    return base


def expected(direction):
    opened = open_model("shipped")
    pairs = task_pairs(opened, 12, ())
    metric = logit_difference(pairs.correct, pairs.wrong)
    return patch_sweep(opened.model, pairs.clean, pairs.corrupted, metric, ["z"], ("layer", "role"), direction)


def test_the_folder_holds_the_sweeps_numbers_figures_and_page(tmp_path):
    page = run(tmp_path, pairs=12, sites=("z",), direction="both")
    table, values = pd.read_csv(tmp_path / "effect.csv"), load_file(tmp_path / "values.safetensors")
    assert list(table) == ["direction", "site", "layer", "role", "effect", "n"] and (table["n"] == 12).all()
    for direction, rows in table.groupby("direction", sort=False):
        wanted = expected(direction)
        assert np.array_equal(rows["effect"].to_numpy(np.float32), wanted.effect()["z"].flatten().numpy())
        assert torch.equal(values[f"{direction}.z"], wanted.values["z"]) and torch.equal(values["clean"], wanted.clean)
    tidy = pd.read_parquet(tmp_path / "sweep.parquet")
    assert len(tidy) == 2 * values["noising.z"].numel() and set(tidy["direction"]) == {"denoising", "noising"}
    assert len(pd.read_csv(tmp_path / "prompts.csv")) == 12
    assert json.loads((tmp_path / "settings.json").read_text())["by"] == ["layer", "role"]
    left = {path.name for path in tmp_path.iterdir()} - {"figures"}
    assert left == {"effect.csv", "sweep.parquet", "values.safetensors", "prompts.csv", "settings.json", "index.html",
                    "provenance.json"}  # fmt: skip
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"denoising_role.png", "noising_role.png"}
    text = page.read_text()
    assert text.count("data:image/png") == 2 and "largest difference of 2 checked cells from a full run: " in text
    best = table[table["direction"] == "denoising"]["effect"].abs().max()
    assert f"{best:.3g}" in text and ">nan<" not in text.lower() and "-nan " not in text


def test_an_interrupted_sweep_goes_on_and_a_finished_one_is_never_overwritten(tmp_path, monkeypatch):
    original, calls = Job._run, []

    def stops(self, cells, touched):
        calls.append(len(cells))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, cells, touched)

    options = {"pairs": 12, "sites": ("z",), "by": ("layer", "role"), "engine": "reference"}
    monkeypatch.setattr(Job, "_run", stops)
    with pytest.raises(SweepInterrupted):
        run(tmp_path / "a", **options)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "settings.json",
        "checkpoint-denoising.safetensors",
    }
    with pytest.raises(module.SweepFolderError, match=r"direction: 'denoising' there, 'noising' asked for"):
        run(tmp_path / "a", direction="noising", **options)
    assert "going on" in prepare(Asked(model="shipped", folder=tmp_path / "a", **options)).words[-1]
    monkeypatch.setattr(Job, "_run", original)
    run(tmp_path / "a", **options)
    run(tmp_path / "b", **options)
    assert (tmp_path / "a" / "effect.csv").read_text() == (tmp_path / "b" / "effect.csv").read_text()
    assert calls[0] == 1 and "tokens × blocks" in (tmp_path / "a" / "index.html").read_text()
    with pytest.raises(FileExistsError, match="never overwritten"):
        run(tmp_path / "a", **options)


def test_typed_prompts_and_ablations(tmp_path, saved):
    ready = prepare(Asked(model="shipped", folder=tmp_path / "a", **TYPED))
    assert ready.settings["by"] == ("layer", "position") and "18 cells" not in ready.words[1]
    assert ready.opened.text(ready.pairs.clean, 0) == TYPED["clean"]
    ids = {"clean": "1 2 3", "correct": "4", "wrong": "5"}
    page = run(tmp_path / "b", model=str(saved / "plain"), ablate="zero", sites=("attn_out+ffn_out",), **ids)
    model = open_model(str(saved / "plain")).model
    wanted = ablation_sweep(model, torch.tensor([[1, 2, 3]]), logit_difference(4, 5), "zero", [("attn_out", "ffn_out")])
    table = pd.read_csv(tmp_path / "b" / "effect.csv")
    assert set(table["direction"]) == {"ablation (zero)"} and len(table) == 9
    got = table["effect"].to_numpy(np.float32)
    assert np.array_equal(got, wanted.effect()["attn_out+ffn_out"].flatten().numpy())
    assert "corrupted" not in page.read_text().split("How this page")[0].split("base64")[0].replace("prompts.csv", "")


@pytest.mark.parametrize(
    ("options", "figure"),
    [
        ({"by": ("layer", "head"), "sites": ("z",)}, "z_heads"),
        ({"by": ("layer", "head", "position"), "sites": ("z",)}, "z_heads"),
        ({"by": ("window", "head", "role"), "sites": ("z",), "window": 3}, "z_heads"),
        ({"by": ("layer", "neuron"), "sites": ("ffn_act",)}, "histogram"),
        ({"by": ("window",), "sites": ("attn_out",), "ablate": "mean"}, "window"),
        ({"model": "induction", "pairs": 3}, "role"),
        ({"model": "dyck", "pairs": 3, "by": ("layer", "position")}, "position"),
        ({"model": "copy", "pairs": 3}, "source_role"),
    ],
)
def test_every_kind_of_axes_has_a_figure(tmp_path, saved, options, figure):
    options = {"pairs": 8, "model": "shipped", **options}
    if options["model"] != "shipped":
        options["model"] = str(saved / options["model"])
    ready = prepare(Asked(folder=tmp_path / "new", **options))
    [result] = ready.run_all(progress=False).values()
    table = result.effect_table()
    shown = {name: (drawn, caption) for name, drawn, caption, _ in figures(result, table, ready.opened, ready.pairs)}
    drawn, caption = shown[figure]
    assert "prompt" in caption and all(ax.get_ylabel() for ax in drawn.axes[:1]) and np.isfinite(table["effect"]).all()
    said = " ".join([caption, *(ax.get_title() for ax in drawn.axes)])
    assert ("largest" in said) == ("position" in ready.settings["by"] and "head" in ready.settings["by"])


def test_a_peak_is_chosen_on_half_the_prompts_and_estimated_on_the_others():
    wanted = expected("denoising")
    place, effect, n = peak(wanted, "z")
    values, clean, corrupted = wanted.values["z"], wanted.clean, wanted.corrupted
    even = (values[..., ::2] - corrupted[::2]).mean(-1) / (clean[::2] - corrupted[::2]).mean()
    layer, role = divmod(int(even.abs().argmax()), values.shape[1])
    odd = (values[layer, role, 1::2] - corrupted[1::2]).mean() / (clean[1::2] - corrupted[1::2]).mean()
    assert n == 6 and np.isclose(effect, float(odd))
    assert place == f"layer {layer}, role {wanted.coordinates['z'][1][role]}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt9"}, "model 'gpt9' is not allowed; allowed: 'shipped', 'smollm2', or a folder"),
        ({**TYPED, "corrupted": "we know Malo"}, r"--clean has 6 tokens \(we \| know .* and --corrupted 3 .*equal length"),
        ({**TYPED, "corrupted": TYPED["clean"]}, "is the clean prompt"),
        ({**TYPED, "corrupted": "we know Bert Mundal by job"}, "--corrupted 'we know Bert.* 'Bert' is not in the vocabulary"),
        ({**TYPED, "correct": "brewer pilot"}, r"--correct 'brewer pilot' is 2 tokens \(brewer \| pilot\); .*single"),
        ({**TYPED, "wrong": "brewer"}, "the same token"),
        ({**TYPED, "wrong": ""}, "--wrong missing"),
        ({**TYPED, "pairs": 4}, "--pairs 4 is not allowed with --clean"),
        ({**TYPED, "ablate": "zero"}, "--corrupted .* is not allowed with --ablate zero"),
        ({**TYPED, "ablate": "mean", "corrupted": ""}, "--ablate mean of one prompt"),
        ({"ablate": "zero", "direction": "both"}, "--direction both is not allowed with --ablate zero"),
        ({"pairs": 99_999}, r"--pairs 99999 is not allowed; allowed: 1 … 2048"),
        ({"check": -1}, "--check -1 is not allowed"),
        ({"budget": 1e-6}, "budget=1,000 bytes is less"),
        ({"by": ("layer", "nonsense")}, "nonsense.*allowed: different ones of layer"),
        ({"window": 3}, "needs 'window' in by="),
        ({"device": "abacus"}, "device 'abacus' cannot be used; allowed: 'auto', 'cpu'"),
    ],
)  # fmt: skip
def test_what_cannot_be_swept_is_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        prepare(Asked(**{"model": "shipped", "folder": tmp_path / "new", **options}))
    assert not (tmp_path / "new").exists()


def test_folders_that_are_no_model_or_no_sweep_are_refused(tmp_path, saved):
    (tmp_path / "state.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="training that has not finished"):
        open_model(str(tmp_path))
    with pytest.raises(module.SweepFolderError, match="not empty and holds no sweep"):
        prepare(Asked(model="shipped", pairs=2, folder=tmp_path))
    with pytest.raises(ValueError, match=r"names no task .*token ids 0 … 12"):
        prepare(Asked(model=str(saved / "plain"), folder=tmp_path / "x"))
    with pytest.raises(ValueError, match="--clean is not allowed for an encoder-decoder"):
        prepare(Asked(model=str(saved / "copy"), folder=tmp_path / "x", **TYPED))
    ids = {"clean": "1 2", "corrupted": "1 13", "correct": "4", "wrong": "5"}
    with pytest.raises(ValueError, match=r"--corrupted '1 13' is not allowed; allowed: token ids 0 … 12"):
        prepare(Asked(model=str(saved / "plain"), folder=tmp_path / "x", **ids))


def test_the_command_line_passes_every_option():
    fields = {field.name for field in dataclasses.fields(cli.Sweep)}
    assert fields - {"dry_run"} == {field.name for field in dataclasses.fields(Asked)}
    asked, command = Asked(model="shipped"), cli.Sweep("shipped")
    assert all(getattr(asked, name) == getattr(command, name) for name in fields - {"dry_run"})


@pytest.mark.slow
def test_smollm2_from_text(tmp_path):
    if not cache_folder().is_dir():
        pytest.skip("the weights are not in the cache")
    words = {"clean": "The capital of France is", "corrupted": "The capital of Italy is", "correct": " Paris"}
    with pytest.raises(ValueError, match=r"--wrong 'Naples' is \d tokens .* such as ' Naples' with its leading space"):
        prepare(Asked(model="smollm2", folder=tmp_path / "a", wrong="Naples", **words))
    run(tmp_path / "a", model="smollm2", wrong=" Rome", by=("window", "position"), window=5, **words)
    table = pd.read_csv(tmp_path / "a" / "effect.csv")
    assert len(table) == 3 * 30 * 6 and table["clipped"].sum() == 3 * 4 * 6
    assert table.loc[table["position"] < 4, "effect"].eq(0).all() and table["effect"].max() > 0.9
    ready = prepare(Asked(model="smollm2", folder=tmp_path / "b", pairs=2, sites=("z",)))
    assert ready.settings["by"] == ("layer", "role") and "<|endoftext|>" in ready.words[1]
