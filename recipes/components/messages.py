# SPDX-License-Identifier: Apache-2.0
"""Messages as people have them, in the one form that chat templates take.

The form is that of transformers and OpenAI: `role` and `content`, and where they were said
`tool_calls` and `reasoning_content`. Logs and data sets also have ShareGPT's `from` and `value`,
OpenAI's older `function_call`, calls without the `function` around them, arguments as JSON text,
content as a list of parts, and nulls that readers of tables fill in.

Every problem is raised as a ValueError whose text continues "train.jsonl, line 7: ".
"""

import json
from collections.abc import Mapping
from typing import Any

from components.columns import is_empty, shorten

Message = dict[str, Any]  # {"role": ..., "content": ...}, and possibly more keys

# Keys of a message that say whether it is trained on: OpenAI's, axolotl's and others'
TRAINED_KEYS = ("weight", "train", "loss")
# transformers writes the first of these under all of their names
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
OTHER_NAMES_OF_REASONING = ("thoughts", "thought")
# Names of the arguments of a call: OpenAI's, Llama's, Hermes' and Anthropic's
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
CALL_KEYS = ("name", "id", "type", "index", *ARGUMENT_KEYS)
# ShareGPT's names, and those of data sets in its form: {from: role}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
SHAREGPT_CALL = "function_call"  # from: its value is the JSON of a call, or of a list of calls


# ---- Messages ----
def normalize_message(message: Any, number: int) -> Message:
    """Return a message with role and content, the calls of tools as objects, and no empty keys.

    Args:
        number: its number in the conversation, from 1, for problems.

    Returns:
        A new message. Its content is one text, "" if it has only calls or reasoning. TRAINED_KEYS
        are kept as they are.
    """
    if not isinstance(message, Mapping):
        raise ValueError(
            f"message {number} is not an object with role and content: {shorten(message)}"
        )
    if is_sharegpt(message):
        message = from_sharegpt(message, number)
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no role: {shorten(dict(message))}")
    label = name_message(message, number)
    # 0 and false are values; null, "" and [] are what readers fill in
    normalized = {key: value for key, value in message.items() if not is_empty(value)}
    if role == "function":  # OpenAI's older name
        normalized["role"] = "tool"
    if "function_call" in normalized and "tool_calls" in normalized:
        raise ValueError(f"{label} has tool_calls and function_call: leave one of them out")
    if "function_call" in normalized:
        normalized["tool_calls"] = [normalized.pop("function_call")]
    if "tool_calls" in normalized:
        normalized["tool_calls"] = normalize_calls(normalized["tool_calls"], label)
    rename_reasoning(normalized, label)
    says_more = "tool_calls" in normalized or reasoning_of(normalized) is not None
    normalized["content"] = normalize_content(message, label, may_be_missing=says_more)
    return normalized


def rename_reasoning(message: Message, label: str) -> None:
    """Put the reasoning of a message under a name that chat templates know."""
    for name in OTHER_NAMES_OF_REASONING:
        if name not in message:
            continue
        if reasoning_of(message) is not None:
            raise ValueError(f"{label} has reasoning under several names: leave out {name}")
        message["reasoning_content"] = message.pop(name)


def name_message(message: Mapping[str, Any], number: int) -> str:
    """Return the name of a message in a problem: "message 2 (assistant)"."""
    return f"message {number} ({message['role'][:40]})"


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """Return the reasoning of a message, under whichever name, or None."""
    for key in REASONING_KEYS:
        if message.get(key) is not None:
            return message[key]
    return None


def normalize_content(message: Mapping[str, Any], label: str, may_be_missing: bool) -> str:
    """Return the content of a message as one text; its parts become lines."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(read_part(part, label) for part in content)
    if content is None and may_be_missing:
        return ""
    found = "it has no content"
    if "content" in message:
        found = f"its content is {shorten(content)}"
    raise ValueError(
        f"{label} has no text: {found}; content has to be a text or a list of parts of text"
    )


def read_part(part: Any, label: str) -> str:
    """Return the text of a part of a message's content."""
    if isinstance(part, str):
        return part
    kind = (part.get("type") or "text") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if isinstance(text, str):
        return text
    found = shorten(kind or part)
    raise ValueError(
        f"{label} has a part of its content that is not text: {found}; this recipe trains on text"
    )


