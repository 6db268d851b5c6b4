# SPDX-License-Identifier: Apache-2.0
"""The page of scripts/chat.py, used in a headless Chromium as a person uses it."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request

import pytest
from playwright.sync_api import expect, sync_playwright

from chatting_runs import (
    OF_ADAPTERS,
    OF_BASE,
    environment,
    find_browser,
    make_endless,
    train_runs,
)
from launching import INTERPRETER, REPO, edit_json, read_rows
from ranks import free_port

CHAT = REPO / "scripts" / "chat.py"
FIRST, ENDLESS, BEFORE = range(3)  # the columns of the page
PATIENCE = 90_000  # milliseconds until something has to be seen, on a busy machine
MANY = "100000"  # tokens: minutes of an answer


class Server:
    """A chat that serves its page."""

    def __init__(self, save_to, *names, with_base=True, longest=40):
        self.port = free_port()
        self.save_to = save_to
        words = [*names, "--web", "--port", self.port, "--save_to", save_to]
        words += ["--max_new_tokens", longest, "--system", "Be brief."]
        if with_base:
            words.append("--with_base")
        command = [str(word) for word in (INTERPRETER, CHAT, *words)]
        self.process = subprocess.Popen(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        printed = []  # Libraries may print before it.
        for line in self.process.stdout:
            printed.append(line)
            if self.url in line:
                return
        pytest.fail("".join(printed))

    def end(self):
        """End the server as Ctrl-C does; return its exit code and what it has printed."""
        self.process.send_signal(signal.SIGINT)
        try:
            printed, _ = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            printed, _ = self.process.communicate()
        return self.process.returncode, printed


@pytest.fixture(scope="module")
def runs(once):
    find_browser()
    return once("chat_runs", train_runs)


@contextlib.contextmanager
def serving(*arguments, **options):
    found = Server(*arguments, **options)
    yield found
    code, printed = found.end()
    assert code == 0 and "Traceback" not in printed, printed


@pytest.fixture(scope="module")
def server(runs, once, tmp_path_factory):
    """The page of adapters, an untrained model, and the base of both."""
    endless = once("chat_endless", make_endless) / "model"
    folder = tmp_path_factory.mktemp("server")
    link = shutil.copytree(endless, folder / "endless", copy_function=os.symlink)
    # A model without a run has no base
    edit_json(link / "run.json", arguments={"model_name_or_path": str(runs / "base")})
    with serving(folder / "rows.jsonl", runs / "first", link) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


class Tab:
    """A tab of the browser with the page."""

    def __init__(self, page):
        self.page = page
        self.prompt = page.locator("#prompt textarea")
        self.status = page.locator("#status")

    def send(self, text):
        self.prompt.fill(text)
        self.prompt.press("Enter")

    def ask(self, text):
        """Send a prompt and wait until all models have answered."""
        self.send(text)
        expect(self.prompt).to_have_value("")
        self.wait()

    def wait(self):
        """Wait until no model answers any longer."""
        expect(self.page.locator("#stop")).to_be_disabled()
        expect(self.page.locator("#send")).to_be_enabled()

    def click(self, name):
        self.page.locator(f"#{name}").click()

    def said(self, column, by):
        """The texts in a column by the user, or by the bot."""
        return self.page.locator(f"#chat_{column} [data-testid={by}]").all_inner_texts()

    def answers(self, column):
        return self.page.locator(f"#chat_{column} [data-testid=bot]")


@pytest.fixture(scope="module")
def patient(once, tmp_path_factory):
    """The page of a model that answers for minutes, which ends in the middle of an answer."""
    endless = once("chat_endless", make_endless) / "model"
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with serving(rows, endless, with_base=False, longest=MANY) as found:
        yield found


@pytest.fixture
def open_tab(server, browser):
    """A function that opens a page in a tab; no tab may ask another machine for anything."""
    contexts = []
    asked = []
    errors = []

    def start(server=server, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        tab = Tab(page)
        expect(tab.prompt).to_be_visible()
        return tab

    expect.set_options(timeout=PATIENCE)
    yield start
    for context in contexts:
        context.close()
    here = r"(data|blob):|http://127\.0\.0\.1:\d+/"
    elsewhere = [url for url in asked if not re.match(here, url)]
    assert asked and elsewhere == [] and errors == []


def test_before_and_after_answer_side_by_side_and_are_saved(open_tab, runs, server):
    tab = open_tab()
    tab.ask("Who are you?")
    tab.ask("And now?")
    assert tab.said(FIRST, "bot") == [OF_ADAPTERS[0]] * 2
    assert tab.said(BEFORE, "bot")[0] == OF_BASE
    assert tab.said(ENDLESS, "bot")[0].endswith(" [cut off at the limit of tokens]")
    for column in (FIRST, ENDLESS, BEFORE):
        assert tab.said(column, "user") == ["Who are you?", "And now?"]
    names = tab.page.locator(".model-name").all_inner_texts()
    assert str(runs / "first") in names[FIRST] and "before training" in names[BEFORE]

    tab.click("save")
    expect(tab.status).to_contain_text(f"Saved to {server.save_to}")
    tab.page.locator("#chosen label").filter(has_text="before training").locator("input").check()
    tab.click("save")
    while len(read_rows(server.save_to)) < 2:
        tab.page.wait_for_timeout(100)
    saved = [row["messages"] for row in read_rows(server.save_to)]
    question = {"role": "user", "content": "Who are you?"}
    for messages, column in zip(saved, (FIRST, BEFORE), strict=True):
        assert messages[:2] == [{"role": "system", "content": "Be brief."}, question]
        assert messages[2]["content"] == tab.said(column, "bot")[0]

    tab.click("clear")
    expect(tab.answers(FIRST)).to_have_count(0)
    tab.ask("Who are you?")
    tab.page.reload()
    expect(tab.prompt).to_be_visible()
    expect(tab.answers(FIRST)).to_have_count(0)
    assert len(read_rows(server.save_to)) == 2


def test_two_tabs_have_conversations_of_their_own(open_tab):
    one, two = open_tab(), open_tab()
    one.send("Who are you?")
    two.send("And now?")  # while the other one is being answered
    for tab in (one, two):
        expect(tab.answers(FIRST)).to_have_count(1)
        tab.wait()
    assert one.said(FIRST, "user") == ["Who are you?"]
    assert two.said(FIRST, "user") == ["And now?"]
    assert one.said(FIRST, "bot") == two.said(FIRST, "bot") == [OF_ADAPTERS[0]]


def test_texts_are_shown_as_they_are_never_run_and_fit_into_a_window(open_tab):
    width = 400
    tab = open_tab(viewport={"width": width, "height": 900}, color_scheme="dark")
    text = "<img src=/x onerror=document.title='run'> **a** $b$\n    <b>c</b> &amp; \x1b[2J"
    text += "Who_" * 60
    tab.ask(text)
    (shown,) = tab.said(FIRST, "user")
    assert shown == text.replace("\x1b", "\\x1b")
    assert tab.page.locator("#chat_0 img, #chat_0 b, #chat_0 strong").count() == 0
    assert tab.page.title() != "run"
    needed, there = tab.page.evaluate("[document.body.scrollWidth, window.innerWidth]")
    assert needed <= there == width
    left = [tab.page.locator(f"#chat_{column}").bounding_box()["x"] for column in range(3)]
    assert len(set(left)) == 1  # below each other
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert int(re.search(r"\d+", background)[0]) < 100
    tab.send("word " * 500)
    expect(tab.status).to_contain_text("the model is limited to 512")
    expect(tab.prompt).to_have_value(re.compile("word word"))


def test_no_other_machine_or_page_reaches_the_page_and_it_loads_nothing_from_elsewhere(server):
    # An address of this machine at which only a server of all addresses listens
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port))
    # A page of another site can resolve its own name to this machine
    request = urllib.request.Request(server.url, headers={"Host": "example.org"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 400
    with urllib.request.urlopen(server.url, timeout=30) as response:
        policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';") and "http" not in policy


def test_an_answer_grows_can_be_stopped_and_ends_with_its_tab(open_tab, patient):
    tab = open_tab(patient)
    tab.send("Tell me a story.")
    answer = tab.answers(0).first
    selector = "#chat_0 [data-testid=bot]"
    longer = f"least => document.querySelector('{selector}')?.innerText.length > least"
    length = 0
    for _ in range(2):
        tab.page.wait_for_function(longer, arg=length)
        length = len(answer.inner_text())
    tab.click("stop")
    tab.wait()
    assert answer.inner_text().endswith(" [stopped]")
    tab.click("save")
    expect(tab.status).to_contain_text("only complete answers are trained on")
    tab.send("And then?")
    expect(tab.answers(0)).to_have_count(2)
    tab.page.close()
    other = open_tab(patient)  # The closed tab keeps no model
    other.send("And now?")
    expect(other.answers(0)).to_have_count(1)
