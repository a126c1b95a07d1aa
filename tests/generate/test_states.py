"""Hybrids of Gated DeltaNet and attention: a row's state has its own tokens only, whatever other
rows do.
"""

import re
from dataclasses import replace
from functools import cache

import accounts
import jax
import numpy as np
import pytest
from flax import nnx
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from small_generators import SmallDecoder, greedy_ids
from support import swept
from variants import small_model

import jaxtp
from jaxtp import ModelConfig
from jaxtp.generate import engine
from jaxtp.generate.decode_model import (
    cache_bytes,
    decode_mesh,
    has_states,
    model_mesh,
    to_decode_model,
)
from jaxtp.generate.programs import Programs, Shape
from jaxtp.layers.cache import DROPPED, NewTokens
from jaxtp.layers.gated_delta import GatedDeltaConfig, GatedDeltaNet, KimiDeltaAttention

CONFIG = small_model(
    vocab_size=259,
    num_layers=2,
    norm_eps=1e-3,
    delta_value_heads=4,
    delta_key_heads=2,
    delta_key_dim=6,
    delta_value_dim=8,
    pattern=({}, {"delta_value_heads": 0}),
)
LENGTH = 128
TOKENS = 12
SETTINGS = jaxtp.generate.Settings(max_tokens=TOKENS)


def slowly(weights):
    """Returns weights with which states do not forget at once."""
    return {
        name: array - 6 if name.endswith("decay_log") else array for name, array in weights.items()
    }


SMALL = SmallDecoder(CONFIG, scale=0.3, change=slowly)
MAMBA = SmallDecoder(replace(CONFIG, delta_kind="mamba2"), scale=0.3, change=slowly)


BESIDE = SmallDecoder(
    replace(MAMBA.config, parts="all", pattern=(), mamba_scales=(1.5, *[0.75] * 6)),
    scale=0.3,
    change=slowly,
)


@cache
def greedy(prompt, small=SMALL):
    return greedy_ids(small.logits, prompt, TOKENS, LENGTH)


def prompts_of(count, most):
    rng = default_rng(0)
    return [tuple(rng.integers(0, 256, length).tolist()) for length in rng.integers(1, most, count)]


def stream(generator, prompt, **settings):
    """Returns the result of a prompt; what is in the cache remains."""
    pieces = generator.stream([list(prompt)], replace(SETTINGS, **settings), keep=True)
    (result,) = (piece.result for piece in pieces if piece.result)
    return result


def assert_read(generator, prompt, kept):
    """Checks the text of a prompt, of which `kept` tokens should be in the cache."""
    assert stream(generator, prompt).ids == greedy(prompt)
    speed = generator.speed
    assert (speed.kept_tokens, speed.prefill_tokens) == (kept, len(prompt) - kept)


@swept(
    "case",
    [
        (SMALL, None),
        (SMALL, (1, 1, 3)),
        (SMALL, (2, 1, 2)),
        (MAMBA, (1, 1, 2)),
        (BESIDE, (1, 1, 2)),
    ],
)
def test_texts_are_those_of_reading_everything_again(case):
    """Of more prompts than rows, packed, and in chunks that are shorter than a prompt; equal
    ones are read once.
    """
    small, mesh = case
    prompts = prompts_of(5, 60)
    prompts[2:4] = [(5,), (6, 7)]  # shorter than the convolution
    generator = small.generator(mesh, batch_size=4)
    for given in (prompts, prompts[:1] * 4):
        found = [result.ids for result in generator.generate(given, SETTINGS)]
        assert found == [greedy(prompt, small) for prompt in given]
    parts = 1 if mesh is None else mesh[0] * mesh[1]
    assert generator.speed.prefill_tokens == parts * len(prompts[0])


@pytest.mark.wide
def test_texts_are_the_same_in_a_long_chunk():
    prompts = prompts_of(6, 110)
    generator = SMALL.generator(chunk=1024, batch_size=4)
    assert [result.ids for result in generator.generate(prompts, SETTINGS)] == [
        greedy(prompt) for prompt in prompts
    ]


@pytest.mark.wide
def test_a_turn_reads_on_from_a_state_that_is_its_beginning(monkeypatch):
    """Another turn reads everything: a state cannot be cut back."""
    monkeypatch.setattr(engine, "CHAT_SLOTS", LENGTH)
    generator = SMALL.generator()
    first = tuple(b"what is this?")
    assert_read(generator, first, 0)
    second = (*first, *greedy(first), *b" and that?")
    assert_read(generator, second, len(first) + TOKENS - 1)  # the last token is not in the cache
    third = (*second, *b"!")  # without the answer
    assert_read(generator, third, 0)
    assert_read(generator, third, 0)  # the state has more than the prompt


@pytest.mark.wide
def test_nothing_is_kept_of_a_state_past_a_stop_text_or_an_interrupt(monkeypatch):
    monkeypatch.setattr(engine, "SECONDS_PER_CALL", 1e6)  # calls of 1, 2 and 4 tokens
    generator = SMALL.generator()
    first = tuple(b"what is this?")
    text = greedy(first)
    assert text[2] not in text[:2]
    monkeypatch.setattr(
        generator.tokenizer, "decode", lambda ids: bytes(ids).decode("latin-1").encode()
    )
    stopped = stream(generator, first, stop=(chr(text[2]),))
    assert (stopped.finish, stopped.ids) == ("stop", text[:3])
    second = (*first, *text[:3])
    assert_read(generator, second, 0)
    wait = engine.wait
    calls = iter(range(100))

    def interrupted(*sampled):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return wait(*sampled)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream(generator, first)
    assert_read(generator, second, 0)

    def between_chunks(read, total):
        raise KeyboardInterrupt

    third = (*second, *b"!", *range(20))
    with pytest.raises(KeyboardInterrupt):
        list(generator.stream([list(third)], SETTINGS, keep=True, progress=between_chunks))
    assert_read(generator, third, 16)


