"""What the first thing is that our block cannot express of an architecture that no family covers."""

from __future__ import annotations

from typing import Any

PARALLEL = ("gptj", "gpt_neox", "phi", "falcon", "cohere", "cohere2", "codegen")
HEADLESS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GPT2Model")


def misfit(architecture: str, config: Any) -> str:
    """The first feature of an unsupported architecture that our block cannot express, as a phrase."""
    kind = str(getattr(config, "model_type", ""))

    def has(*names: str) -> bool:
        return any(getattr(config, name, None) not in (None, False, 0) for name in names)

    features = {
        "a prediction head with its own layer and norm (pass the body, model.bert)": architecture.startswith("BertFor"),
        "no unembedding (pass the causal language model that holds it)": architecture in HEADLESS,
        "relative position bias": has("relative_attention_num_buckets"),
        "a mixture of experts": has("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "state-space layers": has("state_size", "mamba_d_state", "ssm_state_size"),
        "soft caps on logits": has("final_logit_softcapping", "attn_logit_softcapping"),
        "parallel attention and FFN": has("use_parallel_residual", "parallel_attn") or kind in PARALLEL,
        "position bias instead of embeddings (ALiBi)": has("alibi") or kind in ("bloom", "mpt"),
        "scaled embeddings and norms with gain 1 + weight": kind.startswith("gemma"),
        "multipliers on embeddings, residuals or logits": has(
            "embedding_multiplier", "residual_multiplier", "logits_scaling"
        ),
    }
    return next((feature for feature, found in features.items() if found), f"no converter for model_type {kind!r}")
