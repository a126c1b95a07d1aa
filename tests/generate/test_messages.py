"""Conversations as prompts: they have the tokens of `jaxtp prepare`, and the model's scores."""

import json
from pathlib import Path

import pytest
from corpora import dataset, prompts_and_answers, write
from hf_folders import random_model
from made_once import made_once
from numpy.testing import assert_allclose
from small_tokenizers import CHAT_TOKENS, byte_level
from support import assert_refused
from tables import read_json, read_table, write_json
from variants import small_model

import jaxtp
from jaxtp.config.entry import UserError
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.generate.__main__ import main
from jaxtp.generate.loading import open_source, open_tokenizer
from jaxtp.tools.evaluate.__main__ import main as evaluate

TEMPLATE = (
    "{%- if tools %}<|turn|>tools: {{ tools|tojson }}<|stop|>\n{% endif %}{%- for m in messages %}"
    "<|turn|>{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ "
    "c.function.arguments ARGUMENTS }}]{% endfor %}<|stop|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|turn|>assistant: {% if thinks %}<think>{% endif %}{% endif %}"
)
"""The header ends in a space, with which a word is one token."""
OBJECTS = TEMPLATE.replace("ARGUMENTS", "|tojson")
TEXTS = TEMPLATE.replace("ARGUMENTS", "+ ''")
TABLES = read_table(__file__)
TOOLS = TABLES["tools"]
ASKED = TABLES["asked"]
ROWS = TABLES["rows"]
LONG = TABLES["long"]


def make_model(folder):
    content = byte_level(["yes: yes, yes no the"] * 9, 280, CHAT_TOKENS)
    (folder / "t").mkdir()
    (folder / "t/tokenizer.json").write_bytes(content)
    write_json(folder / "t/tokenizer_config.json", {"eos_token": "<|end|>"})
    size = open_tokenizer(folder / "t").info.vocab_size  # log-probabilities are among its tokens
    model = random_model(small_model(vocab_size=size, d_ff=16))
    jaxtp.hf.save(model, folder / "model", tokenizer_from=folder / "t")
    (folder / "model/chat_template.jinja").write_text(OBJECTS)


