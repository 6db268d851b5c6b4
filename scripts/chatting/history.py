# SPDX-License-Identifier: Apache-2.0
"""What was said in a conversation, by the user and by each of the models."""

from dataclasses import dataclass, field
from typing import Any

from core.chat import Conversation, Message
from generation.answering import Ending, Reply


@dataclass
class Turn:
    """What the user said, and what models answered.

    Attributes:
        replies: {number of the model, from 0: its answer}.
    """

    prompt: str
    replies: dict[int, Reply] = field(default_factory=dict)

    def reply_of(self, model: int) -> Reply | None:
        """Return the answer of a model, or the first one if it has not answered."""
        if model in self.replies:
            return self.replies[model]
        return next(iter(self.replies.values()), None)


@dataclass
class History:
    """A conversation with one or several models.

    All models are asked the same: each prompt follows the answers of the chosen model.

    Attributes:
        system: the system prompt; "" for none.
        chosen: the number, from 0, of the model whose answers the conversation continues with.
    """

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    chosen: int = 0

    def asking(self, prompt: str) -> Conversation:
        """Return the conversation that ends with a new prompt."""
        return Conversation([*self.messages(), {"role": "user", "content": prompt}])

    def messages(self) -> list[Message]:
        """Return what was said, with the answers of the chosen model."""
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.prompt})
            reply = turn.reply_of(self.chosen)
            if reply is not None:
                messages.append({"role": "assistant", "content": reply.text})
        return messages

    def row(self) -> dict[str, Any]:
        """Return the conversation as a row to train on.

        An answer that was stopped or cut off has weight 0, so that no model learns to end there.
        """
        messages = self.messages()
        answers = [message for message in messages if message["role"] == "assistant"]
        replies = [turn.reply_of(self.chosen) for turn in self.turns]
        given = [reply for reply in replies if reply is not None]
        for message, reply in zip(answers, given, strict=True):
            if reply.ending is not Ending.COMPLETE or not reply.text:
                message["weight"] = 0
        return {"messages": messages}

    def undo(self) -> Turn | None:
        """Take the last turn back and return it; None if there is none."""
        if not self.turns:
            return None
        return self.turns.pop()

    def reset(self) -> None:
        """Forget all turns. The system prompt and the chosen model remain."""
        self.turns.clear()
