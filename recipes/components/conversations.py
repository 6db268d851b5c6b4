# SPDX-License-Identifier: Apache-2.0
"""Check that a conversation has messages with a role and a text, and an answer to train on.

Every problem is raised as a ValueError whose text continues "train.jsonl, line 7: ".
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from components.columns import (
    MAX_SHOWN,
    Row,
    TrackedRow,
    advise_columns,
    is_empty,
    list_columns,
    rename_columns,
    shorten,
)

Message = dict[str, Any]  # {"role": ..., "content": ...}, and possibly more keys

TOOL_COLUMNS = ("tools", "functions")  # columns with the tools that the assistant may call
TOOL_KEYS = ("tool_calls", "function_call", "tool_call_id")  # keys of a message
TOOL_ROLES = ("tool", "function")
# Keys of a message that say whether it is trained on. The recipes train on everything that the
# assistant says and on nothing else.
TRAINED_KEYS = ("weight", "train", "loss")
KNOWN_KEYS = ("role", "content", *TRAINED_KEYS)
# Keys of a message that carry part of what was said. A row is refused if the chat template drops
# one of them. Any other key (id, timestamp, ...) only describes the message. Most logs of
# conversations have such keys, so they are not refused, but named in the start summary.
SAID_KEYS = (
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
    "thoughts",
    "thought",
    "refusal",
    "tools",
    "documents",
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
    "file",
    "files",
    "attachments",
)

SHAREGPT = (
    "has from and value (ShareGPT): rename them to role and content, and write user for human and "
    "assistant for gpt"
)


# ---- Conversations ----
def find_messages(
    row: Row, formats: Mapping[str, str], columns: Mapping[str, str] | None = None
) -> Any:
    """Return a row as a list of messages, not yet validated; None if it has none of the columns.

    The messages are in the column `messages`, or in a column with a question and one with its
    answer, which may be texts or lists of messages. An `input` is appended to an `instruction`.

    Args:
        formats: {column with a question: column with its answer}.
        columns: {role: column}, as --columns gives them. Then only the columns of that format are
            looked at, even if the row has those of another one too.
    """
    messages = None
    if columns:
        row = rename_columns(row, columns)
        formats = {key: value for key, value in formats.items() if {key, value} & set(columns)}
    if not columns or "messages" in columns:
        messages = row.get("messages")
    if messages:
        return messages
    for question, answer in formats.items():
        if question in row and answer in row:
            return messages_of_pair(row, question, answer)
    return messages


def trains_on_answers_only(
    row: Row,
    columns: Mapping[str, str] | None,
    completion_only_loss: bool,
    assistant_only_loss: bool,
) -> bool:
    """Return the flag that applies to a row: one is for prompts and answers, one for messages.

    Args:
        columns: as in `find_messages`.
    """
    column_of_messages: str | None = "messages"
    if columns:
        column_of_messages = columns.get("messages")
    if column_of_messages and row.get(column_of_messages):
        return assistant_only_loss
    return completion_only_loss


def messages_of_pair(row: Row, question: str, answer: str) -> list[Message]:
    """Return the messages in two columns; what is not text raises Python's own error."""
    prompt = row[question]
    if question == "instruction" and row.get("input"):
        prompt = "\n\n".join([prompt, row["input"]])
    if isinstance(prompt, list):
        return prompt + row[answer]
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": row[answer]}]


def validate_conversation(messages: Any, row: Row, formats: Mapping[str, str]) -> list[Message]:
    """Return the messages of a row if they are a conversation with an answer to train on.

    Args:
        messages: what `find_messages`, or the recipe, found.
        row: the row of these messages, which must not have tools.
        formats: as in `find_messages`, for the message about missing columns.
    """
    if not isinstance(messages, list):
        needed = " | ".join(f"{question}, {answer}" for question, answer in formats.items())
        raise ValueError(
            f"has the columns {list_columns(row)}; needs messages | {needed}: "
            f"{advise_conversation_columns(row)}"
        )
    validate_messages(messages, row)
    return messages


