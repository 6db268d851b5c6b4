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
from pathlib import Path
from threading import Event
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from chatting.conversation import History, Turn
from chatting.speakers import Speaker
from common import Exit, first_line, stop
from generation.answering import UNANSWERED, Reply, printable

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
.model-name {font-weight: 600; overflow-wrap: anywhere;}
.models {align-items: flex-end !important;}  /* below names of one and of two lines */
.chat {height: 52vh !important;}
.chat .message {overflow-wrap: anywhere;}
.chat .md {white-space: pre-wrap;}
.chat button[aria-label="Clear"] {display: none;}  /* it would clear one column only */
#status {min-height: 1.5em; overflow-wrap: anywhere;}
label span {overflow-wrap: anywhere;}
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
        self.history = gr.State(history)
        with gr.Row(elem_classes="models"):
            self.chats: list[gr.Chatbot] = []
            for number, speaker in enumerate(speakers):
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
            self.stop = gr.Button("Stop", min_width=100, interactive=False, elem_id="stop")
            self.clear = gr.Button("Clear", min_width=100, elem_id="clear")
            self.save = gr.Button("Save as training row", min_width=150, elem_id="save")
        self.chosen = gr.Radio(
            [(speaker.name, number) for number, speaker in enumerate(speakers)],
            value=history.chosen,
            label="The conversation continues with the answers of",
            elem_id="chosen",
            visible=len(speakers) > 1,
        )
        buttons = [self.send, self.stop, self.clear, self.save]
        outputs = [self.history, self.prompt, self.status, *buttons, *self.chats]
        # Tabs wait for each other at the lock of the models, and not for a turn of gradio's
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        private["concurrency_limit"] = None
        said = [self.history, self.chosen]
        asking = [self.send.click, self.prompt.submit]
        gr.on(asking, self.on_send, [self.prompt, *said], outputs, **private)
        self.stop.click(self.on_stop, None, None, queue=False, **private)
        self.clear.click(self.on_clear, self.history, outputs, **private)
        self.save.click(self.on_save, said, self.status, **private)

    # ---- Events ----
    def on_stop(self, request: gr.Request) -> None:
        """Stop the answers of a tab. It is also called when the tab is closed."""
        if request.session_hash in self.stopping:
            self.stopping[request.session_hash].set()

    def on_clear(self, history: History) -> Update:
        """Start over."""
        history.turns.clear()
        return {self.history: history, self.status: "", **self.shown(history)}

    def on_save(self, history: History, chosen: int) -> str:
        """Append the conversation to the file of rows."""
        history.chosen = chosen
        try:
            return html.escape(history.save(self.save_to))
        except (ValueError, OSError) as error:
            return html.escape(str(error))

    def on_send(
        self, prompt: str, history: History, chosen: int, request: gr.Request
    ) -> Iterator[Update]:
        """Yield the page while the models answer what was typed."""
        tab = str(request.session_hash)
        if not prompt.strip() or tab in self.stopping:  # Enter was pressed while they answer
            return
        stopping = self.stopping[tab] = Event()
        history.chosen = chosen
        conversation = history.asking(prompt.strip())
        turn = Turn(prompt.strip())
        history.turns.append(turn)
        problem = ""
        try:
            yield {self.status: "Answering ...", self.prompt: "", **self.buttons(answering=True)}
            for number, speaker in enumerate(self.speakers):
                if stopping.is_set():
                    break
                parts, whole = speaker.answerer.start(conversation, stopping, speaker.taking_turn())
                text = ""
                shown_at = 0.0
                for part in parts:
                    text += part
                    if text.strip() and time.monotonic() - shown_at >= REFRESH:
                        shown_at = time.monotonic()
                        turn.replies[number] = Reply(text)
                        yield self.shown(history)
                turn.replies.pop(number, None)  # nothing is kept of an answer that fails
                turn.replies[number] = whole.result()
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
                if number in turn.replies:
                    reply = turn.replies[number]
                    text = (reply.text + reply.mark) or "[no text]"
                    messages.append({"role": "assistant", "content": shown_text(text)})
            updates[chat] = messages
        return updates

    def buttons(self, answering: bool) -> Update:
        """Return which buttons can be used while models answer, or while they do not."""
        others = [self.send, self.clear, self.save]
        updates: Update = {button: gr.Button(interactive=not answering) for button in others}
        return {**updates, self.stop: gr.Button(interactive=answering)}


# ---- The server ----
async def add_policy(request: Any, call_next: Any) -> Any:
    """Add the policy, by which the browser loads nothing from elsewhere, to a response."""
    response = await call_next(request)
    response.headers["Content-Security-Policy"] = POLICY
    return response


def serve(speakers: Sequence[Speaker], history: History, save_to: Path, port: int) -> None:
    """Serve the page until Ctrl-C. Raises SystemExit with 64 if the port is not free."""
    with gr.Blocks(title=TITLE, fill_width=True) as blocks:
        page = Page(speakers, history, save_to)
        blocks.unload(page.on_stop)
    # A page of another site that resolves its name to this machine is refused by its name
    only_here = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    only_from_here = Middleware(BaseHTTPMiddleware, dispatch=add_policy)
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
            app_kwargs={"middleware": [only_here, only_from_here]},
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
