"""The model class for lm-evaluation-harness on tasks that need no download, beside plain
log-probabilities.
"""

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from corpora import jsonl
from evaluations import TEXTS
from flax import nnx
from quick_run import quick_flags
from runs import TEXT, records
from small_tokenizers import begins_texts
from support import assert_refused, swept
from tables import read_json, read_table, write_json

import jaxtp

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from jaxtp.checkpoint.__main__ import main as compare
from jaxtp.config.entry import UserError
from jaxtp.generate.loading import SourceConfig, open_source
from jaxtp.tools.evaluate.__main__ import main
from jaxtp.tools.evaluate.harness import ConfigError, JaxtpLM
from jaxtp.tools.evaluate.measure import Scorer
from jaxtp.tools.report.__main__ import main as report
from jaxtp.train.__main__ import main as train

QUESTIONS = read_table(__file__)


def requests(kind, *pairs):
    return [Instance(kind, {}, args, index) for index, args in enumerate(pairs)]


def begins(lm, text):
    """Returns the first token of a text."""
    return lm.source.tokenizer.encode_batch([text])[0][0]


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """The tiny model, with a tokenizer whose template begins each text, as Llama 3's does."""
    place = tmp_path_factory.mktemp("harness") / "model"
    shutil.copytree(tiny_model, place)
    (place / "tokenizer.json").write_bytes(begins_texts())
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    template = "{% for m in messages %}<|turn|>{{ m.content }}<|stop|>{% endfor %}<|turn|>"
    write_json(place / "tokenizer_config.json", {**names, "chat_template": template})
    return place


@pytest.fixture(scope="module")
def logprobs(model):
    """The log-probabilities `[T, V]` of what follows each of some tokens, in float64 from whole
    logits.
    """
    compute = nnx.jit(lambda model, ids: model(ids))
    whole = jaxtp.hf.load(model)

    def found(ids):
        padded = np.pad(np.array(ids, np.int32), (0, 96 - len(ids)))
        logits = np.float64(compute(whole, padded[None]))[0, : len(ids)]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return found


def most_likely(logprobs, ids, count, vocab_size=None):
    """Returns the most likely tokens after some tokens, one after another."""
    found = list(ids)
    for _ in range(count):
        found.append(int(logprobs(found)[-1, :vocab_size].argmax()))
    return found[len(ids) :]


def opened(model, batch_size=8, sequence_length=2048, **mesh):
    source = open_source(model, SourceConfig(special_tokens=True))
    decoder = source.stored.load(source.config, jaxtp.make_mesh(**mesh))
    return JaxtpLM(
        decoder, source, batch_size=batch_size, max_length=sequence_length, check=lambda: None
    )


@pytest.mark.parametrize(
    "settings", [{"batch_size": 1}, {"batch_size": 5, "fsdp": 2, "tp": 2}], ids=str
)
def test_log_likelihoods(model, logprobs, settings):
    lm = opened(model, **settings)
    pairs = [("", "the dog")]
    for context, answers in QUESTIONS:
        pairs += [(context, answer) for answer in answers]
    found = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (context, answer), (logprob, best) in zip(pairs, found, strict=True):
        ids = lm.tok_encode(context + answer)
        begin = len(lm.tok_encode(context)) if context else 1
        assert ids[0] == lm.prefix_token_id == begins(lm, "<|begin|>")
        each = logprobs(ids)[begin - 1 : -1]
        assert logprob == pytest.approx(each[np.arange(len(each)), ids[begin:]].sum(), rel=1e-6)
        assert best is bool((each.argmax(-1) == ids[begin:]).all())
    context = lm.tok_encode("the lazy")
    ((_, best),) = lm._loglikelihood_tokens([(None, context, most_likely(logprobs, context, 2))])
    assert best is True


def test_answers_of_one_token_share_the_pass_of_their_context(model, monkeypatch):
    lm = opened(model, batch_size=4)
    batches = []
    whole = Scorer.next_token_logprobs

    def recorded(self, batch, last):
        batches.append(batch)
        return whole(self, batch, last)

    monkeypatch.setattr(Scorer, "next_token_logprobs", recorded)
    monkeypatch.setattr(Scorer, "__call__", None)
    context = lm.tok_encode("the lazy")
    lm._loglikelihood_tokens([(None, context, [token]) for token in range(10, 30)])
    (batch,) = batches
    assert (batch["labels"] >= 0).any(1).tolist() == [True, False, False, False]


