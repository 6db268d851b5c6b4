# SPDX-License-Identifier: Apache-2.0
"""The text that a chat template makes of a conversation, and where in it the assistant speaks.

What a template does with a conversation is up to its author: some drop tools or reasoning, some
rewrite earlier turns. So what it wrote is compared with what was said, and a row of which something
is missing is refused with a ValueError whose text continues "train.jsonl, line 7: ".
"""

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from components.columns import Row, TrackedRow
from components.conversations import Conversation
from components.messages import REASONING_KEYS, Message, name_message, reasoning_of

Span = tuple[int, int]  # start and end of a part of a text, in characters

ANSWER = "31415"  # digits, which no chat template rewrites
EXAMPLE = Conversation(
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": ANSWER}],
    tools=[],
    is_trained_on=[False, True],
)

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Keys of a message that carry part of what was said. A row is refused if the chat template drops
# one of them. Any other key (id, timestamp, ...) only describes the message. Most logs of
# conversations have such keys, so they are not refused, but named in the start summary.
SAID_KEYS = (
    "name",
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
# Keys whose text is looked for in what the template wrote, and the link of a result to its call
KNOWN_KEYS = ("role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, with the settings that it is rendered with.

    Attributes:
        tokenizer: with a chat template.
        settings: variables of the template, such as {"enable_thinking": False}.
    """

    tokenizer: Any
    settings: Mapping[str, Any] = field(default_factory=dict)

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Args:
            add_generation_prompt: whether to end with what opens the assistant's next turn.
        """
        text, _ = self._render(conversation, add_generation_prompt=add_generation_prompt)
        return text

    def render_marked(self, conversation: Conversation) -> tuple[str, list[Span] | None]:
        """Return the text of a conversation, and its parts that are marked with {% generation %}.

        None instead of the parts if the template has no such marks.
        """
        if GENERATION_MARK.search(self._source(conversation)) is None:
            return self.render(conversation), None
        return self._render(conversation, return_assistant_tokens_mask=True)

    def encode(self, text: str) -> Any:
        """Return the tokens of a text that the template wrote, as a tokenizers.Encoding.

        These are the tokens that a call of the tokenizer returns. Such a call also makes lists that
        nothing here reads, which takes time.

        Raises:
            ValueError: if the tokenizer does not know where its tokens are.
        """
        if not self.tokenizer.is_fast:
            raise ValueError(
                "cannot be tokenized: the tokenizer is written in Python and does not tell where "
                "in a text its tokens are: use a model with a tokenizer.json"
            )
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()  # which an earlier call of the tokenizer may have left behind
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return backend.encode(text, add_special_tokens=False)

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """The texts of the tokens that may end a turn.

        These are the special ones. Some tokenizers do not flag their end of turn as special, so
        other added tokens count too, except for white space, and for tags inside a turn, such as
        </tool_call>.
        """
        ends = []
        for token in self.tokenizer.added_tokens_decoder.values():
            is_space = not token.content.strip()
            if token.special or not (is_space or token.content.startswith("</")):
                ends.append(token.content)
        return tuple(ends)

    @cached_property
    def around_answer(self) -> tuple[str, str]:
        """What the template writes before and behind an answer that is no token: "" if nothing.

        Such as the tags of reasoning that was not given, or an <|im_end|> that is mere text.
        """
        try:
            prompt = self.render(EXAMPLE.up_to(1), add_generation_prompt=True)
            text = self.render(EXAMPLE)
        except Exception:  # Templates raise what they like, for what they do not take
            return "", ""
        before, answer, after = text.removeprefix(prompt).rpartition(ANSWER)
        if not answer or not text.startswith(prompt):
            return "", ""
        for token in self.end_tokens:
            after = after.partition(token)[0]
        tokens = self.tokenizer([before, after], add_special_tokens=False)["input_ids"]
        before, after = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return before.strip(), after.strip()

    def answer_in(self, written: str) -> str:
        """Return what a model wrote without what the template writes around an answer."""
        before, after = self.around_answer
        answer = written.strip().removeprefix(before)
        if after:
            answer = answer.partition(after)[0]
        return answer.strip()

    @cached_property
    def _variables(self) -> dict[str, Any]:
        # A tokenizer makes the map of its special tokens again whenever it is asked for
        return {**self.tokenizer.special_tokens_map, **self.settings}

    def _render(self, conversation: Conversation, **options: Any) -> tuple[str, Any]:
        """Return the text of a conversation, and its marked parts if the options ask for them.

        The tokenizer's apply_chat_template writes the same text, but looks at each message first.
        """
        tools: Any = conversation.tools or None
        rendered: Any = render_jinja_template(  # annotated as if it returned one text
            [conversation.messages],
            tools=tools,
            chat_template=self._source(conversation),
            **options,
            **self._variables,
        )
        texts, spans = rendered
        return texts[0], spans[0] if spans else None

    def _source(self, conversation: Conversation) -> str:
        # Some tokenizers have a template of its own for conversations with tools
        return self.tokenizer.get_chat_template(tools=conversation.tools or None)


# ---- Arguments of calls ----
def fit_arguments(conversation: Conversation, template: ChatTemplate) -> Conversation:
    """Return a conversation whose calls have their arguments as the template expects them.

    Most templates take an object and write its JSON. Some, such as DeepSeek-V3's, take the JSON:
    given an object, they fail or write Python's form of it.
    """
    objects = []
    for message in conversation.messages:
        for call in message.get("tool_calls", ()):
            objects.append(call["function"]["arguments"])
    if not any(objects):
        return conversation
    try:
        text = template.render(conversation)
    except TypeError:
        return with_json_arguments(conversation)
    for arguments in objects:
        if arguments and repr(arguments) in text and json.dumps(arguments) != repr(arguments):
            return with_json_arguments(conversation)
    return conversation


def with_json_arguments(conversation: Conversation) -> Conversation:
    """Return a conversation whose calls have their arguments as JSON text."""
    messages = []
    for message in conversation.messages:
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        messages.append({**message, "tool_calls": calls} if calls else message)
    return replace(conversation, messages=messages)


# ---- Where the assistant speaks ----
class Answers(NamedTuple):
    """Where the assistant's answers are in the text of a conversation.

    Attributes:
        text: what the template writes.
        spans: the parts of it that are trained on.
        left_out: the indices of the messages, from 0, that should be trained on but cannot be.
    """

    text: str
    spans: Sequence[Span]
    left_out: Sequence[int]


def find_answers(conversation: Conversation, template: ChatTemplate) -> Answers:
    """Return the text of a conversation, and which parts of it are trained on.

    If the template marks what the assistant says, its author's marks count. Otherwise a turn is
    what the conversation up to and including it has beyond the prompt before it, and a turn that
    the template writes differently once the conversation has moved on is left out: the model would
    be trained on a text that does not follow from its prompt.
    """
    text, marks = template.render_marked(conversation)
    spans = []
    left_out = []
    if marks is not None:
        last = indices_of_answers(conversation)[-1]
        for index, marked in assign_marks(marks, conversation, text, template).items():
            if index != last and lacks_reasoning(conversation, index, text, marked):
                left_out.append(index)
            else:
                end = end_with_turn(marked[-1], conversation, index, text, template)
                spans += [*marked[:-1], (marked[-1][0], end)]
        return Answers(text, spans, left_out)
    for index in indices_trained_on(conversation):
        span = find_turn(conversation, index, text, template)
        if span is None:
            left_out.append(index)
        else:
            spans.append(span)
    return Answers(text, spans, left_out)


def indices_trained_on(conversation: Conversation) -> list[int]:
    """Return the indices of the messages that are trained on, from 0."""
    return [
        index for index, is_trained_on in enumerate(conversation.is_trained_on) if is_trained_on
    ]


def indices_of_answers(conversation: Conversation) -> list[int]:
    """Return the indices of the assistant's messages, from 0."""
    return [
        index
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
    ]


def find_turn(
    conversation: Conversation, index: int, text: str, template: ChatTemplate
) -> Span | None:
    """Return where the text of a message is, with its end of turn; None if it is not there.

    Args:
        index: of the message, from 0.
        text: of the whole conversation.
    """
    before = template.render(conversation.up_to(index), add_generation_prompt=True)
    after = text
    if index + 1 < len(conversation.messages):
        after = template.render(conversation.up_to(index + 1))
    after = after.rstrip()
    if not text.startswith(after):
        after = without_closing_token(after, template)
    is_in_text = text.startswith(before) and text.startswith(after)
    if not is_in_text or len(after) <= len(before):
        return None
    end = len(after)
    if not after.endswith(template.end_tokens):
        # In GLM's templates, the token that opens the next turn also ends this one
        for token in template.end_tokens:
            if text.startswith(token, end):
                return len(before), end + len(token)
    return len(before), end


def without_closing_token(text: str, template: ChatTemplate) -> str:
    """Return the text of a conversation without a token that follows its last end of turn.

    Phi-3's template closes each conversation in this way, and not each turn.
    """
    shorter = text.removesuffix(template.tokenizer.eos_token or "").rstrip()
    return shorter if shorter.endswith(template.end_tokens) else text


def assign_marks(
    spans: Sequence[Span], conversation: Conversation, text: str, template: ChatTemplate
) -> dict[int, list[Span]]:
    """Return {index of a message that is trained on: the parts of the text marked as its own}.

    Raises:
        ValueError: if not all answers are trained on, and the template does not show which of the
            marks belong to those that are.
    """
    answers = indices_of_answers(conversation)
    is_one_each = len(spans) == len(answers)
    all_are_trained_on = answers == indices_trained_on(conversation)
    if is_one_each and all_are_trained_on:
        indices = answers
    else:  # perhaps several marks in one turn, or one mark around several
        indices = find_owners(spans, answers, conversation, text, template)
    if indices is None and is_one_each:
        indices = answers
    if indices is None and all_are_trained_on:
        indices = [answers[-1]] * len(spans)  # It makes no difference to what is trained on
    if indices is None:
        raise ValueError(
            "the chat template does not show which of its text belongs to which of the assistant's "
            "messages, and not all of them are trained on: use another --chat_template"
        )
    marked: dict[int, list[Span]] = {}
    for index, span in zip(indices, spans, strict=True):
        if conversation.is_trained_on[index]:
            marked.setdefault(index, []).append(span)
    return marked


def find_owners(
    spans: Sequence[Span],
    answers: Sequence[int],
    conversation: Conversation,
    text: str,
    template: ChatTemplate,
) -> list[int] | None:
    """Return the index of the message to which each mark belongs, or None if that is unknown.

    It is the last message that begins before the mark. Where a message begins is unknown if the
    template writes what is before it differently once the conversation has moved on.

    Args:
        answers: the indices of the assistant's messages.
    """
    starts = []
    for index in answers:
        before = template.render(conversation.up_to(index))
        if not text.startswith(before):
            return None
        starts.append(len(before))
    indices = []
    for start, _ in spans:
        number = bisect_right(starts, start)
        indices.append(answers[max(number - 1, 0)])
    return indices


def end_with_turn(
    span: Span, conversation: Conversation, index: int, text: str, template: ChatTemplate
) -> int:
    """Return where the last marked part of a message ends, with the end of turn that follows it.

    Some templates do not mark the end of turn. A model that is trained on their marks as they are
    does not learn to stop. If the template does not mark the last words of a turn either, its end
    is left as it is.

    Args:
        index: of the message, from 0.
        text: of the whole conversation.
    """
    _, end = span
    if text[:end].rstrip().endswith(template.end_tokens):
        return end
    turn = text
    if index + 1 < len(conversation.messages):
        turn = template.render(conversation.up_to(index + 1))
        if not text.startswith(turn):
            turn = without_closing_token(turn.rstrip(), template)
        if not text.startswith(turn):
            return end
    rest = turn[end:].lstrip()
    start = len(turn) - len(rest)
    closing = template.tokenizer.eos_token or ""
    for token in template.end_tokens:
        if rest.startswith(token) and rest.removeprefix(token).strip() in {"", closing}:
            return start + len(token)
    return end


def lacks_reasoning(
    conversation: Conversation, index: int, text: str, spans: Sequence[Span]
) -> bool:
    """Return whether a message has reasoning that the template has not written into its spans.

    Many templates drop it from all turns but the last. Trained on, such a turn would teach the
    model to answer without it.
    """
    reasoning = reasoning_of(conversation.messages[index])
    written = "".join(text[start:end] for start, end in spans)
    return isinstance(reasoning, str) and reasoning.strip() not in written


# ---- What the template drops ----
def check_nothing_is_lost(
    conversation: Conversation, text: str, left_out: Collection[int], template: ChatTemplate
) -> None:
    """Raise a ValueError that names what was said and is not in the text of a conversation.

    Args:
        text: as the template rendered it.
        left_out: indices of messages that are not trained on, since the template rewrites them. It
            often drops their reasoning on purpose.
    """
    fix = "remove it from the data, or use a template that writes it (--chat_template)"
    for tool in conversation.tools:
        name = tool["function"]["name"]
        if name not in text:
            raise ValueError(f"has the tool {name}, which the chat template drops: {fix}")
    roles = {message["role"] for message in conversation.messages}
    everything = "\n".join(
        said for message in conversation.messages for _, said in parts_of(message)
    )
    for index, message in enumerate(conversation.messages):
        for key, said in parts_of(message):
            is_dropped_on_purpose = key in REASONING_KEYS and (
                index in left_out or not conversation.is_trained_on[index]
            )
            if is_dropped_on_purpose or not said:
                continue
            # The template may have written the same text elsewhere: in another message, or of its
            # own accord, which most do with the names of roles
            is_written = text.count(said) == everything.count(said)
            if is_written and not any(said in name for name in roles):
                continue
            if makes_no_difference(conversation, index, key, text, template):
                raise ValueError(
                    f"{name_message(message, index + 1)} has {key}, which the chat template "
                    f"drops: {fix}"
                )
    index = find_dropped_call(conversation, template)
    if index is not None:
        raise ValueError(
            f"{name_message(conversation.messages[index], index + 1)} has tool_calls, which the "
            f"chat template drops: {fix}"
        )


def find_dropped_call(conversation: Conversation, template: ChatTemplate) -> int | None:
    """Return the index of the first message with a call that the template does not write, if any.

    That the name of its tool is in the text does not suffice, since the tools and other calls have
    it too. So the template is given calls with names that are nowhere else.
    """
    if not any("tool_calls" in message for message in conversation.messages):
        return None
    renamed, names = with_unique_names(conversation)
    text = text_or_none(renamed, template)
    if text is None:
        return None
    for index, name in names:
        if name not in text:
            return index
    return None


def with_unique_names(conversation: Conversation) -> tuple[Conversation, list[tuple[int, str]]]:
    """Return a conversation in which each call has a name of its own, and (index, name) of each.

    The index is that of the message. Kimi's template names a call by its id, such as
    functions.weather:0, so the name changes there too.
    """
    messages = []
    names = []
    for index, message in enumerate(conversation.messages):
        calls = []
        for number, call in enumerate(message.get("tool_calls", ())):
            old = call["function"]["name"]
            new = f"{old}_{index}_{number}_"
            renamed = {**call, "function": {**call["function"], "name": new}}
            if isinstance(call.get("id"), str):
                renamed["id"] = call["id"].replace(old, new)
            calls.append(renamed)
            names.append((index, new))
        messages.append({**message, "tool_calls": calls} if calls else message)
    return replace(conversation, messages=messages), names


def parts_of(message: Message) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of the texts of a message."""
    yield "content", message["content"].strip()
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            yield key, message[key].strip()


def makes_no_difference(
    conversation: Conversation, index: int, key: str, text: str, template: ChatTemplate
) -> bool:
    """Return whether the text stays the same if a key of a message says something else."""
    messages = list(conversation.messages)
    message = dict(messages[index])
    if key == "content":
        message["content"] *= 2  # and not "", which a template may refuse
    else:
        message = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    messages[index] = message
    return text_or_none(replace(conversation, messages=messages), template) == text


def text_or_none(conversation: Conversation, template: ChatTemplate) -> str | None:
    """Return the text of a conversation, or None if the template refuses it."""
    try:
        return template.render(conversation)
    except Exception:  # a template may raise anything; if it fails without a key, it uses it
        return None


def check_other_keys(
    row: Row, conversation: Conversation, text: str, template: ChatTemplate
) -> None:
    """Check that the template drops no other key that carries part of what was said.

    Dropped keys that only describe a message, such as an id, are noted in a TrackedRow, from which
    the start summary names them.
    """
    dropped = find_dropped_keys(conversation, text, template)
    for key in dropped:
        index = first_with(key, conversation.messages)
        if key in SAID_KEYS and index is not None:
            raise ValueError(
                f"{name_message(conversation.messages[index], index + 1)} has {key}, which the "
                "chat template drops: remove it from the data, or use a template that writes it "
                "(--chat_template)"
            )
    if isinstance(row, TrackedRow):
        row.dropped_keys.update(dropped)


def first_with(key: str, messages: Sequence[Message]) -> int | None:
    """Return the index of the first message that says something with a key.

    The name in a result of a tool is that of the tool, which its call has too.
    """
    for index, message in enumerate(messages):
        if key in message and not (key == "name" and message["role"] == "tool"):
            return index
    return None


def find_dropped_keys(conversation: Conversation, text: str, template: ChatTemplate) -> list[str]:
    """Return the keys that make no difference to the text that the chat template writes."""
    others: dict[str, None] = {}  # used as an ordered set
    for message in conversation.messages:
        others.update(dict.fromkeys(key for key in message if key not in KNOWN_KEYS))
    if not others:
        return []
    if text_or_none(without_keys(others, conversation), template) == text:
        return list(others)
    dropped = []
    for key in others:
        if text_or_none(without_keys([key], conversation), template) == text:
            dropped.append(key)
    return dropped


def without_keys(keys: Collection[str], conversation: Conversation) -> Conversation:
    """Return a conversation whose messages lack these keys."""
    fewer = []
    for message in conversation.messages:
        fewer.append({key: value for key, value in message.items() if key not in keys})
    return replace(conversation, messages=fewer)
