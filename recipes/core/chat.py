# SPDX-License-Identifier: Apache-2.0
"""Conversations: from the columns of a row to tokens, of which the assistant's are trained on.

Messages are those of transformers and OpenAI: `role` and `content`, and where they were said
`tool_calls` and `reasoning_content`. ShareGPT's form, columns with a question and its answer, older
names and JSON texts of calls and tools become them. What a template does with them is up to its
author, so what it wrote is compared with what was said, and a row of which something is missing is
refused. Every problem of a row is a ValueError whose text continues "train.jsonl, line 7: ".
"""

import contextlib
import copy
import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from core.data import (
    IGNORED,
    Row,
    hash_of_row,
    is_empty,
    list_columns,
    missing_columns,
    rename_columns,
)

Message = dict[str, Any]  # {"role": ..., "content": ...}, and possibly more keys
Span = tuple[int, int]  # start and end of a part of a text, in characters

SHAREGPT_ROLES = {  # {what ShareGPT and its kin call a speaker: role}
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
}
CHAT_COLUMNS = ("messages", "system", "tools", "input")  # beside those of questions and answers
WEIGHTS = ("weight", "train", "loss")  # keys that say whether a message is trained on
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that transformers knows
ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a call: OpenAI, Llama, Hermes, ...
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
DEFAULT_TEMPLATE = (  # for tokenizers without one of their own
    "{{ bos_token or '' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{{ '\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt }}"
)


@dataclass(frozen=True)
class Conversation:
    """A conversation as chat templates take it.

    Attributes:
        is_trained_on: of each message, whether it is trained on; only the assistant's are.
        is_pair: whether it is from a column with a question and one with its answer.
        images: those in its messages, in their order, which recipes for images have.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    is_trained_on: Sequence[bool] = ()
    is_pair: bool = False
    images: Sequence[Any] = ()

    def up_to(self, index: int) -> "Conversation":
        """Return the conversation before the message at an index."""
        return replace(
            self, messages=self.messages[:index], is_trained_on=self.is_trained_on[:index]
        )


ANSWER = "31415"  # digits, which no chat template rewrites
EXAMPLE = Conversation([{"role": "user", "content": "1"}, {"role": "assistant", "content": ANSWER}])


# ---- Rows ----
def read_conversation(
    row: Row, formats: Mapping[str, str], columns: Mapping[str, str] | None = None
) -> Conversation:
    """Return the conversation in a row if it has an answer to train on.

    The messages are in a column `messages`, or `conversations` as ShareGPT has it, or in a column
    with a question and one with its answer, which may be texts or lists of messages. The columns
    `system` and `tools` go with all of them.

    Args:
        formats: {column with a question: column with its answer}.
        columns: {role: column}, as --columns gives them. Then only the columns of that format are
            looked at, even if the row has those of another one too.
    """
    columns = columns or {}
    row = rename_columns(row, columns)
    named = columns.keys() - {"system", "tools"}
    tools = find_tools(row)
    system = row.get("system")
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), list) and row[name] and (not named or name in named):
            return make_conversation(row[name], tools, system)
    for question, answer in formats.items():
        is_looked_at = not named or question in named or answer in named
        if is_looked_at and question in row and answer in row:
            asked = row[question]
            if question == "instruction" and not is_empty(row.get("input")):
                asked = [{"role": "user", "content": [asked, "", row["input"]]}]
            asked = as_messages(asked, "user")
            given = asked + as_messages(row[answer], "assistant")
            conversation = make_conversation(given, tools, system, num_asked=len(asked))
            return replace(conversation, is_pair=True)
    needed = ["messages, a list of objects with role and content"]
    needed += [f"{question}, {answer}" for question, answer in formats.items()]
    raise ValueError(missing_columns(row, " | ".join(needed), "prompt", "completion"))


def find_tools(row: Row) -> list[dict[str, Any]]:
    """Return the tools in a row."""
    if is_empty(row.get("tools")):
        return []
    return read_functions(row["tools"], read_tool, "has tools")


def as_messages(value: Any, role: str) -> list[Any]:
    """Return a list of messages as it is, and anything else as one message."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def make_conversation(
    given: Sequence[Any], tools: list[dict[str, Any]], system: Any = None, num_asked: int = 0
) -> Conversation:
    """Return the messages of a row as a conversation if there is an answer to train on.

    Args:
        system: the text of a system message that comes first, unless they begin with one.
        num_asked: how many messages at the beginning are the question, and not trained on.
    """
    messages = []
    is_trained_on = []
    for index, said in enumerate(given):
        message, has_weight = read_message(said, index + 1)
        messages.append(message)
        is_trained_on.append(has_weight and index >= num_asked)
        if is_trained_on[index] and not says_something(message):
            raise ValueError(f"message {index + 1} is empty: the model would learn to say nothing")
    speakers = [message["role"] for message in messages if says_something(message)]
    asked = [place for place, role in enumerate(speakers) if role == "user"]
    is_answered = asked and "assistant" in speakers[asked[0] :]
    if messages[0]["role"] == "assistant" or not is_answered or not any(is_trained_on):
        raise ValueError(
            "has no answer to train on: one after a user's text, without a weight of 0; its texts "
            f"are by {list_columns(speakers)}"
        )
    if not is_empty(system) and messages[0]["role"] != "system":
        first, _ = read_message({"role": "system", "content": system}, 0)
        messages.insert(0, first)
        is_trained_on.insert(0, False)
    return Conversation(messages, tools, is_trained_on)


