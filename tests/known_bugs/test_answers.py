"""What other systems made of conversations: which tokens a model learns, and after which prompt.

Texts are compared with those that are written here, and with what the bug would make of them.
"""

import json
from pathlib import Path

import jinja2
import pytest
from corpora import output, refusal, write
from small_tokenizers import byte_level
from tokenizers import Tokenizer

from jaxtp.data.chat_template import without_marks
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.preference import PairsOfConversations
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.tokenizer import HuggingFaceTokenizer

TEMPLATE = (
    "{% if tools %}tools\n{{ tools|tojson }}</s>\n{% endif %}{% for m in messages %}{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} CALL]{% endfor %}</s>"
    "\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)
OBJECTS = TEMPLATE.replace("CALL", "{{ c.function.arguments|tojson }}")
TEXTS = TEMPLATE.replace("CALL", "{{ '' + c.function.arguments }}")
OPENS = TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
QUESTION = {"role": "user", "content": "Why?"}
TOOLS = [{"type": "function", "function": {"name": "get"}}]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def opened(template=TEMPLATE, kind=Conversations, **settings):
    write("t/tokenizer.json", byte_level(["\n\n\n\n"], 300, ["</s>"]))
    write("all.jinja", template)
    tokenizer = HuggingFaceTokenizer(Path("t/tokenizer.json").read_bytes(), "t", eos="</s>")
    config = PrepareConfig(
        template=Path("all.jinja"), tokenizer=Path("t"), messages="messages", **settings
    )
    return kind(config, tokenizer), tokenizer


def learned(*messages, template=TEMPLATE, **row):
    """Prompt and answer of each document, as texts."""
    turns = opened(template)[0].of_row({"messages": [*messages], **row}).turns
    return [(without_marks(turn.prompt), without_marks(turn.text)) for turn in turns]


def test_trl_5213_a_prompt_that_opens_the_reasoning_is_a_prefix():
    """https://github.com/huggingface/trl/issues/5213: the prompt of Qwen 3.5, which opens the
    reasoning, was not the start of prompt and answer, of which only a warning told. Here such a
    prompt ends before the tag.
    """
    ((prompt, text),) = learned(QUESTION, answer("So."), template=OPENS)
    assert (prompt, text) == ("user\nWhy?</s>\nassistant\n", "So.</s>\n")
    wrong = "user\nWhy?</s>\nassistant\n<think>\n"
    assert not (prompt + text).startswith(wrong)


def test_maxtext_5013_reasoning_after_a_prompt_that_opens_it_is_learned():
    """https://github.com/AI-Hypercomputer/maxtext/pull/5013: a prompt ended in an empty block of
    reasoning, so that the answer's reasoning stood after the block, which was then closed again.
    Here the tags at the end of a prompt are left out where the answer has its own.
    """
    closed = TEMPLATE.replace("assistant\n{% endif", "assistant\n<think></think>{% endif")
    ((prompt, text),) = learned(QUESTION, answer("So.", reasoning="As is."), template=closed)
    assert text == "<think>As is.</think>So.</s>\n"
    closed_twice = prompt + "<think></think>" + text.removeprefix("<think>")
    assert (closed_twice.count("</think>"), (prompt + text).count("</think>")) == (2, 1)


def test_skyrl_2092_an_answer_that_shares_a_token_with_its_prompt_is_whole():
    """https://github.com/NovaSky-AI/SkyRL/pull/2092: an answer had as many labels as it adds tokens
    to its prompt, so where one token has the end of the prompt and the start of the answer, the
    first was never learned. Here the prompt has the tokens that it has alone, and the answer all
    of its text.
    """
    conversations, tokenizer = opened()
    turns = conversations.of_row({"messages": [QUESTION, answer("\n\nSo.")]}).turns
    ((prompt, ids),) = conversations.encode(turns)
    text = without_marks(turns[0].prompt)
    library = Tokenizer.from_file("t/tokenizer.json")
    assert prompt.tolist() == library.encode(text).ids
    assert tokenizer.decode(ids).startswith(b"\n\nSo.")
    assert library.encode(text + "\n\nSo.").ids[: len(prompt)] != prompt.tolist(), "shared"


@pytest.mark.parametrize("template", [OBJECTS, TEXTS])
def test_oumi_2605_arguments_have_the_form_that_the_template_writes(template):
    """https://github.com/oumi-ai/oumi/pull/2605: some templates need the arguments of calls as
    objects, others as JSON in a string, and with the other form they fail or write other text. Here
    both are tried. No bug is injected: the text is compared with that which is written here.
    """
    for arguments in ({"city": "Rom"}, '{"city": "Rom"}'):
        call = {"function": {"name": "get", "arguments": arguments}}
        ((_, text),) = learned(QUESTION, answer(None, tool_calls=[call]), template=template)
        assert text == '[get {"city": "Rom"}]</s>\n'


def test_transformers_45419_arguments_are_not_json_in_json():
    """https://github.com/huggingface/transformers/issues/45419: templates wrote arguments that are
    JSON in a string with escaped quotes, as JSON in JSON. Here they are written once.
    """
    arguments = '{"city": "Rom"}'
    call = {"function": {"name": "get", "arguments": arguments}}
    ((_, text),) = learned(QUESTION, answer("", tool_calls=[call]), template=OBJECTS)
    assert json.dumps(arguments) not in text
    assert arguments in text


def test_trl_6259_both_answers_of_a_pair_have_the_tools():
    """https://github.com/huggingface/trl/pull/6259: training with preferences (KTO) ignored the
    tools of a row, as if none were defined. Here the prompt of both answers of a pair has them.
    """
    conversations, _ = opened(kind=PairsOfConversations, preference=True)
    row = {"prompt": [QUESTION], "chosen": [answer("a")], "rejected": [answer("b")]}
    turns = conversations.of_row(row | {"tools": TOOLS}).turns
    assert ["tools\n" in turn.prompt for turn in turns] == [True, True]
    assert ["tools\n" in turn.prompt for turn in conversations.of_row(row).turns] == [False, False]


def test_cookbook_387_an_answer_of_weight_zero_is_not_learned():
    """https://github.com/fw-ai/cookbook/pull/387: `weight: 0` was dropped, so answers that are
    context were trained, without their reasoning. Here they are in prompts only.
    """
    _not_learned({"weight": 0})


def test_verl_5316_an_answer_of_loss_mask_zero_is_not_learned():
    """https://github.com/verl-project/verl/issues/5316: a wrong answer among an agent's steps could
    not be left out of the loss. Here `loss_mask: 0` or `trainable: false` leaves it out.
    """
    _not_learned({"loss_mask": 0})
    _not_learned({"trainable": False})


def test_llamafactory_10471_an_answer_without_loss_is_not_learned():
    """https://github.com/hiyouga/LlamaFactory/pull/10471: all earlier answers were left out of the
    loss, or none. Here `loss: false` leaves out one.
    """
    _not_learned({"loss": False})


def _not_learned(mark):
    first = answer("Bad.", **mark)
    ((prompt, text),) = learned(QUESTION, first, QUESTION, answer("So."))
    assert ("Bad." in prompt, text) == (True, "So.</s>\n")
    assert len(learned(QUESTION, answer("Bad."), QUESTION, answer("So."))) == 2, "without the mark"


def test_verl_6854_earlier_reasoning_is_learned_in_its_own_turn():
    """https://github.com/verl-project/verl/issues/6854: a template removes reasoning from earlier
    turns, so a turn's prompt does not begin with the tokens of the turn before it, and one sequence
    of all turns has a prompt that inference never has. Here each answer is rendered as the last
    one.
    """
    rows = [QUESTION, answer("a", reasoning="one"), QUESTION, answer("b", reasoning="two")]
    (start, first), (prompt, second) = learned(*rows)
    assert (first, second) == ("<think>one</think>a</s>\n", "<think>two</think>b</s>\n")
    assert "one" not in prompt
    assert not prompt.startswith(start + first), "as one sequence of all turns would begin"


def test_axolotl_2762_a_template_that_marks_answers_is_read():
    """https://github.com/axolotl-ai-cloud/axolotl/issues/2762: a template that marks what is
    learned by `{% generation %}` ended the preparation. Here it is read, and an answer is what the
    text has after its prompt, its end too, whatever is marked.
    """
    marked = TEMPLATE.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
    )
    with pytest.raises(jinja2.TemplateSyntaxError, match="unknown tag 'generation'"):
        jinja2.Environment().parse(marked)
    ((prompt, text),) = learned(QUESTION, answer("So."), template=marked)
    assert (prompt, text) == ("user\nWhy?</s>\nassistant\n", "So.</s>\n")


def test_datasets_6891_a_json_file_of_lines_is_read_as_rows():
    """https://github.com/huggingface/datasets/issues/6891: `to_json` writes an object in each line,
    also to a file named `.json`, which a reader of JSON refuses. Here both are rows.
    """
    rows = [{"messages": [QUESTION, answer(text)]} for text in "ab"]
    opened()
    command = "d.json --messages messages --template all.jinja --tokenizer t --overwrite"
    lines = "\n".join(map(json.dumps, rows))
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines)
    for content in (lines, json.dumps(rows)):
        write("d.json", content)
        assert "2 documents" in output(f"{command} --held-out 0")
    write("d.json", json.dumps(rows)[:-9])
    assert "d.json" in refusal(command)
