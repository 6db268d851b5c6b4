# SPDX-License-Identifier: Apache-2.0
"""What was said by the user and by each of the models, and as a row that the recipe reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from core.chat import Conversation, Message
from generation.answering import Reply
from tasks.illustrated import IMAGE, in_parts
from tasks.images import load_picture
from vlm import row_to_conversation


@dataclass
class Turn:
    """What the user said, and what models answered.

    Attributes:
        replies: {number of the model, from 0: its answer}.
        images: absolute paths of the images before the prompt.
    """

    prompt: str
    replies: dict[int, Reply] = field(default_factory=dict)
    images: Sequence[str] = ()


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

    def asking(self, prompt: str, images: Sequence[str] = ()) -> Conversation:
        """Return the conversation that ends with a new prompt behind these images."""
        asked = {"role": "user", "content": IMAGE * len(images) + prompt}
        paths = [*self.images(), *images]
        loads = [partial(load_picture, path, Path(), False) for path in paths]
        return Conversation([*self.messages(), asked], images=loads)

    def images(self) -> list[str]:
        """Return the paths of the images of all prompts."""
        return [path for turn in self.turns for path in turn.images]

    def messages(self) -> list[Message]:
        """Return what was said, with the answers of the chosen model, or the first that answered.

        An answer that was stopped or cut off has weight 0, so that no model learns to end there.
        """
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            content = IMAGE * len(turn.images) + turn.prompt
            messages.append({"role": "user", "content": content})
            reply = turn.replies.get(self.chosen, next(iter(turn.replies.values())))
            message: Message = {"role": "assistant", "content": reply.text}
            if reply.mark or not reply.text:
                message["weight"] = 0
            messages.append(message)
        return messages

    def save(self, path: Path) -> str:
        """Append the conversation to a file as one row, and return that as a message.

        Raises ValueError if the conversation cannot be trained on, OSError if it cannot be written.
        """
        row: dict[str, Any] = {"messages": self.messages()}
        if images := self.images():
            row = {"images": images, "messages": [in_parts(each) for each in row["messages"]]}
        try:
            row_to_conversation(row)
        except ValueError as error:
            advice = "only complete answers are trained on"
            raise ValueError(f"not saved: the conversation {error}; {advice}") from None
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            if file.read()[-1:] not in ("", "\n"):
                file.write("\n")  # A last line without its end would run into the new row
            file.write(json.dumps(row) + "\n")
        return f"Saved to {path}."
