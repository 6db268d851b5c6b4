# SPDX-License-Identifier: Apache-2.0
"""Conversations of rows: where they are, and what makes them ones that can be trained on.

Every problem is raised as a ValueError whose text continues "train.jsonl, line 7: ".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.columns import (
    MAX_SHOWN,
    Row,
    advise_columns,
    guess_columns,
    is_empty,
    list_columns,
    rename_columns,
    shorten,
)
from components.messages import (
    SHAREGPT_ROLES,
    TRAINED_KEYS,
    Message,
    is_by_assistant,
    is_sharegpt,
    name_message,
    normalize_message,
    normalize_tools,
    pop_weight,
    reasoning_of,
)

Tool = dict[str, Any]  # {"type": "function", "function": a JSON schema}

MESSAGE_COLUMNS = ("messages", "conversations")  # the second is ShareGPT's
# Chat templates may know others too
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
BESIDE_MESSAGES = ("system", "tools")  # roles that go with every format
TOOL_COLUMNS = ("tools", "functions")  # columns with the tools that the assistant may call


@dataclass(frozen=True)
class Conversation:
    """A conversation as chat templates take it.

    Attributes:
        messages: as components/messages.py normalizes them.
        tools: the tools that the assistant may call.
        is_trained_on: of each message, whether it is trained on; only what the assistant says is.
    """

    messages: list[Message]
    tools: list[Tool]
    is_trained_on: list[bool]

    def up_to(self, index: int) -> "Conversation":
        """Return the messages before this index, from 0."""
        return replace(
            self, messages=self.messages[:index], is_trained_on=self.is_trained_on[:index]
        )

    def with_last_answer_only(self) -> "Conversation":
        """Return the conversation with only the last answer to be trained on, if it is one."""
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        is_last = [index == answers[-1] for index in range(len(self.messages))]
        if not self.is_trained_on[answers[-1]]:
            raise ValueError("has weight 0 on its last answer, the only one that --learn last uses")
        return replace(self, is_trained_on=is_last)


# ---- Rows ----
def find_messages(
    row: Row, formats: Mapping[str, str], columns: Mapping[str, str] | None = None
) -> Any:
    """Return a row as a list of messages, not yet validated; None if it has none of the columns.

    The messages are in one of MESSAGE_COLUMNS, or in a column with a question and one with its
    answer, which may be texts or lists of messages. An `input` is appended to an `instruction`. A
    text in a column `system` becomes the first message, unless they begin with one.

    Args:
        formats: {column with a question: column with its answer}.
        columns: {role: column}, as --columns gives them. Then only the columns of that format are
            looked at, even if the row has those of another one too.
    """
    row = rename_columns(row, columns or {})
    named = named_formats(columns)
    if named:
        formats = {key: value for key, value in formats.items() if {key, value} & named}
    messages = None
    for name in columns_of_messages(columns):
        if not messages:
            messages = row.get(name, messages)
    if not messages:
        for question, answer in formats.items():
            if question in row and answer in row:
                messages = messages_of_pair(row, question, answer)
                break
    return with_system_text(messages, row)


def named_formats(columns: Mapping[str, str] | None) -> set[str]:
    """Return the roles in --columns that say in which format the rows are."""
    return set(columns or ()) - set(BESIDE_MESSAGES)


def columns_of_messages(columns: Mapping[str, str] | None) -> Sequence[str]:
    """Return the columns, under the names of their roles, in which messages are looked for."""
    named = named_formats(columns)
    if not named:
        return MESSAGE_COLUMNS
    return ["messages"] if "messages" in named else []


def messages_of_pair(row: Row, question: str, answer: str) -> list[Any]:
    """Return the messages in two columns; of those in the question, none is trained on."""
    prompt = row[question]
    if question == "instruction" and not is_empty(row.get("input")):
        for column, text in (("instruction", prompt), ("input", row["input"])):
            if not isinstance(text, str):
                raise ValueError(f"its {column} must be a text, but is {shorten(text)}")
        prompt = "\n\n".join([prompt, row["input"]])
    asked = []
    for message in as_messages(prompt, "user"):
        asked.append({**message, "weight": 0} if is_by_assistant(message) else message)
    return asked + as_messages(row[answer], "assistant")


def as_messages(value: Any, role: str) -> list[Any]:
    """Return a list of messages as it is, and anything else as the text of one message."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def with_system_text(messages: Any, row: Row) -> Any:
    """Return messages that begin with the text in a row's column `system`, if it has one."""
    if not isinstance(messages, list) or is_empty(row.get("system")):
        return messages
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and "system" in (first.get("role"), first.get("from")):
        return messages
    return [{"role": "system", "content": row["system"]}, *messages]


