"""A tiny model in Hugging Face's format, and a dataset of its tokens in several shards."""

import json

import pytest
from corpora import prepared
from evaluations import SIZES, TEXTS
from flax import nnx
from small_tokenizers import byte_level

import jaxtp


def save(folder, seed):
    """Saves a model."""
    jaxtp.save_hf(jaxtp.Decoder(jaxtp.ModelConfig(**SIZES, d_ff=16), rngs=nnx.Rngs(seed)), folder)
    (folder / "tokenizer.json").write_bytes(byte_level())
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The model."""
    return save(tmp_path_factory.mktemp("model") / "tiny", 0)


@pytest.fixture(scope="session")
def data(tmp_path_factory, model):
    """The folder of the dataset."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": text[: len(text) // 3], "completion": f"{text} {i}"} for i in range(4) for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = ["--prompt-field", "prompt", "--completion-field", "completion"]
    options = ["--tokenizer", model, "--no-eos", "--held-out", "0.2", "--shard-tokens", "1000"]
    return prepared(folder / "data", folder / "a.jsonl", *fields, *options).folder
