"""What a conversation must be: messages with a role and a text, and an answer to train on.

Every problem is raised as a ValueError whose text continues "train.jsonl, line 7: ".
"""

from collections.abc import Mapping
from typing import Any

from components.columns import Row

Message = dict[str, Any]  # {"role": ..., "content": ...}, and possibly more keys


def find_messages(row: Row, formats: Mapping[str, str]) -> Any:
    """Return a row as a list of messages, not yet validated; None if it has none of the columns.

    The messages are the column `messages`, or a column with a question and one with its answer,
    which may be texts or lists of messages. An `input` follows an `instruction`.

    Args:
        formats: {column with a question: column with its answer}.
    """
    raise NotImplementedError


def validate_conversation(messages: Any, row: Row, formats: Mapping[str, str]) -> list[Message]:
    """Return the messages of a row if they are a conversation with an answer to train on.

    Args:
        messages: what `find_messages`, or the recipe, took for them.
        row: where they are from; it must not have tools.
        formats: as in `find_messages`, for the message about missing columns.
    """
    raise NotImplementedError


def validate_message_keys(row: Row, messages: list[Message], tokenizer: Any) -> None:
    """Check that the chat template drops no key that carries a part of what was said.

    Dropped keys that only describe a message, such as an id, are noted in the row, so that the
    start summary names them.
    """
    raise NotImplementedError


def validate_pair(row: Row) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a row if they can be compared.

    Both answers are texts or lists of messages. The prompt is of the same kind, or both answers
    begin with it, and what is returned as the prompt is then of another kind, mostly None.
    """
    raise NotImplementedError
