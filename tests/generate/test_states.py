"""Hybrids of Gated DeltaNet and attention: a row's state has its own tokens only, whatever other rows do."""

import dataclasses
from functools import cache

import accounts
import jax
import numpy as np
import pytest
from flax import nnx
from support import random_weights, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.generate import engine
from jaxtp.generate.decode_model import decode_mesh, decode_sizes, has_states, to_decode_model
from jaxtp.generate.request import GenerationError
from jaxtp.layers.cache import DROPPED, NewTokens
from jaxtp.layers.gated_delta import GatedDeltaConfig, GatedDeltaNet
from jaxtp.mesh import mesh_sizes
from jaxtp.tools.estimate.generation import cache_bytes as estimated_bytes

CONFIG = jaxtp.ModelConfig(
    vocab_size=259,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    d_ff=24,
    norm_eps=1e-3,
    delta_value_heads=4,
    delta_key_heads=2,
    delta_key_dim=6,
    delta_value_dim=8,
    pattern=({}, {"delta_value_heads": 0}),
)
LENGTH = 128
TOKENS = 12
SETTINGS = jaxtp.GenerationSettings(max_tokens=TOKENS)


def build(config=CONFIG):
    return jaxtp.Decoder(config, rngs=nnx.Rngs(0))


@cache
def weights():
    slow = lambda name, array: array - 6 if name.endswith("decay_log") else array  # else states forget at once
    return {name: slow(name, array) for name, array in random_weights(build, scale=0.3).items()}


@cache
def model_on(mesh):
    pair = without_mesh(build, weights()) if mesh is None else state_on_mesh(build, weights(), jaxtp.make_mesh(*mesh))
    return nnx.merge(*pair)


@cache
def read_whole():
    graph, state = without_mesh(build, weights())
    whole = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids[None])[0])
    return lambda ids: whole(state, ids)


@cache
def greedy(prompt):
    """The likeliest tokens after a prompt, each from reading everything again."""
    ids = list(prompt)
    for _ in range(TOKENS):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(ids)] = ids
        ids.append(int(np.argmax(read_whole()(padded)[len(ids) - 1, :256])))
    return tuple(ids[-TOKENS:])


def generator_on(mesh, chunk=16, **options):
    generator = jaxtp.Generator(model_on(mesh), ByteTokenizer(), **options)
    generator._chunk = chunk
    return generator


def prompts_of(count, most, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 256, length).tolist()) for length in rng.integers(1, most, count)]


def stream(generator, prompt, **settings):
    """Returns the result, and the counts of prompt tokens that were in the cache and that were read."""
    pieces = generator.stream([list(prompt)], dataclasses.replace(SETTINGS, **settings), keep=True)
    (result,) = (piece.result for piece in pieces if piece.result)
    return result, (generator.speed.timing.kept_tokens, generator.speed.timing.prefill_tokens)


MESHES = [None, (1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 2, 4), (2, 2, 2), (2, 1, 1), (1, 1, 8)]


@pytest.mark.parametrize("mesh", sweep(MESHES), ids=str)
def test_texts_are_those_of_reading_everything_again(mesh):
    """Of more prompts than rows, packed, and in chunks that are shorter than a prompt."""
    prompts = prompts_of(7, 60)
    prompts[2:4] = [(5,), (6, 7)]  # shorter than the convolution
    generator = generator_on(mesh, batch_size=3)
    assert [result.ids for result in generator.generate(prompts, SETTINGS)] == list(map(greedy, prompts))


@pytest.mark.wide
@pytest.mark.parametrize("chunk", [96, 1024])
def test_long_chunks(chunk):
    prompts = prompts_of(9, 110)
    generator = generator_on(None, chunk, batch_size=4)
    assert [result.ids for result in generator.generate(prompts, SETTINGS)] == list(map(greedy, prompts))


