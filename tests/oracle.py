"""The textbook's equations in float64 NumPy, written to be checked by eye: one sequence, one token, one head at a time.

Shares no code with the package and imports neither it nor torch. Numbers in brackets are the book's equations.

config: a plain dict (`ModelConfig.to_dict()`; None for `attention_scale` or `final_norm` means the book's default).
weights: a dict of arrays indexed as researchers index them, None where absent:
  W_E [vocab d_model], W_pos [n_ctx d_model], W_segment [n_segments d_model], W_U [d_model vocab], b_U [vocab],
  embedding_norm, final_norm: {"weight", "bias"} [d_model],
  layers: a list of dicts W_Q [head d_model d_head], W_K W_V [kv_head …], W_O [head d_head d_model], b_Q b_K b_V
  [head d_head], b_O [d_model], q_norm k_norm [d_head], norm1 norm2 {"weight", "bias"}, W_in W_gate [d_model d_ff],
  W_out [d_ff d_model], b_in b_gate [d_ff], b_out [d_model], beta (a number).
An encoder-decoder's weights above are its decoder's, whose layers also have cross_norm {"weight", "bias"} and cross, a
dict of its own W_Q … b_O; and there is encoder: a dict of embedding_norm, final_norm and layers.
"""

import math

import numpy as np


def forward(config, weights, tokens, mask=None, prefix_length=None, segments=None, source=None, source_mask=None):
    """Every site of the model, in the order in which the book reaches it: text ("0.norm1_scale") -> [batch …]."""
    sequences = []
    for b in range(len(tokens)):
        real = [True] * len(tokens[b]) if mask is None else [bool(m) for m in mask[b]]
        if config["kind"] == "encoder-decoder":
            source_real = [True] * len(source[b]) if source_mask is None else [bool(m) for m in source_mask[b]]
            sequences.append(two_stacks(config, weights, tokens[b], real, source[b], source_real))
            continue
        prefix = 0 if prefix_length is None else int(prefix_length[b])
        segment = [0] * len(tokens[b]) if segments is None else segments[b]
        sequences.append(one_stack(config, weights, tokens[b], real, prefix, segment))
    return {site: np.stack([values[site] for values in sequences]) for site in sequences[0]}


def two_stacks(config, weights, tokens, real, source, source_real):
    """The encoder reads the whole source; every decoder layer then reads what the encoder's end says of it."""
    encoder_config = {**config, "kind": "encoder", "head": False}
    encoder = one_stack(encoder_config, {**weights, **weights["encoder"]}, source, source_real)
    if "final" not in encoder:  # without a final norm, the stream that leaves the last block
        encoder["final"] = list(encoder.values())[-1]
    decoder = one_stack(config, weights, tokens, real, memory=(encoder["final"], source_real))
    sites = {f"encoder.{name}": value for name, value in encoder.items()}
    sites.update({f"decoder.{name}": value for name, value in decoder.items()})
    return sites


def one_stack(config, weights, tokens, real, prefix=0, segment=None, memory=None):
    """One sequence: real says which positions are tokens, the others are padding. memory: what cross-attention reads."""
    sites = {}
    ids = position_ids(real)
    x = sites["embed"] = np.array([weights["W_E"][token] for token in tokens])
    if config["positions"] == "learned":
        sites["pos_embed"] = np.array([weights["W_pos"][p] for p in ids])
        x = x + sites["pos_embed"]
    if config["positions"] == "sinusoidal":
        sites["pos_embed"] = np.array([sinusoid(p, config["d_model"]) for p in ids])
        x = x + sites["pos_embed"]
    if config["n_segments"]:
        x = x + np.array([weights["W_segment"][g] for g in segment])
    if config["embedding_norm"]:
        x = np.array([norm(config, weights["embedding_norm"], x_i)[2] for x_i in x])

    edges = admitted_edges(config, real, ids, prefix)
    for layer, w in enumerate(weights["layers"]):
        block = post_norm_block if config["norm_position"] == "post" else pre_norm_block
        inner = {}
        x = block(config, w, x, ids, edges, memory, inner)
        sites.update({f"{layer}.{name}": value for name, value in inner.items()})

    final = config["norm_position"] == "pre" and config["norm"] != "none"
    if final if config["final_norm"] is None else config["final_norm"]:
        x = normed(config, weights["final_norm"], x, "final", sites)
    if config["head"]:
        W_U = weights["W_E"].T if config["tied_embeddings"] else weights["W_U"]
        sites["logits"] = np.array([linear(x_i, W_U, weights["b_U"]) for x_i in x])
    return sites


