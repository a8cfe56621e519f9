"""One thread everywhere, small models to share, and the oracle's and the faults' counts at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import summary
import torch

from interp import ModelConfig, Transformer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    """Two layers, grouped keys and values, gated FFN, rotary: most options at once."""
    return ModelConfig(
        vocab=13,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_model=16,
        n_ctx=16,
        norm="rmsnorm",
        ffn="swiglu",
        positions="rotary",
    )


@pytest.fixture(scope="session")
def model(config) -> Iterator[Transformer]:
    """A random float64 model of `config`. Never trained or changed by a test: checked at the end."""
    model = Transformer(config, seed=1).double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), (
        "a test changed the shared model"
    )
    assert all(p.grad is None and p.requires_grad for p in model.parameters()), (
        "a test left gradients on the shared model"
    )


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """Three sequences of seven tokens."""
    return torch.randint(0, 13, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def shipped():
    """(model, task) that come with the package."""
    import interp

    return interp.shipped()


def pytest_sessionfinish(session) -> None:
    """A process of pytest-xdist hands its lines to the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["lines"] = summary.LINES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    summary.LINES.extend(getattr(node, "workeroutput", {}).get("lines", ()))


def pytest_terminal_summary(terminalreporter) -> None:
    for line in summary.LINES:
        terminalreporter.write_line(line)
