# SPDX-License-Identifier: Apache-2.0
"""A chat template in Ollama's language, where it only writes something around each message.

Ollama does not run Jinja. Its templates are Go's (https://docs.ollama.com/template), in which a
conversation is a loop over `.Messages`. What a chat template writes around messages is found by
rendering conversations, and the result is compared with it on others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import Exit, stop
from core.chat import ChatTemplate, Conversation
from generation.comparing import Trained, adds_bos
from generation.rows import is_plain

Messages = Sequence[Mapping[str, Any]]
SYSTEM = {"role": "system", "content": "qZsysQ"}
USER = {"role": "user", "content": "qZuserQ"}
ANSWER = {"role": "assistant", "content": "qZanswerQ"}
AGAIN = {"role": "user", "content": "qZagainQ"}
# What could be escaped, cut or taken for a template's own language
STRANGE = ('He said "no" {{ .Role }} {% if %} \\n', "多行\nétage\n\n🦙", "<b>&amp;</b>")


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around the messages of a conversation.

    Attributes:
        lead: before the first message.
        no_system: after that, if there is no system message: a default one, for example.
        before, after: {role: text before and after the content of a message}.
        generation: where an answer is to begin.
    """

    lead: str
    no_system: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    generation: str

    def render(self, messages: Messages) -> str:
        """Return the text in which an answer to messages is to be generated, as Ollama does."""
        text = self.lead
        if messages[0]["role"] != "system":
            text += self.no_system
        for message in messages:
            role = message["role"]
            text += self.before[role] + message["content"] + self.after[role]
        return text + self.generation

    def to_go(self) -> str:
        """Return the template for Ollama. Each text is a string of Go, so that none is trimmed."""
        lines = [go_text(self.lead)]
        if self.no_system:
            lines += ["{{- if not .System }}", go_text(self.no_system), "{{- end }}"]
        lines.append("{{- range $i, $message := .Messages }}")
        branch = "{{- if"
        for role, text in self.before.items():
            lines.append(f'{branch} eq $message.Role "{role}" }}}}')
            lines += [go_text(text), "{{- $message.Content }}", go_text(self.after[role])]
            branch = "{{- else if"
        lines += ["{{- end }}", "{{- end }}", go_text(self.generation)]
        return "\n".join(line for line in lines if line)


def go_text(text: str) -> str:
    """Return an action of a Go template that writes a text; nothing for an empty one."""
    return "{{- " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def find_turns(trained: Trained) -> Turns:
    """Return the chat template of a trained folder as turns, without a token that Ollama adds.

    Raises SystemExit with 65 if there is none, or if turns cannot write what it writes.
    """
    tokenizer = trained.tokenizer
    template = ChatTemplate(tokenizer, trained.source.settings)
    start = tokenizer.bos_token if adds_bos(tokenizer) else ""

    def render(messages: Messages, adds_generation_prompt: bool = True) -> str:
        conversation = Conversation([dict(message) for message in messages])
        return template.render(conversation, adds_generation_prompt).removeprefix(start)

    try:
        turns = probe(render)
        asked = [one.messages for one in trained.conversations if is_plain(one)]
        for text in STRANGE:
            strange = {"role": "user", "content": text}
            asked.append([strange, ANSWER, USER, {"role": "assistant", "content": text}, AGAIN])
            if "system" in turns.before:
                asked.append([SYSTEM, strange, ANSWER, USER])
        for messages in asked:
            if turns.render(messages) != render(messages):
                raise ValueError(f"it changes {messages}")
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        stop(
            Exit.DATA,
            f"{trained.source.name}: Ollama's templates cannot write its chat template: {reason}; "
            "export it --to gguf, and serve that with llama-server, which runs the template itself",
        )
    return turns


def probe(render: Callable[..., str]) -> Turns:
    """Return what a function that renders messages writes around them. Raises ValueError."""
    start, ask = split(render([USER]), USER)
    _, between, back, _ = split(render([USER, ANSWER, AGAIN]), USER, ANSWER, AGAIN)
    _, after_user = split(render([USER], False), USER)
    _, after_answer = split(render([USER, ANSWER], False), ANSWER)
    before_user = without(back, start=after_answer)
    before = {"user": before_user, "assistant": without(between, start=after_user)}
    after = {"user": after_user, "assistant": after_answer}
    lead = without(start, end=before_user)
    generation = without(ask, start=after_user)
    try:
        text = render([SYSTEM, USER])
    except ValueError:  # It takes no system messages
        return Turns(lead, "", before, after, generation)
    with_system, middle, _ = split(text, SYSTEM, USER)
    no_system = ""
    if not with_system.startswith(lead):  # What stands before the first user is a default message
        no_system, lead = lead, ""
    before = {"system": without(with_system, start=lead), **before}
    after = {"system": without(middle, end=before_user), **after}
    return Turns(lead, no_system, before, after, generation)


def split(text: str, *messages: Mapping[str, str]) -> list[str]:
    """Return the parts of a text around messages. Raises ValueError unless each is there once."""
    parts = []
    for message in messages:
        if text.count(message["content"]) != 1:
            raise ValueError(f"it does not write each message once: {text!r}")
        part, text = text.split(message["content"])
        parts.append(part)
    return [*parts, text]


def without(text: str, start: str = "", end: str = "") -> str:
    """Return a text without its start and its end. Raises ValueError if it has others."""
    if not text.startswith(start) or not text.endswith(end):
        raise ValueError(f"it writes {text!r} where {start!r} was expected first, {end!r} last")
    return text.removeprefix(start).removesuffix(end)


def modelfile(gguf_name: str, turns: Turns, stops: Sequence[str], num_ctx: int) -> str:
    """Return a Modelfile (https://docs.ollama.com/modelfile).

    Args:
        stops: texts that end an answer.
        num_ctx: the most tokens of a prompt and its answer. Ollama's default is smaller than most
            models', and it cuts longer prompts without an error.
    """
    lines = [f"FROM ./{gguf_name}", f'TEMPLATE """{turns.to_go()}"""']
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in stops]
    return "\n".join([*lines, f"PARAMETER num_ctx {num_ctx}\n"])