def advise_conversation_columns(row: Row) -> str:
    """Return what to do about a row that has no conversation in its columns."""
    if "messages" in row:
        return "messages is a list of objects with role and content"
    for name in row:
        value = row[name]
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and "role" in first:
            return f"pass --columns messages={name}, or edit PROMPT_AND_ANSWER"
        if isinstance(first, dict) and is_sharegpt(first):
            return f"{name} {SHAREGPT}"
    wanted = {"prompt": "prompt", "completion": "completion"}
    return advise_columns(row, wanted, "PROMPT_AND_ANSWER")


def validate_messages(messages: Sequence[Any], row: Row) -> None:
    """Check each message by itself, and that one of them is an answer."""
    refuse_tools(row)
    for number, message in enumerate(messages, 1):
        validate_message(message, number)
    said_by = [message["role"] for message in messages if message["content"].strip()]
    if messages and messages[0]["role"] == "assistant":
        has_answer = False
    else:
        has_answer = "user" in said_by and "assistant" in said_by[said_by.index("user") :]
    if not has_answer:
        roles = ", ".join(said_by)[:MAX_SHOWN]
        raise ValueError(
            f"has no answer to train on after a user's text: its texts are by {roles or 'nobody'}"
        )
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError(
                f"message {number} (assistant) is empty: the model would learn to say nothing"
            )


def refuse_tools(row: Row) -> None:
    """Refuse a row with tools, which the recipes do not pass to the chat template."""
    for column in TOOL_COLUMNS:
        if not is_empty(row.get(column)):
            raise ValueError(
                f"has {column}, which this recipe does not pass to the chat template yet: "
                "remove the column if the answers do not need it, or leave out the row"
            )


# ---- Messages ----
def validate_message(message: Any, number: int) -> None:
    """Check a message by itself.

    Args:
        number: its place in the conversation, from 1.
    """
    if not isinstance(message, dict):
        raise ValueError(
            f"message {number} is not an object with role and content: {shorten(message)}"
        )
    role = message.get("role")
    if not isinstance(role, str) and is_sharegpt(message):
        raise ValueError(f"message {number} {SHAREGPT}")
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no role: {shorten(message)}")
    place = name_message(message, number)
    refuse_tool_calls(message, place)
    if not isinstance(message.get("content"), str):
        found = "it has no content"
        if "content" in message:
            found = f"its content is {shorten(message['content'])}"
        raise ValueError(f"{place} has no text: {found}; content has to be one text")
    refuse_other_training(message, place)


def is_sharegpt(message: Mapping[str, Any]) -> bool:
    """Return whether a message has the keys of ShareGPT instead of role and content."""
    return {"from", "value"} <= set(message)


def name_message(message: Message, number: int) -> str:
    """Return the name of a message in a problem: "message 2 (assistant)"."""
    return f"message {number} ({message['role'][:40]})"


def refuse_tool_calls(message: Message, place: str) -> None:
    """Refuse a message that calls a tool or is the result of one."""
    calls = [key for key in TOOL_KEYS if not is_empty(message.get(key))]
    if calls or message["role"] in TOOL_ROLES:
        found = ", ".join(calls) or "the role of a tool"
        raise ValueError(f"{place} has {found}, and tool calls are not supported yet")


def refuse_other_training(message: Message, place: str) -> None:
    """Refuse a message that says it is trained on or not, if the recipe does the opposite."""
    role = message["role"]
    is_trained_on = role == "assistant"
    actual = "is trained on" if is_trained_on else "is not trained on"
    for key in TRAINED_KEYS:
        requested = message.get(key)
        if requested is not None and requested != is_trained_on:  # 1 is True, 0 is False
            raise ValueError(
                f"{place} has {key} {shorten(requested)}, but what the {role[:40]} says {actual}: "
                "the recipe cannot change that for one message yet"
            )


