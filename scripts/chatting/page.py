# SPDX-License-Identifier: Apache-2.0
"""The conversation on a page in a browser: a column for each model, and one prompt for all.

Texts are shown as they are, and never as HTML.
"""

import copy
import html
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr
from gradio.blocks import Block

from chatting.history import History, Turn
from chatting.rows import save_row
from chatting.speakers import Decoding, Speaker
from exits import first_line
from generation.answering import UNANSWERED, Ending, Reply, RunningAnswer, printable

REFRESH = 0.05  # seconds between two views of an answer that grows
TITLE = "Chat with trained models"
Update = dict[Any, Any]  # {component of the page: its new value}


@dataclass
class Page:
    """What the page shows and does.

    Attributes:
        history: with which each tab of a browser begins.
        decoding: with which each tab begins.
        save_to: the only file that the page writes to.
        stopping: {tab that waits for answers: the event that stops them}.
    """

    speakers: Sequence[Speaker]
    history: History
    decoding: Decoding
    save_to: Path
    stopping: dict[str, Event] = field(default_factory=dict)

    @property
    def names(self) -> list[tuple[str, int]]:
        """Return the choices of a model: its name and its number, from 0."""
        return [(speaker.name, number) for number, speaker in enumerate(self.speakers)]

    def stop_all(self) -> None:
        """Stop the answers of all tabs."""
        for stopping in list(self.stopping.values()):
            stopping.set()


# ---- What is shown ----
def shown_messages(history: History, number: int) -> list[dict[str, Any]]:
    """Return the messages in the column of a model, as gradio takes them."""
    messages = []
    for turn in history.turns:
        messages.append({"role": "user", "content": shown_text(turn.prompt)})
        reply = turn.replies.get(number)
        if reply is not None:
            text = reply.text + reply.ending.value
            messages.append({"role": "assistant", "content": shown_text(text or "[no text]")})
    return messages


def shown_text(text: str) -> list[dict[str, str]]:
    """Return a text as the content of a message that the browser shows as it is.

    gradio would remove the indentation of a string, and put its tags into the page.
    """
    return [{"type": "text", "text": html.escape(printable(text))}]


