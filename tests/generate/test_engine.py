"""The generator: greedy texts are those of the plain model, a prompt's text is its own, and how
texts end.
"""

import dataclasses
from functools import cache, partial

import accounts
import jax
import numpy as np
import pytest
import reference
from flax import nnx
from hf_folders import move_adapters, random_model, values
from numpy.random import default_rng
from numpy.testing import assert_allclose
from small_generators import SmallDecoder, greedy_ids
from support import compilations, swept, use_mesh
from tables import assert_errors, raised_by, read_table, with_tuples
from variants import small_model

import jaxtp
from jaxtp import Decoder, LoraConfig, Precision, merge_adapters
from jaxtp.config.entry import NumericsError
from jaxtp.data.manifest import BYTES, TokenizerInfo
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.generate import engine
from jaxtp.generate.decode_model import decode_mesh, model_mesh, to_decode_model, weight_bytes
from jaxtp.generate.programs import Programs, Shape
from jaxtp.generate.request import GenerationError
from jaxtp.mesh import mesh_sizes

CONFIG = small_model(vocab_size=259, num_layers=2, num_heads=8, norm_eps=1e-3)
PROMPTS = ["a", "tensor", "forty characters, which are several chunks", "überall"]
LONG = PROMPTS[2]
LENGTH = 64
TOKENS = 12
SETTINGS = jaxtp.generate.Settings(max_tokens=TOKENS)
SAMPLED = jaxtp.generate.Settings(
    max_tokens=TOKENS,
    temperature=1.2,
    top_k=100,
    top_p=0.95,
    min_p=0.001,
    seed=7,
)
SMALL = SmallDecoder(CONFIG)
change = dataclasses.replace


@cache
def one():
    return SMALL.generator()


@cache
def reference_logits():
    return jax.jit(lambda weights, ids: reference.decoder_logits(weights, CONFIG, ids[None])[0])


def likeliest(prompt, weights=None):
    """Returns greedy ids after a prompt, by plain formulas."""
    ids = prompt.encode() if isinstance(prompt, str) else prompt
    return greedy_ids(partial(reference_logits(), weights or SMALL.weights), ids, TOKENS, LENGTH)


def ids_of(results):
    return [result.ids for result in results]


