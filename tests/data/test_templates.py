"""The templates of TRL's wheel, each with conversations of several shapes: what is prepared is what
transformers renders, or it is refused. Needs the libraries transformers and trl.
"""

import json
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from corpora import write
from small_tokenizers import byte_fallback, byte_level
from tables import read_table
from tokenizers import Tokenizer

from jaxtp.config.entry import UserError
from jaxtp.data.chat_template import ChatTokenizer, without_marks
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.tokenizer import HuggingFaceTokenizer

rendering = pytest.importorskip("transformers.utils.chat_template_utils")
if find_spec("trl") is None or not hasattr(rendering, "_alias_reasoning_fields"):
    pytest.skip("needs the library trl, and transformers from 5.24 on", allow_module_level=True)
pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]
FOLDER = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
TABLES = read_table(__file__)
SPECIAL = TABLES["special"]
REASONING = ("reasoning", "thinking", "reasoning_content")
WORD = "Zqvx"


def rendered(template, messages, **settings):
    (text,), _ = rendering.render_jinja_template(
        [messages], chat_template=template, **settings, **SPECIAL
    )
    return text


def as_texts(messages):
    """The same messages with the arguments of calls as JSON."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copied


def in_parts(messages):
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def expected(template, messages, tools):
    """Text and prompt of the last message as transformers renders it, in each form of the input."""
    joined = [
        {key: part for key, part in message.items() if part is not None} for message in messages
    ]
    for message in joined:
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
    for given in (joined, as_texts(joined), in_parts(joined)):
        with suppress(Exception):  # of the template
            whole = rendered(template, given, tools=tools)
            settings = {"tools": tools, "add_generation_prompt": True}
            yield whole, rendered(template, given[:-1], **settings)


def check(template, turn, messages, tools):
    """Compares an answer with transformers' texts, and its span with those of another answer."""
    start = without_marks(turn.prompt)
    text = start + without_marks(turn.text)
    prompts = [prompt for whole, prompt in expected(template, messages, tools) if whole == text]
    assert any(
        prompt == start or (prompt.startswith(start) and "think" in prompt[len(start) :])
        for prompt in prompts
    )
    last = messages[-1]
    name = next((name for name in REASONING if last.get(name)), "content")
    changed = [*messages[:-1], last | {name: WORD}]
    texts = [whole for whole, _ in expected(template, changed, tools) if WORD in whole]
    if last["content"] and "<think>" not in last["content"]:
        assert any(whole.startswith(start) and WORD in whole[len(start) :] for whole in texts)


def check_ids(tokenizer, turns):
    """Compares ids: those of a prompt are its own, and all text is there."""
    library = Tokenizer.from_str(json.dumps(tokenizer.file()))
    ids_of = lambda text: library.encode(text, add_special_tokens=False).ids
    spelled = lambda ids: library.decode(ids, skip_special_tokens=False)
    pairs = [(turn.prompt, turn.text) for turn in turns]
    for pair, ids in zip(pairs, ChatTokenizer(tokenizer).encode(pairs), strict=True):
        prompt, text = map(without_marks, pair)
        before, learned = (part.tolist() for part in ids)
        assert before == ids_of(prompt)
        assert spelled(before + learned) == spelled(ids_of(prompt + text))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.jinja")), ids=lambda file: file.stem)
def test_what_is_prepared_is_what_transformers_renders(file, folder):
    write("t/tokenizer_config.json", json.dumps(SPECIAL))
    write("t/tokenizer.json", byte_level(["hello", "\n\n"], 300, list(SPECIAL.values())))
    pieces = Tokenizer.from_str(byte_fallback().decode())
    pieces.add_special_tokens(list(SPECIAL.values()))
    tokenizers = [
        HuggingFaceTokenizer(content, "t", eos="</s>")
        for content in (Path("t/tokenizer.json").read_bytes(), pieces.to_str().encode())
    ]
    config = PrepareConfig(template=file, tokenizer=Path("t"))
    conversations = Conversations(config, tokenizers[0])
    prepared = []
    for name, messages in TABLES["shapes"].items():
        tools = TABLES["tools"] if "call" in name else None
        try:
            turns = conversations.turns(messages, {"tools": tools})
        except UserError:
            assert name != "one"
            continue
        answers = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        for index, turn in zip(answers, turns, strict=True):
            check(file.read_text(), turn, messages[: index + 1], tools)
        prepared += turns
    for tokenizer in tokenizers:
        check_ids(tokenizer, prepared)
