"""Texts that are measured: of several scripts, of one token, and longer than a window."""

TEXTS = ["Grüße", "naïve café — two  spaces\n", "x", *("the lazy dog, " * n + "ran" for n in (1, 3, 9, 20))]
