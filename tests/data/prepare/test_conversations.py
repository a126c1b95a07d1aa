"""Conversations: a document for each answer, made by the model's chat template."""

import io
import json
import sys

import pytest
from corpora import jsonl, parquet, prepared, refused
from runs import SMALL, mesh
from small_tokenizers import CHAT_TOKENS, begins_texts
from tokenizers import Tokenizer

from jaxtp.data.chat_template import ChatTemplate
from jaxtp.data.corpus import load_corpus
from jaxtp.data.prepare import session
from jaxtp.data.prepare.__main__ import main
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.data.tokenizer_files import TokenizerError, template_day
from jaxtp.generate.__main__ import main as generate
from jaxtp.generate.loading import open_source
from jaxtp.train.__main__ import main as train

LIBRARY = Tokenizer.from_str(begins_texts().decode())
FIRST, END, TURN, STOP = map(LIBRARY.token_to_id, CHAT_TOKENS)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
NAMED = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def said(*contents):
    """A conversation in which user and assistant take turns."""
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


CHANNELS = (
    "{%- for m in messages %}{%- if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "<|turn|>assistant to=functions.{{ call.name }}<|channel|>commentary<|message|>{{ call.arguments|tojson }}<|stop|>"
    "{%- elif m.role != 'assistant' %}<|turn|>{{ m.role }}<|message|>{{ m.content }}<|stop|>"
    "{%- elif not loop.last or add_generation_prompt %}"
    "<|turn|>assistant<|channel|>final<|message|>{{ m.content }}<|stop|>"
    "{%- else %}{% if m.thinking %}<|turn|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|stop|>{% endif %}"
    "<|turn|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|turn|>assistant{% endif %}"
)
"""As gpt-oss's: <|end|> only after the last answer, which alone has its reasoning."""


ROWS = [said("naïve?", "yes", "and 🙂", "no\n"), said("a", "b <|stop|> c"), said("<|turn|>x", "y", "z")]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").write_bytes(begins_texts())
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps(NAMED | {"chat_template": TEMPLATE}))
    jsonl(tmp_path / "a.jsonl", ROWS)
    return tmp_path


def make(folder, *flags, rows="a.jsonl"):
    return prepared(folder / "d", folder / rows, "--tokenizer", folder / "t", "--messages", "messages", *flags)


def documents(dataset, name="train"):
    """Prompt and answer of each document."""
    split = dataset.splits[name]
    for index in range(split.num_documents):
        ids, cut = split.document(index).tolist(), split.prompt_length(index)
        yield ids[:cut], ids[cut:]


def spelled(ids):
    return LIBRARY.decode(ids, skip_special_tokens=False)


def test_images_are_refused_counted_or_read_as_words(folder, capsys):
    parts = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": "x.png"}}]
    jsonl(folder / "b.jsonl", [ROWS[0], said(parts, "a cat"), said("<audio> and?", "no"), said(parts[:1], "this")])
    command = [folder / "b.jsonl", "--tokenizer", folder / "t", "--messages", "messages", "--held-out", 0]
    assert "line 2: message 1 has <image>, and only text is read" in refused(capsys, *command, "--out", folder / "d")
    assert make(folder, "--on-error", "skip", "--held-out", 0, rows="b.jsonl").splits["train"].num_documents == 3
    assert "2 x image, audio or video" in capsys.readouterr().out
    dataset = make(folder, "--media-as-text", "--held-out", 0, "--overwrite", rows="b.jsonl")
    texts = [spelled(prompt) for prompt, _ in documents(dataset)]
    assert ["What is <image>" in text for text in texts] == [False, False, True, False, False]
    assert sum("<audio> and?" in text for text in texts) == 1