def test_a_turn_reads_on_from_a_state_that_is_its_beginning():
    """Another turn reads everything: a state cannot be cut back."""
    generator, first = generator_on(None), tuple(b"what is this?")
    answer, counts = stream(generator, first)
    assert (answer.ids, counts) == (greedy(first), (0, len(first)))
    second = (*first, *answer.ids, *b" and that?")
    found, counts = stream(generator, second)
    known = len(first) + TOKENS - 1  # the last token is not in the cache
    assert (found.ids, counts) == (greedy(second), (known, len(second) - known))
    third = (*second, *b"!")  # without the answer
    found, counts = stream(generator, third)
    assert (found.ids, counts) == (greedy(third), (0, len(third)))
    found, counts = stream(generator, third)
    assert (found.ids, counts) == (greedy(third), (0, len(third))), "the state has more than the prompt"


def test_speculation_is_refused():
    with pytest.raises(GenerationError, match=r"speculate=2: .* \(Gated DeltaNet\) cannot take back .*; leave it out"):
        generator_on(None).generate([(1,)], dataclasses.replace(SETTINGS, speculate=2))


def test_equal_prompts_share_the_state_after_them():
    (prompt,), generator = prompts_of(1, 60), generator_on(None, batch_size=4)
    assert [result.ids for result in generator.generate([prompt] * 4, SETTINGS)] == [greedy(prompt)] * 4
    assert generator.speed.timing.prefill_tokens == len(prompt)


@pytest.mark.wide
def test_nothing_is_kept_of_a_state_past_a_stop_text_or_an_interrupt(monkeypatch):
    monkeypatch.setattr(engine, "SECONDS_PER_CALL", 1e6)  # calls of 1, 2 and 4 tokens
    generator, first = generator_on(None), tuple(b"what is this?")
    text = greedy(first)
    assert text[2] not in text[:2]
    monkeypatch.setattr(generator.tokenizer, "decode", lambda ids: bytes(ids).decode("latin-1").encode())
    stopped, _ = stream(generator, first, stop=(chr(text[2]),))
    assert (stopped.finish, stopped.ids) == ("stop", text[:3])
    second = (*first, *text[:3])
    found, counts = stream(generator, second)
    assert (found.ids, counts) == (greedy(second), (0, len(second)))
    wait, calls = engine.wait, iter(range(100))

    def interrupted(*sampled):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return wait(*sampled)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream(generator, first)
    found, counts = stream(generator, second)
    assert (found.ids, counts) == (greedy(second), (0, len(second)))


@pytest.mark.wide
def test_an_interrupt_between_chunks_of_a_prompt(monkeypatch):
    generator, (prompt,) = generator_on(None), prompts_of(1, 61, seed=3)
    assert len(prompt) > 20

    def interrupt(read, total):
        if read < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generator.stream([list(prompt)], SETTINGS, keep=True, progress=interrupt))
    found, counts = stream(generator, prompt)
    assert (found.ids, counts) == (greedy(prompt), (16, len(prompt) - 16))


@pytest.mark.wide
@pytest.mark.parametrize("rows", [1, 8])
def test_a_token_updates_the_states_in_place(rows):
    """In the compiled loop, one instruction makes an array as large as the states: the new states."""
    config = dataclasses.replace(CONFIG, delta_value_heads=8, delta_key_dim=32, delta_value_dim=32)
    generator = jaxtp.Generator(build(config), ByteTokenizer(), batch_size=rows)
    generator.generate(["a"] * rows, dataclasses.replace(SETTINGS, max_tokens=2))
    (programs,) = generator._programs.values()
    compiled = programs.compiled_decode(generator._cache.arrays)
    assert compiled.memory_analysis().alias_size_in_bytes >= generator.speed.cache_bytes
    module, entry = accounts.parse_module(compiled.as_text())
    (loop,) = [instruction for instruction in module[entry] if instruction.opcode == "while"]
    made = [
        instruction.opcode
        for instruction in module[loop.attribute("body")]
        if instruction.opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast")
        and accounts._bytes(instruction.type) >= rows * 8 * 32 * 32 * 4
    ]
    assert made == ["fusion"]


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 4), (2, 2, 2)], ids=str)
def test_the_estimate_of_a_cache_is_its_size(mesh):
    model, mesh = model_on(mesh), jaxtp.make_mesh(*mesh)
    placed = decode_mesh(mesh)
    expected = engine.cache_bytes(to_decode_model(model, placed), placed, 8, 64)
    assert estimated_bytes(CONFIG, decode_sizes(mesh_sizes(mesh)), 8, 64) == expected


