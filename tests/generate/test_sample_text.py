"""Texts of a model in training: those of a generator with its weights, and a run that does not
notice.
"""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import pytest
from flax import nnx
from runs import TEXT, records
from small_tokenizers import begins_texts
from support import decoder, use_mesh
from variants import small_model

import jaxtp
from jaxtp.config.entry import NumericsError
from jaxtp.config.schema import ConfigError
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.generate.loading import open_tokenizer
from jaxtp.generate.request import GenerationError

MODEL = small_model(vocab_size=256)
SETTINGS = jaxtp.generate.Settings(max_tokens=6, temperature=1.0, seed=3)
PROMPTS = ["line", "the quick"]


def run_of(model, mesh, folder, batches=None):
    """Returns what a callback sees of a run without data, which collects its `lines`."""
    data = SimpleNamespace(batches=batches, path=None, mixture={})
    lines = []
    return SimpleNamespace(
        model=model,
        mesh=mesh,
        config=SimpleNamespace(data=data, run=SimpleNamespace(dir=folder)),
        paused=lambda what: nullcontext(),
        line=lines.append,
        lines=lines,
    )


def run(tmp_path, mesh, callbacks):
    (tmp_path / "text.txt").write_text(TEXT)
    settings = {
        "data.path": tmp_path / "text.txt",
        "data.sequence_length": 16,
        "data.global_batch_size": 4,
        "eval.batches": 1,
        "train.log_every": 1,
        "checkpoint.every": 2,
        "checkpoint.keep": 9,
    }
    with jaxtp.Trainer(
        model=MODEL,
        callbacks=callbacks,
        mesh=mesh,
        folder=tmp_path / "run",
        steps=4,
        settings=settings,
    ) as trainer:
        trainer.run_to_end()
    return records(tmp_path / "run", "param_norm")


@pytest.mark.wide
def test_texts_are_those_of_the_checkpoints(tmp_path, capsys):
    mesh = "fsdp=2,cp=2,tp=2"
    (tmp_path / "silent").mkdir()
    sampled = run(tmp_path, mesh, [jaxtp.generate.sample_text(PROMPTS, every=2, settings=SETTINGS)])
    printed = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("step ") and '"' in line
    ]
    assert sampled == run(tmp_path / "silent", mesh, [])
    expected = []
    for step in (2, 4):
        with use_mesh():
            model = jaxtp.load_run(tmp_path / f"run/checkpoints/{step}")
        results = jaxtp.generate.Generator(model, ByteTokenizer()).generate(PROMPTS, SETTINGS)
        expected += [
            f"step {step}: {json.dumps(p + r.text, ensure_ascii=False)}"
            for p, r in zip(PROMPTS, results, strict=True)
        ]
    assert printed == expected
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-2])
    assert row["lost_to_sample_text"] > 0


def test_invalid_settings_and_a_missing_tokenizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="every=0: should be 1 or more"):
        jaxtp.generate.sample_text("a", every=0)
    with pytest.raises(ConfigError, match="max_tokens"):
        jaxtp.generate.sample_text("a", settings=jaxtp.generate.Settings(max_tokens=0))
    run = run_of(nnx.eval_shape(decoder(MODEL)), None, tmp_path, batches="mine.py:batches")
    sample = jaxtp.generate.sample_text("a", every=1)
    with pytest.raises(GenerationError, match="name no tokenizer; give one by tokenizer="):
        sample(run, SimpleNamespace(index=1))
    run.model = None
    with pytest.raises(GenerationError, match="the model is a NoneType"):
        sample(run, SimpleNamespace(index=1))


@pytest.mark.wide
def test_a_text_starts_with_the_first_token_of_a_given_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(begins_texts())
    tokenizer = open_tokenizer(tmp_path)
    with use_mesh() as mesh:
        model = decoder(small_model(vocab_size=tokenizer.info.vocab_size))()
        run = run_of(model, mesh, tmp_path)
        jaxtp.generate.sample_text("ab", settings=SETTINGS, tokenizer=tmp_path)(
            run, SimpleNamespace(index=100)
        )
        (result,) = jaxtp.generate.Generator(model, tokenizer).generate(["ab"], SETTINGS)
    assert tokenizer.info.prefix
    assert run.lines == [f"step 100: {json.dumps('ab' + result.text, ensure_ascii=False)}"]


@pytest.mark.wide
def test_a_text_ends_where_the_mesh_still_divides_the_learned_positions(tmp_path):
    sample = jaxtp.generate.sample_text("ab", every=1)
    with use_mesh(cp=2, tp=2) as mesh:
        model = decoder(small_model(vocab_size=256, learned_positions=14, sequence_parallel=True))()
    run = run_of(model, mesh, tmp_path)
    sample(run, SimpleNamespace(index=1))
    run.model = jax.tree.map(lambda x: jax.numpy.full_like(x, jax.numpy.nan), model)
    with pytest.raises(NumericsError, match="logits after prompt 0 are not finite"):
        sample(run, SimpleNamespace(index=2))
    assert [line.startswith('step 1: "ab') for line in run.lines] == [True]