@pytest.mark.wide
def test_a_token_updates_the_states_in_place():
    """In the compiled loop, one instruction makes an array as large as the states: the new
    states.
    """
    rows = 8
    config = replace(CONFIG, delta_value_heads=8, delta_key_dim=32, delta_value_dim=32)
    mesh = model_mesh(SMALL.on(None))
    model = to_decode_model(SmallDecoder(config).build(), mesh)
    programs = Programs(model, mesh, Shape(rows, 64), SETTINGS, 256, frozenset())
    compiled = programs.compiled_decode(programs.empty())
    size = programs.cache_bytes
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    module, entry = accounts.parse_module(compiled.as_text())
    (loop,) = [instruction for instruction in module[entry] if instruction.opcode == "while"]
    passed_on = ("parameter", "tuple", "get-tuple-element", "bitcast")
    states = rf"\w+\[(\d+,)*{rows},8,32,32\]"
    made = [
        instruction.opcode
        for instruction in module[loop.attribute("body")]
        if instruction.opcode not in passed_on and re.match(states, instruction.type)
    ]
    assert made == ["fusion"]


def test_a_state_has_one_size_for_rows_of_any_length():
    """Only the keys and values of a layer of attention grow: 2 x 4 numbers of 4 bytes for each
    kv head and token.
    """
    mesh = decode_mesh(model_mesh(SMALL.on(None)))
    model = to_decode_model(SMALL.on(None), mesh)
    short, long = (cache_bytes(model, mesh, 8, slots) for slots in (64, 128))
    assert long - short == 8 * 64 * 2 * (2 * 4 * 4)
    assert has_states(model, mesh)
    without = SmallDecoder(ModelConfig(num_layers=1))
    assert not has_states(to_decode_model(without.on(None), mesh), mesh)


DELTA = GatedDeltaConfig(delta_value_heads=4, delta_key_heads=2, delta_key_dim=6, delta_value_dim=8)
KIMI = replace(DELTA, delta_key_heads=4, delta_gate_rank=4)
LAYERS = [(GatedDeltaNet, DELTA), (KimiDeltaAttention, KIMI)]
ROWS = 5
PACKED = 96
DOCUMENTS = 8
LONGEST = 240


@cache
def layer_programs(kind, config):
    """Returns programs of a layer, documents, the layer's outputs of whole documents, and empty
    states.
    """
    layer = kind(8, config, rngs=nnx.Rngs(0))
    layer.decay_log[...] -= 6  # else states forget at once
    inputs = default_rng(1).normal(size=(DOCUMENTS, LONGEST, 8)).astype(np.float32)
    decode = jax.jit(layer.decode)
    return decode, inputs, np.asarray(jax.jit(layer)(inputs)), layer.init_cache(ROWS, 1)


class Rows:
    """Rows that read documents, some of them anew: by row, the document and the number of tokens
    that it has read.

    Both methods return new tokens, and the document and position of each by its place.
    """

    def __init__(self, rng):
        self.rng = rng
        self.read = {row: self.begin() for row in range(ROWS)}

    def begin(self):
        return int(self.rng.integers(DOCUMENTS)), 0

    def packed(self):
        """Tokens of one row, which may continue."""
        positions = np.full((1, PACKED), DROPPED, np.int32)
        row_of = np.full((1, PACKED), -1, np.int32)
        continued = bool(self.rng.random() < 0.6)
        row = int(self.rng.integers(ROWS))
        document, start = self.read[row] if continued else self.begin()
        wanted = int(self.rng.choice([1, 2, 3, 64, self.rng.integers(1, 90)]))
        end = min(start + wanted, LONGEST)
        places = {(0, index): (document, start + index) for index in range(end - start)}
        positions[0, : len(places)] = range(start, end)
        row_of[0, : len(places)] = row
        self.read[row] = document, end
        return NewTokens(positions, row_of, continued), places

    def single(self):
        """One token of some rows."""
        positions = np.full((ROWS, 1), DROPPED, np.int32)
        places = {}
        for row in range(ROWS):
            if self.rng.random() < 0.6 and self.read[row][1] < LONGEST:
                document, position = self.read[row] if self.rng.random() < 0.9 else self.begin()
                positions[row] = position
                places[row, 0] = document, position
                self.read[row] = document, position + 1
        return NewTokens(positions), places


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "config"), LAYERS)
def test_rows_that_begin_continue_wait_and_begin_again(kind, config):
    """Any order of packed tokens and single ones: each row reads on from its own tokens."""
    decode, inputs, expected, empty = layer_programs(kind, config)
    for seed in range(6):
        rows = Rows(default_rng(seed))
        caches = empty
        for _ in range(12):
            before = caches
            is_packed = rows.rng.random() < 0.5
            new, places = rows.packed() if is_packed else rows.single()
            x = np.ones((*new.positions.shape, 8), np.float32)
            for at, place in places.items():
                x[at] = inputs[place]
            y, caches = decode(x, caches, new)
            found = np.array([y[at] for at in places])
            assert_allclose(
                found, [expected[place] for place in places.values()], rtol=1e-4, atol=1e-5
            )
            touched = {*new.rows[0].tolist()} if is_packed else {row for row, _ in places}
            for old, after in zip(before, caches, strict=True):
                for row in {*range(ROWS)} - touched:
                    assert_array_equal(old[row], after[row])
