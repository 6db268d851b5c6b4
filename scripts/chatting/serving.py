# SPDX-License-Identifier: Apache-2.0
"""The server of the page. Only this machine reaches it, and it asks no other one for anything.

The page has the fonts of the system, and its Content-Security-Policy lets the browser load only
what this server has. Analytics and the look for newer versions are off.
"""

import contextlib
import os
from threading import Event
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from exits import Exit, first_line, stop

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
import gradio as gr

from chatting.page import TITLE, Page, View

HOST = "127.0.0.1"  # no other machine reaches it
FONTS = ("system-ui", "sans-serif")
FIXED_FONTS = ("ui-monospace", "monospace")
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


def build(page: Page) -> gr.Blocks:
    """Return the page as gradio's blocks."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as blocks:
        view = View(page)
        blocks.unload(view.on_stop)
    return blocks


def serve(page: Page, port: int) -> None:
    """Serve the page until Ctrl-C. Raises SystemExit with 64 if the port is not free."""
    # A page of another site that resolves its name to this machine is refused by its name
    only_here = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    try:
        build(page).launch(
            server_name=HOST,
            server_port=port,
            quiet=True,
            share=False,
            inbrowser=False,
            prevent_thread_lock=True,
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            theme=gr.themes.Default(font=FONTS, font_mono=FIXED_FONTS),
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
        page.stop_all()
        # An interpreter that ends while a thread of it computes is aborted by C++. From here on the
        # lock is held, so that no other answer begins. Pressing again does not wait.
        with contextlib.suppress(KeyboardInterrupt):
            page.speakers[0].lock.acquire()
