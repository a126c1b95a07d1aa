"""Conversations: a document for each answer, made by the model's chat template."""

import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from corpora import (
    BEGIN,
    CHAT_NAMES,
    CHAT_TEMPLATE,
    CHAT_TOKENIZER,
    STOP,
    conversation,
    dataset,
    output,
    prompts_and_answers,
    refusal,
    spelled,
    write,
    write_chat_tokenizer,
)
from runs import SMALL, mesh
from small_tokenizers import byte_level
from tables import assert_errors, read_table

from jaxtp.data.chat_template import ChatTemplate
from jaxtp.data.corpus import load_corpus
from jaxtp.data.prepare import batches
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import Position
from jaxtp.data.prepare.run import open_job
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.data.tokenizer_files import (
    TokenizerError,
    chat_template,
    template_arguments,
    template_day,
)
from jaxtp.generate.__main__ import main as generate
from jaxtp.generate.loading import open_source
from jaxtp.train.__main__ import main as train

CHANNELS = (
    "{%- for m in messages %}{%- if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "<|turn|>assistant to=functions.{{ call.name }}<|channel|>commentary<|message|>{{ "
    "call.arguments|tojson }}<|stop|>{%- elif m.role != 'assistant' %}<|turn|>{{ m.role "
    "}}<|message|>{{ m.content }}<|stop|>{%- elif not loop.last or add_generation_prompt %}"
    "<|turn|>assistant<|channel|>final<|message|>{{ m.content }}<|stop|>{%- else %}{% if "
    "m.thinking %}<|turn|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|stop|>{% endif "
    "%}<|turn|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|turn|>assistant{% endif %}"
)
"""As gpt-oss's: <|end|> only after the last answer, which alone has its reasoning."""

TABLES = read_table(__file__)
ROWS = [
    conversation("naïve?", "yes", "and 🙂", "no\n"),
    conversation("a", "b <|stop|> c"),
    conversation("<|turn|>x", "y", "z"),
]


@pytest.fixture(autouse=True)
def _rows(folder):
    write_chat_tokenizer()
    write("a.jsonl", ROWS)


def made(line):
    return dataset(f"{line} --tokenizer t --held-out 0 --overwrite")


def messages_of(line):
    """Prompt and answer of each document, as ids; files hold conversations in `messages`."""
    return prompts_and_answers(made(f"{line} --messages messages"))


def test_images_are_refused_counted_or_read_as_words():
    parts = TABLES["images"]
    heard = conversation("<audio> and?", "the tag <video> and <audio>...</audio>")
    write(
        "b.jsonl", [ROWS[0], conversation(parts, "a cat"), heard, conversation(parts[:1], "this")]
    )
    command = "b.jsonl --messages messages --tokenizer t --held-out 0"
    assert "line 2: message 1 has <image>, and only text is read" in refusal(command)
    assert "2 x image, audio or video" in output(f"{command} --on-error skip")
    assert len(messages_of("b.jsonl --on-error skip")) == 3
    texts = [spelled(prompt) for prompt, _ in messages_of("b.jsonl --media-as-text")]
    assert ["What is <image>" in text for text in texts] == [False, False, True, False, False]
    assert sum("<audio> and?" in text for text in texts) == 1


def test_channels_and_tool_calls_are_what_a_model_writes_after_the_header():
    call = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rom"}}}
    row = conversation("Is it warm?", None, "20", "Yes.", "And dry?", "No.")
    _, calls, tool, first, _, last = row["messages"]
    calls["tool_calls"] = [call]
    tool["role"] = "tool"
    first["thinking"] = "20 is warm"
    last["thinking"] = None
    write("b.jsonl", [row])
    write("channels", CHANNELS)
    found = messages_of("b.jsonl --template channels")
    assert [spelled(answer) for _, answer in found] == [
        ' to=functions.get<|channel|>commentary<|message|>{"city": "Rom"}<|stop|>',
        "<|channel|>analysis<|message|>20 is "
        "warm<|stop|><|turn|>assistant<|channel|>final<|message|>Yes.<|end|>",
        "<|channel|>final<|message|>No.<|end|>",
    ]
    prompts = [spelled(prompt) for prompt, _ in found]
    assert not [
        prompt
        for prompt in prompts
        if not prompt.endswith("<|stop|><|turn|>assistant") or "warm<" in prompt
    ]


@pytest.mark.parametrize("name", ["b.jsonl", "b.parquet"])
def test_each_answer_is_a_document_after_the_messages_before_it(name):
    write(name, ROWS)
    found = messages_of(name)
    template = ChatTemplate(CHAT_TEMPLATE, "t", CHAT_NAMES)
    expected = []
    for row, index in ((0, 1), (0, 3), (1, 1), (2, 1)):
        messages = ROWS[row]["messages"]
        expected.append(
            (template.render(messages[:index]), f"{messages[index]['content'].strip()}<|stop|>\n")
        )
    assert [(spelled(prompt), spelled(answer)) for prompt, answer in found] == expected
    assert found[0][0] == CHAT_TOKENIZER.encode(expected[0][0], add_special_tokens=False).ids


def test_only_the_template_makes_special_tokens_unless_the_switch_is_given():
    for flags, stops in {"": [2, 4, 2, 2], "--special-tokens": [2, 4, 3, 2]}.items():
        found = messages_of(f"a.jsonl {flags}")
        assert [(prompt + answer).count(STOP) for prompt, answer in found] == stops
        assert [prompt.count(BEGIN) for prompt, _ in found] == [1, 1, 1, 1]


def test_the_answers_of_a_conversation_are_in_one_split():
    write("b.jsonl", [conversation(f"{i}?", "yes", "sure?", "no") for i in range(60)])
    halves = dataset("b.jsonl --messages messages --tokenizer t --held-out 0.4")
    for name in ("train", "validation"):
        texts = [spelled(prompt + answer) for prompt, answer in prompts_and_answers(halves, name)]
        assert len(texts) > 20
        assert all(
            second.startswith(first) for first, second in zip(texts[::2], texts[1::2], strict=True)
        )


def test_bytes_can_have_a_template():
    write("x.jinja", "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    found = dataset("a.jsonl --messages messages --template x.jinja --held-out 0")
    prompt, answer = prompts_and_answers(found)[1]
    assert ByteTokenizer().decode(prompt).decode() == "[naïve?][yes][and 🙂]"
    assert ByteTokenizer().decode(answer) == b"[no\n]"


def test_the_summary_counts_tokens_with_loss():
    out = output("a.jsonl --messages messages --tokenizer t --held-out 0")
    found = made("a.jsonl --messages messages")
    answers = sum(len(answer) for _, answer in prompts_and_answers(found))
    assert (
        f"{found.splits['train'].num_tokens:,} tokens, {answers:,} of them with loss, in 1 shard"
        in out
    )
    assert load_corpus(Path("d"), validation=Path("d")).loss_tokens == answers
    write("a.txt", "abc")
    assert "with loss" not in output("a.txt --held-out 0 --out plain")
    assert load_corpus(Path("plain")).sources[0].train.num_loss_tokens == 2


def test_documents_of_conversations_end_in_the_stop_token_and_another_template_is_another_dataset():
    command = "a.jsonl --messages messages --tokenizer t"
    assert f"documents   begin with <|begin|> ({BEGIN}); end with <|stop|> ({STOP})\n" in output(
        command
    )
    assert "is finished; there is nothing to do" in output(command)
    tokenizer = dataset(command).tokenizer
    assert (tokenizer.prefix, tokenizer.eos_id) == ((BEGIN,), STOP)
    write("t/chat_template.jinja", "{# another #}" + CHAT_TEMPLATE)
    assert "template: " in refusal(command)


MISTAKES = read_table(__file__, "mistaken_conversations")


def test_rows_that_are_no_conversation_are_refused_or_skipped():
    def error_of(row):
        write("b.jsonl", [ROWS[0], row["row"]])
        return refusal("b.jsonl --messages messages --tokenizer t --overwrite").partition(
            "b.jsonl, line 2: "
        )[2]

    assert_errors(MISTAKES["messages"], error_of)
    write("b.jsonl", [ROWS[0], *(row["row"] for row in MISTAKES["messages"])])
    assert len(messages_of("b.jsonl --on-error skip")) == 2


def test_files_without_messages_are_refused():
    def error_of(row):
        write(row["name"], row["content"])
        return refusal(f"{row['name']} --messages messages --tokenizer t --overwrite")

    assert_errors(MISTAKES["files"], error_of)


def test_keys_that_occur_twice_and_deep_nesting_are_refused():
    twice = '{"role": "user", "content": "a", "content": "b"}'
    for messages, error in {
        twice: 'the key "content" occurs twice',
        "[" * 20_000: "not JSON: nested too deeply",
    }.items():
        write("b.jsonl", '{"messages": [' + messages + "]}")
        assert f"line 1: {error}" in refusal(
            "b.jsonl --messages messages --tokenizer t --overwrite"
        )


def test_a_resumed_command_writes_the_day_on_which_it_was_begun(monkeypatch):
    write(
        "day.jinja",
        "{{ strftime_now('%d %b %Y, %H:%M') }} {{ [1, 2, 3, 4, 5, 6] | random }}" + CHAT_TEMPLATE,
    )
    rows = [conversation(f"{i}?", f"{i}") for i in range(30)]
    write("b.jsonl", [*rows[:10], {"messages": 3}, *rows[10:]])
    command = "b.jsonl --tokenizer t --template day.jinja --messages messages"
    with monkeypatch.context() as patched:
        patched.setattr(Conversations, "first_day", lambda self: "2026-01-31")
        refusal(command)
        patched.setattr(Conversations, "first_day", lambda self: "2026-02-01")
        command += " --on-error skip"
        assert "the chat template writes the day 2026-01-31; --date names another" in output(
            command
        )
    output(f"{command} --out e --date 2026-01-31")
    assert prompts_and_answers(open_dataset(Path("d"))) == prompts_and_answers(
        open_dataset(Path("e"))
    )
    prompt, _ = prompts_and_answers(open_dataset(Path("d")))[0]
    assert spelled(prompt).startswith("31 Jan 2026, 12:00")
    assert template_day(Path("d")) == template_day(Path("e")) == "2026-01-31"
    assert "date: None -> 2026-02-01" in refusal(f"{command} --date 2026-02-01")
    assert template_day(made("a.jsonl --messages messages --out none").folder) is None
    write("d/tokenizer_config.json", '{"chat_template_day": "31 January"}')
    with pytest.raises(TokenizerError, match="chat_template_day = 31 January: not a day"):
        template_day(Path("d"))


def test_templates_that_cannot_be_used_are_refused():
    command = "a.jsonl --tokenizer t --messages messages --template x.jinja --overwrite"
    assert "x.jinja: No such file" in refusal(command)

    def error_of(row):
        write("x.jinja", row["template"])
        return refusal(command)

    assert_errors(MISTAKES["templates"], error_of)


def test_a_tokenizer_without_a_template_needs_one():
    write("t/tokenizer_config.json", json.dumps(CHAT_NAMES))
    error = refusal("a.jsonl --messages messages --tokenizer t")
    assert "t has no chat template; give one by --template FILE" in error
    write("t/chat_template.json", json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert len(messages_of("a.jsonl")) == 4
    assert "bytes come with no chat template" in refusal("a.jsonl --messages messages --overwrite")


def sharegpt(number, row):
    """A row as ShareGPT has it, in one of its two spellings."""
    names = [{"user": "human", "assistant": "gpt"}, {"user": "user", "assistant": "chatgpt"}][
        number % 2
    ]
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in row["messages"]]
    return {"id": number, "conversations": turns}


SHAREGPT = [sharegpt(number, row) for number, row in enumerate(ROWS)]


@pytest.mark.parametrize("name", ["s.jsonl", "s.parquet"])
def test_sharegpt_is_read_as_messages_are(name):
    expected = messages_of("a.jsonl")
    write(name, SHAREGPT)
    assert prompts_and_answers(made(f"{name} --messages conversations")) == expected


@pytest.mark.parametrize("name", ["s.jsonl", "s.parquet"])
def test_alpaca_is_read_as_a_question_and_its_answer(name):
    rows = TABLES["alpaca"]
    absent = dict.fromkeys(("input", "system", "history")) if name == "s.parquet" else {}
    write(name, [absent | row for row in rows])
    user = "<|begin|><|turn|>user\n"
    brief = "<|begin|><|turn|>system\nBe brief.<|stop|>\n<|turn|>user\n"
    then = "<|stop|>\n<|turn|>assistant\n"
    expected = [
        f"{user}Add.\n\n1 2{then}|3<|stop|>\n",
        f"{user}Say.{then}|so<|stop|>\n",
        f"{brief}Go.{then}|on<|stop|>\n",
        f"{user}q{then}|a<|stop|>\n",
        f"{user}q{then}a<|stop|>\n<|turn|>user\nTry.{then}|so<|stop|>\n",
    ]
    out = output(f"{name} --messages instruction --tokenizer t --held-out 0")
    assert "left out    1 x empty document" in out
    pairs = prompts_and_answers(open_dataset(Path("d")))
    assert [spelled(prompt) + "|" + spelled(answer) for prompt, answer in pairs] == expected


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", TABLES["layouts"])
def test_the_layout_is_found_and_said(name, suffix):
    row, flags, layout = TABLES["layouts"][name]
    file = write(f"f.{suffix}", [{**row, "source": "web"}])
    command = f"{file} --tokenizer t --held-out 0"
    out = output(command)
    assert f"layout      {layout}\n" in out
    assert re.search(r"\nignored     the fields ('id', )?'source'\n", out)
    ((prompt, answer),) = prompts_and_answers(open_dataset(Path("d")))
    end = "" if name == "texts" else "<|stop|>\n"
    assert spelled(answer).removesuffix("<|end|>") == f"b{end}"
    assert "is finished" in output(f"{command} {flags}")
    assert (spelled(prompt) == "<|begin|>a") == (name == "texts")


def test_answers_in_a_prompt_of_messages_are_not_learned():
    before, last = conversation("a", "b", "c", "d"), {"role": "assistant", "content": "e"}
    prompt = before["messages"][:3]
    completions = [[last], last, "e", [last, before["messages"][2], last]]
    write("p.jsonl", [{"prompt": prompt, "completion": part} for part in completions])
    pairs = prompts_and_answers(made("p.jsonl --prompt-field prompt --completion-field completion"))
    answers = [spelled(answer) for _, answer in pairs]
    assert answers == ["e<|stop|>\n"] * 5
    assert spelled(pairs[0][0]).endswith("b<|stop|>\n<|turn|>user\nc<|stop|>\n<|turn|>assistant\n")
    write("all.jinja", WRITES_ALL)
    write("p.jsonl", [{"prompt": "a", "completion": [last], "tools": TOOLS, "system": "S"}])
    ((first, _),) = prompts_and_answers(made("p.jsonl --template all.jinja"))
    assert "tools\n[" in spelled(first)
    assert "<|turn|>system\nS<|stop|>\n<|turn|>user\na<|stop|>" in spelled(first)


def test_keys_of_messages_that_the_template_does_not_write_are_listed():
    row = conversation("a", "b", "c", "d")
    row["messages"][0] |= {"name": "Ann", "day": 3, "refusal": None}
    row["messages"][1] |= {"weight": 1, "day": 4}
    write("b.jsonl", [row, row])
    names = CHAT_TEMPLATE.replace("{{ m.role }}", "{{ m.role }}{{ m.name }}")
    write("names.jinja", names)
    command = "b.jsonl --tokenizer t --template names.jinja"
    listed = "ignored     'day' of the messages of 'assistant'; 'day' of the messages of 'user'\n"
    assert listed in output(command)
    assert listed in output(f"{command} --show 1")
    assert "'name' of the messages of 'user'" in output("b.jsonl --tokenizer t --out e")
    write("c.jsonl", [conversation("a", "b")])
    assert "ignored" not in output("c.jsonl --tokenizer t --out f")


@pytest.mark.wide
def test_conversations_are_read_from_lists_folders_and_tables_of_the_library_datasets():
    import datasets

    expected = messages_of("a.jsonl")
    write("in/s.json", json.dumps(SHAREGPT, indent=2))
    datasets.Dataset.from_list(SHAREGPT).save_to_disk("table")
    for name in ("in/s.json", "in", "hf:table"):
        assert prompts_and_answers(made(f"{name} --messages conversations")) == expected, name


def test_a_command_reads_one_layout():
    write("s.jsonl", SHAREGPT)
    write("a.jsonl", [{"instruction": "Say.", "output": "so"}])
    error = refusal("s.jsonl a.jsonl --messages conversations --tokenizer t")
    assert "a.jsonl, line 1: no field 'conversations'; fields: 'instruction', 'output'" in error


def test_layouts_that_cannot_be_read_are_refused():
    def error_of(row):
        write("s.jsonl", [row["row"]])
        return refusal(f"s.jsonl {row['flags']} --tokenizer t --overwrite")

    assert_errors(MISTAKES["layouts"], error_of)


@pytest.mark.journey
def test_one_can_talk_to_a_run_as_its_data_do(monkeypatch, capsys):
    write("b.jsonl", [conversation(f"{i}?", f"{i}") for i in range(40)])
    output("b.jsonl --messages messages --tokenizer t --held-out 0.3")
    size = [
        "--model.vocab-size",
        str(CHAT_TOKENIZER.get_vocab_size()),
        *mesh(1, 1, 1),
        "--train.steps=2",
    ]
    assert train([*SMALL, *size, "--data.path=d", "--run.dir=run"]) == 0
    shown = capsys.readouterr().out
    loss_tokens = load_corpus(Path("d")).loss_tokens
    assert f" tokens to train on, {loss_tokens:,} of them with loss, " in shown
    assert "jaxtp generate --model run --chat; jaxtp convert" in shown
    source = open_source(Path("run"))
    assert (source.chat.text, source.chat.special_tokens) == (CHAT_TEMPLATE, CHAT_NAMES)
    assert (source.prefix, source.end_ids, source.chat.day) == ((BEGIN,), {STOP}, None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    capsys.readouterr()
    assert generate(["--model=run", "--chat", "--max-tokens", "2"]) == 0
    assert "prefill" in capsys.readouterr().err


def test_a_conversation_whose_documents_take_too_much_memory_is_refused():
    """Each answer comes with all before it: in memory a line of many answers is many times as
    long as in the file.
    """
    path = write("long.jsonl", [conversation(*["x" * 50] * 40), conversation("a", "b")])
    assert path.stat().st_size < 5000
    command = "long.jsonl --messages messages --max-document-bytes 5000"
    error = refusal(f"{command} --tokenizer t")
    assert (
        "line 1: its answers with their prompts: more than 5,000 bytes; a larger "
        "--max-document-bytes" in error
    )
    assert made(f"{command} --on-error skip").splits["train"].num_documents == 1


WRITES_ALL = (
    "{%- if tools %}<|turn|>tools\n{{ tools|tojson }}<|stop|>\n{% endif %}{%- for m in messages %}"
    "<|turn|>{{ m.role }}\n{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ "
    "m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments"
    "|tojson }}]{% endfor %}<|stop|>\n{% endfor %}{%- if add_generation_prompt %}<|turn|>assistant"
    "\n{% if thinks %}<think>\n{% endif %}{% endif %}"
)
TOOLS = TABLES["tools"]


def texts_of(rows, flags="", template=WRITES_ALL):
    """Prompt and answer of each document, as texts."""
    write("c.jsonl", rows)
    write("all.jinja", template)
    found = prompts_and_answers(made(f"c.jsonl --template all.jinja --messages messages {flags}"))
    return [(spelled(prompt), spelled(answer)) for prompt, answer in found]


def refused(row, template=WRITES_ALL):
    write("c.jsonl", [row])
    write("all.jinja", template)
    return refusal("c.jsonl --template all.jinja --messages messages --tokenizer t --overwrite")


def calling(arguments, **row):
    """A row in which the assistant calls a tool, and answers with its result."""
    found = conversation("Is it warm?", None, "20", "Yes.")
    call = {"type": "function", "function": {"name": "get", "arguments": arguments}}
    found["messages"][1]["tool_calls"] = [call]
    found["messages"][2]["role"] = "tool"
    return {**found, **row}


def test_arguments_of_calls_are_written_once_as_objects_or_texts():
    given = {"city": "Rom", "unit": None}
    for arguments in (given, json.dumps(given)):
        ((_, call), (prompt, _)) = texts_of([calling(arguments)])
        assert call == '[get {"city": "Rom", "unit": null}]<|stop|>\n'
        assert call in prompt
        as_text = WRITES_ALL.replace("|tojson }}]", " }}]").replace(
            "c.function.arguments", "'' + c.function.arguments"
        )
        assert texts_of([calling(arguments)], template=as_text)[0][1] == call
    error = refused(calling(given), WRITES_ALL.replace("|tojson }}]", "['city'] }}]"))
    assert "message 2: the template does not write the call of get" in error
    assert "message 2: 'arguments' of the call of 'get' are not an object" in refused(calling("[]"))
    assert "is a string that is no JSON" in refused(calling("{city"))


def test_tables_give_calls_no_keys_of_other_rows():
    write("c.parquet", [calling({"city": "Rom"}), calling({"day": 3})])
    write("all.jinja", WRITES_ALL)
    found = prompts_and_answers(made("c.parquet --template all.jinja --messages messages"))
    assert spelled(found[0][1]) == '[get {"city": "Rom"}]<|stop|>\n'
    assert spelled(found[2][1]) == '[get {"day": 3}]<|stop|>\n'


def test_tools_are_in_a_file_for_all_rows_or_in_any_field():
    write("all.jinja", WRITES_ALL)
    row = calling({})
    other = [{"name": "get", "description": "its own"}]
    Path("tools.json").write_text(json.dumps(TOOLS))
    write("c.jsonl", [row, {**row, "tools": other}])
    words = "c.jsonl --template all.jinja --messages messages"
    found = prompts_and_answers(made(f"{words} --tools tools.json"))
    assert template_arguments(Path("d"))["tools"] == TOOLS
    write("c.jsonl", [{**row, "tools": tools} for tools in (TOOLS, other)])
    assert found == prompts_and_answers(made(words))
    write("c.jsonl", [{**row, "apis": tools} for tools in (TOOLS, other)])
    assert found == prompts_and_answers(made(f"{words} --tools-field apis"))
    assert "did you mean 'apis'?" in refusal(f"{words} --tokenizer t --overwrite --tools-field api")
    assert "--tools none.json: No such file" in refusal(f"{words} --tokenizer t --tools none.json")
    assert "--tools is for conversations" in refusal("c.jsonl --field a --tools tools.json")


def test_tools_reach_the_template_as_a_list_or_as_json():
    expected = f"<|turn|>tools\n{json.dumps(TOOLS)}<|stop|>\n"
    bare = [tool["function"] for tool in TOOLS]
    for tools in (TOOLS, json.dumps(TOOLS), bare, json.dumps(bare)):
        prompts = [prompt for prompt, _ in texts_of([calling({}, tools=tools)])]
        assert [prompt.startswith(expected) for prompt in prompts] == [True, True]
    assert not texts_of([calling({}, tools=[])])[0][0].startswith("<|turn|>tools")
    row = {**conversation("a", "b"), "tools": TOOLS}
    assert "does not write the tool get" in refused(row, CHAT_TEMPLATE)
    row["messages"][0]["content"] = "get"
    assert "the template does not write 'tools'" in refused(row, CHAT_TEMPLATE)
    assert "tool 1 has no name" in refused(calling({}, tools=[{}]))


def test_sharegpt_calls_are_messages_of_the_assistant():
    turns = TABLES["sharegpt"]
    roles = [
        {"role": turn["from"].replace("function", "tool"), "content": turn["value"]}
        for turn in turns
    ]
    for messages in (turns, roles):
        ((_, calls), (prompt, _)) = texts_of([{"messages": messages}])
        assert calls == '[get {"city": "Rom"}][get {"city": "Pisa"}]<|stop|>\n'
        assert "<|turn|>tool\n20<|stop|>" in prompt
    assert 'has the role "moon"' in refused({"messages": [{"role": "moon", "content": "a"}]})


def test_answers_that_are_marked_or_empty_are_left_out_and_counted():
    row = conversation("a", "BAD", "b", "", "c", "GOOD")
    row["messages"][1]["weight"] = 0
    ((prompt, answer),) = texts_of([row])
    assert (answer, "BAD" in prompt) == ("GOOD<|stop|>\n", True)
    command = "c.jsonl --template all.jinja --messages messages --tokenizer t --held-out 0"
    assert "left out    1 x answer marked as not learned, 1 x empty answer" in output(
        f"{command} --overwrite"
    )
    row["messages"][1]["weight"] = 0.5
    assert "message 2: 'weight' is 0.5, and not 0 or 1" in refused(row)
    row["messages"][1]["weight"] = 1
    assert [answer for _, answer in texts_of([row], "--answers last")] == ["GOOD<|stop|>\n"]


def test_rows_without_an_answer_to_learn_fill_batches_too(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 2)
    row = conversation("a", "b")
    row["messages"][1]["weight"] = 0
    write("b.jsonl", [row] * 5)
    job = open_job(
        Path("d"), PrepareConfig(inputs=("b.jsonl",), messages="messages", tokenizer=Path("t"))
    )
    found = batches.batches(job.sources, job.fields, Position(0, 0), "stop")
    assert [len(batch.left_out) for batch in found] == [2, 2, 1]


def test_arguments_of_the_template_and_prompts_that_open_the_reasoning():
    plain = conversation("a", "b")
    thought = conversation("a", "b")
    thought["messages"][1]["reasoning"] = "c"
    own = {**plain, "chat_template_kwargs": {"thinks": False}}
    prompts = [prompt for prompt, _ in texts_of([plain, own])]
    assert [prompt.endswith("assistant\n") for prompt in prompts] == [True, True]
    flag = "--template-arguments.thinks true"
    write("c.jsonl", [plain])
    command = "c.jsonl --template all.jinja --messages messages --tokenizer t --overwrite"
    out = output(f"{command} {flag}")
    assert "prompts end before '<think>', with which the template opens the reasoning" in out
    assert open_dataset(Path("d")).folder.joinpath("tokenizer_config.json").exists()
    assert template_arguments(Path("d")) == {"thinks": True}
    mistyped = f"{command} --template-arguments.thinking true"
    assert "note        the template reads no argument 'thinking'\n" in output(mistyped)
    assert [answer for _, answer in texts_of([thought])] == ["(c)b<|stop|>\n"]
    assert "does not write all of its 'reasoning_content': c" in refused(thought, CHAT_TEMPLATE)
    assert "may not have 'tools'" in refused({**plain, "chat_template_kwargs": {"tools": []}})


def test_what_a_model_writes_may_be_marked_by_the_template():
    marked = CHAT_TEMPLATE.replace(
        "{{ m.content | trim }}", "{% generation %}{{ m.content | trim }}{% endgeneration %}"
    )
    rows = [conversation("a", "b")]
    assert texts_of(rows, template=marked) == texts_of(rows, template=CHAT_TEMPLATE)
    write("m.jinja", marked)
    command = "a.jsonl --messages messages --tokenizer t --template m.jinja --overwrite"
    note = "yes<|stop|> is learned, which is all that follows the prompt, though the template marks"
    assert output(command).count(f"{note} yes as generated") == 1
    write("m.jinja", marked.replace("{% endgeneration %}<|stop|>", "<|stop|>{% endgeneration %}"))
    assert "marks" not in output(command)


def test_conversations_with_tools_have_the_template_for_them():
    messages = ROWS[0]["messages"]
    texts = [
        CHAT_TEMPLATE,
        WRITES_ALL,
        f"  {WRITES_ALL}\n",
        "\n\n{{ tools }}  \n\n",
        "{{- tools -}}  ",
    ]
    for with_tools, plain in itertools.permutations(texts, 2):
        both = [
            {"name": "tool_use", "template": with_tools},
            {"name": "default", "template": plain},
        ]
        write("t/tokenizer_config.json", json.dumps({"chat_template": both}))
        joined = ChatTemplate(chat_template(Path("t")), "joined", {})
        for tools, template in ((TOOLS, with_tools), (None, plain)):
            arguments = {"tools": tools}
            expected = ChatTemplate(template, "alone", {}).render(messages, arguments=arguments)
            assert joined.render(messages, arguments=arguments) == expected
    write("t/chat_template.jinja", plain)
    write("t/additional_chat_templates/tool_use.jinja", with_tools)
    assert chat_template(Path("t")) == joined.text


def test_an_answer_that_shares_a_token_with_its_prompt_keeps_all_its_text():
    space = CHAT_TEMPLATE.replace("assistant\n", "assistant: ").replace("role }}\n", "role }}: ")
    ((prompt, answer),) = texts_of([conversation("the", "the user")], template=space)
    assert (prompt[-11:], answer) == ("assistant: ", "the user<|stop|>\n")


def with_call(*calls, **message):
    """A row with a question and an answer of calls."""
    row = conversation("Is it warm?", None)
    row["messages"][1] |= {"tool_calls": list(calls), **message}
    return row


def test_arguments_of_calls_have_three_names():
    for name in ("arguments", "args", "parameters"):
        keys = {"name": "get", name: {"city": "Rom"}}
        with_id = WRITES_ALL.replace("[{{ c.function", "[{{ c.id }}{{ c.function")
        for call, id in (({"id": "x7", **keys}, "x7"), ({"function": keys}, "")):
            ((_, answer),) = texts_of([with_call(call)], template=with_id)
            assert answer == f'[{id}get {{"city": "Rom"}}]<|stop|>\n'
    assert "the call of 'get' has 'input'" in refused(with_call({"name": "get", "input": {"a": 1}}))
    twice = {"name": "get", "args": {"a": 1}, "parameters": {"a": 2}}
    assert "has 'args' and 'parameters'" in refused(with_call(twice))
    old = {"name": "get", "arguments": "{}"}
    assert "has other calls in 'function_call'" in refused(
        with_call({**old, "name": "put"}, function_call=old)
    )
    assert texts_of([with_call(old, function_call=old)])[0][1] == "[get {}]<|stop|>\n"


def test_a_call_after_a_text_keeps_its_reasoning_and_marks():
    call = {"role": "function_call", "content": '{"name": "get", "arguments": {}}'}
    row = conversation("Is it warm?", "Let me look.")
    question, text = row["messages"]

    def rows(first, second):
        return {"messages": [question, text | first, call | second]}

    for keys in (({}, {"reasoning": "hm"}), ({"thinking": "hm"}, {"weight": 1})):
        ((_, answer),) = texts_of([rows(*keys)])
        assert answer == "(hm)Let me look.[get {}]<|stop|>\n"
    for keys in (({}, {"weight": 0}), ({"thinking": "hm"}, {"thinking": "oh"})):
        assert "message 3 and the one before it are one answer" in refused(rows(*keys))


def test_parts_of_a_content_may_be_reasoning():
    text = {"type": "text", "text": "4"}
    for thought in (
        {"type": "thinking", "thinking": "hm"},
        {"type": "reasoning", "text": "hm"},
    ):
        assert texts_of([conversation("2+2", [thought, text])])[0][1] == "(hm)4<|stop|>\n"
    error = refused(conversation("2+2", [text, {"type": "tool_use", "text": "x"}]))
    assert 'message 2: a part of its content has the type "tool_use"' in error
    row = conversation("2+2", "4")
    row["messages"][1] |= {"reasoning_content": "", "thinking": "", "reasoning": "hm"}
    assert texts_of([row])[0][1] == "(hm)4<|stop|>\n"


def test_a_system_field_is_read_in_each_layout():
    row = conversation("a", "b") | {"system": "S"}
    own = conversation("a", "b")
    own["messages"].insert(0, {"role": "developer", "content": "S"})
    named = conversation("a", "b") | {"system": "S"}
    named["messages"].insert(0, {"role": "system", "content": "S"})
    prompts = [prompt for prompt, _ in texts_of([row, own, named])]
    assert [prompt.count("<|turn|>system\nS<|stop|>") for prompt in prompts] == [1, 1, 1]
    template = "{# 'developer' #}" + WRITES_ALL
    assert "<|turn|>developer\nS" in texts_of([own], template=template)[0][0]


def test_roles_that_the_template_reads_are_not_renamed():
    row = conversation("a", "f()", "20", "b")
    for role in ("observation", "function"):
        row["messages"][2]["role"] = role
        named = f"{{% if messages[0]['role'] == '{role}' %}}{{% endif %}}{WRITES_ALL}"
        assert f"<|turn|>{role}\n20" in texts_of([row], template=named)[1][0]
        other = f"{{% set kind = {{'function': 'x'}} %}}{WRITES_ALL}"
        assert "<|turn|>tool\n20" in texts_of([row], template=other)[1][0]


FIRST_CALL = WRITES_ALL.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
AS_PYTHON = WRITES_ALL.replace("|tojson }}]", " }}]")
NO_CALLS = CHAT_TEMPLATE.replace("m.content | trim", "m.content or ''")


def test_each_of_several_calls_has_to_be_written():
    first = {"name": "add", "arguments": {"a": 12, "b": 3}}
    second = {"name": "add", "arguments": {"a": 1, "b": 2}}
    for calls, part in (((first, second), "the call of add"), ((first, first), "call 1 of 2")):
        row = with_call(*calls)
        assert f"message 2: the template does not write {part}" in refused(row, FIRST_CALL)
        assert len(texts_of([row])) == 1
    one_digit = WRITES_ALL.replace("c.function.arguments|tojson", "c.function.arguments.b")
    row = with_call({"name": "add", "arguments": {"b": 12, "a": 1}})
    assert "does not write the call of add" in refused(row, one_digit)


def test_calls_of_earlier_answers_are_checked_and_written_as_json():
    marked = calling({"city": "Rom"})
    marked["messages"][1]["weight"] = 0
    for row, flag in ((marked, ""), (calling({"city": "Rom"}), "--answers last")):
        ((prompt, _),) = texts_of([row], flag, AS_PYTHON)
        assert '[get {"city": "Rom"}]<|stop|>' in prompt
    assert "message 2: the template does not write the call of get" in refused(marked, NO_CALLS)
    cut = WRITES_ALL.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}")
    marked["messages"][1]["content"] = "Let me look."
    assert "message 2: the template does not write it, whose role is 'assistant'" in refused(
        marked, cut
    )


def test_the_error_of_calls_is_about_what_is_missing():
    only_text = "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{{ '' + "
    only_text += "c.function.arguments }}{% endfor %}{% endfor %}" + WRITES_ALL
    row = calling({"city": "Rom"}, tools=TOOLS)
    without_tools = only_text.replace("{%- if tools %}", "{%- if no_tools %}")
    assert "does not write the tool get" in refused(row, without_tools)
    part = "(messages[-1:] if messages[-1].content == 'Yes.' else messages)"
    other = WRITES_ALL.replace("in messages", f"in {part}")
    assert "starts this answer differently" in refused(calling({"city": "Rom"}), other)


def test_documents_that_the_template_does_not_write_are_refused():
    row = {**conversation("a", "b"), "documents": [{"text": "c"}]}
    assert "the template does not write 'documents'" in refused(row)
    template = "{{ documents }}" + WRITES_ALL
    assert "'text': 'c'" in texts_of([row], template=template)[0][0]


def test_a_null_of_a_row_overrides_an_argument_of_all_rows():
    rows = [conversation("a", "b") | {"chat_template_kwargs": {"thinks": None}}]
    ((prompt, _),) = texts_of(rows, "--template-arguments.thinks true")
    assert prompt.endswith("<|turn|>assistant\n")


def test_a_greeting_without_a_prompt_is_left_out_where_the_template_needs_one():
    row = {
        "messages": [{"role": "assistant", "content": "Hi"}, *conversation("a", "b")["messages"]]
    }
    assert [answer[:2] for _, answer in texts_of([row])] == ["Hi", "b<"]
    needs_one = "{% if messages[0].role == 'system' %}{% endif %}" + WRITES_ALL
    ((prompt, answer),) = texts_of([row], template=needs_one)
    assert ("<|turn|>assistant\nHi<|stop|>" in prompt, answer) == (True, "b<|stop|>\n")
    command = "c.jsonl --template all.jinja --messages messages --tokenizer t --overwrite"
    assert "left out    1 x answer without a prompt" in output(command)


def test_a_template_without_an_end_of_answers_is_noted():
    write("c.jsonl", [conversation("a", "b")])
    command = "c.jsonl --template end.jinja --messages messages --tokenizer t --overwrite"
    for end, is_noted in (("<|stop|>", False), ("\n", True), ("##", False)):
        after = "{% endfor %}{%- if add"
        write("end.jinja", WRITES_ALL.replace(f"<|stop|>\n{after}", f"{end}{after}"))
        out = output(command)
        assert ("note        the template writes no end after an answer" in out) == is_noted
        assert ("end with <|stop|>" in out) == (end == "<|stop|>")


def test_each_message_is_checked_once(monkeypatch):
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate,
        "render",
        lambda self, messages, **keys: rendered.append(messages) or render(self, messages, **keys),
    )
    texts = [text for number in range(20) for text in (f"Who {number}?", "b")]
    upper = WRITES_ALL.replace("{{ m.content }}", "{{ m.content | replace('Who', 'Q') }}")
    assert len(texts_of([conversation(*texts)], template=upper)) == 20
    assert len(rendered) == 1 + 20  # one is the first test of the template


def test_a_message_that_is_left_out_is_found_though_its_text_stands_elsewhere():
    names_it = "{% if m.role != 'system' %}{{ m.content }}{% endif %}{% for c in"
    template = WRITES_ALL.replace("{{ m.content }}{% for c in", names_it)
    row = {"messages": [{"role": "system", "content": "stop"}, *conversation("a", "b")["messages"]]}
    assert "message 1: the template does not write it" in refused(row, template)


def test_a_text_before_calls_may_be_gone_from_later_prompts():
    """As in the template of gpt-oss."""
    text = "{{ m.content if loop.last or not m.tool_calls }}"
    row = calling({"city": "Rom"})
    row["messages"][1] |= {"content": "Let me look.", "weight": 0}
    ((prompt, answer),) = texts_of([row], template=WRITES_ALL.replace("{{ m.content }}", text))
    assert ("Let me" in prompt, answer) == (False, "Yes.<|stop|>\n")


def test_templates_may_read_parts_only_or_need_tools():
    parts = WRITES_ALL.replace("{{ m.content }}", "{{ m.content[0].text }}")
    expected = texts_of([calling({"city": "Rom"})])
    assert texts_of([calling({"city": "Rom"})], template=parts) == expected
    needs = WRITES_ALL.replace("{%- if tools %}", "{%- if tools|length %}")
    row = conversation("a", "b") | {"tools": TOOLS}
    assert texts_of([row], template=needs) == texts_of([row])


def test_tags_of_reasoning_in_an_answer_are_tokens_where_they_are_special():
    tags = ["<think>", "</think>"]
    write("s/tokenizer.json", byte_level(["a"], 300, [*tags, "</s>"]))
    write("c.jsonl", [conversation("<think>?", "<think>so</think>b")])
    write("all.jinja", WRITES_ALL)
    found = dataset("c.jsonl --template all.jinja --tokenizer s --eos </s> --messages messages")
    ((prompt, answer),) = prompts_and_answers(found)
    assert [len({0, 1} & set(ids)) for ids in (prompt, answer)] == [0, 2]
