"""The generator: greedy texts are those of the plain model, a prompt's text is its own, and how texts end."""

import dataclasses
from functools import cache

import accounts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from support import random_weights, sizes_of, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.config.entry import NumericsError
from jaxtp.config.schema import ConfigError
from jaxtp.data.manifest import BYTES, TokenizerInfo
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.generate import engine
from jaxtp.generate.decode_model import decode_mesh, model_mesh, to_decode_model, weight_bytes
from jaxtp.generate.programs import Programs, Shape
from jaxtp.generate.request import GenerationError
from jaxtp.mesh import mesh_shape, mesh_sizes

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


SAMPLED_FROM = lambda seed: dataclasses.replace(SAMPLED, seed=seed)


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


def generator_of(model, tokenizer=None, **options):
    """Reads prompts in chunks of 16 tokens."""
    generator = jaxtp.Generator(model, tokenizer or ByteTokenizer(), **options)
    generator._chunk = 16
    return generator


def generator_on(mesh, **options):
    return generator_of(model_on(mesh), **options)


@cache
def one():
    return generator_on(None)


@cache
def greedy(prompt):
    """The likeliest bytes after a prompt, one at a time, each from reading everything again; plainly computed."""
    values = weights()  # outside of the trace, which would be cached with them
    logits = jax.jit(lambda ids: reference.decoder_logits(values, CONFIG, ids[None])[0])
    ids = list(prompt.encode())
    for _ in range(TOKENS):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(ids)] = ids
        ids.append(int(np.argmax(logits(padded)[len(ids) - 1, :256])))
    return tuple(ids[-TOKENS:])


@pytest.mark.parametrize("mesh", sweep([None, (1, 1, 8), (2, 2, 2), (1, 2, 4)], (2, 2, 2)), ids=str)
def test_greedy_is_the_argmax_of_the_plain_model(mesh):
    generator = generator_on(mesh)
    results = generator.generate(PROMPTS, SETTINGS)
    assert [result.index for result in results] == list(range(len(PROMPTS)))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.ids == greedy(prompt)
        assert result.text.encode() == bytes(result.ids).decode(errors="replace").encode()
        assert (result.finish, result.prompt_tokens) == ("length", len(prompt.encode()))
    timing = generator.speed.timing
    assert timing.prefill_tokens == sum(len(prompt.encode()) for prompt in PROMPTS)
    assert timing.decode_tokens == len(PROMPTS) * (TOKENS - 1)
    assert min(timing.prefill_seconds, timing.decode_seconds, generator.speed.compile_seconds) > 0


def test_logprobs_are_those_of_the_model():
    (result,) = one().generate(PROMPTS[1:2], SAMPLED)
    ids = np.array([*PROMPTS[1].encode(), *result.ids])
    plain = jax.jit(lambda ids: reference.decoder_logits(weights(), CONFIG, ids[None])[0])
    logits = np.asarray(plain(ids), np.float64)[:, :256]
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = logprobs[np.arange(len(ids) - TOKENS - 1, len(ids) - 1), ids[-TOKENS:]]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 1, 8), (2, 2, 2)], ids=str)
def test_a_seed_gives_the_same_text_in_any_batch_and_on_any_mesh(mesh):
    together = one().generate(PROMPTS, SAMPLED)
    assert len({result.ids for result in together}) == len(PROMPTS)
    assert [r.ids for r in generator_on(mesh, batch_size=3).generate(PROMPTS, SAMPLED)] == [r.ids for r in together]
    for result, prompt in zip(together, PROMPTS, strict=True):
        alone = dataclasses.replace(SAMPLED, seed=SAMPLED.seed + result.index)
        assert one().generate([prompt], alone)[0].ids == result.ids
    assert one().generate(PROMPTS[:1], dataclasses.replace(SAMPLED, seed=8))[0].ids != together[0].ids


