"""Texts for evaluation: in several scripts, with one token, and longer than a window."""

TEXTS = [
    "Grüße",
    "naïve café — two  spaces\n",
    "x",
    *("the lazy dog, " * n + "ran" for n in (1, 3, 9, 20)),
]

SIZES = {
    "vocab_size": 300,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}
