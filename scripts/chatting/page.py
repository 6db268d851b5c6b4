# SPDX-License-Identifier: Apache-2.0
"""The conversation on a page in a browser: a column for each model, and one prompt for all.

Texts are shown as they are, and never as HTML. Only this machine reaches the page, and it asks no
other one for anything: it has the fonts of the system, and its Content-Security-Policy lets the
browser load only what this server has. Analytics and the look for newer versions are off.
"""

import html
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from chatting.conversation import History, Turn
from chatting.speakers import Speaker
from common import Exit, first_line, stop
from generation.answering import UNANSWERED, Ending, Reply, printable

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
import gradio as gr

REFRESH = 0.05  # seconds between two views of an answer that grows
TITLE = "Chat with trained models"
HOST = "127.0.0.1"  # no other machine reaches it
THEME = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "worker-src 'self' blob:; frame-ancestors 'none'"
)
CSS = """
h1 {font-size: 1.5rem; font-weight: 600;}
.model-name {font-weight: 600; overflow-wrap: anywhere;}
.models {align-items: flex-end !important;}  /* below names of one and of two lines */
.chat {height: 52vh !important;}
.chat .message {overflow-wrap: anywhere;}
.chat .md {white-space: pre-wrap;}
.chat button[aria-label="Clear"] {display: none;}  /* it would clear one column only */
#status {min-height: 1.5em; overflow-wrap: anywhere;}
label span {overflow-wrap: anywhere;}
@media (max-width: 640px) {.chat {height: 38vh !important;}}
"""
Update = dict[Any, Any]  # {component of the page: its new value}


def shown_text(text: str) -> list[dict[str, str]]:
    """Return a text as the content of a message that the browser shows as it is.

    gradio would remove the indentation of a string, and put its tags into the page.
    """
    return [{"type": "text", "text": html.escape(printable(text))}]