def test_channels_and_tool_calls(folder):
    """Each answer is what a model writes after the header alone."""
    call = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rom"}}}
    messages = [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "20"},
        {"role": "assistant", "content": "Yes.", "thinking": "20 is warm"},
        {"role": "user", "content": "And dry?"},
        {"role": "assistant", "content": "No.", "thinking": None},
    ]
    jsonl(folder / "b.jsonl", [{"messages": messages}])
    (folder / "channels").write_text(CHANNELS)
    dataset = make(folder, "--template", folder / "channels", "--held-out", 0, rows="b.jsonl")
    prompts, answers = zip(*([spelled(ids) for ids in document] for document in documents(dataset)), strict=True)
    assert answers == (
        ' to=functions.get<|channel|>commentary<|message|>{"city": "Rom"}<|stop|>',
        "<|channel|>analysis<|message|>20 is warm<|stop|><|turn|>assistant<|channel|>final<|message|>Yes.<|end|>",
        "<|channel|>final<|message|>No.<|end|>",
    )
    assert all(prompt.endswith("<|stop|><|turn|>assistant") for prompt in prompts)
    assert ["20 is warm" in prompt for prompt in prompts] == [False] * 3


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_each_answer_is_a_document_after_what_comes_before_it(folder, write):
    write(folder / f"b.{write.__name__}", ROWS)
    dataset = make(folder, "--held-out", 0, rows=f"b.{write.__name__}")
    found = list(documents(dataset))
    template = ChatTemplate(TEMPLATE, "t", NAMED)
    answers = [(row["messages"], i) for row in ROWS for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
    assert [spelled(prompt) for prompt, _ in found] == [template.render(messages[:i]) for messages, i in answers]
    assert [spelled(answer) for _, answer in found] == [
        f"{messages[i]['content'].strip()}<|stop|>\n" for messages, i in answers
    ]
    assert found[0][0] == LIBRARY.encode(template.render(ROWS[0]["messages"][:1]), add_special_tokens=False).ids


def test_special_tokens_are_the_templates_alone(folder):
    found = [prompt + answer for prompt, answer in documents(make(folder, "--held-out", 0))]
    assert [ids.count(FIRST) for ids in found] == [1, 1, 1, 1]
    assert [ids.count(TURN) for ids in found] == [2, 4, 2, 2]
    assert [ids.count(STOP) for ids in found] == [2, 4, 2, 2]
    again = prepared(
        *(folder / "e", folder / "a.jsonl", "--tokenizer", folder / "t", "--messages", "messages"),
        *("--special-tokens", "--held-out", 0),
    )
    assert [(p + a).count(STOP) for p, a in documents(again)] == [2, 4, 3, 2]


def test_the_answers_of_a_conversation_are_in_one_split(folder):
    rows = [said(f"{i}?", "yes", "sure?", "no") for i in range(60)]
    jsonl(folder / "b.jsonl", rows)
    dataset = make(folder, "--held-out", 0.4, rows="b.jsonl")
    for name in ("train", "validation"):
        texts = [spelled(prompt + answer) for prompt, answer in documents(dataset, name)]
        assert len(texts) > 20
        assert all(second.startswith(first) for first, second in zip(texts[::2], texts[1::2], strict=True))


def test_bytes_and_a_template_of_ones_own(folder):
    (folder / "x.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    command = ["--messages", "messages", "--template", folder / "x.jinja", "--held-out", 0]
    dataset = prepared(folder / "d", folder / "a.jsonl", *command)
    pairs = [tuple(ByteTokenizer().decode(part).decode() for part in pair) for pair in documents(dataset)]
    assert pairs[1] == ("[naïve?][yes][and 🙂]", "[no\n]")


def test_it_says_how_many_tokens_have_loss(folder, capsys):
    dataset = make(folder, "--held-out", 0)
    answers = sum(len(answer) for _, answer in documents(dataset))
    assert f"{dataset.splits['train'].num_tokens:,} tokens, {answers:,} of them with loss, in 1 shard" in (
        capsys.readouterr().out
    )
    assert load_corpus(folder / "d", validation=folder / "d").loss_tokens == answers
    (folder / "a.txt").write_text("abc")
    plain = prepared(folder / "plain", folder / "a.txt", "--held-out", 0)
    assert "with loss" not in capsys.readouterr().out
    assert plain.splits["train"].num_loss_tokens == 2


def test_what_it_says_and_that_it_is_finished(folder, capsys):
    dataset = make(folder)
    assert (dataset.tokenizer.prefix, dataset.tokenizer.eos_id) == ((FIRST,), STOP)
    assert f"documents   begin with <|begin|> ({FIRST}); end with <|stop|> ({STOP})\n" in capsys.readouterr().out
    make(folder)
    assert "is finished; there is nothing to do" in capsys.readouterr().out
    (folder / "t/chat_template.jinja").write_text("{# another #}" + TEMPLATE)
    command = ["--tokenizer", folder / "t", "--messages", "messages", "--out", folder / "d"]
    assert "template: " in refused(capsys, folder / "a.jsonl", *command)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, 'not a list of messages, but "hello"'),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": ["x"]}, "message 1 is not an object with role and content"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "message 1: 'content' is not a string, but null; give it a text, or remove the message",
        ),
        (
            {"messages": [{"speaker": "human", "value": "x"}]},
            "message 1 has no 'role': rename one of its keys to 'role': 'speaker', 'value'",
        ),
        (
            {"messages": [{"role": "user", "text": "x"}]},
            "message 1 has no 'content': rename its key 'text' to 'content'",
        ),
        (
            {"messages": [{"role": "user"}]},
            "message 1 has no 'content': it has only 'role'; give it a content, or remove the message",
        ),
        ({"messages": [{}]}, "message 1 has no 'role': it is empty; remove it"),
        (
            {"messages": [{"role": "User", "content": "x"}, {"role": "Assistant", "content": "y"}]},
            "so there is no answer to learn; it has 'User', 'Assistant'; write 'assistant' instead of 'Assistant'",
        ),
        ({"messages": [{"from": "moon", "value": "x"}]}, 'message 1 is from "moon", and not from human, user, gpt'),
        (
            {"messages": [{"from": "gpt", "value": 3}]},
            "message 1: 'content' is not a string, but 3",
        ),
        (said("a"), "no message has the role 'assistant', so there is no answer to learn; it has 'user'"),
        (said("a", "\ufdd0"), "holds U+FDD0, which is no character"),
        ({"message": []}, "no field 'messages'; did you mean 'message'?"),
    ],
)
def test_what_is_no_conversation(folder, capsys, row, message):
    jsonl(folder / "b.jsonl", [ROWS[0], row])
    command = [folder / "b.jsonl", "--tokenizer", folder / "t", "--messages", "messages", "--held-out", 0]
    error = refused(capsys, *command, "--out", folder / "d")
    assert "b.jsonl, line 2: " in error
    assert message in error
    dataset = make(folder, "--on-error", "skip", "--held-out", 0, rows="b.jsonl")
    assert dataset.splits["train"].num_documents == 2