def pre_norm_block(config, w, x, ids, edges, memory, sites):
    """7.27-7.32: x + Sublayer(LayerNorm(x)); a decoder that has an encoder reads it between attention and FFN."""
    sites["resid_pre"] = x
    t1 = normed(config, w["norm1"], x, "norm1", sites)  # 7.27
    t2 = sites["attn_out"] = attention(config, w, t1, ids, edges, sites)  # 7.28
    t3, name = t2 + x, "resid_mid"  # 7.29
    if memory is not None:
        sites["resid_mid"] = t3
        t = normed(config, w["cross_norm"], t3, "cross_norm", sites)
        read = sites["cross_out"] = cross_attention(config, w["cross"], t, memory, sites)
        t3, name = read + t3, "resid_cross"
    if config["ffn"] == "none":
        sites["resid_post"] = t3
        return t3
    sites[name] = t3
    t4 = normed(config, w["norm2"], t3, "norm2", sites)  # 7.30
    t5 = sites["ffn_out"] = feed_forward(config, w, t4, sites)  # 7.31
    h = sites["resid_post"] = t5 + t3  # 7.32
    return h


def post_norm_block(config, w, x, ids, edges, memory, sites):
    """LayerNorm(x + Sublayer(x)): the original transformer; each sublayer is followed by its own norm."""
    sites["resid_pre"] = x
    last = "attention" if memory is None else "cross-attention"
    last = last if config["ffn"] == "none" else "FFN"  # the last norm's output is the block's

    def add_and_norm(sublayer, x, out, norm_name, name):
        name = "resid_post" if sublayer == last else name
        sites[f"{name}_sum"] = out + x
        return normed(config, w[norm_name], out + x, norm_name, sites, name)

    t2 = sites["attn_out"] = attention(config, w, x, ids, edges, sites)
    x = add_and_norm("attention", x, t2, "norm1", "resid_mid")
    if memory is not None:
        read = sites["cross_out"] = cross_attention(config, w["cross"], x, memory, sites)
        x = add_and_norm("cross-attention", x, read, "cross_norm", "resid_cross")
    if config["ffn"] != "none":
        t5 = sites["ffn_out"] = feed_forward(config, w, x, sites)
        x = add_and_norm("FFN", x, t5, "norm2", "resid_post")
    return x


# Norms


def norm(config, w, x):
    """(σ, x̂, output) of one token's vector."""
    d, epsilon = len(x), config["norm_eps"]
    if config["norm"] == "none":
        return None, None, x
    if config["norm"] == "layernorm":
        mu = sum(x) / d  # 7.23
        sigma = math.sqrt(sum((x_j - mu) ** 2 for x_j in x) / d + epsilon)  # 7.24, ε inside the root
        x_hat = (x - mu) / sigma  # 7.25
        return sigma, x_hat, w["weight"] * x_hat + w["bias"]  # 7.26
    rms = math.sqrt(sum(x_j**2 for x_j in x) / d + epsilon)
    return rms, x / rms, w["weight"] * (x / rms)


def normed(config, w, x, name, sites, output=None):
    """The norm of every position's vector, its inner values told under `name`, its output under `output` or `name`."""
    rows = [norm(config, w, x_i) for x_i in x]
    if config["norm"] != "none":
        sites[f"{name}_scale"] = np.array([[sigma] for sigma, _, _ in rows])
        sites[f"{name}_hat"] = np.array([x_hat for _, x_hat, _ in rows])
    sites[output or name] = np.array([out for _, _, out in rows])
    return sites[output or name]