@pytest.fixture
def model(tmp_path, tmp_path_factory, monkeypatch):
    """A model with a template; the test's folder is the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(made_once(tmp_path_factory, "model of messages", make_model) / "model")
    return Path("model")


def prompts_of(row, flags=""):
    """The prompts of a dataset of one row, and its answers."""
    write("a.jsonl", [row])
    flags = f"--messages messages --tokenizer model --held-out 0 --overwrite {flags}"
    return prompts_and_answers(dataset(f"a.jsonl {flags}"))


@pytest.mark.parametrize("template", [OBJECTS, TEXTS])
def test_a_prompt_has_the_tokens_of_the_dataset(template, model):
    write("t.jinja", template)
    found = prompts_of(LONG, "--template t.jinja")
    tokenizer = open_tokenizer("d")
    for end, (prompt, _) in zip((2, 4, 6), found, strict=True):
        assert tokenizer.chat(LONG["messages"][:end], json.dumps(TOOLS), x=1) == prompt
    ((prompt, _),) = prompts_of(ROWS["reasoning"], "--template-arguments.thinks true")
    tokenizer = open_tokenizer("d")
    assert tokenizer.chat([ASKED]) == prompt
    assert tokenizer.decode(tokenizer.chat([ASKED], thinks=False)).endswith(b"assistant: ")


def test_what_cannot_be_written_is_refused_by_name(model):
    tokenizer = open_tokenizer(model)
    for messages, arguments, words in TABLES["refused"]:
        with pytest.raises(UserError) as error:
            tokenizer.chat(messages, **arguments)
        assert words in str(error.value)
        assert "--media-as-text" not in str(error.value)
    with pytest.raises(UserError, match="has no chat template"):
        ByteTokenizer().chat([ASKED])


@pytest.mark.journey
def test_a_generator_answers_conversations(model):
    source = open_source(model)
    generator = jaxtp.generate.Generator(jaxtp.hf.load(model), source.tokenizer)
    settings = jaxtp.generate.Settings(max_tokens=3)
    ids = source.tokenizer.chat([ASKED], TOOLS)
    prompts = ["yes", [ASKED], ids, None]
    first, second, third = generator.generate(prompts, settings, tools=TOOLS)
    assert (second.ids, second.index, second.prompt_tokens) == (third.ids, 1, len(ids))
    assert (first.index, third.index) == (0, 2)
    stop = source.tokenizer.special["<|stop|>"]
    assert source.tokenizer.conversations.ends == [stop]
    assert stop not in source.end_ids
    with pytest.raises(UserError, match="prompt 1: message 2 has no 'role'"):
        generator.generate([[ASKED], [ASKED, {}]], settings)
    for arguments in ({"tools": TOOLS}, {"thinks": False}):
        with pytest.raises(UserError, match=f"{next(iter(arguments))}: only a chat template"):
            generator.generate(["yes"], settings, **arguments)


def forced(generator, prompt, answer):
    """The log-probability of each token of an answer: texts of one token are drawn until all have
    been drawn.
    """
    found = {}
    for seed in range(100):
        missing = [place for place in range(len(answer)) if place not in found]
        settings = jaxtp.generate.Settings(
            max_tokens=1, samples=256, seed=seed * 10**6, temperature=9.0
        )
        for result in generator.generate([prompt + answer[:place] for place in missing], settings):
            place = missing[result.index]
            if result.ids == (answer[place],):
                found[place] = result.logprobs[0]
        if len(found) == len(answer):
            return [found[place] for place in range(len(answer))]
    raise AssertionError(f"{len(answer) - len(found)} tokens were never drawn")


@pytest.mark.journey
def test_the_loss_of_an_answer_is_the_sum_of_its_log_probabilities(model):
    # Rows with equal prompts share one reading where a prompt is long beside a chunk.
    generator = jaxtp.generate.Generator(
        jaxtp.hf.load(model), open_tokenizer(model), end_ids=frozenset(), batch_size=256, chunk=128
    )
    for row in ROWS.values():
        ((_, answer),) = prompts_of(row)
        flags = ["--model=model", "--data=d", "--split=train", "--json=e.json"]
        assert evaluate(flags) == 0
        found = read_json(Path("e.json"))["all"]
        prompt = generator.tokenizer.chat([ASKED], row.get("tools"))
        assert found["tokens"] == len(answer)
        assert_allclose(
            found["loss"] * len(answer), -sum(forced(generator, prompt, answer)), rtol=1e-5
        )


@pytest.mark.journey
def test_a_file_of_conversations_has_an_answer_for_each_row(model, capsys):
    rows = [ROWS["a call"], LONG, {"messages": json.dumps([ASKED])}]
    write("a.jsonl", [rows[0], *rows[1:]])
    write("tools.json", json.dumps(TOOLS))
    flags = ["--model=model", "--messages=messages", "--prompt-file=a.jsonl", "--max-tokens=3"]
    assert main([*flags, "--tools=tools.json", "--template-arguments.thinks=true", "--json=-"]) == 0
    shown = capsys.readouterr()
    found = [json.loads(line) for line in shown.out.splitlines()]
    tokenizer = open_tokenizer(model)
    for record, row, end in zip(found, (*rows[:2], {"messages": [ASKED]}), (1, 6, 1), strict=True):
        ids = tokenizer.chat(row["messages"][:end], TOOLS, thinks=True)
        assert record["prompt_tokens"] == len(ids)
        assert len(record["prompt"]) == end
    assert [record["index"] for record in found] == [0, 1, 2]
    assert "left out 2 answers at the end" in shown.err
    assert main(flags) == 0
    assert capsys.readouterr().out.startswith('--- 0: "Is it warm?"\n')


MISTAKES = {
    "a.jsonl, line 1: no field 'mesages'; did you mean --messages messages?": "--messages mesages",
    "a.jsonl, line 2): message 1 has no 'role'": "--messages messages",
    "--tools tools.jso: No such file": "--messages messages --tools tools.jso",
    "--tools tools.json: 'tools' is not a list": "--messages messages --tools tools.json",
    "--tools tools.json: no tools in it": "--messages messages --tools tools.json",
    "--template-arguments.tools": "--messages messages --template-arguments.tools 1",
    "leave --prompt and --chat out": "--messages messages --prompt a",
    "--tools is for chat templates": "--tools tools.json",
    "--tools-field a needs --messages": "--tools-field a",
    "no field 'toolz'; it has messages": "--messages messages --tools-field toolz",
    "messages = []: should be text, or a conversation for --messages": "--field messages",
}


def test_mistakes_are_named(model, capsys):
    write("a.jsonl", [ROWS["reasoning"], {"messages": [{"content": "a"}]}])
    write("tools.json", "3")
    for words, flags in MISTAKES.items():
        if "--field" in flags:
            write("a.jsonl", [{"messages": []}])
        if "no tools" in words:
            write("tools.json", "[]")
        flags = ["--model=model", "--prompt-file=a.jsonl", *flags.split()]
        assert_refused(main, flags, words, capsys)
