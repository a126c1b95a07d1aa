"""Reads the conversation of a row: its messages, and what it gives the chat template beside them.

A message has `role` and `content`, as OpenAI's have. ShareGPT's and Alpaca's rows are converted,
with the tools of LLaMA-Factory and the calls of ms-swift.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    "system": "system",
    "developer": "developer",
}
"""The roles of messages by the names that layouts give them; a message of `function_call` holds
calls of tools by the assistant, as JSON."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MEDIUM = re.compile("image|audio|video")
_MEDIA = re.compile(f"<({_MEDIUM.pattern})>")


class Conversation(NamedTuple):
    """The conversation of a row."""

    messages: object  # as the row has them; `checked` reads them
    arguments: Mapping[str, object]  # for the template


def conversation_of(row: Row, fields: Fields, arguments: Mapping[str, object]) -> Conversation:
    """Returns a row's conversation; raises `ChatError`.

    Args:
      arguments: the template's arguments of all rows, which those of the row override.
    """
    return Conversation(_messages(row, fields), arguments_of(row, arguments))


def arguments_of(row: Row, arguments: Mapping[str, object]) -> dict[str, object]:
    """Returns a row's tools, documents and arguments for the template; raises `ChatError`."""
    own = _parsed(row.get("chat_template_kwargs"), "'chat_template_kwargs'") or {}
    if not isinstance(own, dict):
        raise ChatError(f"'chat_template_kwargs' is not an object, but {shorten(own)}")
    for name in RESERVED:
        if name in own:
            raise ChatError(f"'chat_template_kwargs' may not have {name!r}")
    merged = {**arguments, **{name: value for name, value in own.items() if value is not None}}
    tools = _tools(row.get("tools") or row.get("functions"))
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


def _messages(row: Row, fields: Fields) -> object:
    texts = [name for name in fields.optional if name not in ("history", *TEMPLATE_FIELDS)]
    for name in (*texts, *(fields.names if fields.prompt else ())):
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
    if any(
        isinstance(message, dict) and "system" in (message.get("role"), message.get("from"))
        for message in messages
    ):
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
        message = {**message, "content": _joined(message["content"])}
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
                f"message {number} has {media[0]}, and only text is read; --media-as-text keeps "
                "that word as text",
            )
        is_learned(message, number)
        if is_after_call and merged[-1]["role"] == ASSISTANT:
            calls = [*(merged[-1].get("tool_calls") or ()), *message["tool_calls"]]
            merged[-1] = {**merged[-1], "tool_calls": calls}
        else:
            merged.append(_with_reasoning(message, number))
    return merged


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


def as_texts(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the arguments of tool calls as JSON in strings."""
    return [_with_arguments(message, True) for message in messages]


def as_objects(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the arguments of tool calls as objects."""
    return [_with_arguments(message, False) for message in messages]


def calls_of(message: Message) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the name and the arguments of each tool call."""
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"], _object(call["function"])


def _with_arguments(message: Message, as_text: bool) -> Message:
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
    if role in _ROLES:
        return {**message, "role": _ROLES[role]}
    # A template may name other roles, such as `ipython`.
    if re.search(f"['\"]{re.escape(role)}['\"]", template):
        return message
    near = _ROLES.get(role.lower())
    fix = f"write {near!r} instead" if near else f"known roles are {', '.join(_ROLES)}"
    raise ChatError(
        f"message {number} has the role {shorten(role)}, which the template does not name; {fix}"
    )


def _with_calls(message: Message, number: int) -> Message:
    """Returns a message with its tool calls as a list of functions with arguments."""
    calls = message.get("tool_calls")
    role = message["role"]
    if role == _CALL:
        calls = _parsed(message["content"], f"message {number}")
        message = {**message, "role": ASSISTANT, "content": ""}
        if not calls:
            raise ChatError(f"message {number} has no tool call")
    elif message.get(_CALL):
        calls = message[_CALL]
    message = {key: value for key, value in message.items() if key != _CALL}
    if not calls:
        return message
    if isinstance(calls, dict):
        calls = [calls]
    if message["role"] != ASSISTANT or not isinstance(calls, list):
        raise ChatError(
            f"message {number}: tool calls are a list in a message of {ASSISTANT!r}, but "
            f"{shorten(calls)} is in one of {message['role']!r}"
        )
    return {**message, "tool_calls": [_call(call, number) for call in calls]}


def _call(item: object, number: int) -> dict[str, object]:
    call = _parsed(item, f"a tool call of message {number}")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(f"message {number}: a tool call has no name: {shorten(call)}")
    name = function["name"]
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    parsed = _parsed(arguments, f"message {number}: 'arguments' of the call of {name!r}")
    if not isinstance(parsed, dict):
        raise ChatError(
            f"message {number}: 'arguments' of the call of {name!r} are not an object, but "
            f"{shorten(arguments)}"
        )
    if function is call:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning(message: Message, number: int) -> Message:
    """Gives a message's reasoning the two names that templates read, as transformers does."""
    for name in _REASONING:
        reasoning = message.get(name)
        if reasoning is None:
            continue
        if not isinstance(reasoning, str):
            raise ChatError(f"message {number}: {name!r} is not a string, but {shorten(reasoning)}")
        present = {key: value for key, value in message.items() if value is not None}
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


def _joined(content: object) -> object:
    # Joins parts such as {"type": "text", "text": ...} and {"type": "image_url", ...}.
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            return content
        text = part.get("text")
        kind = part.get("type")
        medium = _MEDIUM.search(kind) if isinstance(kind, str) else None
        if medium:
            text = f"<{medium[0]}>"
        if not isinstance(text, str):
            return content
        texts.append(text)
    return "".join(texts)
