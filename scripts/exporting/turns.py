# SPDX-License-Identifier: Apache-2.0
"""A chat template as what stands around each turn, which Ollama's template language can write.

Ollama does not run Jinja. Its templates are Go's (https://docs.ollama.com/template), in which a
conversation is a loop over `.Messages`. A chat template that only writes something before and
after each message can be rewritten; what it writes is found by rendering conversations.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

Message = Mapping[str, str]
# Renders messages, and the beginning of an answer if the second argument is True
Renderer = Callable[[Sequence[Message], bool], str]
ROLES = ("system", "user", "assistant")
# What the texts after an action of a Go template belong to
PLACES = {
    "if not .System": "no_system",
    "range $i, $message := .Messages": "before",
    "$message.Content": "after",
}
# Texts of probes, which no chat template has
MARKS = ("qZsysQ", "qZuserQ", "qZanswerQ", "qZagainQ")


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around the messages of a conversation.

    Attributes:
        lead: before the first message.
        no_system: after that, if there is no system message: a default one, for example.
        before, after: {role: text before and after the content of a message}.
        generation: where an answer is to begin.
        joins_system: whether a system message stands inside the first user's turn, which then
            has no text before its content.
    """

    lead: str
    no_system: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    generation: str
    joins_system: bool = False

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text in which an answer to messages is to be generated, as Ollama does."""
        text = self.lead
        if messages[0]["role"] != "system":
            text += self.no_system
        previous = None
        for message in messages:
            role = message["role"]
            if not (self.joins_system and role == "user" and previous == "system"):
                text += self.before[role]
            text += message["content"] + self.after[role]
            previous = role
        return text + self.generation

    def without_start(self, start: str) -> "Turns":
        """Return turns that leave out the start of a text, which another program writes."""
        if self.lead.startswith(start):
            return replace(self, lead=self.lead.removeprefix(start))
        before = dict(self.before)
        if "system" in before:
            before["system"] = before["system"].removeprefix(start)
        return replace(self, no_system=self.no_system.removeprefix(start), before=before)

    def to_go(self) -> str:
        """Return the template for Ollama. Each text is a string of Go, so that none is trimmed."""
        lines = [go_text(self.lead)]
        if self.no_system:
            lines += ["{{- if not .System }}", go_text(self.no_system), "{{- end }}"]
        lines.append("{{- range $i, $message := .Messages }}")
        branch = "{{- if"
        for role in ROLES:
            if role not in self.before:
                continue
            lines.append(f'{branch} eq $message.Role "{role}" }}}}')
            if role == "user" and self.joins_system:
                lines.append("{{- if not (and $.System (eq $i 1)) }}")
                lines += [go_text(self.before[role]), "{{- end }}"]
            else:
                lines.append(go_text(self.before[role]))
            lines.append("{{- $message.Content }}")
            lines.append(go_text(self.after[role]))
            branch = "{{- else if"
        lines += ["{{- end }}", "{{- end }}", go_text(self.generation)]
        return "\n".join(line for line in lines if line)


def go_text(text: str) -> str:
    """Return an action of a Go template that writes a text; nothing for an empty one."""
    if not text:
        return ""
    return "{{- " + json.dumps(text, ensure_ascii=False) + " }}"


def read_go(template: str) -> Turns:
    """Return the turns of a template that `to_go` wrote. Raises ValueError for any other one."""
    texts = {"lead": "", "no_system": "", "generation": ""}
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    place = "lead"
    role = ""
    for action in re.findall(r"\{\{- (.*?) \}\}(?=\n|$)", template, flags=re.DOTALL):
        condition = re.fullmatch(r'(?:else )?if eq \$message\.Role "(\w+)"', action)
        if condition:
            role = condition[1]
            before[role] = after[role] = ""
            place = "before"
        elif action.startswith('"') and place in texts:
            texts[place] = json.loads(action)
        elif action.startswith('"'):
            (before if place == "before" else after)[role] = json.loads(action)
        else:
            place = PLACES.get(action, place)
            if action == "end" and role and place != "before":
                place = "generation"
    joins_system = "(eq $i 1)" in template
    turns = Turns(**texts, before=before, after=after, joins_system=joins_system)
    if turns.to_go() != template.strip("\n"):
        raise ValueError("not of the form that is written here")
    return turns


# ---- By probes ----
def find_turns(render: Renderer) -> Turns:
    """Return what a chat template writes around messages.

    Raises ValueError if it does not write the same around each message of a role.
    """
    system, user, answer, again = MARKS
    asked = [{"role": "user", "content": user}]
    longer = [
        *asked,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": again},
    ]
    start, end = split(render(asked, True), user)
    _, between_user, between_answer, _ = split(render(longer, True), user, answer, again)
    # Where two texts meet, any cut will do that holds for all conversations. That at the end of a
    # conversation is the author's own.
    _, after_user = split(render(asked, False), user)
    if not (end.startswith(after_user) and between_user.startswith(after_user)):
        after_user = commonprefix([end, between_user])
    _, after_answer = split(render(longer[:2], False), answer)
    before_user = between_answer.removeprefix(after_answer)
    if not (between_answer.startswith(after_answer) and start.endswith(before_user)):
        before_user = common_end(start, between_answer)
    turns = Turns(
        lead=without_end(start, before_user),
        no_system="",
        before={"user": before_user, "assistant": without_start(between_user, after_user)},
        after={"user": after_user, "assistant": without_end(between_answer, before_user)},
        generation=without_start(end, after_user),
    )
    return with_system(turns, render, [{"role": "system", "content": system}, *asked])


def with_system(turns: Turns, render: Renderer, messages: Sequence[Message]) -> Turns:
    """Return the turns with those of system messages, if the template takes any."""
    try:
        start, between, _ = split(render(messages, True), MARKS[0], MARKS[1])
    except ValueError:
        return turns
    lead = turns.lead
    no_system = ""
    if not start.startswith(lead):  # What stands before the first user is a default message
        no_system = lead
        lead = ""
    before_user = turns.before["user"]
    joins_system = not between.endswith(before_user)
    after_system = between if joins_system else without_end(between, before_user)
    return Turns(
        lead,
        no_system,
        {**turns.before, "system": without_start(start, lead)},
        {**turns.after, "system": after_system},
        turns.generation,
        joins_system,
    )


def common_end(one: str, another: str) -> str:
    """Return the longest end that two texts have in common."""
    return commonprefix([one[::-1], another[::-1]])[::-1]


def split(text: str, *marks: str) -> list[str]:
    """Return the parts of a text between marks. Raises ValueError unless each is there once."""
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            raise ValueError(f"it does not write each message once: {text!r}")
        part, text = text.split(mark)
        parts.append(part)
    return [*parts, text]


def without_start(text: str, start: str) -> str:
    """Return a text without its start. Raises ValueError if it has another one."""
    if not text.startswith(start):
        raise ValueError(f"it writes {text!r} where {start!r} was expected first")
    return text[len(start) :]


def without_end(text: str, end: str) -> str:
    """Return a text without its end. Raises ValueError if it has another one."""
    if not text.endswith(end):
        raise ValueError(f"it writes {text!r} where {end!r} was expected last")
    return text[: len(text) - len(end)]


# ---- Proof ----
def plain_conversations(has_system: bool) -> Iterator[list[Message]]:
    """Yield conversations that every template has to write as the chat template does.

    Args:
        has_system: whether the template takes system messages.
    """
    texts = (
        "Name a river.",
        'He said "no" {{ .Role }} {% if %} \\n',
        "多行\nétage\n\n🦙",
        "<b>&amp;</b>",
    )
    for text in texts:
        yield [{"role": "user", "content": text}]
    longer: list[Message] = [
        {"role": "user", "content": texts[0]},
        {"role": "assistant", "content": "The Elbe."},
        {"role": "user", "content": texts[1]},
    ]
    yield longer
    yield [*longer, {"role": "assistant", "content": texts[2]}, {"role": "user", "content": "On."}]
    if has_system:
        for conversation in (longer[:1], longer):
            yield [{"role": "system", "content": "Be short."}, *conversation]


def find_difference(turns: Turns, render: Renderer) -> str | None:
    """Return how turns differ from a chat template in plain conversations, or None."""
    for messages in plain_conversations("system" in turns.before):
        theirs = turns.render(messages)
        ours = render(messages, True)
        if theirs != ours:
            return f"it writes {ours!r}, and turns can only write {theirs!r}"
    return None


def find_notes(turns: Turns, render: Renderer) -> Iterator[str]:
    """Yield what a chat template does with plain conversations that turns cannot."""
    padded = [{"role": "user", "content": "  A question. \n"}]
    if turns.render(padded) != render(padded, True):
        yield "the chat template strips white space around a message, which Ollama keeps"
    if "system" not in turns.before:
        yield "the chat template takes no system messages, and so does the Modelfile"