def rms_only(x, gain, epsilon):
    """RMSNorm of one head's query or key."""
    return gain * x / math.sqrt(sum(x_j**2 for x_j in x) / len(x) + epsilon)


# Positions


def position_ids(real):
    """A token's position = how many tokens stand before it; padding takes the last token's position (0 at first)."""
    return [max(sum(real[: i + 1]) - 1, 0) for i in range(len(real))]


def sinusoid(p, d):
    """PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos(p / 10000^(2i/d)) (Vaswani 2017, section 3.5)."""
    row = np.zeros(d)
    for i in range(d // 2):
        row[2 * i] = math.sin(p / 10000 ** (2 * i / d))
        row[2 * i + 1] = math.cos(p / 10000 ** (2 * i / d))
    return row


def rotary_frequency(config, i, n):
    """Radians per position of pair i among the n rotated entries (Su 2021), as Llama 3.1 scales long wavelengths."""
    theta = config["rotary_base"] ** (-2 * i / n)
    scaling = config["rotary_scaling"]
    if scaling is None:
        return theta
    if scaling["type"] == "linear":
        return theta / scaling["factor"]
    wavelength = 2 * math.pi / theta
    low, high, context = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_n_ctx"]
    if wavelength > context / low:
        return theta / scaling["factor"]
    if wavelength < context / high:
        return theta
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * theta / scaling["factor"] + smooth * theta


def rotate(config, x, p):
    """Turn each pair (x_i, x_{i + n/2}) of one head's vector by p θ_i; entries from n on stay."""
    n = round(config["rotary_fraction"] * len(x))
    out = x.copy()
    for i in range(n // 2):
        angle = p * rotary_frequency(config, i, n)
        out[i] = x[i] * math.cos(angle) - x[i + n // 2] * math.sin(angle)
        out[i + n // 2] = x[i] * math.sin(angle) + x[i + n // 2] * math.cos(angle)
    return out


# Attention


def admitted_edges(config, real, ids, prefix):
    """edges[i][j]: may position i read position j of its own stack?"""
    n = len(real)
    edges = np.zeros((n, n), dtype=bool)
    for i in range(n):
        for j in range(n):
            if config["kind"] == "encoder":
                sees = True
            else:
                sees = j <= i
            if config["window"] is not None and abs(ids[i] - ids[j]) >= config["window"]:
                sees = False
            if config["kind"] == "prefix-decoder" and ids[j] < prefix:
                sees = True
            edges[i, j] = sees and real[j]
    return edges


def attention(config, w, t1, ids, edges, sites):
    """softmax(q·k scale) v of each head, then each head's W_O, summed (7.28)."""
    q = sites["q"] = heads(t1, w["W_Q"], w["b_Q"])
    k = sites["k"] = heads(t1, w["W_K"], w["b_K"])
    v = sites["v"] = heads(t1, w["W_V"], w["b_V"])
    if config["positions"] == "rotary" or config["qk_norm"]:
        q = sites["q_rot"] = into_scores(config, q, w["q_norm"], ids)
        k = sites["k_rot"] = into_scores(config, k, w["k_norm"], ids)
    return attend(config, w, q, k, v, edges, sites, "")


def cross_attention(config, w, t, memory, sites):
    """Queries from the decoder, keys and values from the encoder's last states, whose every real position is read."""
    states, source_real = memory
    q = sites["cross_q"] = heads(t, w["W_Q"], w["b_Q"])
    k = sites["cross_k"] = heads(states, w["W_K"], w["b_K"])
    v = sites["cross_v"] = heads(states, w["W_V"], w["b_V"])
    edges = np.array([source_real for _ in t])
    return attend(config, w, q, k, v, edges, sites, "cross_")


def heads(x, W, b):
    """Each position's vector by each head's matrix: [pos head d_head]."""
    return np.array([[linear(x_i, W[h], None if b is None else b[h]) for h in range(len(W))] for x_i in x])


def attend(config, w, q, k, v, edges, sites, prefix):
    """What query i makes of the keys j that it may read, head by head; its inner values told under prefix + name."""
    n_query, n_heads, d_head = q.shape
    n_key, n_kv = k.shape[:2]
    d_model, group = w["W_O"].shape[2], n_heads // n_kv  # `group` query heads share one key-value head
    scale = 1 / math.sqrt(d_head) if config["attention_scale"] is None else config["attention_scale"]
    scores, pattern = np.full((n_heads, n_query, n_key), -np.inf), np.zeros((n_heads, n_query, n_key))
    z, head_out = np.zeros((n_query, n_heads, d_head)), np.zeros((n_query, n_heads, d_model))
    for h in range(n_heads):
        for i in range(n_query):
            for j in range(n_key):
                if edges[i, j]:
                    scores[h, i, j] = np.dot(q[i, h], k[j, h // group]) * scale
            pattern[h, i] = softmax(scores[h, i])
            for j in range(n_key):
                z[i, h] += pattern[h, i, j] * v[j, h // group]
            head_out[i, h] = z[i, h] @ w["W_O"][h]
    named = {"scores": scores, "pattern": pattern, "z": z, "head_out": head_out}
    sites.update({prefix + name: value for name, value in named.items()})
    b_O = np.zeros(d_model) if w["b_O"] is None else w["b_O"]
    return np.array([sum(head_out[i, h] for h in range(n_heads)) + b_O for i in range(n_query)])


def into_scores(config, x, gain, ids):
    """q or k as it enters the scores: normed per head, then rotated by its position."""
    out = np.zeros_like(x)
    for i in range(x.shape[0]):
        for h in range(x.shape[1]):
            row = rms_only(x[i, h], gain, config["norm_eps"]) if config["qk_norm"] else x[i, h]
            out[i, h] = rotate(config, row, ids[i]) if config["positions"] == "rotary" else row
    return out


def softmax(scores):
    """exp(s_j) / Σ exp(s); a row without any edge attends to nothing."""
    if np.all(scores == -np.inf):
        return np.zeros_like(scores)
    powers = np.exp(scores - np.max(scores))
    return powers / np.sum(powers)


# Feed-forward


def swish(x, beta):
    """x σ(βx) (7.21)."""
    return x / (1 + math.exp(-beta * x)) if beta * x > -700 else 0.0  # where exp would overflow, σ < 1e-304


def gelu(x):
    """x Φ(x), Φ the standard normal's distribution function."""
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    """GPT-2's approximation of `gelu` (Hendrycks & Gimpel 2016)."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x):
    """max(x, 0)."""
    return max(x, 0.0)


def feed_forward(config, w, t4, sites):
    """Plain: act(x W1 + b1) W2 + b2. Gated: (act(x W1 + b1) ⊗ (x W2 + b2)) W3 + b3 (7.22)."""
    activation = {
        "relu": relu,
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "swish": lambda x: swish(x, w["beta"]),
        "swiglu": lambda x: swish(x, w["beta"]),
        "geglu": gelu,
        "reglu": relu,
        "bilinear": lambda x: x,
    }[config["ffn"]]
    gated = config["ffn"] in ("swiglu", "geglu", "reglu", "bilinear")
    W1, b1 = (w["W_gate"], w["b_gate"]) if gated else (w["W_in"], w["b_in"])
    sites["ffn_pre"] = np.array([linear(x, W1, b1) for x in t4])
    act = np.array([[activation(entry) for entry in row] for row in sites["ffn_pre"]])
    if gated:
        sites["ffn_up"] = np.array([linear(x, w["W_in"], w["b_in"]) for x in t4])
        act = act * sites["ffn_up"]
    sites["ffn_act"] = act
    return np.array([linear(m, w["W_out"], w["b_out"]) for m in act])


def linear(x, W, b):
    """x W + b."""
    return x @ W if b is None else x @ W + b