def find_tools(row: Row, columns: Mapping[str, str] | None = None) -> list[Tool]:
    """Return the tools in a row, normalized.

    Args:
        columns: as in `find_messages`.
    """
    row = rename_columns(row, columns or {})
    for column in TOOL_COLUMNS:
        if not is_empty(row.get(column)):
            return normalize_tools(row[column])
    return []


def trains_on_answers_only(
    row: Row,
    columns: Mapping[str, str] | None,
    completion_only_loss: bool,
    assistant_only_loss: bool,
) -> bool:
    """Return the flag that applies to a row: one is for prompts and answers, one for messages.

    Raises a ValueError if the row says that a message is not trained on, and the flag that it is.

    Args:
        columns: as in `find_messages`.
    """
    row = rename_columns(row, columns or {})
    of_messages = [name for name in columns_of_messages(columns) if row.get(name)]
    if of_messages:
        if not assistant_only_loss:
            check_no_weight_0(row, of_messages, "--no_assistant_only_loss")
        return assistant_only_loss
    if not completion_only_loss:
        check_no_weight_0(row, list(row), "--no_completion_only_loss")
    return completion_only_loss


def check_no_weight_0(row: Row, columns: Sequence[str], flag: str) -> None:
    """Check that no message in these columns of a row is to be left out of the loss.

    Args:
        flag: with which everything is trained on.
    """
    for column in columns:
        messages = row[column]
        if not isinstance(messages, list):
            continue
        for number, message in enumerate(messages, 1):
            for key in TRAINED_KEYS:
                if isinstance(message, Mapping) and message.get(key) == 0:
                    raise ValueError(
                        f"has {key} {message[key]} in message {number} of {column}, which {flag} "
                        f"would train on: leave out {flag}, or remove the {key}"
                    )


# ---- Conversations ----
def read_conversation(
    row: Row, formats: Mapping[str, str], columns: Mapping[str, str] | None = None
) -> Conversation:
    """Return the conversation in a row if it has an answer to train on.

    Args:
        formats, columns: as in `find_messages`.
    """
    messages = find_messages(row, formats, columns)
    if not isinstance(messages, list):
        needed = " | ".join(f"{question}, {answer}" for question, answer in formats.items())
        raise ValueError(
            f"has the columns {list_columns(row)}; needs messages | {needed}: "
            f"{advise_conversation_columns(row)}"
        )
    return make_conversation(messages, find_tools(row, columns))


def advise_conversation_columns(row: Row) -> str:
    """Return what to do about a row that has no conversation in its columns."""
    for name in MESSAGE_COLUMNS:
        if name in row:
            return f"{name} is a list of objects with role and content"
    for name in row:
        value = row[name]
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and ("role" in first or is_sharegpt(first)):
            return f"pass --columns messages={name}, or edit PROMPT_AND_ANSWER"
    wanted = {"prompt": "prompt", "completion": "completion"}
    return advise_columns(row, wanted, "PROMPT_AND_ANSWER")


def make_conversation(messages: Sequence[Any], tools: list[Tool]) -> Conversation:
    """Return messages as a conversation: each normalized, and one of them an answer to train on.

    Args:
        messages: as they are in the row.
        tools: normalized.
    """
    normalized = []
    is_trained_on = []
    for number, raw in enumerate(messages, 1):
        message = normalize_message(raw, number)
        is_trained_on.append(pop_weight(message, name_message(message, number)))
        normalized.append(message)
    check_roles(normalized)
    for number, message in enumerate(normalized, 1):
        if is_trained_on[number - 1] and not says_something(message):
            raise ValueError(
                f"message {number} (assistant) is empty: the model would learn to say nothing"
            )
    if not any(is_trained_on):
        raise ValueError("has no answer to train on: all of the assistant's messages have weight 0")
    return Conversation(normalized, tools, is_trained_on)


def check_roles(messages: Sequence[Message]) -> None:
    """Check that the assistant says something after a user does."""
    said_by = [message["role"] for message in messages if says_something(message)]
    has_answer = "user" in said_by and "assistant" in said_by[said_by.index("user") :]
    if not has_answer or messages[0]["role"] == "assistant":
        raise ValueError(
            f"has no answer to train on after a user's text: {describe_speakers(messages, said_by)}"
        )