# ---- Further keys of messages ----
def validate_message_keys(row: Row, messages: Sequence[Message], tokenizer: Any) -> None:
    """Check that the chat template drops no key that carries part of what was said.

    Dropped keys that only describe a message, such as an id, are noted in a TrackedRow, from which
    the start summary names them.
    """
    dropped = find_dropped_keys(messages, tokenizer)
    lost = [key for key in dropped if key in SAID_KEYS]
    if lost:
        raise ValueError(
            f"{first_with(lost[0], messages)} has {', '.join(lost)}, which the chat template "
            "drops: remove it from the data, or use a tokenizer whose template writes it"
        )
    if isinstance(row, TrackedRow):
        row.dropped_keys.update(dropped)


def find_dropped_keys(messages: Sequence[Message], tokenizer: Any) -> list[str]:
    """Return the keys that make no difference to the text that the chat template writes."""
    others: dict[str, None] = {}  # used as an ordered set
    for message in messages:
        for key, value in message.items():
            if key not in KNOWN_KEYS and not is_empty(value):
                others[key] = None
    if not others:
        return []
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    if text_without(others, messages, tokenizer) == text:
        return list(others)
    return [key for key in others if text_without([key], messages, tokenizer) == text]


def first_with(key: str, messages: Sequence[Message]) -> str:
    """Return the name of the first message that has a key."""
    for number, message in enumerate(messages, 1):
        if not is_empty(message.get(key)):
            return name_message(message, number)
    raise KeyError(key)


def text_without(keys: Collection[str], messages: Sequence[Message], tokenizer: Any) -> str | None:
    """Return the chat template's text for messages without these keys, or None if it fails."""
    fewer = []
    for message in messages:
        fewer.append({key: value for key, value in message.items() if key not in keys})
    try:
        return tokenizer.apply_chat_template(fewer, tokenize=False)
    except Exception:  # a template may raise anything; if it fails without a key, it uses it
        return None


# ---- Pairs of answers ----
def validate_pair(row: Row) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a row if they can be compared.

    Both answers are texts, or both are lists of messages. Either the prompt is of the same kind, or
    both answers begin with it. In that case the returned prompt is None, or a text to be ignored.
    """
    prompt = row.get("prompt")
    chosen = row.get("chosen")
    rejected = row.get("rejected")
    if not are_comparable(prompt, chosen, rejected):
        raise ValueError(
            f"has the columns {list_columns(row)}; needs chosen and rejected, both texts or both "
            "lists of messages, and prompt, of the same kind, unless they begin with it: "
            f"{advise_pair_columns(row)}"
        )
    refuse_tools(row)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(answer, list):
            before = prompt if isinstance(prompt, list) else []
            validate_messages(before + answer, row)
        if not last_text(answer).strip():
            raise ValueError(f"has no text in {name}")
    return prompt, chosen, rejected


def advise_pair_columns(row: Row) -> str:
    """Return what to do about a row whose columns are no prompt with two answers."""
    wanted = {"chosen": "chosen", "rejected": "rejected"}
    if set(wanted) <= set(row):
        return "edit row_to_pair"
    advice = advise_columns(row, {**wanted, "prompt": "prompt"}, "row_to_pair")
    if "--columns" in advice:
        return advice
    return advise_columns(row, wanted, "row_to_pair")


def last_text(answer: Any) -> str:
    """Return the text of an answer, or of its last message; "" if it has no messages."""
    if isinstance(answer, str):
        return answer
    return answer[-1]["content"] if answer else ""


def are_comparable(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Return whether both answers are texts or both are lists, and fit the kind of the prompt."""
    if isinstance(chosen, str):
        return isinstance(rejected, str) and not isinstance(prompt, list)
    return isinstance(chosen, list) and isinstance(rejected, list)