def says_something(message: Message) -> bool:
    """Return whether a message has a text, reasoning, or a call of a tool."""
    others = ("tool_calls", *REASONING)
    return bool(message["content"].strip()) or any(key in message for key in others)


# ---- Messages ----
def read_message(given: Any, number: int) -> tuple[Message, bool]:
    """Return a message with role, content as one text, calls as objects, and no empty keys.

    Args:
        number: its number in the conversation, from 1, for problems.

    Returns:
        The message, and whether it may be trained on: it is the assistant's and has no weight of 0.
    """
    if isinstance(given, Mapping) and "from" in given and "role" not in given:
        given = from_sharegpt(given)
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError(f"message {number} is no object with role and content: {given!s:.80}")
    # 0 and false are values; null, "" and [] are what readers of tables fill in
    message = {key: value for key, value in given.items() if not is_empty(value)}
    message["role"] = "tool" if given["role"] == "function" else given["role"]
    name = name_message(message, number)
    if "function_call" in message:  # OpenAI's older form
        message.setdefault("tool_calls", message.pop("function_call"))
    if "tool_calls" in message:
        owner = f"{name} has tool calls"
        message["tool_calls"] = read_functions(message["tool_calls"], read_call, owner)
    # The text "[]" or "null" is not empty here: it may be the whole answer
    content = given.get("content")
    message["content"] = ""
    if content is not None or not says_something(message):
        message["content"] = read_content(content, name)
    return message, pop_weight(message, name)


def from_sharegpt(given: Mapping[str, Any]) -> Message:
    """Return a message of ShareGPT with role and content, or with its call of a tool."""
    message = dict(given)
    speaker = str(message.pop("from"))
    if speaker not in SHAREGPT_ROLES:  # Templates may write any role, and not train on it
        known = ", ".join(SHAREGPT_ROLES)
        raise ValueError(f"has a message from {speaker:.40}, which is none of {known}")
    said = message.pop("value", None)
    key = "content"
    if speaker == "function_call":
        key = "tool_calls"
    return {**message, "role": SHAREGPT_ROLES[speaker], key: said}


def name_message(message: Message, number: int) -> str:
    """Return the name of a message in a problem: "message 2 (assistant)"."""
    return f"message {number} ({message['role'][:40]})"


