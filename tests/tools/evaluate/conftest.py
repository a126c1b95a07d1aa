"""A tiny model in Hugging Face's format, with a tokenizer, and texts."""

import json

import pytest
from evaluations import SIZES, TEXTS
from flax import nnx
from small_tokenizers import byte_level

import jaxtp


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    jaxtp.save_hf(jaxtp.Decoder(jaxtp.ModelConfig(**SIZES, d_ff=16), rngs=nnx.Rngs(0)), folder)
    (folder / "tokenizer.json").write_bytes(byte_level())
    return folder


@pytest.fixture(scope="session")
def lines(tmp_path_factory):
    """The texts as JSONL."""
    path = tmp_path_factory.mktemp("texts") / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path