class View:
    """The components of the page, and what happens when they are used."""

    def __init__(self, page: Page) -> None:
        """Build the page; called inside `gr.Blocks`."""
        self.page = page
        gr.HTML(f"<h1>{TITLE}</h1>")
        self.history = gr.State(page.history)
        self.columns: list[gr.Column] = []
        self.chats: list[gr.Chatbot] = []
        with gr.Row(elem_classes="models"):
            for number, speaker in enumerate(page.speakers):
                self._add_column(number, speaker)
        self.status = gr.HTML(elem_id="status")
        self._add_prompt()
        self._add_settings()
        self._connect()

    # ---- Layout ----
    def _add_column(self, number: int, speaker: Speaker) -> None:
        with gr.Column(min_width=300) as column:
            name = html.escape(printable(speaker.name))
            gr.HTML(f'<div class="model-name">{number + 1}. {name}</div>')
            chat = gr.Chatbot(
                show_label=False,
                height=None,
                elem_classes="chat",
                render_markdown=False,
                buttons=[],
                feedback_options=None,
                elem_id=f"chat_{number}",
                placeholder=" ",
            )
        self.columns.append(column)
        self.chats.append(chat)

    def _add_prompt(self) -> None:
        with gr.Row(equal_height=True):
            self.prompt = gr.Textbox(
                label="Prompt",
                show_label=False,
                placeholder="Ask the models",
                max_lines=8,
                scale=6,
                min_width=300,
                autofocus=True,
                elem_id="prompt",
            )
            self.send = gr.Button("Send", variant="primary", min_width=100, elem_id="send")
            self.stop = gr.Button(
                "Stop", variant="stop", min_width=100, interactive=False, elem_id="stop"
            )
        with gr.Row():
            self.retry = gr.Button("Retry", size="sm", min_width=70, elem_id="retry")
            self.undo = gr.Button("Undo", size="sm", min_width=70, elem_id="undo")
            self.clear = gr.Button("Clear", size="sm", min_width=70, elem_id="clear")
            self.save = gr.Button("Save as training row", size="sm", min_width=150, elem_id="save")

    def _add_settings(self) -> None:
        page = self.page
        everyone = list(range(len(page.speakers)))
        several = len(page.speakers) > 1
        with gr.Accordion("Settings", elem_id="settings"):
            with gr.Row(visible=several):
                self.shown = gr.CheckboxGroup(
                    page.names, value=everyone, label="Models that answer", elem_id="shown"
                )
                self.chosen = gr.Radio(
                    page.names,
                    value=page.history.chosen,
                    label="The conversation continues with the answers of",
                    elem_id="chosen",
                )
            self.system = gr.Textbox(
                page.history.system, label="System prompt", max_lines=6, elem_id="system"
            )
            with gr.Row():
                self.temperature = gr.Number(
                    page.decoding.temperature,
                    label="Temperature (0: the likeliest tokens)",
                    minimum=0,
                    step=0.1,
                    elem_id="temperature",
                )
                self.max_new_tokens = gr.Number(
                    page.decoding.max_new_tokens,
                    label="Longest answer, in tokens",
                    minimum=1,
                    precision=0,
                    elem_id="max_new_tokens",
                )

    def _connect(self) -> None:
        """Connect what is clicked with what happens then."""
        settings: set[Block] = {
            self.history,
            self.shown,
            self.chosen,
            self.system,
            self.temperature,
            self.max_new_tokens,
        }
        buttons = [self.send, self.stop, self.retry, self.undo, self.clear, self.save]
        outputs = [self.history, self.prompt, self.status, *buttons, *self.chats]
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        # Tabs wait for each other at the lock of the models, and not for a turn of gradio's
        answering: dict[str, Any] = {**private, "concurrency_limit": None}
        asking: set[Block] = {*settings, self.prompt}
        gr.on([self.send.click, self.prompt.submit], self.on_send, asking, outputs, **answering)
        self.retry.click(self.on_retry, settings, outputs, **answering)
        self.stop.click(self.on_stop, None, None, queue=False, **private)
        self.undo.click(self.on_undo, {self.history}, outputs, **private)
        self.clear.click(self.on_clear, {self.history}, outputs, **private)
        self.save.click(self.on_save, {self.history, self.chosen}, self.status, **private)
        self.shown.change(
            self.on_shown, {self.shown, self.chosen}, [*self.columns, self.chosen], **private
        )

    # ---- Events ----
    def on_send(self, values: Update, request: gr.Request) -> Iterator[Update]:
        """Answer what was typed."""
        prompt = values[self.prompt].strip()
        if not prompt:
            return
        cleared = {self.prompt: ""}
        failed = yield from self.answer(prompt, values, str(request.session_hash), cleared)
        if failed:
            yield {self.prompt: prompt}  # to be shortened, for example

    def on_retry(self, values: Update, request: gr.Request) -> Iterator[Update]:
        """Answer the last prompt again. If that fails the old answers remain."""
        history = values[self.history]
        turn = history.undo()
        if turn is None:
            yield {self.status: "Nothing was said yet."}
            return
        failed = yield from self.answer(turn.prompt, values, str(request.session_hash))
        if failed:
            history.turns.append(turn)
            yield {self.history: history, **self.chats_of(history)}

    def on_stop(self, request: gr.Request) -> None:
        """Stop the answers of a tab. It is also called when the tab is closed."""
        stopping = self.page.stopping.get(str(request.session_hash))
        if stopping is not None:
            stopping.set()

    def on_undo(self, values: Update) -> Update:
        """Take the last turn back into the box of the prompt."""
        history = values[self.history]
        turn = history.undo()
        if turn is None:
            return {self.status: "Nothing was said yet."}
        return {
            self.history: history,
            self.prompt: turn.prompt,
            self.status: "",
            **self.chats_of(history),
        }

    def on_clear(self, values: Update) -> Update:
        """Start over."""
        history = values[self.history]
        history.reset()
        return {self.history: history, self.status: "", **self.chats_of(history)}

    def on_save(self, values: Update) -> str:
        """Append the conversation to the file of rows."""
        history = copy.copy(values[self.history])
        history.chosen = values[self.chosen]
        path = self.page.save_to
        try:
            count = save_row(history, path)
        except OSError as error:
            return html.escape(f"Not saved: cannot write {path}: {error.strerror}")
        except ValueError as error:
            return html.escape(f"Not saved: {error}")
        return html.escape(f"Saved: {path} has {count} row{'' if count == 1 else 's'}.")

    def on_shown(self, values: Update) -> Update:
        """Show the columns of these models; the conversation continues with one of them."""
        shown = values[self.shown]
        updates: Update = {}
        for number, column in enumerate(self.columns):
            updates[column] = gr.Column(visible=number in shown)
        if shown:
            choices = [(name, number) for name, number in self.page.names if number in shown]
            chosen = values[self.chosen]
            if chosen not in shown:
                chosen = min(shown)
            updates[self.chosen] = gr.Radio(choices, value=chosen)
        return updates

    # ---- Answers ----
    def answer(
        self, prompt: str, values: Update, tab: str, at_start: Update | None = None
    ) -> Generator[Update, None, bool]:
        """Yield the page while the models answer; return whether none of them has answered.

        Args:
            at_start: further changes of the page when the models begin to answer. They belong into
                the update that disables the buttons: after one of its own, the page would for a
                moment look as if the models had answered.
        """
        if tab in self.page.stopping:  # Enter was pressed while the models answer
            return True
        history = values[self.history]
        history.system = values[self.system].strip()
        history.chosen = values[self.chosen]
        shown = sorted(values[self.shown])
        if not shown:
            yield {self.status: "Choose a model that answers, in the settings."}
            return True
        decoding = Decoding(values[self.temperature] or 0.0, values[self.max_new_tokens] or 1)
        stopping = Event()
        self.page.stopping[tab] = stopping
        turn = Turn(prompt)
        before = copy.copy(history)
        before.turns = list(history.turns)
        history.turns.append(turn)
        problem = ""
        try:
            buttons = self.buttons_while(answering=True)
            yield {**buttons, self.status: "Answering ...", **(at_start or {})}
            for number in shown:
                if stopping.is_set():
                    break
                running = self.page.speakers[number].answer(before, prompt, decoding, stopping)
                yield from self.show_answer(running, history, number)
        except UNANSWERED as error:
            problem = f"Error: {first_line(error)}"
        finally:
            stopping.set()
            self.page.stopping.pop(tab, None)
        if not turn.replies:
            history.undo()
        yield {
            self.history: history,
            self.status: html.escape(printable(problem)),
            **self.buttons_while(answering=False),
            **self.chats_of(history),
        }
        return not turn.replies

    def show_answer(
        self, running: RunningAnswer, history: History, number: int
    ) -> Iterator[Update]:
        """Yield the page while a model answers the last prompt, whose turn gets the answer."""
        replies = history.turns[-1].replies
        text = ""
        shown_at = 0.0
        for part in running:
            text += part
            now = time.monotonic()
            if text.strip() and now - shown_at >= REFRESH:
                shown_at = now
                replies[number] = Reply(text, Ending.COMPLETE)
                yield self.chats_of(history)
        replies.pop(number, None)  # nothing is kept of an answer that fails
        replies[number] = running.result()
        yield self.chats_of(history)

    def chats_of(self, history: History) -> Update:
        """Return what the columns show of a conversation."""
        return {chat: shown_messages(history, place) for place, chat in enumerate(self.chats)}

    def buttons_while(self, answering: bool) -> Update:
        """Return which buttons can be used while models answer, or while they do not."""
        others = [self.send, self.retry, self.undo, self.clear, self.save]
        updates: Update = {button: gr.Button(interactive=not answering) for button in others}
        updates[self.stop] = gr.Button(interactive=answering)
        return updates
