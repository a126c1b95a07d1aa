"""Reads the conversation of a row: its messages, and what it gives the chat template beside them.

A message has `role` and `content`, as OpenAI's have. ShareGPT's and Alpaca's rows are converted,
with the tools of LLaMA-Factory and the calls of ms-swift.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxtp.config.reading import MAX_JSON, read_bytes
from jaxtp.config.schema import ConfigError, nearest_file
from jaxtp.data.chat_template import ASSISTANT, ChatError, Message
from jaxtp.data.prepare.readers import MEDIA, BadInputError, Fields, Row, shorten

TEMPLATE_FIELDS = ("tools", "functions", "documents", "chat_template_kwargs")
"""Fields of a row that the chat template gets beside its messages. `functions` are the tools of
OpenAI's older files."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that are no arguments."""
MARKS = ("weight", "train", "training", "trainable", "loss_mask", "loss")
"""Keys of a message that say, by 0 or 1, whether it is learned."""
_CALL = "function_call"
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), ASSISTANT),
    **dict.fromkeys((_CALL, "tool_call"), _CALL),
    **dict.fromkeys(("observation", "tool", "tool_response", "function"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""The roles of messages by the names that layouts give them; a message of `function_call` holds
calls of tools by the assistant, as JSON."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ARGUMENTS = ("arguments", "args", "parameters")
_OF_CALLS = {"name", "id", "call_id", "index", "type", "function", *_ARGUMENTS}
"""The keys that may hold a tool call's arguments, and all keys that a tool call may have."""
_TEXTS = (None, "text", "input_text", "output_text")
_THOUGHTS = ("reasoning", "thinking")
"""Types of the parts of a content: its text, and its reasoning."""
_MEDIUM = re.compile("image|audio|video")
_MEDIA = re.compile(r"<image>|^\s*<(audio|video)>(?!.*</\1>)|<(audio|video)>\s*$", re.DOTALL)
"""Words for media in a content. Audio and video are also tags of HTML, which a text may speak of;
as media they stand at its start or end."""


def arguments_of(
    row: Row, arguments: Mapping[str, object], tools_field: str | None = None
) -> dict[str, object]:
    """Returns a row's tools, documents and arguments for the template; raises `ChatError`.

    Args:
      arguments: the template's arguments for all rows; a row's own arguments override them.
      tools_field: a field of the row's tools, before `tools` and `functions`.
    """
    own = _parsed(row.get("chat_template_kwargs"), "'chat_template_kwargs'") or {}
    if not isinstance(own, dict):
        raise ChatError(f"'chat_template_kwargs' is not an object, but {shorten(own)}")
    for name in RESERVED:
        if name in own:
            raise ChatError(f"'chat_template_kwargs' may not have {name!r}")
    merged = {**arguments, **own}
    names = [tools_field or "tools", "tools", "functions"]
    tools = _tools(next(filter(None, map(row.get, names)), None))
    if tools:
        merged["tools"] = tools
    documents = _parsed(row.get("documents"), "'documents'")
    if documents:
        if not isinstance(documents, list) or not all(
            isinstance(document, dict) for document in documents
        ):
            raise ChatError(f"'documents' is not a list of objects, but {shorten(documents)}")
        merged["documents"] = documents
    return merged


def read_tools(path: Path) -> dict[str, object]:
    """Returns the tools in the file of --tools, as an argument of templates.

    Raises ConfigError if the file has no list of tools.
    """
    try:
        tools = arguments_of({"tools": read_bytes(path, MAX_JSON).decode()}, {})
    except OSError as error:
        raise ConfigError(f"--tools {path}: {error.strerror}{nearest_file(path)}") from None
    except (ChatError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tools {path}: {error}") from None
    if not tools:
        raise ConfigError(f"--tools {path}: no tools in it; leave --tools out, or give a list")
    return tools


def _parsed(value: object, name: str) -> Any:
    """Returns a value that may be given as JSON in a string, which is None where it is empty."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ChatError(f"{name} is a string that is no JSON: {shorten(value)}") from None


def _tools(value: object) -> list[dict[str, object]]:
    value = _parsed(value, "'tools'")
    if isinstance(value, dict):
        value = [value]
    if value is not None and not isinstance(value, list):
        raise ChatError(f"'tools' is not a list, but {shorten(value)}")
    tools = []
    for number, item in enumerate(value or (), 1):
        tool = _parsed(item, f"tool {number}")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError(f"tool {number} has no name: {shorten(tool)}")
        if isinstance(function.get("parameters"), str):
            parameters = _parsed(function["parameters"], f"'parameters' of tool {number}")
            function = {**function, "parameters": parameters}
        if function is not tool and "function" in tool:
            tools.append({**tool, "function": function})
        else:
            bare = {key: part for key, part in function.items() if key != "type"}
            tools.append({"type": "function", "function": bare})
    return tools


def messages_of(row: Row, fields: Fields) -> object:
    """Returns a row's messages, for `checked`; raises `ChatError`."""
    texts = [name for name in fields.optional if name not in ("history", *TEMPLATE_FIELDS)]
    for name in (*texts, *((fields.prompt, fields.text) if fields.prompt else ())):
        value = row.get(name)
        if not isinstance(value, str) and (value is not None or name in fields.names):
            raise ChatError(f"{name!r} is not a string, but {shorten(value)}")
    messages = row[fields.text]
    if fields.prompt is None:
        if isinstance(messages, str) and messages.lstrip().startswith("["):
            messages = _parsed(messages, repr(fields.text))
    else:
        question = "\n\n".join(str(text) for text in (row[fields.prompt], row.get("input")) if text)
        history = row.get("history") or []
        if not isinstance(history, list) or not all(
            isinstance(turn, list) and len(turn) == 2 for turn in history
        ):
            raise ChatError(f"'history' is not a list of pairs of texts, but {shorten(history)}")
        turns = [*history, [question, messages]]
        conversation: list[Message] = []
        for question, answer in turns:
            conversation.append({"role": "user", "content": question})
            conversation.append({"role": ASSISTANT, "content": answer})
        messages = conversation
    if isinstance(messages, list):
        return with_system(messages, row.get("system"))
    return messages


def as_messages(value: object, role: str) -> object:
    """Returns a text as the only message, of a role, and a message as a list of it."""
    if isinstance(value, str):
        value = {"role": role, "content": value}
    return [value] if isinstance(value, dict) else value


def with_system(messages: list[Message], system: object) -> list[Message]:
    """Puts a row's system message, if it has one, before the others."""
    if not system:
        return messages
    contents = [
        message.get("content", message.get("value"))
        for message in messages
        if isinstance(message, dict) and "system" in (message.get("role"), message.get("from"))
    ]
    if contents == [system]:
        return messages
    if contents:
        raise ChatError("there are two system messages, one of them in the field 'system'")
    return [{"role": "system", "content": system}, *messages]


def checked(messages: object, template: str, media_as_text: bool) -> list[Message]:
    """Returns messages with role and content; raises `ChatError` or `BadInputError`.

    Args:
      messages: in one of the layouts.
      template: the chat template, which may name roles of its own.
    """
    if messages == []:
        raise ChatError("the list of messages is empty")
    if not isinstance(messages, list):
        raise ChatError(f"not a list of messages, but {shorten(messages)}")
    merged: list[Message] = []
    for number, message in enumerate(messages, 1):
        if isinstance(message, str) and message.startswith("{"):
            message = _parsed(message, f"message {number}")
        if not isinstance(message, dict):
            raise ChatError(
                f"message {number} is not an object with role and content, but {shorten(message)}"
            )
        message = _with_role(message, number, template)
        is_after_call = bool(merged) and message["role"] == _CALL
        message = _with_calls(message, number)
        message = _with_reasoning(_joined(message, number), number)
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                fix = "; give it a text, or remove the message" if message[key] is None else ""
                raise ChatError(
                    f"message {number}: {key!r} is not a string, but {shorten(message[key])}{fix}"
                )
        media = _MEDIA.search(message["content"])
        if media and not media_as_text:
            raise BadInputError(
                MEDIA,
                f"message {number} has {media[0].strip()}, and only text is read; --media-as-text "
                "keeps that word as text",
            )
        is_learned(message, number)
        if is_after_call and merged[-1]["role"] == ASSISTANT:
            merged[-1] = _merged(merged[-1], message, number)
        else:
            merged.append(message)
    return merged


def _merged(first: Message, second: Message, number: int) -> Message:
    """Returns a message of the assistant with the calls of the message after it."""
    present = {name: part for name, part in second.items() if part is not None}
    learned = [is_learned(message, number) for message in (first, second)]
    reasoning = [message.get("reasoning_content") for message in (first, present)]
    if learned[0] != learned[1] or (all(reasoning) and reasoning[0] != reasoning[1]):
        raise ChatError(
            f"message {number} and the one before it are one answer, but their reasoning, or "
            f"their marks ({', '.join(MARKS)}), differ; make one message of them"
        )
    own = {name: part for name, part in first.items() if part not in (None, "")}
    return {**present, **own, "tool_calls": [*(own.get("tool_calls") or ()), *second["tool_calls"]]}


def is_learned(message: Message, number: int) -> bool:
    """Returns whether a message's marks leave it to be learned; raises `ChatError`."""
    learned = True
    for name in MARKS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ChatError(f"message {number}: {name!r} is {shorten(value)}, and not 0 or 1")
        if value and message["role"] != ASSISTANT:
            raise ChatError(
                f"message {number}: {name!r} is {shorten(value)}, but its role is "
                f"{message['role']!r}, and only answers of {ASSISTANT!r} are learned"
            )
        learned = learned and bool(value)
    return learned


def calls_of(message: Message) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the name and the arguments of each tool call."""
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"], _object(call["function"])


def with_arguments(message: Message, *, as_text: bool) -> Message:
    """Returns a message with the arguments of its tool calls as JSON in strings, or as objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        if not as_text:
            arguments = _object(function)
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _object(function: Mapping[str, Any]) -> dict[str, object]:
    arguments = function["arguments"]
    return dict(json.loads(arguments) if isinstance(arguments, str) else arguments)


def _with_role(message: Message, number: int, template: str) -> Message:
    """Returns a message with its role as templates name it, and with `content`."""
    if message.get("role") is None and {"from", "value"} <= message.keys():
        sender = message["from"]
        if not isinstance(sender, str) or sender not in _ROLES:
            raise ChatError(
                f"message {number} is from {shorten(sender)}, and not from {', '.join(_ROLES)}"
            )
        remaining = {name: part for name, part in message.items() if name not in ("from", "value")}
        return {**remaining, "role": _ROLES[sender], "content": message["value"]}
    instead = ("tool_calls", _CALL, *_REASONING)  # of the content
    if message.get("content") is None and any(message.get(name) for name in instead):
        message = {**message, "content": ""}
    for name in ("role", "content"):
        if name not in message:
            raise _no_key(name, number, message)
    role = message["role"]
    if not isinstance(role, str):
        return message
    # A template may name roles of its own, such as `ipython` or `observation`. It reads tool calls
    # in messages of the assistant.
    if _ROLES.get(role) not in (_CALL, ASSISTANT) and _names_role(template, role):
        return message
    if role in _ROLES:
        return {**message, "role": _ROLES[role]}
    near = _ROLES.get(role.lower())
    fix = f"write {near!r} instead" if near else f"known roles are {', '.join(_ROLES)}"
    raise ChatError(
        f"message {number} has the role {shorten(role)}, which the template does not name; {fix}"
    )


@lru_cache
def _names_role(template: str, role: str) -> bool:
    """Returns whether a template reads a role of this name."""
    quoted = rf"['\"]{re.escape(role)}['\"]"
    if role in ("function", "human"):  # templates quote these words for other things, too
        quoted = rf"role['\"]?\]?\s*(?:==\s*|in\s*[\[(][^\])]*){quoted}"
    return re.search(quoted, template) is not None


def _with_calls(message: Message, number: int) -> Message:
    """Returns a message with its tool calls as a list of functions with arguments."""
    parts = [message.get("tool_calls"), message.get(_CALL)]
    if message["role"] == _CALL:
        parts.append(_parsed(message["content"], f"message {number}"))
        message = {**message, "role": ASSISTANT, "content": ""}
        if not parts[-1]:
            raise ChatError(f"message {number} has no tool call")
    message = {key: value for key, value in message.items() if key != _CALL}
    calls = [_calls(part, message["role"], number) for part in parts if part]
    if not calls:
        return message
    first, *remaining = ({"tool_calls": part} for part in calls)
    if any(list(calls_of(call)) != list(calls_of(first)) for call in remaining):
        raise ChatError(f"message {number} has other calls in {_CALL!r} than in 'tool_calls'")
    return {**message, **first}


def _calls(calls: object, role: object, number: int) -> list[dict[str, object]]:
    if isinstance(calls, dict):
        calls = [calls]
    if role != ASSISTANT or not isinstance(calls, list):
        raise ChatError(
            f"message {number}: tool calls are a list in a message of {ASSISTANT!r}, but "
            f"{shorten(calls)} is in one of {role!r}"
        )
    return [_call(call, number) for call in calls]


def _call(item: object, number: int) -> dict[str, object]:
    call = _parsed(item, f"a tool call of message {number}")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(f"message {number}: a tool call has no name: {shorten(call)}")
    name = function["name"]
    parts = {key: part for key, part in {**call, **function}.items() if part is not None}
    names = [key for key in _ARGUMENTS if parts.get(key, "") != ""]
    unknown = parts.keys() - _OF_CALLS
    if len(names) > 1 or (unknown and not names):
        keys = names or sorted(unknown)
        raise ChatError(
            f"message {number}: the call of {name!r} has {' and '.join(map(repr, keys))}; give it "
            "its arguments in 'arguments'"
        )
    arguments = parts[names[0]] if names else {}
    parsed = _parsed(arguments, f"message {number}: 'arguments' of the call of {name!r}")
    if not isinstance(parsed, dict):
        raise ChatError(
            f"message {number}: 'arguments' of the call of {name!r} are not an object, but "
            f"{shorten(arguments)}"
        )
    if function is call:
        call = {key: parts[key] for key in ("id",) if key in parts}
        return {"type": "function", **call, "function": {"name": name, "arguments": arguments}}
    outer = {key: part for key, part in call.items() if key not in _ARGUMENTS}
    inner = {key: part for key, part in function.items() if key not in _ARGUMENTS}
    return {**outer, "function": {**inner, "arguments": arguments}}


def _with_reasoning(message: Message, number: int) -> Message:
    """Gives a message's reasoning the two names that templates read, as transformers does."""
    for name in _REASONING:
        reasoning = message.get(name)
        if reasoning in (None, ""):
            continue
        if not isinstance(reasoning, str):
            raise ChatError(f"message {number}: {name!r} is not a string, but {shorten(reasoning)}")
        empty = [key for key in message if key in _REASONING and message[key] == ""]
        present = {
            key: value for key, value in message.items() if value is not None and key not in empty
        }
        return {"thinking": reasoning, **present, "reasoning_content": reasoning}
    return message


def _no_key(key: str, number: int, message: Message) -> ChatError:
    """Returns the error of a message without its role or its content."""
    other_keys = [name for name in list(message)[:4] if name not in ("role", "content")]
    if len(other_keys) == 1:
        fix = f"rename its key {other_keys[0]!r} to {key!r}"
    elif other_keys:
        fix = f"rename one of its keys to {key!r}: {', '.join(map(repr, other_keys))}"
    elif message:
        fix = f"it has only {next(iter(message))!r}; give it a {key}, or remove the message"
    else:
        fix = "it is empty; remove it"
    return ChatError(f"message {number} has no {key!r}: {fix}")


def no_answer(roles: Sequence[str]) -> ChatError:
    """Returns the error of a conversation without a message of the assistant."""
    names = ", ".join(map(repr, dict.fromkeys(roles)))
    return ChatError(
        f"no message has the role {ASSISTANT!r}, so there is no answer to learn; it has {names}"
    )


def _joined(message: Message, number: int) -> Message:
    """Joins parts of a content, such as {"type": "text", "text": ...}, of the type of a medium, or
    of its reasoning."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            return message
        kind = part.get("type")
        text = part.get("text")
        medium = _MEDIUM.search(kind) if isinstance(kind, str) else None
        if medium:
            text = f"<{medium[0]}>"
        elif kind in _THOUGHTS:
            text = part.get(kind) or text
        elif kind not in _TEXTS:
            raise ChatError(
                f"message {number}: a part of its content has the type {shorten(kind)}, and not "
                f"{', '.join(map(repr, (*_TEXTS[1:], *_THOUGHTS)))}"
            )
        if not isinstance(text, str):
            return message
        (thoughts if kind in _THOUGHTS else texts).append(text)
    joined = {**message, "content": "".join(texts)}
    if not any(thoughts):
        return joined
    if any(message.get(name) for name in _REASONING):
        raise ChatError(f"message {number} has reasoning in its content and in a key of its own")
    return {**joined, "reasoning_content": "".join(thoughts)}