def test_a_text_longer_than_the_model_reads_is_cut_into_windows(model, logprobs):
    lm = opened(model, sequence_length=16)
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *zip(TEXTS)))
    for text, logprob in zip(TEXTS, found, strict=True):
        ids = lm.tok_encode(text)
        total = 0.0
        for done in range(0, len(ids), 16):
            labels = ids[done : done + 16]
            end = done + len(labels)
            window = [lm.prefix_token_id, *ids][max(end - 16, 0) : end]
            total += logprobs(window)[-len(labels) :][np.arange(len(labels)), labels].sum()
        assert logprob == pytest.approx(total, rel=1e-6)
    too_long = "a continuation has 17 tokens, and the model reads 16"
    for continuation, message in (
        ([2] * 17, too_long),
        ([300], "the token 300 is beyond the 300 of"),
    ):
        with pytest.raises(UserError, match=message):
            lm._loglikelihood_tokens([(None, [1], continuation)])


def test_texts_end_at_their_stop_texts(model, logprobs):
    lm = opened(model, batch_size=2)
    tokenizer = lm.source.tokenizer
    settings = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False, "temperature": 0.7}

    def generate(settings, *prompts):
        return lm.generate_until(
            requests("generate_until", *((prompt, settings) for prompt in prompts))
        )

    prompts = ["the lazy dog", "Grüße, the lazy"]
    found = generate(settings, *prompts)
    for prompt, text in zip(prompts, found, strict=True):
        ids = most_likely(logprobs, lm.tok_encode(prompt), 4, tokenizer.info.vocab_size)
        greedy = tokenizer.decode(np.array(ids)).decode(errors="replace")
        assert text == greedy.split("\n")[0].split("<|end|>")[0]
    stop = found[0][1:2]
    assert generate({"until": [stop], "max_gen_toks": 4}, prompts[0]) == [
        found[0].partition(stop)[0]
    ]
    for wrong, message in (({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 10**6}, "reads")):
        with pytest.raises(ConfigError, match=message):
            generate(wrong, "a")


def test_a_conversation_is_written_by_the_template(model, tiny_model):
    lm = opened(model)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert lm.apply_chat_template(messages[:1]) == "<|turn|>hi<|stop|><|turn|>"
    assert (
        lm.apply_chat_template(messages, add_generation_prompt=False)
        == "<|turn|>hi<|stop|><|turn|>yes"
    )
    assert lm.tok_encode("<|turn|>hi")[1] == begins(lm, "<|turn|>")
    plain = opened(tiny_model)
    assert plain.prefix_token_id == plain.eot_token_id == begins(plain, "\n")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks of each kind, about `QUESTIONS`."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"q": context, "options": answers[:2], "a": len(answers) % 2}
        for context, answers in QUESTIONS
    ]
    file = jsonl(folder / "rows.jsonl", rows)
    for task in Path(__file__).with_name("tasks").glob("*.yaml"):
        (folder / task.name).write_text(task.read_text().replace("ROWS", str(file)))
    return folder