def test_keys_that_occur_twice_and_deep_nesting(folder, capsys):
    deep = "[" * 900 + "]" * 900
    contents = {
        "twice": '{"role": "user", "content": "a", "content": "b"}',
        "deep": f'{{"role": "user", "content": "a", "more": {deep}}}',
    }
    for name, message in contents.items():
        row = f'{{"messages": [{message}, {{"role": "assistant", "content": "c"}}]}}\n'
        (folder / f"{name}.jsonl").write_text(row)
    command = ["--tokenizer", folder / "t", "--held-out", 0, "--out", folder / "d"]
    error = refused(capsys, folder / "twice.jsonl", *command)
    assert 'twice.jsonl, line 1: the key "content" occurs twice in an object; remove one of them' in error
    assert "deep.jsonl, line 1: not JSON: nested too deeply" in refused(capsys, folder / "deep.jsonl", *command)


def shards(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("train", "validation"))}


def test_a_resumed_command_writes_the_day_on_which_it_was_begun(folder, capsys, monkeypatch):
    template = "{{ strftime_now('%d %b %Y, %H:%M') }} {{ [1, 2, 3, 4, 5, 6] | random }}" + TEMPLATE
    (folder / "day.jinja").write_text(template)
    rows = [said(f"{i}?", f"{i}") for i in range(30)]
    jsonl(folder / "b.jsonl", [*rows[:10], {"messages": 3}, *rows[10:]])
    flags = ["--template", folder / "day.jinja", "--on-error", "skip"]
    monkeypatch.setattr(session, "first_day", lambda config: "2026-01-31")
    refused(capsys, folder / "b.jsonl", "--tokenizer", folder / "t", *flags[:2], "--out", folder / "d")
    monkeypatch.setattr(session, "first_day", lambda config: "2026-02-01")
    resumed = make(folder, *flags, rows="b.jsonl")
    assert "date        the chat template writes the day 2026-01-31; --date names another" in capsys.readouterr().out
    monkeypatch.undo()
    named = ["--out", folder / "e", "--date", "2026-01-31", "--messages", "messages"]
    assert main([*map(str, [folder / "b.jsonl", "--tokenizer", folder / "t", *flags, *named])]) == 0
    assert shards(resumed.folder) == shards(folder / "e")
    prompt, _ = next(documents(resumed))
    assert spelled(prompt).startswith("31 Jan 2026, 12:00")
    assert template_day(folder / "d") == template_day(folder / "e") == "2026-01-31"
    command = [folder / "b.jsonl", "--tokenizer", folder / "t", *flags, "--messages", "messages"]
    assert "date: None -> 2026-02-01" in refused(capsys, *command, "--date", "2026-02-01", "--out", folder / "d")
    assert "--date tomorrow: should be a day, such as 2026-01-31" in refused(capsys, *command, "--date", "tomorrow")


