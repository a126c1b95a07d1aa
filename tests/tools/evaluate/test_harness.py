"""The model class for lm-evaluation-harness on tasks that need no download, beside plain log-probabilities."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from evaluations import TEXTS
from flax import nnx
from small_tokenizers import begins_texts

import jaxtp

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from jaxtp.config.entry import Interrupt
from jaxtp.generate.loading import SourceConfig, open_source
from jaxtp.tools.evaluate.__main__ import main
from jaxtp.tools.evaluate.harness import HarnessError, JaxtpLM
from jaxtp.tools.evaluate.measure import Scorer

QUESTIONS = [("the lazy", [" dog", " a", " ran, the dog"]), ("naïve", [" café", " dog"]), ("the lazy", [" dog", " b"])]


def requests(kind, pairs):
    return [Instance(kind, {}, args, index) for index, args in enumerate(pairs)]


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """The tiny model, with a tokenizer whose template begins each text, as Llama 3's does."""
    place = tmp_path_factory.mktemp("harness") / "model"
    shutil.copytree(tiny_model, place)
    (place / "tokenizer.json").write_bytes(begins_texts())
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    template = "{% for m in messages %}<|turn|>{{ m.content }}<|stop|>{% endfor %}<|turn|>"
    (place / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": template}))
    return place


@pytest.fixture(scope="module")
def logprobs(model):
    """The log-probabilities `[T, V]` of what follows each of some tokens, in float64 from whole logits."""
    graph, state = nnx.split(jaxtp.load_hf(model))
    logits_of = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))

    def found(ids):
        padded = np.zeros((1, 96), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.float64(logits_of(state, padded))[0, : len(ids)]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return found


def opened(model, batch_size=8, sequence_length=2048, **mesh):
    source = open_source(model, SourceConfig(special_tokens=True))
    decoder = source.load(jaxtp.make_mesh(**mesh))
    return JaxtpLM(decoder, source, batch_size=batch_size, max_length=sequence_length, interrupt=Interrupt())


@pytest.mark.parametrize("settings", [{"batch_size": 1}, {"batch_size": 5, "fsdp": 2, "tp": 2}], ids=str)
def test_log_likelihoods(model, logprobs, settings):
    lm = opened(model, **settings)
    pairs = [(context, answer) for context, answers in QUESTIONS for answer in answers] + [("", "the dog")]
    found = lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    for (context, answer), (logprob, best) in zip(pairs, found, strict=True):
        ids = lm.tok_encode(context + answer)
        begin = len(lm.tok_encode(context)) if context else 1
        assert ids[0] == lm.prefix_token_id == lm.source.tokenizer.encode_batch(["<|begin|>"])[0][0]
        each = logprobs(ids)
        at = np.arange(begin, len(ids))
        assert logprob == pytest.approx(each[at - 1, ids[begin:]].sum(), rel=1e-6)
        assert best is bool((each[at - 1].argmax(-1) == ids[begin:]).all())
    likeliest = lm.tok_encode("the lazy")
    for _ in range(2):
        likeliest.append(int(logprobs(likeliest)[-1].argmax()))
    assert lm._loglikelihood_tokens([(None, likeliest[:-2], likeliest[-2:])])[0][1] is True


def test_answers_of_one_token_share_the_pass_of_their_context(model, monkeypatch):
    lm, rows = opened(model, batch_size=4), []
    whole = Scorer.next_token_logprobs
    monkeypatch.setattr(
        Scorer, "next_token_logprobs", lambda self, batch, last: rows.append(batch) or whole(self, batch, last)
    )
    monkeypatch.setattr(Scorer, "__call__", None)
    context = lm.tok_encode("the lazy")
    lm._loglikelihood_tokens([(None, context, [token]) for token in range(10, 30)])
    assert len(rows) == 1
    assert ((rows[0]["labels"] >= 0).sum(1) > 0).tolist() == [True, False, False, False]


def test_a_text_longer_than_the_model_reads_is_cut_into_windows(model, logprobs):
    lm = opened(model, sequence_length=16)
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]))
    for text, logprob in zip(TEXTS, found, strict=True):
        ids = lm.tok_encode(text)
        first = [lm.prefix_token_id, *ids]
        total, done = 0.0, 0
        while done < len(ids):
            count = min(16, len(ids) - done)
            window = first[max(done + count - 16, 0) : done + count]
            total += logprobs(window)[-count:][np.arange(count), ids[done : done + count]].sum()
            done += count
        assert logprob == pytest.approx(total, rel=1e-6)
    with pytest.raises(HarnessError, match="a continuation has 17 tokens, and the model reads 16"):
        lm._loglikelihood_tokens([(None, [1], [2] * 17)])
    with pytest.raises(HarnessError, match="the token 300 is beyond the 300 of"):
        lm._loglikelihood_tokens([(None, [1], [300])])