REFUSED = {
    # All tasks of the harness are listed.
    "--tasks own_choise": "no such task; did you mean own_choice?",
    "--tasks own_broken": "--tasks own_broken: ",
    "--tasks own_choice --task-folder nowhere": "--task-folder nowhere: no such folder",
    "--tasks own_choice --sequence-length 0": "--sequence-length 0",
}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
class TestTheCommand:
    def test_tasks_of_ones_own(self, model, tasks, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
        names = ["--tasks", "own_choice", "--tasks", "own_rolling", "--tasks", "own_text"]
        file = tmp_path / "numbers.json"
        flags = [f"--model={model}", f"--task-folder={tasks}", *names, f"--json={file}"]
        assert main(flags) == 0
        record = read_json(file)
        assert re.search(r"own_choice +0 +acc +0\.\d{4} +0\.\d{4}\n", capsys.readouterr().out)
        assert record["n-samples"]["own_choice"] == {"original": 3, "effective": 3}
        texts = [context for context, _ in QUESTIONS]
        total = sum(
            opened(model).loglikelihood_rolling(requests("loglikelihood_rolling", *zip(texts)))
        )
        expected = -total / np.log(2) / len("".join(texts).encode())
        assert record["results"]["own_rolling"]["bits_per_byte,none"] == pytest.approx(
            expected, rel=1e-6
        )

    @swept("flags", REFUSED, *list(REFUSED)[1:])
    def test_what_is_refused_before_the_weights_are_read(
        self, model, tasks, monkeypatch, capsys, flags
    ):
        monkeypatch.setattr("jaxtp.generate.loading.load_folder", None)
        words = [f"--model={model}", f"--task-folder={tasks}", *flags.split()]
        assert_refused(main, words, REFUSED[flags], capsys)

    def test_a_chat_needs_a_template(self, tiny_model, tasks, capsys):
        words = [
            f"--model={tiny_model}",
            f"--task-folder={tasks}",
            "--tasks",
            "own_choice",
            "--chat",
        ]
        assert_refused(
            main, words, f"--chat: {tiny_model} has no chat template; leave --chat out", capsys
        )


NAMES = ["own_choice", "own_rolling", "own_text"]


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A run of four steps without tasks, and its text."""
    folder = tmp_path_factory.mktemp("silent")
    text = folder / "text.txt"
    text.write_text(TEXT)
    assert train([*quick_flags(folder / "run", text, 1, 1, 1), *STEPS]) == 0
    return folder


STEPS = ["--train.steps=4", "--checkpoint.every=2", "--checkpoint.keep=9"]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
class TestDuringARun:
    @pytest.fixture(autouse=True)
    def hub(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))

    def flags(self, folder, silent, tasks, *sizes):
        chosen = ["--eval.tasks", *NAMES, "--eval.tasks-every=2", f"--eval.task-folder={tasks}"]
        return [*quick_flags(folder, silent / "text.txt", *sizes), *STEPS, *chosen]

    def test_scores_are_those_of_the_checkpoints_and_the_run_does_not_notice(
        self, silent, tasks, tmp_path, capsys
    ):
        run = tmp_path / "run"
        flags = self.flags(run, silent, tasks, 1, 1, 1)
        numbers = np.random.get_state()[1].tolist()
        assert train([*flags, "--train.steps=2"]) == 0
        assert train(flags) == 0
        assert np.random.get_state()[1].tolist() == numbers
        assert compare(["diff", str(silent / "run"), str(run)]) == 0
        printed = capsys.readouterr().out
        for step in (2, 4):
            file = tmp_path / f"{step}.json"
            names = [f"--tasks={name}" for name in NAMES]
            source = [f"--model={run}/checkpoints/{step}", f"--task-folder={tasks}"]
            assert main([*source, *names, f"--json={file}"]) == 0
            results = read_json(file)["results"]
            for name, metric in zip(NAMES, ("acc", "bits_per_byte", "exact_match"), strict=True):
                score = records(run, f"eval_{name}/{metric}")[step]
                assert score == pytest.approx(results[name][f"{metric},none"], rel=1e-7)
                assert f"eval_{name}/{metric} {score:.4g}" in printed
        assert report([str(run), "--out", str(tmp_path / "page.html")]) == 0
        assert "eval_own_choice/acc" in (tmp_path / "page.html").read_text()

    @pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 1, 2, 2)], ids=str)
    def test_every_mesh_has_the_scores_of_one_device(self, silent, tasks, tmp_path, sizes):
        run = tmp_path / "run"
        # Only the last step
        last = ["--eval.tasks-every=0"]
        assert train([*self.flags(run, silent, tasks, *sizes), *last]) == 0
        one = tmp_path / "one"
        assert train([*self.flags(one, silent, tasks, 1, 1, 1), *last]) == 0
        for key in ("eval_own_choice/acc", "eval_own_rolling/bits_per_byte"):
            assert records(run, key) == pytest.approx(records(one, key), rel=1e-5)

    def test_a_signal_ends_the_tasks_and_saves_the_run(self, silent, tasks, tmp_path, monkeypatch):
        run = tmp_path / "run"
        answer = JaxtpLM._scores

        def interrupted(self, rows, length):
            signal.raise_signal(signal.SIGTERM)
            return answer(self, rows, length)

        monkeypatch.setattr(JaxtpLM, "_scores", interrupted)
        assert train(self.flags(run, silent, tasks, 1, 1, 1)) == 0
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
        assert "eval_own" not in (run / "metrics.jsonl").read_text()

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--eval.tasks=own_choise"], "--eval.tasks own_choise: no such task; did you mean"),
            (["--eval.task-folder=nowhere"], "--eval.task-folder nowhere: no such folder"),
        ],
        ids=str,
    )
    def test_refused_at_the_start(self, silent, tasks, tmp_path, capsys, flags, message):
        words = [*self.flags(tmp_path / "run", silent, tasks, 1, 1, 1), *flags]
        assert_refused(train, words, message, capsys)
        assert not (tmp_path / "run").exists()
