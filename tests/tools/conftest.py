"""A tiny model in Hugging Face's format, with a tokenizer."""

import pytest
from evaluations import SIZES
from flax import nnx
from made_once import made_once
from small_tokenizers import byte_level

import jaxtp


def save_model(folder, seed, norm=1.0):
    """Saves a model, whose last norm has this scale, and its tokenizer in a new folder."""
    model = jaxtp.Decoder(jaxtp.ModelConfig(**SIZES, d_ff=16), rngs=nnx.Rngs(seed))
    model.norm.scale[...] = norm
    jaxtp.hf.save(model, folder, allow_non_finite=True)
    (folder / "tokenizer.json").write_bytes(byte_level())
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of the model."""
    return (
        made_once(tmp_path_factory, "tiny_model", lambda folder: save_model(folder / "m", 0)) / "m"
    )