def test_each_program_is_compiled_once():
    generator = generator_on(None, batch_size=2)
    for prompts in (PROMPTS, [PROMPTS[2]] * 5, PROMPTS):
        assert len(generator.generate(prompts, SETTINGS)) == len(prompts)
        assert generator.speed.shape == Shape(rows=2, slots=64)
    (programs,) = generator._programs.values()
    assert set(programs._compiled) == {("read", 16, False), ("read", 16, True), "copy", "decode", "empty"}
    assert generator.speed.compile_seconds == 0, "of the last call"


def test_rows_that_end_make_room_and_no_prompt_is_padded():
    """Of many prompts of many lengths, with texts of many lengths: each text is that of the prompt alone, every token
    is read once, and a row is never empty while prompts wait."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in rng.integers(1, 40, 12)]
    ends = frozenset(range(0, 256, 9))
    alone = generator_on(None, end_ids=ends, batch_size=1)
    expected = [alone.generate([prompt], SAMPLED_FROM(index))[0] for index, prompt in enumerate(prompts)]
    assert len({len(result.ids) for result in expected}) > 4
    generator = generator_on((2, 1, 2), end_ids=ends, batch_size=4)
    found = generator.generate(prompts, SAMPLED_FROM(0))
    assert [result.ids for result in found] == [result.ids for result in expected]
    assert [result.finish for result in found] == [result.finish for result in expected]
    timing = generator.speed.timing
    assert (timing.prefill_tokens, timing.kept_tokens) == (sum(map(len, prompts)), 0)


@pytest.mark.parametrize("mesh", sweep([None, (2, 2, 2), (2, 1, 2)], None), ids=str)
def test_samples_of_a_prompt_and_prompts_with_the_same_beginning_are_read_once(mesh, monkeypatch):
    """By each part of the batch; the texts are those of reading each prompt again."""
    prompts = [PROMPTS[2], PROMPTS[2][:30] + "another end", PROMPTS[0]]
    settings = dataclasses.replace(SAMPLED, samples=4)
    generator = generator_on(mesh, batch_size=16)
    found, timing = generator.generate(prompts, settings), generator.speed.timing
    assert [(each.index, each.sample) for each in found] == [(i, sample) for i in range(3) for sample in range(4)]
    lengths = [len(prompt) for prompt in prompts]
    assert timing.prefill_tokens + timing.kept_tokens == 4 * sum(lengths)
    if mesh is None:
        assert timing.prefill_tokens == lengths[0] + lengths[1] - 30 + 4 * lengths[2]
    monkeypatch.setattr(engine.Scheduler, "_most_shared", lambda self, row, request: (row, 0))
    again = [prompt for prompt in prompts for _ in range(4)]
    expected = generator.generate(again, dataclasses.replace(settings, samples=1))
    assert generator.speed.timing.prefill_tokens == 4 * sum(lengths)
    assert [each.ids for each in found] == [each.ids for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.wide
def test_a_copy_of_rows_is_in_place():
    generator = generator_on(None)
    generator.generate([PROMPTS[2]] * 8, SETTINGS)
    (programs,) = generator._programs.values()
    sizes = programs._compiled["copy"].memory_analysis()
    assert sizes.alias_size_in_bytes == generator.speed.cache_bytes
    assert sizes.temp_size_in_bytes < generator.speed.cache_bytes / 4


@pytest.mark.wide
def test_a_conversation_is_read_on_from_what_the_cache_has(monkeypatch):
    """Also when an answer is given up, when another is asked for, and when the memory has to grow."""
    monkeypatch.setattr("jaxtp.generate.engine.CHAT_SLOTS", 64)
    generator, plain = generator_on(None), one()
    first = list(b"what is this?")
    (answer,) = (piece.result for piece in generator.stream([first], SETTINGS, keep=True) if piece.result)
    turns = [[*first, *answer.ids, *b" and that?"], [*first, *b" no"], [*first, *b" no", *range(97, 97 + 60)]]
    known = [[*first, *answer.ids[:-1]]]
    for turn in turns:
        pieces = generator.stream([turn], SETTINGS, keep=True)
        begun = [next(pieces) for _ in range(4)]
        assert [piece.token for piece in begun] == list(plain.generate([turn], SETTINGS)[0].ids[:4])
        pieces.close()
        kept = next(i for i, (a, b) in enumerate(zip(known[-1] + [-1], turn, strict=False)) if a != b)
        kept = 0 if turn is turns[-1] else kept  # a larger cache starts empty
        timing = generator.speed.timing
        assert (timing.kept_tokens, timing.prefill_tokens) == (kept, len(turn) - kept)
        known.append([*turn, *(piece.token for piece in begun)][: len(generator._cache.tokens[0])])
    assert generator.speed.shape == Shape(rows=1, slots=128)
    (result,) = generator.generate([turns[-1]], SETTINGS)
    assert generator.speed.timing.kept_tokens == 0, "nothing is kept unless it is asked for"
    assert result.ids == plain.generate([turns[-1]], SETTINGS)[0].ids


@pytest.mark.wide
def test_what_failed_is_not_gone_on_from(monkeypatch):
    generator, decode = one(), Programs.decode
    expected = generator.generate(PROMPTS, SETTINGS)

    def fail(*arguments, **options):
        decode(*arguments, **options)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "decode", fail)
        with pytest.raises(MemoryError):
            generator.generate(PROMPTS, SETTINGS)
    assert generator._cache is None
    assert generator.generate(PROMPTS, SETTINGS) == expected


@pytest.mark.wide
def test_an_interrupt_while_tokens_are_made_loses_none_that_were_read(monkeypatch):
    generator, wait = generator_on(None), engine.wait
    expected = one().generate(PROMPTS[2:3], SETTINGS)
    calls = iter(range(100))

    def interrupted(*sampled):
        if next(calls) == 5:  # three parts of the prompt, and two tokens
            raise KeyboardInterrupt
        return wait(*sampled)

    monkeypatch.setattr("jaxtp.generate.engine.CHAT_SLOTS", 64)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(generator.stream(PROMPTS[2:3], SETTINGS, keep=True))
    found = [piece.result for piece in generator.stream(PROMPTS[2:3], SETTINGS, keep=True) if piece.result]
    assert [result.ids for result in found] == [result.ids for result in expected]
    assert generator.speed.timing.prefill_tokens == 1


@pytest.mark.wide
@pytest.mark.parametrize(("seconds", "calls"), [(0.0, TOKENS - 1), (1e6, 4)])  # 1, 2, 4, and the rest
def test_several_tokens_in_a_call_are_those_of_one_in_each(seconds, calls, monkeypatch):
    expected, made, decode = one().generate(PROMPTS, SAMPLED), [], Programs.decode
    monkeypatch.setattr("jaxtp.generate.engine.SECONDS_PER_CALL", seconds)
    monkeypatch.setattr(Programs, "decode", lambda *a, **k: made.append(1) or decode(*a, **k))
    assert one().generate(PROMPTS, SAMPLED) == expected
    assert len(made) == calls


WIDE = dataclasses.replace(
    CONFIG,
    d_model=128,
    d_ff=512,
    head_dim=32,
    num_heads=4,
    tie_embeddings=True,
    precision=jaxtp.Precision(param="bfloat16"),
)


@pytest.mark.wide
@pytest.mark.parametrize("case", [(None, 1), ((1, 1, 4), 4), ((1, 2, 2), 8)], ids=str)
def test_a_token_reads_weights_and_cache_once_and_nothing_is_copied(case):
    """By the compiled loop, also of shared kv heads: no copy, conversion, transposition or gather of a kernel, and what
    its instructions read is at most 1.1 times the weights and the cache."""
    mesh, rows = case
    make = lambda: build(WIDE)
    given = random_weights(make)
    pair = without_mesh(make, given) if mesh is None else state_on_mesh(make, given, jaxtp.make_mesh(*mesh))
    model = nnx.merge(*pair)
    generator = jaxtp.Generator(model, ByteTokenizer(), batch_size=rows)
    generator.generate(["a" * 50] * rows, dataclasses.replace(SETTINGS, max_tokens=2))
    (programs,) = generator._programs.values()
    compiled = programs.compiled_decode(generator._cache.arrays)
    held = weight_bytes(model, mesh_sizes(generator._mesh)) + generator.speed.cache_bytes
    assert compiled.memory_analysis().alias_size_in_bytes >= generator.speed.cache_bytes
    read, rearranged = accounts.bytes_of_a_turn(compiled.as_text(), least=2**13)
    assert rearranged == []
    assert held - 2**16 < read <= 1.1 * held


def test_every_device_has_the_tokens():
    """Each process reads them."""
    make = lambda: build(CONFIG)
    model = nnx.merge(*state_on_mesh(make, random_weights(make), jaxtp.make_mesh(fsdp=2, tp=2)))
    generator = jaxtp.Generator(model, ByteTokenizer())
    generator.generate(["a", "b"], dataclasses.replace(SETTINGS, max_tokens=2))
    (programs,) = generator._programs.values()
    _, sampled = programs.compiled_decode(generator._cache.arrays).output_shardings
    assert [sharding.is_fully_replicated for sharding in sampled] == [True] * 3


REPEATING = [*PROMPTS, "abcabcabcabc", "hello hello hello"]
SPECULATIVE = {
    "windows": (None, {"num_layers": 1, "sliding_window": 5}, {}),
    "learned positions": (None, {"learned_positions": 53}, {"repetition_penalty": 1.02}),
    "samples": ((2, 1, 2), {}, {"temperature": 0.03, "top_k": 20, "samples": 2}),
    "latents": ((1, 1, 2), {"num_kv_heads": 8, "kv_rank": 8, "rope_head_dim": 2, "value_head_dim": 4}, {}),
    "experts": ((1, 2, 4), {"num_experts": 4, "experts_per_token": 2}, {"temperature": 0.02}),
}


@pytest.mark.parametrize("name", sweep(list(SPECULATIVE), "windows"))
def test_speculation_gives_the_same_texts_in_fewer_steps(name):
    """Whatever ends a text: an end token, a stop text, its length or the context."""
    mesh, changes, settings = SPECULATIVE[name]
    make = lambda: build(dataclasses.replace(CONFIG, **changes))
    model = nnx.merge(*state_on_mesh(make, random_weights(make), jaxtp.make_mesh(*mesh or (1, 1, 1))))
    generator = generator_of(model, batch_size=4, end_ids=frozenset(range(0, 256, 60)), context=60)
    plain = jaxtp.GenerationSettings(max_tokens=45, **settings)
    longest = max((result.text for result in generator.generate(REPEATING, plain)), key=len)
    plain = dataclasses.replace(plain, stop=(longest[20:30],))
    expected = generator.generate(REPEATING, plain)
    assert len({result.finish for result in expected}) > 1
    found = generator.generate(REPEATING, dataclasses.replace(plain, speculate=4))
    for ours, theirs in zip(found, expected, strict=True):
        assert dataclasses.replace(ours, logprobs=()) == dataclasses.replace(theirs, logprobs=())
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    timing = generator.speed.timing
    assert 0 < timing.accepted_tokens < timing.proposed_tokens
    assert timing.decode_tokens == sum(len(result.ids) + (result.finish == "end") - 1 for result in found)


@pytest.mark.wide
def test_a_turn_after_speculation_reads_on_from_the_accepted_tokens():
    generator, settings = generator_on(None), dataclasses.replace(SETTINGS, max_tokens=40, speculate=3)
    turn = list(b"hello hello")
    for new in (len(turn), 4, 4):  # the last token of a text is not in the cache
        *_, last = generator.stream([turn], settings, keep=True)
        assert last.result.ids == one().generate([turn], dataclasses.replace(settings, speculate=0))[0].ids
        assert generator.speed.timing.kept_tokens == len(turn) - new
        assert generator.speed.timing.accepted_tokens > 0
        turn = [*turn, *last.result.ids, *b"abc"]


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
    (result,) = generator_of(model_on(None), tokenizer).generate(PROMPTS[1:2], SETTINGS)
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
    tokenizer = ByteTokenizer()
    tokenizer.prefix = (116, 101)
    with_prefix = generator_of(model_on(None), tokenizer)
    text, ids = with_prefix.generate(["nsor", list(b"tensor")], SETTINGS)
    assert text.ids == ids.ids == greedy("tensor")


@pytest.mark.wide
def test_bfloat16():
    config = dataclasses.replace(CONFIG, precision=jaxtp.Precision(param="bfloat16", compute="bfloat16"))
    graph, state = state_on_mesh(lambda: build(config), weights(), jaxtp.make_mesh(1, 2, 4))
    generator = generator_of(nnx.merge(graph, state))
    results = generator.generate(PROMPTS, SETTINGS)
    assert all(len(result.ids) == TOKENS and np.isfinite(result.logprobs).all() for result in results)
    assert generator.speed.cache_bytes == 2 * 2 * 2 * 64 * 1 * 4 * 2


def test_nothing_to_do():
    assert one().generate([], SETTINGS) == []


REFUSED = {
    "one text": ("ab", {}, GenerationError, r"prompts is a string; for one prompt give \['ab'\]"),
    "one stop text": (
        ["a"],
        {"stop": "abc"},
        ConfigError,
        r"stop='abc' is a string; for one stop text give \('abc',\)",
    ),
    "a number": ([5], {}, GenerationError, "prompt 0 is 5, not text or ids"),
    "empty": (["a", ""], {}, GenerationError, "prompt 1 is empty"),
    "not the model's token": ([[1, 300]], {}, GenerationError, "token 300, but the model's tokens are 0 to 258"),
    "not text": (["\udcff"], {}, GenerationError, "prompt 0 is not UTF-8"),
    "temperature": (["a"], {"temperature": -1.0}, ConfigError, "temperature = -1.0: should be greater"),
    "without effect": (["a"], {"top_k": 5}, ConfigError, "top_k=5 has no effect at temperature 0"),
    "equal samples": (["a"], {"samples": 2}, ConfigError, "samples=2 would be equal texts at temperature 0"),
    "many proposals": (["a"], {"speculate": 65}, ConfigError, "speculate = 65: should be less than or equal to 64"),
    "empty stop": (["a"], {"stop": ("",)}, ConfigError, "would end every text at once; remove it"),
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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "the model is a Linear, which is no jaxtp.Decoder"),
        (jaxtp.Decoder, "the model is the class Decoder, which is no jaxtp.Decoder; only a decoder"),
    ],
)
def test_what_is_no_decoder_is_refused(model, message):
    with pytest.raises(GenerationError, match=message):
        jaxtp.Generator(model, ByteTokenizer())
    with pytest.raises(GenerationError, match=message):
        one().update(model)


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(GenerationError, match="batch_size=0: should be 1 or more"):
        generator_on(None, batch_size=0)


def test_logits_that_are_not_finite_are_said():
    broken = {**weights(), "norm.scale": jnp.full(16, jnp.nan)}
    generator = generator_of(nnx.merge(*without_mesh(build, broken)))
    with pytest.raises(NumericsError, match="logits after prompt 0 are not finite"):
        generator.generate(["a"], SETTINGS)


def test_a_mesh_with_cp_is_refused():
    with pytest.raises(
        GenerationError, match="built on a mesh with cp=2, and a KV cache cannot be split over cp; use cp=1"
    ):
        jaxtp.Generator(nnx.merge(*state_on_mesh(build, weights(), jaxtp.make_mesh(cp=2))), ByteTokenizer())


def test_programs_are_of_the_mesh_of_the_model():
    assert mesh_sizes(model_mesh(model_on(None))) == mesh_shape()
    assert mesh_sizes(model_mesh(model_on((2, 2, 2)))) == mesh_shape(dp=2, fsdp=2, tp=2)


@pytest.mark.wide
def test_a_text_ends_with_the_context_and_a_prompt_beyond_it_is_refused():
    generator, prompts = generator_on(None, context=LENGTH), [PROMPTS[2], PROMPTS[0]]
    room = LENGTH - len(PROMPTS[2])
    whole = dataclasses.replace(SETTINGS, max_tokens=room + 8)
    first, second = generator.generate(prompts, whole)
    assert (first.finish, len(first.ids)) == ("context", room)
    assert (second.finish, len(second.ids)) == ("length", room + 8)
    assert second.ids == one().generate(prompts, whole)[1].ids
    assert "cut     1 at the model's context; --beyond-context continues" in generator.speed.lines()
    for length in (LENGTH, LENGTH + 1):
        with pytest.raises(
            GenerationError, match=rf"prompt 1 has {length} tokens, and the model's context is {LENGTH}"
        ):
            generator.generate(["a", "a" * length], SETTINGS)
    assert one().speed.cut_texts == 0


@pytest.mark.wide
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
    way_out = "--beyond-context" if context == 4 else r"its learned positions \(model.learned_positions\)"
    with pytest.raises(GenerationError, match=f"prompt 0 has 8 tokens, .*{way_out}"):
        generator.generate([list(range(8))])


def test_a_cache_beyond_the_memory_is_refused_before_it_is_made():
    with pytest.raises(GenerationError, match=r"a KV cache of 1 x 2,147,483,648 tokens take .* GiB on each device"):
        one().generate(["a"], dataclasses.replace(SETTINGS, max_tokens=2**31 - 1))


def test_reading_a_long_prompt_is_told():
    told = []
    list(one().stream(["a" * 40], SETTINGS, progress=lambda *progress: told.append(progress)))
    assert told == [(16, 40), (32, 40), (40, 40)]


OTHER = dataclasses.replace(CONFIG, lora=jaxtp.LoraConfig(rank=2), sequence_parallel=True, remat="none")


def trained(mesh):
    """A model with adapters and other weights."""
    with jax.set_mesh(jaxtp.make_mesh(**sizes_of(mesh))):
        model = jax.jit(lambda: jaxtp.Decoder(OTHER, rngs=nnx.Rngs(7)))()
        nnx.update(model, jax.tree.map(lambda array: array + 0.3, nnx.state(model, nnx.LoRAParam)))
        return model


@pytest.mark.parametrize("mesh", sweep([(2, 2, 2), (1, 2, 4), (1, 2, 2, 2)], (2, 2, 2)), ids=str)
def test_an_update_gives_the_texts_of_the_new_weights(mesh):
    generator, model = generator_on((1, 2, 4)), trained(mesh)
    before = generator.generate(PROMPTS, SETTINGS)
    expected = generator_of(jaxtp.merge_adapters(trained((1, 1, 1)))).generate(PROMPTS, SETTINGS)
    old = jax.tree.leaves(nnx.state(generator._model))
    generator.update(model)
    assert all(array.is_deleted() for array in old)
    assert not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(model)))
    results = generator.generate(PROMPTS, SETTINGS)
    assert [each.ids for each in results] == [each.ids for each in expected] != [each.ids for each in before]
    assert generator.speed.compile_seconds == 0
    generator.update(model_on(None))
    assert [each.ids for each in generator.generate(PROMPTS, SETTINGS)] == [each.ids for each in before]


def test_a_model_with_adapters_is_merged():
    model = trained((1, 2, 4))
    found, expected = (
        jax.tree.leaves(nnx.state(to_decode_model(each, decode_mesh(model_mesh(model)))))
        for each in (model, jaxtp.merge_adapters(model))
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_update_is_refused_by_another_architecture_and_in_a_stream():
    generator = generator_on(None)
    with pytest.raises(GenerationError, match=r"another architecture: num_layers=3, not 2$"):
        generator.update(build(dataclasses.replace(CONFIG, num_layers=3)))
    stream = generator.stream(PROMPTS, SETTINGS)
    next(stream)
    with pytest.raises(GenerationError, match="close the iterator of stream before update"):
        generator.update(model_on(None))
    stream.close()
    generator.update(model_on(None))
    assert generator.generate(PROMPTS[:1], SETTINGS)[0].ids == greedy(PROMPTS[0])