def test_texts_end_at_their_stop_texts(model, logprobs):
    lm = opened(model, batch_size=2)
    settings = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.7}
    prompts = ["the lazy dog", "naïve", "Grüße, the lazy"]
    found = lm.generate_until(requests("generate_until", [(prompt, settings) for prompt in prompts]))
    for prompt, text in zip(prompts, found, strict=True):
        ids = lm.tok_encode(prompt)
        for _ in range(6):
            ids.append(int(logprobs(ids)[-1, : lm.source.tokenizer.info.vocab_size].argmax()))
        greedy = lm.source.tokenizer.decode(np.array(ids[len(lm.tok_encode(prompt)) :])).decode(errors="replace")
        assert text == greedy.split("\n")[0].split("<|end|>")[0]
    cut = {"until": [found[0][1:2]], "max_gen_toks": 6}
    assert lm.generate_until(requests("generate_until", [(prompts[0], cut)])) == [
        found[0][: found[0].index(found[0][1:2])]
    ]
    for wrong, message in (({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 10**6}, "reads")):
        with pytest.raises(HarnessError, match=message):
            lm.generate_until(requests("generate_until", [("a", wrong)]))


def test_a_conversation_is_written_by_the_template(model, tiny_model):
    lm = opened(model)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert lm.apply_chat_template(messages[:1]) == "<|turn|>hi<|stop|><|turn|>"
    assert lm.apply_chat_template(messages, add_generation_prompt=False) == "<|turn|>hi<|stop|><|turn|>yes"
    assert lm.tok_encode("<|turn|>hi")[1] == lm.source.tokenizer.encode_batch(["<|turn|>"])[0][0]
    plain = opened(tiny_model)
    assert plain.prefix_token_id == plain.eot_token_id == plain.source.tokenizer.encode_batch(["\n"])[0][0]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks of each kind, about `QUESTIONS`."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"q": context, "options": answers[:2], "a": index % 2} for index, (context, answers) in enumerate(QUESTIONS)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in Path(__file__).with_name("tasks").glob("*.yaml"):
        (folder / task.name).write_text(task.read_text().replace("ROWS", str(file)))
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
class TestTheCommand:
    def test_tasks_of_ones_own(self, model, tasks, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
        names = [word for name in ("choice", "rolling", "text") for word in ("--tasks", f"own_{name}")]
        flags = ["--model", str(model), "--task-folder", str(tasks), *names, "--cache", str(tmp_path / "cache")]
        assert main([*flags, "--json", str(tmp_path / "numbers.json")]) == 0
        printed, record = capsys.readouterr().out, json.loads((tmp_path / "numbers.json").read_text())
        assert "|own_choice |" in printed
        assert record["n-samples"]["own_choice"] == {"original": 3, "effective": 3}
        lm = opened(model)
        texts = [context for context, _ in QUESTIONS]
        total = sum(lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts])))
        expected = -total / np.log(2) / sum(len(text.encode()) for text in texts)
        assert record["results"]["own_rolling"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-6)
        monkeypatch.setattr(JaxtpLM, "_loglikelihood_tokens", None)
        monkeypatch.setattr(JaxtpLM, "generate_until", None)
        assert main([*flags, "--json", "-"]) == 0, "all answers are in the cache"
        assert json.loads(capsys.readouterr().out)["results"] == record["results"]
        assert "torch" not in sys.modules

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--tasks", "own_choise"], "no such task; did you mean own_choice, "),
            (["--tasks", "own_choice", "--tasks", "hellaswagg"], "did you mean hellaswag"),
            (["--tasks", "own_broken"], "--tasks own_broken: "),
            (["--tasks", "own_choice", "--task-folder", "nowhere"], "--task-folder nowhere: no such folder"),
            (["--tasks", "own_choice", "--sequence-length", "0"], "--sequence-length 0"),
        ],
    )
    def test_what_is_refused_before_the_weights_are_read(self, model, tasks, monkeypatch, capsys, flags, message):
        def unread(*_, **__):
            raise AssertionError("the weights are read")

        monkeypatch.setattr("jaxtp.generate.loading.load_folder", unread)
        assert main(["--model", str(model), "--task-folder", str(tasks), *flags]) == 2
        assert message in capsys.readouterr().err

    def test_a_chat_needs_a_template(self, tiny_model, tasks, capsys):
        assert main(["--model", str(tiny_model), "--task-folder", str(tasks), "--tasks", "own_choice", "--chat"]) == 2
        assert f"--chat: {tiny_model} has no chat template; leave --chat out" in capsys.readouterr().err
        assert open_source(tiny_model).template is None