def test_a_template_without_a_day_records_none(folder):
    assert template_day(make(folder).folder) is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "x.jinja refuses this conversation: no"),
        ("{% if %}", "x.jinja: not a chat template"),
        (
            "{% if add_generation_prompt %}<think>{% endif %}{{ messages }}",
            "the template starts this answer differently",
        ),
        (None, "x.jinja: No such file"),
    ],
)
def test_templates_that_cannot_be_used(folder, capsys, template, message):
    if template is not None:
        (folder / "x.jinja").write_text(template)
    command = [folder / "a.jsonl", "--tokenizer", folder / "t", "--messages", "messages"]
    assert message in refused(capsys, *command, "--template", folder / "x.jinja", "--out", folder / "d")


def test_without_a_template_one_is_asked_for(folder, capsys):
    (folder / "t/tokenizer_config.json").write_text(json.dumps(NAMED))
    command = [folder / "a.jsonl", "--messages", "messages", "--out", folder / "d"]
    assert "t has no chat template; give one by --template FILE" in refused(
        capsys, *command, "--tokenizer", folder / "t"
    )
    assert "bytes come with no chat template" in refused(capsys, *command)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--messages", "m", "--field", "f"], "--messages is a row's only field"),
        (["--messages", "m", "--train-bpe", "300"], "--messages needs the tokenizer"),
        (["--messages", "m", "--bos", "none"], "--bos is for documents"),
    ],
)
def test_settings_that_cannot_be(capsys, flags, message):
    assert message in refused(capsys, "x", "--out", "d", *flags)


SHAREGPT = [
    {"id": i, "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]}
    for i, (row, names) in enumerate(
        zip(ROWS, [{"user": "human", "assistant": "gpt"}, {"user": "user", "assistant": "chatgpt"}] * 2, strict=False)
    )
]


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("flags", [[], ["--messages", "conversations"]])
def test_sharegpt_is_read_as_messages_are(folder, capsys, write, flags):
    expected = list(documents(make(folder, "--held-out", 0)))
    write(folder / "s", SHAREGPT)
    command = ["--tokenizer", folder / "t", "--format", write.__name__, "--held-out", 0, *flags]
    capsys.readouterr()
    dataset = prepared(folder / "e", folder / "s", *command)
    assert list(documents(dataset)) == expected
    layout = "layout      ShareGPT, a conversation in each row's 'conversations'; not read: \"id\"\n"
    assert (layout in capsys.readouterr().out) == (not flags)
    prepared(folder / "e", folder / "s", *command)
    assert "is finished; there is nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("flags", [[], ["--messages", "instruction"]])
def test_alpaca_is_read_as_a_question_and_its_answer(folder, capsys, write, flags):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say.", "output": "so"},
        {"instruction": "Be.", "input": "", "output": ""},
        {"instruction": "Go.", "input": None, "output": "on", "system": "Be brief.", "history": []},
    ]
    write(folder / "s", rows if write is jsonl else [{**dict.fromkeys(("input", "system")), **row} for row in rows])
    command = ["--tokenizer", folder / "t", "--format", write.__name__, "--held-out", 0, *flags]
    dataset = prepared(folder / "e", folder / "s", *command)
    asked = ["user\nAdd.\n\n1 2", "user\nSay.", "system\nBe brief.<|stop|>\n<|turn|>user\nGo."]
    assert [(spelled(prompt), spelled(answer)) for prompt, answer in documents(dataset)] == [
        (f"<|begin|><|turn|>{question}<|stop|>\n<|turn|>assistant\n", f"{answer}<|stop|>\n")
        for question, answer in zip(asked, ["3", "so", "on"], strict=True)
    ]
    out = capsys.readouterr().out
    assert ("layout      Alpaca, a conversation of each row's 'instruction', 'input' and 'output'\n" in out) == (
        not flags
    )
    assert "left out    1 x empty document" in out


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_earlier_turns_of_alpaca_come_before_the_question(folder, write):
    rows = [{"instruction": "Say.", "output": "so", "history": [["q", "a"]]}, {"instruction": "Go.", "output": "on"}]
    write(folder / "s", rows if write is jsonl else [{"history": None, **row} for row in rows])
    dataset = prepared(
        folder / "e", folder / "s", "--tokenizer", folder / "t", "--format", write.__name__, "--held-out", 0
    )
    prompts = [spelled(prompt) for prompt, _ in documents(dataset)]
    assert any("user\nq<|stop|>\n<|turn|>assistant\na<|stop|>\n<|turn|>user\nSay." in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "Say.", "output": "so", "history": ["q"]}, "'history' is no list of pairs of texts"),
        (
            {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "q"}], "system": "T"},
            "there are two system messages, one of them in the field 'system'",
        ),
    ],
)
def test_rows_that_are_no_conversation(folder, capsys, row, message):
    jsonl(folder / "s.jsonl", [row])
    assert message in refused(capsys, folder / "s.jsonl", "--tokenizer", folder / "t", "--out", folder / "e")