def read_content(content: Any, name: str) -> str:
    """Return the content of a message as one text; its parts become lines."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part
        if isinstance(part, Mapping) and part.get("type") in (None, "text"):
            text = part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"{name} has no text or list of texts, but {content!s:.80}")
        texts.append(text)
    return "\n".join(texts)


def pop_weight(message: Message, name: str) -> bool:
    """Remove WEIGHTS from a message; return whether it may be trained on."""
    by_assistant = message["role"] == "assistant"
    weights = {key: message.pop(key) for key in WEIGHTS if key in message}
    for key, weight in weights.items():
        if weight not in (0, 1) or (weight and not by_assistant):
            raise ValueError(
                f"{name} has {key} {weight!s:.40}: it has to be 0, or 1 if the assistant says it"
            )
    return by_assistant and all(weights.values())


# ---- Tools ----
def read_functions(given: Any, read: Callable[[Any], Any], owner: str) -> list[dict[str, Any]]:
    """Return calls of tools, or tools, in transformers' form.

    Args:
        given: one or a list of them, or the JSON of either.
        read: the function that reads one.
        owner: what has them, for problems.
    """
    try:
        listed = parse(given)
        listed = [listed] if isinstance(listed, Mapping) else listed
        return [read(parse(one) if isinstance(one, str) else one) for one in listed]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{owner} that are not objects with a name and arguments or parameters: {given!s:.80}"
        ) from error


def read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as {"type", "function": {"name", "arguments": an object}}, with its id."""
    inner = call.get("function") or call
    keys = [key for key in inner if not is_empty(inner[key])]
    given = [parse(inner[key]) for key in keys if key in ARGUMENTS]
    arguments = next(iter(given), {})
    is_whole = {"name", "id", "type", "index", *ARGUMENTS}.issuperset(keys)
    if not is_whole or not isinstance(arguments, dict):
        raise TypeError("the arguments of a call have to be an object")
    read = {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
    if not is_empty(call.get("id")):
        read["id"] = call["id"]
    return read


def read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as {"type": "function", "function": a JSON schema}."""
    if not tool.get("function", tool)["name"]:
        raise KeyError("name")
    return dict(tool) if "function" in tool else {"type": "function", "function": tool}


def parse(value: Any) -> Any:
    """Return what a JSON text says, and another value without nulls, which readers fill in."""
    return json.loads(value) if isinstance(value, str) else without_nulls(value)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys, at any depth, whose value is null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


# ---- The text of a conversation ----
@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, and variables of it, such as {"enable_thinking": False}."""

    tokenizer: Any
    settings: Mapping[str, Any] = field(default_factory=dict)

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, up to where the assistant speaks next on request."""
        text, _ = self.render_marked(conversation, add_generation_prompt)
        return text

    def render_marked(
        self, conversation: Conversation, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the same, and the parts that {% generation %} marks; None if it marks nothing."""
        tools: Any = conversation.tools or None
        # Some tokenizers have a template of its own for conversations with tools
        source = self.tokenizer.get_chat_template(tools=tools)
        has_marks = GENERATION_MARK.search(source) is not None
        try:
            rendered: Any = render_jinja_template(  # annotated as if it returned one text
                [conversation.messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=has_marks,
                **{**self.tokenizer.special_tokens_map, **self.settings},
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"is refused by the chat template: {error!r}") from error
        texts, marks = rendered
        return texts[0], marks[0] if has_marks else None

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """The texts of the tokens that may end a turn.

        Some tokenizers do not flag their end of turn as special, so other added tokens count too,
        except for white space, and for tags inside a turn, such as </tool_call>.
        """
        ends = []
        for token in self.tokenizer.added_tokens_decoder.values():
            is_inside = not token.content.strip() or token.content.startswith("</")
            if token.special or not is_inside:
                ends.append(token.content)
        return tuple(ends)

    @cached_property
    def end_of_turn(self) -> str | None:
        """The text of the token that ends an answer; None if the template writes none."""
        try:
            text = self.without_closing_token(self.render(EXAMPLE))
        except ValueError:
            return None
        after = text.rpartition(ANSWER)[2].rstrip()
        ends = [token for token in self.end_tokens if after.endswith(token)]
        return max(ends, key=len, default=None)

    def stop_tokens(self) -> set[int]:
        """Return the ids of the tokens that end a text or an answer: where generation stops.

        Many base models list only the first, and would go on past the end of their turn.
        """
        ends = {self.tokenizer.eos_token, self.end_of_turn} - {None}
        return {self.tokenizer.convert_tokens_to_ids(end) for end in ends}

    def without_closing_token(self, text: str) -> str:
        """Return a text without a token behind its last end of turn, which Phi-3 writes once."""
        shorter = text.removesuffix(self.tokenizer.eos_token or "").rstrip()
        return shorter if shorter.endswith(self.end_tokens) else text


def fit_arguments(conversation: Conversation, template: ChatTemplate) -> Conversation:
    """Return a conversation whose calls have their arguments as the template expects them.

    Most templates take an object and write its JSON. Some, such as DeepSeek-V3's, take the JSON:
    given an object, they fail or write Python's form of it.
    """
    fitted = copy.deepcopy(conversation)
    calls = [call for message in fitted.messages for call in message.get("tool_calls", ())]
    objects = [call["function"]["arguments"] for call in calls]
    if not any(objects):
        return conversation
    with contextlib.suppress(ValueError):
        text = template.render(conversation)
        if not any(one and repr(one) in text and repr(one) != json.dumps(one) for one in objects):
            return conversation
    for call, arguments in zip(calls, objects, strict=True):
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return fitted


def find_answers(
    conversation: Conversation, template: ChatTemplate
) -> tuple[str, list[Span], list[int]]:
    """Return the text of a conversation, and where in it the answers are that are trained on.

    If the template marks what the assistant says, its author's marks count. Otherwise an answer is
    what the text up to and including it has beyond the prompt before it. One that the template
    writes differently once the conversation has moved on is left out: the model would be trained
    on a text that does not follow from its prompt.

    Returns:
        The text, spans of it, and the indices of the messages that are left out.
    """
    text, marks = template.render_marked(conversation)
    roles = [message["role"] for message in conversation.messages]
    answers = [index for index, role in enumerate(roles) if role == "assistant"]
    begins = list(range(len(answers)))
    if marks is not None and len(marks) != len(answers):
        # Several marks in an answer, or none: those of an answer begin behind those of its prompt
        prompts = [template.render_marked(conversation.up_to(index), True) for index in answers]
        begins = [len(marked or ()) for _, marked in prompts]
    spans = []
    left_out = []
    for index, start, end in zip(answers, begins, [*begins[1:], None], strict=True):
        if not conversation.is_trained_on[index]:
            continue
        if marks is None:
            found = find_turn(conversation, index, text, template)
        else:
            is_last = index == answers[-1]
            message = conversation.messages[index]
            found = complete_marks(marks[start:end], message, is_last, text, template)
        spans += found
        if not found:
            left_out.append(index)
    return text, spans, left_out


def find_turn(
    conversation: Conversation, index: int, text: str, template: ChatTemplate
) -> list[Span]:
    """Return where the message at an index is in the text, with its end of turn; [] if nowhere."""
    before = template.render(conversation.up_to(index), add_generation_prompt=True)
    after = text
    if index + 1 < len(conversation.messages):
        after = template.render(conversation.up_to(index + 1))
    after = after.rstrip()
    if not text.startswith(after):
        after = template.without_closing_token(after)
    is_in_text = text.startswith(before) and text.startswith(after)
    if not is_in_text or len(after) <= len(before):
        return []
    end = len(after)
    if not after.endswith(template.end_tokens):
        # In GLM's templates, the token that opens the next turn also ends this one
        following = [token for token in template.end_tokens if text.startswith(token, end)]
        end += len("".join(following[:1]))
    return [(len(before), end)]


def complete_marks(
    marks: list[Span], message: Message, is_last: bool, text: str, template: ChatTemplate
) -> list[Span]:
    """Return the marked parts of an answer, with the end of turn behind them if it is not marked.

    [] if its reasoning is missing, which many templates drop from all answers but the last: the
    model would learn to answer without it.
    """
    written = "".join(text[start:end] for start, end in marks)
    reasonings = [message[key] for key in REASONING if isinstance(message.get(key), str)]
    if not marks or not (is_last or "".join(reasonings[:1]).strip() in written):
        return []
    start, end = marks[-1]
    rest = text[end:].lstrip()
    end_of_turn = template.end_of_turn
    if end_of_turn is not None and rest.startswith(end_of_turn):
        if not text[:end].rstrip().endswith(template.end_tokens):
            end = len(text) - len(rest) + len(end_of_turn)
    return [*marks[:-1], (start, end)]


# ---- What the template drops ----
def check_nothing_is_lost(
    conversation: Conversation, text: str, template: ChatTemplate, left_out: Collection[int] = ()
) -> None:
    """Raise a ValueError that names what was said and is not in the text of a conversation.

    A template may write a content in another way, as JSON for example. So what is not there word
    for word, and each call, gets a mark, and the template has to write the marks.

    Args:
        left_out: indices of messages that are not trained on, since the template rewrites them. It
            often drops their reasoning on purpose.
    """
    names = [tool["function"]["name"] for tool in conversation.tools]
    lost = [f"has the tool {name}" for name in names if name not in text]
    marked = copy.deepcopy(conversation)
    marks: dict[str, str] = {}  # {mark: what is lost if the template does not write it}
    for index, message in enumerate(marked.messages):
        name = name_message(message, index + 1)
        keys = ["content"]
        if conversation.is_trained_on[index] and index not in left_out:
            keys += REASONING
        for key in keys:
            said = str(message.get(key, ""))
            if said.strip() not in text:
                mark = f"_{index}_{key}_"
                # In the middle: some templates only take what is before or behind a </think>
                message[key] = said + mark + said
                marks[mark] = f"{name} has {key}"
        for number, call in enumerate(message.get("tool_calls", ())):
            tool = call["function"]["name"]  # which is also in the list of tools
            mark = f"{tool}_{index}_{number}_"
            call["function"]["name"] = mark
            if isinstance(call.get("id"), str):  # Kimi's template takes the name from there
                call["id"] = call["id"].replace(tool, mark)
            marks[mark] = f"{name} has tool_calls"
    if marks:
        with contextlib.suppress(ValueError):  # the template needs what was changed
            rendered = template.render(marked)
            lost += [what for mark, what in marks.items() if mark not in rendered]
    if lost:
        fix = "remove it from the data, or use a template that writes it (--chat_template)"
        raise ValueError(f"{lost[0]}, which the chat template drops: {fix}")


# ---- Tokens ----
def tokenize_conversation(
    conversation: Conversation, template: ChatTemplate, max_length: int, **options: Any
) -> dict[str, Any]:
    """Return the tokens of a conversation and their labels, at most max_length of each.

    By default the assistant's tokens are trained on, including its end of turn. They are found by
    their place in the text and not by their id, since the end of turn may also be the pad token
    (huggingface/trl#976).

    Args:
        options: as in `find_trained_text`.

    Returns:
        The columns of `label_tokens`, and rewritten, the number of answers that `find_answers`
        leaves out.
    """
    text, spans, rewritten = find_trained_text(conversation, template, **options)
    encoded = template.tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    starts = [start for start, _ in encoded["offset_mapping"]]
    labeled = label_tokens(encoded["input_ids"], starts, spans, max_length)
    return {**labeled, "rewritten": rewritten}


def find_trained_text(
    conversation: Conversation,
    template: ChatTemplate,
    learn: str = "all",
    completion_only_loss: bool = True,
    assistant_only_loss: bool = True,
) -> tuple[str, list[Span], int]:
    """Return the text of a conversation, and the spans of it that are trained on.

    With them comes the number of answers that `find_answers` leaves out.

    Args:
        learn, completion_only_loss, assistant_only_loss: as in `InstructionTuningArguments`.
    """
    if learn == "last":
        numbers = range(len(conversation.messages))
        last = max(number for number in numbers if conversation.is_trained_on[number])
        conversation = replace(conversation, is_trained_on=[number == last for number in numbers])
    conversation = fit_arguments(conversation, template)
    text, spans, left_out = find_answers(conversation, template)
    check_nothing_is_lost(conversation, text, template, left_out)
    if spans and spans[-1][1] >= len(text.rstrip()):
        closed = close_last_turn(text, template)
        if closed != text:
            spans[-1] = (spans[-1][0], len(closed))
        text = closed
    answers_only = completion_only_loss if conversation.is_pair else assistant_only_loss
    if not answers_only:
        return text, [(0, len(text))], 0
    return text, spans, len(left_out)


def label_tokens(
    tokens: list[int], starts: Any, spans: Sequence[Span], max_length: int
) -> dict[str, Any]:
    """Return the tokens of a text and their labels, at most max_length of each.

    Args:
        starts: where in the text each token begins, ascending.
        spans: the parts of the text that are trained on.

    Returns:
        input_ids and labels (IGNORED: not trained on); truncated, whether the end is missing;
        length, largest and hash of the tokens.
    """
    labels = [IGNORED] * len(tokens)
    for start, end in spans:
        inside = slice(bisect_left(starts, start), bisect_left(starts, end))
        labels[inside] = tokens[inside]
    trained_on = np.flatnonzero(np.array(labels[1:]) != IGNORED)  # token 0 is never predicted
    if len(trained_on) == 0:
        raise ValueError(
            "has no answer that follows from the prompt of its chat template: pass another "
            "--chat_template, or --chat_template_kwargs such as '{\"enable_thinking\": false}'"
        )
    if trained_on[0] + 1 >= max_length:
        raise ValueError(
            f"has no answer within --max_length {max_length}: {trained_on[0] + 1} tokens are prompt"
        )
    kept = np.array(tokens[:max_length], dtype=np.int32)
    return {
        "input_ids": tokens[:max_length],
        "labels": labels[:max_length],
        "truncated": len(tokens) > max_length,
        "length": len(kept),
        "largest": int(kept.max()),
        "hash": hash_of_row(kept.tobytes()),
    }


def close_last_turn(text: str, template: ChatTemplate) -> str:
    """Return a text with the end-of-sequence token if the template leaves its last turn open.

    Otherwise a model does not learn to stop.
    """
    stripped = text.rstrip()
    if stripped.endswith(template.end_tokens):
        return text
    if template.tokenizer.eos_token is None:
        raise ValueError(
            "has an answer without an end: neither chat template nor tokenizer has one"
        )
    return stripped + template.tokenizer.eos_token


def show_trained_tokens(row: Mapping[str, Any], tokenizer: Any) -> str:
    """Return the text of a row, with the parts that are trained on in [[ ]]."""
    text = ""
    pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
    for is_trained_on, part in itertools.groupby(pairs, lambda pair: pair[1] != IGNORED):
        written = tokenizer.decode([token for token, _ in part])
        text += f"[[{written}]]" if is_trained_on else written
    return text + note_plain_template(tokenizer)


def note_plain_template(tokenizer: Any) -> str:
    """Return a line below a sample if the tokenizer had no chat template of its own."""
    if tokenizer.chat_template != DEFAULT_TEMPLATE:
        return ""
    return "\n(in a plain chat template, since the tokenizer has none: --chat_template FILE)"