@pytest.mark.heavy
@swept("mesh", [(2, 1, 2), (1, 2, 4)], (2, 1, 2))
def test_greedy_texts_are_the_argmax_of_plain_formulas(mesh):
    """Prompts and texts have many lengths: a row whose text ends takes the next prompt, each token
    is read once, and each program is compiled once.
    """
    rng = default_rng(0)
    prompts = [
        *PROMPTS,
        *(rng.integers(0, 256, length).tolist() for length in rng.integers(1, 40, 6)),
    ]
    ends = range(0, 256, 9)
    generator = SMALL.generator(mesh, batch_size=4, end_ids=frozenset(ends))
    results = generator.generate(prompts, SETTINGS)
    assert [result.index for result in results] == list(range(len(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        ids = likeliest(prompt)
        length = next((at for at, token in enumerate(ids) if token in ends), TOKENS)
        assert (result.ids, result.finish) == (ids[:length], "end" if length < TOKENS else "length")
        assert result.prompt_tokens == len(prompt.encode() if isinstance(prompt, str) else prompt)
        assert result.text == bytes(result.ids).decode(errors="replace")
        assert len(result.logprobs) == length
    tokens = sum(result.prompt_tokens for result in results)
    decoded = sum(len(result.ids) - (result.finish == "length") for result in results)
    assert len({len(result.ids) for result in results}) > 2
    speed = generator.speed
    assert (speed.prefill_tokens, speed.kept_tokens, speed.decode_tokens) == (tokens, 0, decoded)
    assert min(speed.prefill_seconds, speed.decode_seconds, generator.speed.compile_seconds) > 0
    with compilations() as compiled, compilations("jaxpr_trace_duration") as traced:
        assert generator.generate(prompts, SETTINGS) == results
    assert compiled == traced == []
    assert generator.speed.compile_seconds == 0, "of the last call"
    assert generator.speed.shape == Shape(rows=4, slots=LENGTH)


@pytest.mark.wide
def test_a_seed_gives_the_same_text_in_any_batch_and_on_any_mesh():
    together = ids_of(one().generate(PROMPTS, SAMPLED))
    assert len({*together}) == len(PROMPTS)
    split = SmallDecoder(change(CONFIG, sequence_parallel=True))
    for model, mesh in ((SMALL, (2, 1, 2)), (split, (1, 2, 2, 1))):
        assert ids_of(model.generator(mesh, batch_size=3).generate(PROMPTS, SAMPLED)) == together
    for index, prompt in enumerate(PROMPTS):
        alone = change(SAMPLED, seed=SAMPLED.seed + index)
        assert ids_of(one().generate([prompt], alone)) == [together[index]]
    assert ids_of(one().generate(PROMPTS[:1], change(SAMPLED, seed=8))) != together[:1]
    with_a_gap = one().generate([None, *PROMPTS], change(SAMPLED, seed=SAMPLED.seed - 1))
    assert ids_of(with_a_gap) == together
    assert [each.index for each in with_a_gap] == [1, 2, 3, 4], "a prompt that is None is counted"


@swept("mesh", [None, (2, 1, 2)])
def test_samples_of_a_prompt_are_read_once(mesh):
    """By each part of the batch, unless they are short; log-probabilities are those of plain
    formulas, which read each text again.
    """
    prompts = [LONG, LONG[:30] + "another end", PROMPTS[0]]
    generator = SMALL.generator(mesh, batch_size=8)
    found = generator.generate(prompts, change(SAMPLED, samples=2))
    speed = generator.speed
    assert [(each.index, each.sample) for each in found] == [divmod(index, 2) for index in range(6)]
    lengths = [len(prompt) for prompt in prompts]
    assert speed.prefill_tokens + speed.kept_tokens == 2 * sum(lengths)
    if mesh is None:
        assert speed.prefill_tokens == lengths[0] + lengths[1] + 2 * lengths[2]
    assert len({*ids_of(found)}) == 6
    for result in found:
        length = lengths[result.index]
        ids = np.zeros(LENGTH, np.int32)
        ids[: length + TOKENS] = [*prompts[result.index].encode(), *result.ids]
        logits = reference_logits()(SMALL.weights, ids)[length - 1 : length + TOKENS - 1, :256]
        logprobs = jax.nn.log_softmax(logits)[np.arange(TOKENS), np.array(result.ids)]
        assert_allclose(result.logprobs, logprobs, atol=1e-4)


@pytest.mark.wide
def test_a_conversation_is_read_on_from_the_tokens_in_the_cache(monkeypatch):
    """Also when an answer is given up, when another is asked for, and when the memory has to
    grow.
    """
    monkeypatch.setattr(engine, "CHAT_SLOTS", LENGTH)
    generator = SMALL.generator()
    first = list(b"what is this?")
    *_, last = generator.stream([first], SETTINGS, keep=True)
    longest = [*first, *b" no", *range(97, 97 + 60)]
    known = len(first) + TOKENS - 1  # the last token of a text is not in the cache
    turns = [
        ([*first, *last.result.ids, *b" and that?"], known),
        ([*first, *b" no"], len(first)),
        (longest, 0),  # a larger cache starts empty
    ]
    for turn, kept in turns:
        pieces = generator.stream([turn], SETTINGS, keep=True)
        begun = [next(pieces).token for _ in range(4)]
        pieces.close()
        assert begun == list(one().generate([turn], SETTINGS)[0].ids[:4])
        speed = generator.speed
        assert (speed.kept_tokens, speed.prefill_tokens) == (kept, len(turn) - kept)
    assert generator.speed.shape == Shape(rows=1, slots=2 * LENGTH)
    (result,) = generator.generate([longest], SETTINGS)
    assert generator.speed.kept_tokens == 0, "nothing is kept unless it is asked for"
    assert result.ids == one().generate([longest], SETTINGS)[0].ids


# Of the calls of `wait`, three read the prompt.
INTERRUPTED = {
    "in a program": (Programs, "decode", 1, len(LONG)),
    "while waiting": (engine, "wait", 5, 1),
}


@swept("case", INTERRUPTED)
def test_an_interrupt_in_a_program_loses_the_cache_and_one_while_waiting_loses_nothing(
    case, monkeypatch
):
    owner, name, call, read = INTERRUPTED[case]
    monkeypatch.setattr(engine, "CHAT_SLOTS", LENGTH)
    generator = SMALL.generator()
    original = getattr(owner, name)
    calls = iter(range(100))

    def interrupted(*arguments, **options):
        number = next(calls)
        if number != call or owner is Programs:
            found = original(*arguments, **options)
        if number == call:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        # Calls of one token, then of two: the second call of `decode` is not the last.
        patch.setattr(engine, "SECONDS_PER_CALL", 0.0)
        with pytest.raises(KeyboardInterrupt):
            list(generator.stream([LONG], SETTINGS, keep=True))
    *_, last = generator.stream([LONG], SETTINGS, keep=True)
    assert last.result.ids == likeliest(LONG)
    assert generator.speed.prefill_tokens == read


@pytest.mark.wide
def test_several_tokens_in_a_call_are_those_of_one_in_each(monkeypatch):
    expected = one().generate(PROMPTS, SAMPLED)
    decode = Programs.decode
    made = []
    monkeypatch.setattr(Programs, "decode", lambda *a, **k: made.append(1) or decode(*a, **k))
    for seconds, calls in ((0.0, TOKENS - 1), (1e6, 4)):  # of 1, 2, 4 and the rest
        monkeypatch.setattr(engine, "SECONDS_PER_CALL", seconds)
        made.clear()
        assert one().generate(PROMPTS, SAMPLED) == expected
        assert len(made) == calls


WIDE = change(
    CONFIG,
    d_model=128,
    d_ff=512,
    head_dim=32,
    num_heads=4,
    tie_embeddings=True,
    precision=Precision(param="bfloat16"),
)


@swept("case", [(None, 1), ((1, 2, 2), 8), ((1, 1, 4), 4)])
def test_a_token_reads_weights_and_cache_once_and_nothing_is_copied(case):
    """By the compiled loop, also of shared kv heads: no copy, conversion, transposition or gather
    of a kernel, and its instructions read at most 1.1 times the weights and the cache. A copy of
    rows is in place.
    """
    mesh, rows = case
    model = SmallDecoder(WIDE).on(mesh)
    placed = decode_mesh(model_mesh(model))
    decoder = to_decode_model(model, placed)
    programs = Programs(decoder, placed, Shape(rows, LENGTH), SETTINGS, 256, frozenset())
    caches = programs.empty()
    decode = programs.compiled_decode(caches)
    size = programs.cache_bytes
    held = weight_bytes(model, mesh_sizes(placed)) + size
    read, rearranged = accounts.bytes_of_a_turn(decode.as_text(), least=2**13)
    assert rearranged == []
    assert held - 2**16 < read <= 1.1 * held
    copied = programs.compiled_copy(caches).memory_analysis()
    assert min(copied.alias_size_in_bytes, decode.memory_analysis().alias_size_in_bytes) >= size
    assert copied.temp_size_in_bytes < size / 2
    _, sampled = decode.output_shardings
    assert all(sharding.is_fully_replicated for sharding in sampled), (
        "each process reads the tokens"
    )


@pytest.mark.wide
def test_pieces_add_up_and_come_as_they_are_made():
    pieces = one().stream(PROMPTS, SETTINGS)
    first = next(pieces)
    assert first.result is None
    texts = dict.fromkeys(range(len(PROMPTS)), "") | {first.index: first.text}
    for piece in pieces:
        texts[piece.index] += piece.text
        if piece.result:
            assert texts[piece.index] == piece.result.text


def test_a_text_ends_before_a_stop_text():
    _, whole, *_ = one().generate(PROMPTS, SETTINGS)
    stop = whole.text[3:5]
    pieces = [
        each
        for each in one().stream(PROMPTS, change(SETTINGS, stop=("never there", stop)))
        if each.index == 1
    ]
    result = pieces[-1].result
    assert (result.text, result.finish) == (whole.text.split(stop)[0], "stop")
    assert "".join(piece.text for piece in pieces) == result.text


@pytest.mark.wide
def test_the_prefix_of_a_tokenizer_comes_before_text_and_its_end_token_ends_one():
    tokenizer = ByteTokenizer()
    ids = likeliest("tensor")
    tokenizer.info = TokenizerInfo(BYTES, None, 256, ids[5], tuple(b"te"))
    results = SMALL.generator(None, tokenizer).generate(["nsor", list(b"tensor")], SETTINGS)
    assert [(each.ids, each.finish) for each in results] == [(ids[: ids.index(ids[5])], "end")] * 2


@pytest.mark.wide
def test_bfloat16_halves_the_cache():
    half = Precision(param="bfloat16", compute="bfloat16")
    sizes = []
    for model in (SMALL, SmallDecoder(change(CONFIG, precision=half))):
        generator = model.generator((1, 2, 2))
        (result,) = generator.generate(PROMPTS[:1], SETTINGS)
        assert np.isfinite(result.logprobs).all()
        sizes.append(generator.speed.cache_bytes)
    assert sizes[0] == 2 * sizes[1]


def test_refused_prompts_and_settings():
    assert one().generate([], SETTINGS) == one().generate([None]) == []
    rows = read_table(__file__, "refused_prompts")
    rows.append({"prompts": ["\udcff"], "says": ["GenerationError", "prompt 0 is not UTF-8"]})

    def refuse(row):
        settings = with_tuples(row.get("settings", {}))
        one().generate(row["prompts"], jaxtp.generate.Settings(**settings))

    assert_errors(rows, partial(raised_by, refuse))


NO_DECODERS = {
    "the model is a Linear, which is not a jaxtp.Decoder": lambda: nnx.Linear(
        2, 2, rngs=nnx.Rngs(0)
    ),
    "the model is the class Decoder, which is not a jaxtp.Decoder": lambda: Decoder,
}


@pytest.mark.parametrize("message", NO_DECODERS)
def test_a_model_that_cannot_decode_is_refused(message):
    model = NO_DECODERS[message]()
    with pytest.raises(GenerationError, match=message):
        jaxtp.generate.Generator(model, ByteTokenizer())
    with pytest.raises(GenerationError, match=message):
        one().update(model)


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(GenerationError, match="batch_size=0: should be 1 or more"):
        SMALL.generator(batch_size=0)


def test_logits_that_are_not_finite_are_an_error():
    broken = SmallDecoder(
        CONFIG, change=lambda weights: weights | {"norm.scale": np.full(16, np.nan, np.float32)}
    )
    with pytest.raises(NumericsError, match="logits after prompt 0 are not finite"):
        broken.generator().generate(["a"], SETTINGS)


@pytest.mark.wide
def test_a_text_ends_with_the_context_and_a_prompt_beyond_it_is_refused():
    generator = SMALL.generator(context=LENGTH)
    room = LENGTH - len(LONG)
    whole = change(SETTINGS, max_tokens=room + 8)
    first, second = generator.generate([LONG, PROMPTS[0]], whole)
    assert (first.finish, len(first.ids)) == ("context", room)
    assert (second.finish, second.ids) == ("length", one().generate(PROMPTS[:1], whole)[0].ids)
    assert any(line.startswith("cut     1 ") for line in generator.speed.lines())
    for length in (LENGTH, LENGTH + 1):
        with pytest.raises(
            GenerationError, match=f"prompt 1 has {length} tokens, .* context is {LENGTH}"
        ):
            generator.generate(["a", "a" * length], SETTINGS)


def test_no_token_comes_after_the_learned_positions():
    """Even where a longer context is given, or any."""
    model = SmallDecoder(change(CONFIG, learned_positions=8))
    for context, way_out in (
        (None, "learned_positions"),
        (4, "--beyond-context"),
        (99, "learned_positions"),
    ):
        with pytest.raises(GenerationError, match=f"prompt 0 has 8 tokens, .*{way_out}"):
            model.generator(context=context).generate([list(range(8))])


def test_reading_a_long_prompt_reports_its_progress():
    told = []
    list(
        one().stream(
            ["a", "b", "c", "d" * 37], SETTINGS, progress=lambda *progress: told.append(progress)
        )
    )
    assert told == [(16, 40), (32, 40), (40, 40)]


@pytest.mark.wide
def test_an_update_gives_the_texts_of_the_new_weights():
    """Of a model on another mesh: adapters are merged, old weights are deleted, and nothing is
    compiled again.
    """
    generator = SMALL.generator((1, 1, 2))
    config = change(CONFIG, lora=LoraConfig(rank=2), sequence_parallel=True, remat="none")
    with use_mesh(fsdp=2, cp=2, tp=2):
        model = move_adapters(random_model(config))
    generator.generate(PROMPTS, SETTINGS)
    live = jax.live_arrays()
    generator.update(model)
    deleted = sum(array.nbytes for array in live if array.is_deleted())
    assert deleted >= sum(array.nbytes for array in jax.tree.leaves(nnx.state(SMALL.on(None))))
    assert not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(model)))
    weights = values(merge_adapters(model))
    assert ids_of(generator.generate(PROMPTS, SETTINGS)) == [
        likeliest(prompt, weights) for prompt in PROMPTS
    ]
    assert generator.speed.compile_seconds == 0


@pytest.mark.wide
def test_an_update_takes_other_weights_and_no_other_architecture_and_ends_no_stream():
    generator = SMALL.generator()
    with pytest.raises(GenerationError, match="num_layers=3, not 2"):
        generator.update(nnx.eval_shape(SmallDecoder(change(CONFIG, num_layers=3)).build))
    stream = generator.stream(PROMPTS, SETTINGS)
    next(stream)
    with pytest.raises(GenerationError, match="close the iterator of stream before update"):
        generator.update(SMALL.on(None))
    stream.close()
    other = SmallDecoder(CONFIG, scale=0.2)
    generator.update(other.on(None))
    expected = [likeliest(prompt, other.weights) for prompt in PROMPTS]
    assert (
        ids_of(generator.generate(PROMPTS, SETTINGS))
        == expected
        != [likeliest(prompt) for prompt in PROMPTS]
    )
