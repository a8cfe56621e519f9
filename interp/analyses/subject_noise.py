"""Gaussian noise on the subject's embeddings, causal tracing's published corruption (Meng et al. 2022), and its scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from interp.analyses.joint_metric import TraceError
from interp.hookable import Hookable
from interp.model.inputs import Inputs
from interp.run import prepare, run
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs


def noise_scale(model: Hookable, prompts: Prompts | Pairs | Inputs) -> float:
    """σ: the standard deviation over ALL entries (tokens × dimensions) of the embedding output at the prompts' subject tokens.

    As published; the official code embeds each subject by itself, which is the same where its tokens are.
    """
    inputs = (
        prompts if isinstance(prompts, Inputs) else prompts.inputs if isinstance(prompts, Prompts) else prompts.clean
    )
    inputs = prepare(model, inputs)
    found = []
    for start in range(0, inputs.batch, 32):
        part = inputs.select(slice(start, start + 32))
        found.append(run(model, part, record="embed").cache["embed"][subject_mask(part)])
    return float(torch.cat(found).double().std())


def subject_mask(inputs: Inputs) -> Tensor:
    """Which tokens are the subject's [batch pos] bool, from its first to its last. Raises TraceError without these roles."""
    for role in ("subject", "subject_last"):
        if role not in inputs.roles:
            raise TraceError(f"the prompts have no role {role!r}; they have {', '.join(inputs.roles) or 'none'}")
    at = torch.arange(inputs.length, device=inputs.tokens.device)[None]
    return (at >= inputs.roles["subject"][:, None]) & (at <= inputs.roles["subject_last"][:, None])


def subject_noise(inputs: Inputs, draws: Sequence[int], width: int, seed: int, code: bool = False) -> Tensor:
    """Standard normal noise at the subject's tokens, 0 elsewhere: float64 [batch · draw, pos, width], draws of a prompt in a row.

    The same for a prompt whatever it is traced with. code: the numbers of the official code, the same draws for every prompt.
    """
    mask = subject_mask(inputs).cpu()
    found = torch.zeros(inputs.batch, len(draws), inputs.length, width, dtype=torch.float64)
    for i in range(inputs.batch):
        n = int(mask[i].sum())
        if code:
            drawn = np.random.RandomState(1).randn(len(draws), n, width)
        else:
            tokens = inputs.tokens[i].tolist()
            drawn = np.stack(
                [np.random.default_rng([seed, draw, *tokens]).standard_normal((n, width)) for draw in draws]
            )
        found[i][:, mask[i]] = torch.from_numpy(drawn)
    return found.flatten(0, 1)