def describe_speakers(messages: Sequence[Message], said_by: Sequence[str]) -> str:
    """Return who says something in messages that have no answer, and what may be meant instead.

    Args:
        said_by: the roles of the messages that say something.
    """
    text = f"its texts are by {', '.join(said_by)[:MAX_SHOWN] or 'nobody'}"
    roles = list(dict.fromkeys(message["role"] for message in messages))
    for role, column in (("user", "prompt"), ("assistant", "completion")):
        if role in roles and role not in said_by:
            text += f", and that of the {role} (the {column}) is empty"
    unknown = [role for role in roles if role not in KNOWN_ROLES]
    if unknown:
        shown = ", ".join(unknown)[:MAX_SHOWN]
        text += f"; unknown role: {shown}; known are {', '.join(KNOWN_ROLES)}"
    renames = [f"{role} to {SHAREGPT_ROLES[role]}" for role in unknown if role in SHAREGPT_ROLES]
    if renames:
        text += f"; rename {', '.join(renames)}"
    return text


def says_something(message: Message) -> bool:
    """Return whether a message has a text, reasoning, or a call of a tool."""
    has_text = bool(message["content"].strip())
    return has_text or "tool_calls" in message or reasoning_of(message) is not None


# ---- Pairs of answers ----
def read_pair(row: Row) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a row if they can be compared.

    Both answers are texts, or both are lists of messages, which are normalized. Either the prompt
    is of the same kind, or both answers begin with it. In that case the returned prompt is None, or
    a text to be ignored.
    """
    prompt = row.get("prompt")
    chosen: Any = row.get("chosen")
    rejected: Any = row.get("rejected")
    if not are_comparable(prompt, chosen, rejected):
        raise ValueError(
            f"has the columns {list_columns(row)}; needs chosen and rejected, both texts or both "
            "lists of messages, and prompt, of the same kind, unless they begin with it: "
            f"{advise_pair_columns(row)}"
        )
    if isinstance(chosen, str):
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if not answer.strip():
                raise ValueError(f"has no text in {name}")
        return prompt, chosen, rejected
    asked = []
    if isinstance(prompt, list):
        asked = normalize_turns(prompt, first=1)
        prompt = asked
    return prompt, read_answer(asked, chosen, "chosen"), read_answer(asked, rejected, "rejected")


def read_answer(asked: list[Message], answer: Sequence[Any], name: str) -> list[Message]:
    """Return the normalized messages of an answer that is a conversation with those before it.

    Args:
        asked: the messages of the prompt, normalized.
        name: of its column.
    """
    messages = normalize_turns(answer, first=len(asked) + 1)
    if not messages or not says_something(messages[-1]):
        raise ValueError(f"has no text in {name}")
    check_roles(asked + messages)
    return messages


def normalize_turns(messages: Sequence[Any], first: int) -> list[Message]:
    """Return messages of a pair, normalized; none of the assistant's can be left out of the loss.

    Args:
        first: the number of the first of them in the conversation.
    """
    normalized = []
    for number, raw in enumerate(messages, first):
        message = normalize_message(raw, number)
        label = name_message(message, number)
        by_assistant = message["role"] == "assistant"
        if pop_weight(message, label) != by_assistant:
            raise ValueError(
                f"{label} has weight 0, but answers are compared as a whole: remove it"
            )
        if by_assistant and not says_something(message):
            raise ValueError(f"{label} is empty: the model would learn to say nothing")
        normalized.append(message)
    return normalized


def advise_pair_columns(row: Row) -> str:
    """Return what to do about a row whose columns are no prompt with two answers."""
    wanted = {"chosen": "chosen", "rejected": "rejected"}
    if set(wanted) <= set(row):
        return "edit row_to_pair"
    with_prompt = {**wanted, "prompt": "prompt"}
    if guess_columns(row, with_prompt):
        wanted = with_prompt
    return advise_columns(row, wanted, "row_to_pair")


def are_comparable(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Return whether both answers are texts or both are lists, and fit the kind of the prompt."""
    if isinstance(chosen, str):
        return isinstance(rejected, str) and not isinstance(prompt, list)
    return isinstance(chosen, list) and isinstance(rejected, list)