def test_a_state_has_one_size_for_rows_of_any_length():
    model = to_decode_model(model_on(None), None)
    mesh = generator_on(None)._mesh
    sizes = {slots: engine.cache_bytes(model, mesh, 8, slots) for slots in (64, 128)}
    keys = 8 * 2 * 64 * 4 * 2 * 4
    states = 8 * 4 * (4 * 6 * 8 + 3 * (2 * 2 * 6 + 4 * 8))
    assert sizes == {64: keys + states, 128: 2 * keys + states}
    assert has_states(model, mesh)
    assert not has_states(to_decode_model(build(jaxtp.ModelConfig(num_layers=1)), None), mesh)


DELTA = GatedDeltaConfig(delta_value_heads=4, delta_key_heads=2, delta_key_dim=6, delta_value_dim=8)
ROWS, PACKED, DOCUMENTS = 5, 160, 8


@cache
def layer_programs():
    """Programs of a layer: a whole document, packed tokens and a token of each row; and outputs of whole documents."""
    layer = GatedDeltaNet(8, DELTA, rngs=nnx.Rngs(0))
    layer.decay_log[...] -= 6  # else states forget at once
    inputs = np.random.default_rng(1).normal(size=(DOCUMENTS, 400, 8)).astype(np.float32)
    decode = jax.jit(layer.decode)
    return decode, inputs, np.asarray(jax.jit(layer)(inputs)), layer.init_cache(ROWS, 1)


@pytest.mark.parametrize("seed", sweep(list(range(12)), 0))
def test_rows_that_begin_continue_wait_and_begin_again(seed):
    """Any order of packed tokens and single ones: each row reads on from its own tokens."""
    rng = np.random.default_rng(seed)
    decode, inputs, expected, caches = layer_programs()
    rows = {row: (int(rng.integers(DOCUMENTS)), 0) for row in range(ROWS)}  # document, tokens read

    def check(found, places):
        for at, (document, position) in places:
            np.testing.assert_allclose(found[at], expected[document, position], rtol=1e-4, atol=1e-5)

    for _ in range(12):
        before = caches
        if rng.random() < 0.5:  # packed: one row may continue, others begin
            order = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
            x, places = np.ones((1, PACKED, 8), np.float32), []
            positions, row_of = np.full((1, PACKED), DROPPED, np.int32), np.full((1, PACKED), -1, np.int32)
            continued = bool(rng.random() < 0.6)
            for index, row in enumerate(order):
                document, start = rows[row]
                if not (index == 0 and continued):
                    document, start = int(rng.integers(DOCUMENTS)), 0
                room = PACKED - len(places)
                count = min(int(rng.choice([1, 2, 3, 64, rng.integers(1, 150)])), room, 400 - start)
                for position in range(start, start + count):
                    at = len(places)
                    x[0, at], positions[0, at], row_of[0, at] = inputs[document, position], position, row
                    places.append(((0, at), (document, position)))
                if count:
                    rows[row] = document, start + count
            y, caches = decode(x, caches, NewTokens(positions, row_of, continued))
            touched = {row for row in row_of[0].tolist() if row >= 0}
        else:
            touched = {row for row in range(ROWS) if rng.random() < 0.6 and rows[row][1] < 400}
            x, positions = np.ones((ROWS, 1, 8), np.float32), np.full((ROWS, 1), DROPPED, np.int32)
            places = []
            for row in touched:
                document, position = rows[row] if rng.random() < 0.9 else (int(rng.integers(DOCUMENTS)), 0)
                x[row, 0], positions[row, 0] = inputs[document, position], position
                places.append(((row, 0), (document, position)))
                rows[row] = document, position + 1
            y, caches = decode(x, caches, NewTokens(positions))
        check(np.asarray(y), places)
        for old, new in zip(before, caches, strict=True):
            for row in set(range(ROWS)) - touched:
                np.testing.assert_array_equal(old[row], new[row])