def pop_weight(message: Message, label: str) -> bool:
    """Remove TRAINED_KEYS from a message; return whether the message is trained on.

    By default, what the assistant says is, and nothing else. A message can only be left out.
    """
    by_assistant = message["role"] == "assistant"
    is_trained_on = by_assistant
    for key in TRAINED_KEYS:
        requested = message.pop(key, None)
        if requested is None:
            continue
        if requested not in (0, 1):  # False is 0, and True is 1
            raise ValueError(
                f"{label} has {key} {shorten(requested)}: it has to be 0, which leaves the message "
                "out of the loss, or 1"
            )
        if requested and not by_assistant:
            raise ValueError(
                f"{label} has {key} {shorten(requested)}, but only what the assistant says can be "
                "trained on: remove it"
            )
        is_trained_on = is_trained_on and bool(requested)
    return is_trained_on


# ---- Tools ----
def normalize_calls(calls: Any, label: str) -> list[dict[str, Any]]:
    """Return calls of tools as {"type": "function", "function": {"name", "arguments"}, ...}.

    Args:
        calls: a list of them, or its JSON; each with or without the "function" around it.
    """
    try:
        calls = parse_json(calls)
        if isinstance(calls, Mapping):
            calls = [calls]
        return [normalize_call(parse_json(call)) for call in calls]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{label} has tool calls that are not objects with a name and arguments: "
            f"{shorten(str(calls))}"
        ) from None


def normalize_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call in transformers' form; without a name it raises a KeyError or TypeError."""
    inner = call.get("function") or call
    unknown = [key for key in inner if key not in CALL_KEYS and not is_empty(inner[key])]
    if unknown:
        raise TypeError(f"a call has no {unknown[0]}")
    function = {"name": require_text(inner["name"]), "arguments": read_arguments(inner)}
    outer = {"type": "function", "function": function}
    if not is_empty(call.get("id")):
        outer["id"] = call["id"]
    return outer


def read_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, which may be JSON, as an object.

    Nulls in an object are left out, since readers of tables fill them in for the arguments of
    other calls; nulls in JSON text are kept.
    """
    given = [function[key] for key in ARGUMENT_KEYS if not is_empty(function.get(key))]
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    else:
        arguments = without_nulls(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("the arguments of a call have to be an object")
    return arguments


def normalize_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools as {"type": "function", "function": a JSON schema}.

    Args:
        tools: a list of them, or its JSON; each with or without the "function" around it. Nulls
            are kept in JSON, where somebody wrote them: in columns, readers fill them in.
    """
    try:
        listed = []
        for tool in parse_json(tools):
            parsed = parse_json(tool)
            if not isinstance(tools, str) and not isinstance(tool, str):
                parsed = without_nulls(parsed)
            listed.append(normalize_tool(parsed))
        return listed
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            "has tools that are not a list of functions, each with a name and parameters as a JSON "
            f"schema: {shorten(str(tools))}"
        ) from None


def normalize_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in transformers' form; without a name it raises a KeyError or TypeError."""
    function = tool.get("function") or tool
    require_text(function["name"])
    if "function" in tool:
        return {**tool, "function": function}
    return {"type": "function", "function": function}


def parse_json(value: Any) -> Any:
    """Return what a JSON text says; anything but a text is returned as it is."""
    return json.loads(value) if isinstance(value, str) else value


def require_text(value: Any) -> str:
    """Return a text unchanged; raise a TypeError for anything else, and for an empty one."""
    if not isinstance(value, str) or not value:
        raise TypeError("has to be a text")
    return value


def without_nulls(value: Any) -> Any:
    """Return a value without the keys, at any depth, whose value is null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


# ---- ShareGPT ----
def is_by_assistant(message: Any) -> bool:
    """Return whether the assistant says a message, which is not yet normalized."""
    if not isinstance(message, Mapping):
        return False
    if is_sharegpt(message):
        speaker = message["from"]
        return speaker == SHAREGPT_CALL or SHAREGPT_ROLES.get(speaker) == "assistant"
    return message.get("role") == "assistant"


def is_sharegpt(message: Mapping[str, Any]) -> bool:
    """Return whether a message has the keys of ShareGPT instead of role and content."""
    return {"from", "value"} <= set(message) and "role" not in message


def from_sharegpt(message: Mapping[str, Any], number: int) -> Message:
    """Return a message of ShareGPT with role and content, or with its call of a tool."""
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    speaker = message["from"]
    if speaker == SHAREGPT_CALL:
        return {**others, "role": "assistant", "content": None, "tool_calls": message["value"]}
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join([*SHAREGPT_ROLES, SHAREGPT_CALL])
        raise ValueError(f"message {number} is from {shorten(speaker)}, which is none of {known}")
    return {**others, "role": SHAREGPT_ROLES[speaker], "content": message["value"]}
