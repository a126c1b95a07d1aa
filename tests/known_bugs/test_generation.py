"""Texts that other systems generated otherwise in a batch than alone: each is held against that of
its prompt.

One generator makes them all, three rows at a time.
"""

from dataclasses import replace
from functools import cache

import jax
import pytest
import reference
from small_generators import SmallDecoder, greedy_ids
from variants import small_model

import jaxtp

pytestmark = pytest.mark.wide

CONFIG = small_model(
    vocab_size=259, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16, rope_theta=10.0
)
PROMPTS = ["a", "tensor", "a prompt that is longer"]
GREEDY = jaxtp.generate.Settings(max_tokens=8)
SAMPLED = replace(GREEDY, temperature=1.5, seed=7)


SMALL = SmallDecoder(CONFIG, scale=0.3)


@cache
def generator():
    return SMALL.generator(batch_size=3)


def texts(prompts, settings):
    return [result.ids for result in generator().generate(prompts, settings)]


def test_unsloth_3699_positions_are_those_in_the_row():
    """https://github.com/unslothai/unsloth/issues/3699: with a cache, prompts that were padded on
    the left to the longest had its positions, and their texts were garbage. Here each text is what
    the plain model says after its prompt.
    """
    logits = jax.jit(lambda ids: reference.decoder_logits(SMALL.weights, CONFIG, ids[None])[0])
    for prompt, found in zip(PROMPTS, texts(PROMPTS, GREEDY), strict=True):
        assert found == greedy_ids(logits, prompt.encode(), GREEDY.max_tokens, 32)


def test_transformers_30670_a_text_does_not_depend_on_the_others():
    """https://github.com/huggingface/transformers/issues/30670: with a static cache the text of a
    prompt was another one beside other prompts. Here it is the same beside any, in any order, and
    in a row that another text had before.
    """
    together = texts(PROMPTS, GREEDY)
    assert len(set(together)) == len(PROMPTS)
    for prompt, found in zip(PROMPTS, together, strict=True):
        assert texts([prompt] * 3, GREEDY) == [found] * 3
    assert texts([*PROMPTS[::-1], *PROMPTS], GREEDY) == [*together[::-1], *together]


def test_vllm_51226_a_seed_holds_whatever_else_is_in_the_batch():
    """https://github.com/vllm-project/vllm/issues/51226: the seed of a request did nothing where
    another request in the batch had none. Here a row's random numbers follow from its own seed and
    length.
    """
    found = texts([PROMPTS[1]] * 3, SAMPLED)
    assert len(set(found)) == 3, "the next prompt has the next seed"
    assert texts([PROMPTS[1], PROMPTS[0], PROMPTS[2]], SAMPLED)[0] == found[0]
    assert texts([PROMPTS[2], PROMPTS[1], PROMPTS[0]], SAMPLED)[1] == found[1]
