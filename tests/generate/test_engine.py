"""The generator: greedy texts are those of the plain model, a prompt's text is its own, and how texts end."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from support import random_weights, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.audit.hlo import count_collectives_in_hlo
from jaxtp.config import ConfigError
from jaxtp.data.manifest import BYTES, TokenizerInfo
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.generate import programs as programs_module
from jaxtp.generate.engine import GenerationError
from jaxtp.generate.programs import Programs, Shape, cache_bytes
from jaxtp.mesh import mesh_sizes, sized

CONFIG = jaxtp.ModelConfig(
    vocab_size=259, d_model=16, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=4, d_ff=24, norm_eps=1e-3
)
PROMPTS = ["a", "tensor", "forty characters, which are several chunks", "überall"]
LENGTH = 64
TOKENS = 12
SETTINGS = jaxtp.GenerationSettings(max_tokens=TOKENS)
SAMPLED = jaxtp.GenerationSettings(
    max_tokens=TOKENS, temperature=1.2, top_k=100, top_p=0.95, min_p=0.001, repetition_penalty=1.2, seed=7
)


def build(config=CONFIG):
    return jaxtp.Decoder(config, rngs=nnx.Rngs(0))


@cache
def weights():
    return random_weights(build)


@cache
def model_on(mesh):
    on_mesh = (
        without_mesh(build, weights()) if mesh is None else state_on_mesh(build, weights(), jaxtp.make_mesh(*mesh))
    )
    return nnx.merge(*on_mesh)


def generator_on(mesh, **options):
    return jaxtp.Generator(model_on(mesh), ByteTokenizer(), **{"chunk": 16, **options})


@cache
def one():
    return generator_on(None)


@cache
def greedy(prompt):
    """The likeliest bytes after a prompt, one at a time, each from reading everything again; plainly computed."""
    logits = jax.jit(lambda ids: reference.decoder_logits(weights(), CONFIG, ids[None])[0])
    ids = list(prompt.encode())
    for _ in range(TOKENS):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(ids)] = ids
        ids.append(int(np.argmax(logits(padded)[len(ids) - 1, :256])))
    return tuple(ids[-TOKENS:])


@pytest.mark.parametrize("mesh", sweep([None, (1, 1, 8), (2, 2, 2), (1, 2, 4)], None, (2, 2, 2)), ids=str)
def test_greedy_is_the_argmax_of_the_plain_model(mesh):
    generator = generator_on(mesh)
    results = generator.generate(PROMPTS, SETTINGS)
    assert [result.index for result in results] == list(range(len(PROMPTS)))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.ids == greedy(prompt)
        assert result.text.encode() == bytes(result.ids).decode(errors="replace").encode()
        assert (result.finish, result.prompt_tokens) == ("length", len(prompt.encode()))
    speed = generator.speed
    assert speed.prefill_tokens == sum(len(prompt.encode()) for prompt in PROMPTS)
    assert speed.decode_tokens == len(PROMPTS) * (TOKENS - 1)
    assert min(speed.prefill_seconds, speed.decode_seconds, speed.compile_seconds) > 0


def test_logprobs_are_those_of_the_model():
    (result,) = one().generate(PROMPTS[1:2], SAMPLED)
    ids = np.array([*PROMPTS[1].encode(), *result.ids])
    plain = jax.jit(lambda ids: reference.decoder_logits(weights(), CONFIG, ids[None])[0])
    logits = np.asarray(plain(ids), np.float64)[:, :256]
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = logprobs[np.arange(len(ids) - TOKENS - 1, len(ids) - 1), ids[-TOKENS:]]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("mesh", sweep([(1, 1, 8), (2, 2, 2)], (2, 2, 2)), ids=str)
def test_a_seed_gives_the_same_text_in_any_batch_and_on_any_mesh(mesh):
    together = one().generate(PROMPTS, SAMPLED)
    assert len({result.ids for result in together}) == len(PROMPTS)
    assert [r.ids for r in generator_on(mesh, batch_size=3).generate(PROMPTS, SAMPLED)] == [r.ids for r in together]
    for result, prompt in zip(together, PROMPTS, strict=True):
        alone = dataclasses.replace(SAMPLED, seed=SAMPLED.seed + result.index)
        assert one().generate([prompt], alone)[0].ids == result.ids
    assert one().generate(PROMPTS[:1], dataclasses.replace(SAMPLED, seed=8))[0].ids != together[0].ids


def test_each_program_is_compiled_once(monkeypatch):
    made = []
    monkeypatch.setattr("jaxtp.generate.engine.Programs", lambda *a: made.append(a[1]) or Programs(*a))
    generator = generator_on(None, batch_size=2)
    for prompts in (PROMPTS, [PROMPTS[2]] * 5, PROMPTS):
        assert len(generator.generate(prompts, SETTINGS)) == len(prompts)
    assert made == [Shape(rows=2, slots=64, chunk=16)]
    assert generator.speed.shape == made[0]


def test_reading_writes_in_place_and_moves_nothing_of_the_cache():
    """The compiler adds one collective to those that the layers write: the gather of the last logits."""
    mesh = jaxtp.make_mesh(1, 2, 4)
    programs = Programs(model_on((1, 2, 4)), Shape(rows=4, slots=64, chunk=16))
    assert (
        cache_bytes(model_on((1, 2, 4)), programs.shape) == 2 * 2 * 2 * 64 * 1 * 4 * 4
    )  # k and v, layers, rows, slots, head, floats
    for compiled, tokens in ((programs._read_chunk, 16), (programs._read_token, 1)):
        assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes(model_on((1, 2, 4)), programs.shape)
        found = count_collectives_in_hlo(compiled.as_text(), mesh_sizes(mesh))
        largest = max(c.bytes for c in found if "fsdp" not in c.axes)
        assert largest <= max(2 * tokens * CONFIG.d_model * 4, 2 * 260 * 4), "activations, or logits of two rows"


def test_pieces_add_up_and_come_as_they_are_made():
    generator = one()
    pieces = generator.stream(PROMPTS, SETTINGS)
    first = next(pieces)
    assert first.result is None
    texts = {first.index: first.text}
    results = {}
    for piece in pieces:
        texts[piece.index] = texts.get(piece.index, "") + piece.text
        if piece.result:
            results[piece.index] = piece.result
    assert texts == {index: result.text for index, result in results.items()}


def test_a_text_ends_at_its_end_token():
    ids = greedy(PROMPTS[1])
    end = ids[5]
    generator = generator_on(None, end_ids=frozenset({end}))
    (result,) = generator.generate(PROMPTS[1:2], SETTINGS)
    assert (result.ids, result.finish) == (ids[: ids.index(end)], "end")
    assert len(result.logprobs) == len(result.ids)


def test_the_tokenizers_end_token_ends_a_text():
    tokenizer = ByteTokenizer()
    tokenizer.info = TokenizerInfo(BYTES, None, 256, greedy(PROMPTS[1])[0])
    (result,) = jaxtp.Generator(model_on(None), tokenizer, chunk=16).generate(PROMPTS[1:2], SETTINGS)
    assert (result.text, result.finish) == ("", "end")


def test_a_text_ends_before_a_stop_text():
    text = one().generate(PROMPTS[1:2], SETTINGS)[0].text
    stop = text[3:5]
    settings = dataclasses.replace(SETTINGS, stop=("never there", stop))
    pieces = list(one().stream(PROMPTS[1:2], settings))
    result = pieces[-1].result
    assert (result.text, result.finish) == (text.split(stop)[0], "stop")
    assert "".join(piece.text for piece in pieces) == result.text


def test_a_prefix_comes_before_text_and_not_before_ids():
    with_prefix = generator_on(None, prefix=(116, 101))
    text, ids = with_prefix.generate(["nsor", list(b"tensor")], SETTINGS)
    assert text.ids == ids.ids == greedy("tensor")


def test_bfloat16():
    config = dataclasses.replace(CONFIG, precision=jaxtp.Precision(param="bfloat16", compute="bfloat16"))
    graph, state = state_on_mesh(lambda: build(config), weights(), jaxtp.make_mesh(1, 2, 4))
    generator = jaxtp.Generator(nnx.merge(graph, state), ByteTokenizer(), chunk=16)
    results = generator.generate(PROMPTS, SETTINGS)
    assert all(len(result.ids) == TOKENS and np.isfinite(result.logprobs).all() for result in results)
    assert generator.speed.cache_bytes == 2 * 2 * 2 * 64 * 1 * 4 * 2


def test_nothing_to_do():
    assert one().generate([], SETTINGS) == []


REFUSED = {
    "one text": ("ab", {}, GenerationError, r"prompts is one text; for one prompt give \['ab'\]"),
    "empty": (["a", ""], {}, GenerationError, "prompt 1 is empty"),
    "not the model's token": ([[1, 300]], {}, GenerationError, "token 300, and the model has those from 0 to 258"),
    "not text": (["\udcff"], {}, GenerationError, "prompt 0 is not UTF-8"),
    "temperature": (["a"], {"temperature": -1.0}, ConfigError, "temperature = -1.0: should be greater"),
    "without effect": (["a"], {"top_k": 5}, ConfigError, "top_k=5 has no effect at temperature 0"),
    "empty stop": (["a"], {"stop": ("",)}, ConfigError, "would end everything; leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    prompts, settings, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        one().generate(prompts, jaxtp.GenerationSettings(**settings))


def test_a_model_that_cannot_read_one_token_is_refused():
    config = dataclasses.replace(CONFIG, sequence_parallel=True)
    graph, state = state_on_mesh(lambda: build(config), weights(), jaxtp.make_mesh(tp=2))
    with pytest.raises(GenerationError, match="build it with sequence_parallel=None"):
        jaxtp.Generator(nnx.merge(graph, state), ByteTokenizer())


def test_logits_that_are_not_finite_are_said():
    broken = {**weights(), "norm.scale": jnp.full(16, jnp.nan)}
    generator = jaxtp.Generator(nnx.merge(*without_mesh(build, broken)), ByteTokenizer(), chunk=16)
    with pytest.raises(GenerationError, match="logits after prompt 0 are not finite"):
        generator.generate(["a"], SETTINGS)


def test_a_mesh_with_cp_is_refused():
    with pytest.raises(
        GenerationError, match="built on a mesh with cp=2, and a cache is not divided over cp; build it on"
    ):
        jaxtp.Generator(nnx.merge(*state_on_mesh(build, weights(), jaxtp.make_mesh(cp=2))), ByteTokenizer())


def test_programs_are_of_the_mesh_of_the_model():
    assert programs_module.mesh_of(model_on(None)) is None
    assert mesh_sizes(programs_module.mesh_of(model_on((2, 2, 2)))) == sized(dp=2, fsdp=2, tp=2)


def test_a_text_ends_with_the_context_and_a_prompt_beyond_it_is_refused():
    generator, prompts = generator_on(None, context=LENGTH), [PROMPTS[2], PROMPTS[0]]
    room = LENGTH - len(PROMPTS[2])
    whole = dataclasses.replace(SETTINGS, max_tokens=room + 8)
    first, second = generator.generate(prompts, whole)
    assert (first.finish, len(first.ids)) == ("context", room)
    assert (second.finish, len(second.ids)) == ("length", room + 8)
    assert second.ids == one().generate(prompts, whole)[1].ids
    assert "cut     1 where the model's context ends; --beyond-context goes on" in generator.speed.lines()
    for length in (LENGTH, LENGTH + 1):
        with pytest.raises(
            GenerationError, match=rf"prompt 1 has {length} tokens, and the model was made for {LENGTH}"
        ):
            generator.generate(["a", "a" * length], SETTINGS)
    assert one().speed.cut_texts == 0


def test_prompts_that_are_none_are_counted():
    settings = dataclasses.replace(SAMPLED, seed=SAMPLED.seed - 1)
    with_a_gap = one().generate([None, *PROMPTS], settings)
    assert [result.index for result in with_a_gap] == [1, 2, 3, 4]
    assert [result.ids for result in with_a_gap] == [result.ids for result in one().generate(PROMPTS, SAMPLED)]
    assert one().generate([None]) == []


@pytest.mark.parametrize("context", [None, 4, 99])
def test_no_token_comes_after_the_learned_positions(context):
    """Even where a longer context is given, or any."""
    model = build(dataclasses.replace(CONFIG, learned_positions=8))
    generator = jaxtp.Generator(model, ByteTokenizer(), context=context)
    way_out = "--beyond-context" if context == 4 else r"no vectors for later positions \(model.learned_positions\)"
    with pytest.raises(GenerationError, match=f"prompt 0 has 8 tokens, .*{way_out}"):
        generator.generate([list(range(8))])


def test_a_cache_beyond_the_memory_is_refused_before_it_is_made():
    with pytest.raises(GenerationError, match=r"the cache for 1 x 2,147,483,648 tokens takes .* GiB on each device"):
        one().generate(["a"], dataclasses.replace(SETTINGS, max_tokens=2**31 - 1))


def test_reading_a_long_prompt_is_told():
    told = []
    generator_on(None, progress=lambda *progress: told.append(progress)).generate(["a" * 40], SETTINGS)
    assert told == [(16, 40), (32, 40), (40, 40)]