@pytest.mark.parametrize("flags", [[], ["--messages", "conversations"]])
def test_an_array_of_json_has_a_layout_too(folder, capsys, flags):
    expected = list(documents(make(folder, "--held-out", 0)))
    (folder / "in").mkdir()
    (folder / "in/s.json").write_text(json.dumps(SHAREGPT, indent=2))
    named = folder / "in" if flags else folder / "in/s.json"
    dataset = prepared(folder / "e", named, "--tokenizer", folder / "t", "--held-out", 0, *flags)
    assert list(documents(dataset)) == expected


@pytest.mark.parametrize("flags", [[], ["--messages", "conversations"]])
def test_a_command_reads_one_layout(folder, capsys, flags):
    jsonl(folder / "s.jsonl", SHAREGPT)
    jsonl(folder / "a.jsonl", [{"instruction": "Say.", "output": "so"}])
    command = [folder / "s.jsonl", folder / "a.jsonl", "--tokenizer", folder / "t", "--out", folder / "e"]
    error = refused(capsys, *command, *flags)
    assert "a.jsonl, line 1: no field 'conversations'; fields: 'instruction', 'output'" in error


def test_a_layout_of_the_library_datasets(folder):
    datasets = pytest.importorskip("datasets")
    expected = list(documents(make(folder, "--held-out", 0)))
    datasets.Dataset.from_list(SHAREGPT).save_to_disk(folder / "table")
    made = prepared(folder / "e", f"hf:{folder / 'table'}", "--tokenizer", folder / "t", "--held-out", 0)
    assert list(documents(made)) == expected


@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_a_layout_is_known_by_its_first_object(folder, field):
    (folder / "s.jsonl").write_text("\n[]\nnot JSON\n" + json.dumps({field: ROWS[0]["messages"]}))
    (folder / "s.txt").write_text("text")
    command = [folder / "s.txt", folder / "s.jsonl", "--tokenizer", folder / "t", "--on-error", "skip"]
    dataset = prepared(folder / "e", *command, "--held-out", 0)
    assert dataset.splits["train"].num_documents == 2


def test_rows_that_have_a_text_are_texts(folder, capsys):
    jsonl(folder / "s.jsonl", [{"text": "abc", "instruction": "a", "output": "b", "messages": []}])
    dataset = prepared(folder / "e", folder / "s.jsonl", "--tokenizer", folder / "t", "--held-out", 0)
    assert not dataset.splits["train"].has_prompts
    assert "layout" not in capsys.readouterr().out