class Page:
    """The components of the page, and what happens when they are used.

    Attributes:
        save_to: the only file that the page writes to.
        stopping: {tab that waits for answers: the event that stops them}.
    """

    def __init__(self, speakers: Sequence[Speaker], history: History, save_to: Path) -> None:
        """Build the page; called inside `gr.Blocks`."""
        self.speakers = speakers
        self.save_to = save_to
        self.stopping: dict[str, Event] = {}
        gr.HTML(f"<h1>{TITLE}</h1>")
        self.history = gr.State(history)
        self.chats: list[gr.Chatbot] = []
        with gr.Row(elem_classes="models"):
            for number, speaker in enumerate(speakers):
                self.add_column(number, speaker)
        self.status = gr.HTML(elem_id="status")
        with gr.Row(equal_height=True):
            self.prompt = gr.Textbox(
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
            self.clear = gr.Button("Clear", size="sm", min_width=70, elem_id="clear")
            self.save = gr.Button("Save as training row", size="sm", min_width=150, elem_id="save")
        self.chosen = gr.Radio(
            [(speaker.name, number) for number, speaker in enumerate(speakers)],
            value=history.chosen,
            label="The conversation continues with the answers of",
            elem_id="chosen",
            visible=len(speakers) > 1,
        )
        self.connect()

    def add_column(self, number: int, speaker: Speaker) -> None:
        """Add the name of a model, and what it answers."""
        with gr.Column(min_width=300):
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
        self.chats.append(chat)

    def connect(self) -> None:
        """Connect what is clicked with what happens then."""
        buttons = [self.send, self.stop, self.retry, self.clear, self.save]
        outputs = [self.history, self.prompt, self.status, *buttons, *self.chats]
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        # Tabs wait for each other at the lock of the models, and not for a turn of gradio's
        answering: dict[str, Any] = {**private, "concurrency_limit": None}
        said = [self.history, self.chosen]
        asked = [self.prompt, *said]
        gr.on([self.send.click, self.prompt.submit], self.on_send, asked, outputs, **answering)
        self.retry.click(self.on_retry, said, outputs, **answering)
        self.stop.click(self.on_stop, None, None, queue=False, **private)
        self.clear.click(self.on_clear, self.history, outputs, **private)
        self.save.click(self.on_save, said, self.status, **private)

    # ---- Events ----
    def on_send(
        self, prompt: str, history: History, chosen: int, request: gr.Request
    ) -> Iterator[Update]:
        """Answer what was typed."""
        if prompt.strip():
            history.chosen = chosen
            yield from self.answer(prompt.strip(), history, str(request.session_hash))

    def on_retry(self, history: History, chosen: int, request: gr.Request) -> Iterator[Update]:
        """Answer the last prompt again."""
        history.chosen = chosen
        if history.turns:
            turn = history.turns.pop()
            yield from self.answer(turn.prompt, history, str(request.session_hash))

    def on_stop(self, request: gr.Request) -> None:
        """Stop the answers of a tab. It is also called when the tab is closed."""
        stopping = self.stopping.get(str(request.session_hash))
        if stopping is not None:
            stopping.set()

    def on_clear(self, history: History) -> Update:
        """Start over."""
        history.turns.clear()
        return {self.history: history, self.status: "", **self.shown(history)}

    def on_save(self, history: History, chosen: int) -> str:
        """Append the conversation to the file of rows."""
        history.chosen = chosen
        try:
            return html.escape(history.save(self.save_to))
        except ValueError as error:
            return html.escape(str(error))

    # ---- Answers ----
    def answer(self, prompt: str, history: History, tab: str) -> Iterator[Update]:
        """Yield the page while the models answer."""
        if tab in self.stopping:  # Enter was pressed while the models answer
            return
        stopping = Event()
        self.stopping[tab] = stopping
        before = replace(history, turns=list(history.turns))
        turn = Turn(prompt)
        history.turns.append(turn)
        problem = ""
        try:
            yield {self.status: "Answering ...", self.prompt: "", **self.buttons(answering=True)}
            for number, speaker in enumerate(self.speakers):
                if stopping.is_set():
                    break
                running = speaker.answer(before, prompt, stopping)
                text = ""
                shown_at = 0.0
                for part in running:
                    text += part
                    if text.strip() and time.monotonic() - shown_at >= REFRESH:
                        shown_at = time.monotonic()
                        turn.replies[number] = Reply(text, Ending.COMPLETE)
                        yield self.shown(history)
                turn.replies.pop(number, None)  # nothing is kept of an answer that fails
                turn.replies[number] = running.result()
        except UNANSWERED as error:
            problem = f"Error: {first_line(error)}"
        finally:
            stopping.set()
            self.stopping.pop(tab, None)
        if not turn.replies:
            history.turns.pop()
        yield {
            self.history: history,
            self.prompt: "" if turn.replies else prompt,  # to be shortened, for example
            self.status: html.escape(printable(problem)),
            **self.buttons(answering=False),
            **self.shown(history),
        }

    def shown(self, history: History) -> Update:
        """Return what the columns show of a conversation."""
        updates: Update = {}
        for number, chat in enumerate(self.chats):
            messages = []
            for turn in history.turns:
                messages.append({"role": "user", "content": shown_text(turn.prompt)})
                reply = turn.replies.get(number)
                if reply is not None:
                    text = (reply.text + reply.ending.value) or "[no text]"
                    messages.append({"role": "assistant", "content": shown_text(text)})
            updates[chat] = messages
        return updates

    def buttons(self, answering: bool) -> Update:
        """Return which buttons can be used while models answer, or while they do not."""
        others = [self.send, self.retry, self.clear, self.save]
        updates: Update = {button: gr.Button(interactive=not answering) for button in others}
        updates[self.stop] = gr.Button(interactive=answering)
        return updates


# ---- The server ----
class ContentPolicy:
    """Adds the policy, by which the browser loads nothing from elsewhere, to each response."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request by the protocol of ASGI."""

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message["headers"] = [*message.get("headers", []), policy]
            await send(message)

        await self.app(scope, receive, send_with_policy)


def serve(speakers: Sequence[Speaker], history: History, save_to: Path, port: int) -> None:
    """Serve the page until Ctrl-C. Raises SystemExit with 64 if the port is not free."""
    with gr.Blocks(title=TITLE, fill_width=True) as blocks:
        page = Page(speakers, history, save_to)
        blocks.unload(page.on_stop)
    # A page of another site that resolves its name to this machine is refused by its name
    only_here = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    try:
        blocks.launch(
            server_name=HOST,
            server_port=port,
            quiet=True,
            share=False,
            prevent_thread_lock=True,
            footer_links=[],
            run_history=False,
            theme=THEME,
            css=CSS,
            app_kwargs={"middleware": [only_here, Middleware(ContentPolicy)]},
        )
    except OSError as error:
        stop(Exit.USAGE, f"--port {port}: {first_line(error)}")
    print(f"The page is at http://{HOST}:{port}; Ctrl-C ends it.", flush=True)
    try:
        Event().wait()
    except KeyboardInterrupt:
        print()
        sys.stdout.flush()
        # An interpreter that ends while a thread of it computes is aborted by C++
        os._exit(0)
