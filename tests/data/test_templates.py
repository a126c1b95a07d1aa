"""The templates of TRL's wheel, each with conversations of several shapes: what is prepared is what
transformers renders, or it is refused. Needs the libraries transformers and trl.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from corpora import write
from small_tokenizers import byte_level

from jaxtp.config.entry import UserError
from jaxtp.data.chat_template import without_marks
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.tokenizer import HuggingFaceTokenizer

rendering = pytest.importorskip("transformers.utils.chat_template_utils")
if find_spec("trl") is None or not hasattr(rendering, "_alias_reasoning_fields"):
    pytest.skip("needs the library trl, and transformers from 5.24 on", allow_module_level=True)
pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]
FOLDER = Path(find_spec("trl").submodule_search_locations[0], "chat_templates")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Tells it.", "parameters": PARAMETERS}
OF_PARTS = ("idefics3", "smolvlm")
"""Templates that read a message as a list of parts, and write nothing of a string."""
TOOLS = [{"type": "function", "function": FUNCTION}]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def calling(arguments, **more):
    function = {"name": "get_weather", "arguments": arguments}
    result = {"role": "tool", "content": "20", "name": "get_weather", "tool_call_id": "abcdefghi"}
    call = answer("", tool_calls=[{"type": "function", "id": "abcdefghi", "function": function}])
    return [user("Is it warm?"), call | more, result, answer("Yes.")]


SHAPES = {
    "one": [user("hi"), answer("yo")],
    "system": [{"role": "system", "content": "be brief"}, user("hi"), answer("yo")],
    "several": [user("hi"), answer("yo"), user("more"), answer("<b>fine</b>")],
    "reasoning": [user("2+2?"), answer("4", reasoning="two and two")],
    "in a text": [user("2+2?"), answer("<think>\ntwo and two\n</think>\n\n4")],
    "line breaks": [user("hi"), answer("\n\nyo")],
    "calls": calling({"city": 'a "b"', "day": 3}),
    "text beside a call": calling({"city": "Rom"}, content="Let me look."),
    "reasoning before a call": calling({"city": "Rom"}, reasoning_content="must look"),
}


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


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.jinja")), ids=lambda file: file.stem)
def test_what_is_prepared_is_what_transformers_renders(file, folder):
    content = byte_level(["hello"], 300, list(SPECIAL.values()))
    write("t/tokenizer.json", content)
    write("t/tokenizer_config.json", json.dumps(SPECIAL))
    tokenizer = HuggingFaceTokenizer(Path("t/tokenizer.json").read_bytes(), "t", eos="</s>")
    config = PrepareConfig(template=file, tokenizer=Path("t"))
    try:
        conversations = Conversations(config, tokenizer)
    except UserError:
        return  # it reads parts of images
    for name, messages in SHAPES.items():
        tools = TOOLS if "call" in name else None
        try:
            turns = conversations.turns(messages, {"tools": tools})
        except UserError:
            assert name != "one" or file.stem.startswith(OF_PARTS)
            continue
        answers = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        for index, turn in zip(answers, turns, strict=True):
            text = without_marks(turn.prompt + turn.text)
            prompts = []
            for given in (messages, as_texts(messages)):
                try:
                    if rendered(file.read_text(), given[: index + 1], tools=tools) == text:
                        settings = {"tools": tools, "add_generation_prompt": True}
                        prompts.append(rendered(file.read_text(), given[:index], **settings))
                except Exception:  # of the template
                    continue
            start = without_marks(turn.prompt)
            assert any(
                prompt == start or (prompt.startswith(start) and "think" in prompt[len(start) :])
                for prompt in prompts
            ), name