def test_rows_without_a_text_name_the_flag_for_conversations(folder, capsys):
    jsonl(folder / "s.jsonl", [{"id": 1, "dialog": []}])
    error = refused(capsys, folder / "s.jsonl", "--tokenizer", folder / "t", "--out", folder / "e")
    assert "no field 'text'; fields: 'id', 'dialog'. Name it with --field NAME, or a conversation with" in error


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"instruction": 3, "output": "x"}, [], "line 1: 'instruction' is not a string, but 3"),
        ({"instruction": "x", "output": None}, [], "line 1: 'output' is not a string, but null"),
        ({"conversations": 3}, [], "line 1: 'conversations': not a list of messages, but 3"),
        ({"conversations": [], "system": 3}, [], "line 1: 'conversations': 'system' is not a string, but 3"),
        ({"conversations": []}, ["--train-bpe", "300"], "--messages needs the tokenizer that the chat template"),
        ({"conversations": []}, [], "bytes come with no chat template; give one by --template FILE"),
    ],
)
def test_layouts_that_cannot_be_read(folder, capsys, row, flags, message):
    jsonl(folder / "s.jsonl", [row])
    tokenizer = [] if flags or "bytes" in message else ["--tokenizer", folder / "t"]
    assert message in refused(capsys, folder / "s.jsonl", *tokenizer, *flags, "--out", folder / "e")


def test_a_template_without_conversations_is_refused(folder, capsys):
    jsonl(folder / "s.jsonl", ["text"])
    command = [folder / "s.jsonl", "--template", folder / "x", "--out", folder / "e"]
    assert "--template is for conversations; give --messages FIELD too" in refused(capsys, *command)


def test_text_and_columns_of_text_are_no_conversations(folder, capsys):
    command = ["--tokenizer", folder / "t", "--messages", "messages", "--out", folder / "d"]
    (folder / "a.txt").write_text("x")
    assert "a.txt: text has no fields; conversations are read from" in refused(capsys, folder / "a.txt", *command)
    parquet(folder / "b.parquet", [{"messages": "x"}])
    error = refused(capsys, folder / "b.parquet", *command)
    assert "row 1: 'messages': not a list of messages, but \"x\"" in error


@pytest.mark.journey
def test_one_can_talk_to_a_run_as_its_data_do(folder, monkeypatch, capsys):
    make(folder, "--held-out", 0.3, rows=jsonl(folder / "b.jsonl", [said(f"{i}?", f"{i}") for i in range(40)]).name)
    size = ["--model.vocab-size", str(LIBRARY.get_vocab_size()), *mesh(1, 1, 1), "--train.steps", "2"]
    assert train([*SMALL, *size, "--data.path", str(folder / "d"), "--run.dir", str(folder / "run")]) == 0
    shown = capsys.readouterr().out
    assert f" tokens to train on, {load_corpus(folder / 'd').loss_tokens:,} of them with loss, " in shown
    source = open_source(folder / "run")
    assert (source.template, source.special_tokens) == (TEMPLATE, NAMED)
    assert (source.prefix, source.end_ids, source.template_day) == ((FIRST,), {STOP}, None)
    described = folder / "d/tokenizer_config.json"
    described.write_text(json.dumps({**NAMED, "chat_template_day": "2026-01-31"}))
    assert open_source(folder / "run").template_day == "2026-01-31"
    described.write_text(json.dumps({**NAMED, "chat_template_day": "31 January"}))
    with pytest.raises(TokenizerError, match="chat_template_day = 31 January: no day"):
        open_source(folder / "run")
    described.write_text(json.dumps(NAMED))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert f"jaxtp generate --model {folder / 'run'} --chat; jaxtp convert" in shown
    capsys.readouterr()
    assert generate(["--model", str(folder / "run"), "--chat", "--max-tokens", "2"]) == 0
    assert "prefill" in capsys.readouterr().err


def test_a_conversation_whose_documents_take_too_much_memory_is_refused(folder, capsys):
    """Each answer comes with all before it: in memory a line of many answers is many times as long as in the file."""
    jsonl(folder / "long.jsonl", [said(*["x" * 50] * 40), said("a", "b")])
    assert (folder / "long.jsonl").stat().st_size < 5000
    command = ["--tokenizer", folder / "t", "--messages", "messages", "--max-document-bytes", 5000]
    error = refused(capsys, folder / "long.jsonl", *command, "--out", folder / "d")
    assert "line 1: its answers with their prompts: more than 5,000 bytes; a larger --max-document-bytes" in error
    dataset = make(folder, "--max-document-bytes", 5000, "--on-error", "skip", "--held-out", 0, rows="long.jsonl")
    assert dataset.splits["train"].num_documents == 1
