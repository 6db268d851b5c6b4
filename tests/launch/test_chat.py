# SPDX-License-Identifier: Apache-2.0
"""scripts/chat.py in the terminal and through a pipe, with what the recipe trained."""

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys

import pytest

from chatting_runs import OF_ADAPTERS, OF_BASE, environment, make_endless, train_runs
from launching import INTERPRETER, REPO, errors_of, read_rows, recipe, script, write_rows

CHAT = REPO / "scripts" / "chat.py"
SHORT = ["--max_new_tokens", "40"]
PATIENCE = 60  # seconds until a line has to come, on a busy machine


@pytest.fixture(scope="module")
def runs(once):
    return once("chat_runs", train_runs)


# ---- Through a pipe ----
def test_adapters_and_their_base_answer_side_by_side(runs):
    names = [runs / "first", runs / "second"]
    done = script("chat", *names, "--with_base", *SHORT, input="Who are you?\n", code=0)
    answers = [*OF_ADAPTERS, OF_BASE]
    assert [line for line in done.output.splitlines() if line in answers] == answers


def test_a_saved_conversation_is_a_row_that_the_recipe_trains_on(runs, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    typed = f"Who are you?\n/model 2\nAnd now?\n/save {rows}\n"
    words = [runs / "first", runs / "second", *SHORT, "--system", "Be brief."]
    assert f"Saved to {rows}" in script("chat", *words, input=typed).output
    saved = read_rows(rows)[1]["messages"]
    assert [message["role"] for message in saved] == ["system"] + 2 * ["user", "assistant"]
    assert saved[-1]["content"] == OF_ADAPTERS[1]
    words = ["--model_name_or_path", runs / "base", "--dataset_name", rows, "--dry_run"]
    recipe(*words, "--output_dir", tmp_path / "run", code=0)


def test_what_goes_wrong_in_a_conversation_is_a_line_and_does_not_end_it(runs):
    typed = [b"/nothing", b"word " * 500, b"\xff\xfe", b"/save /none/rows.jsonl", b"/image a.png"]
    typed.append(b"Who are you?")
    command = [sys.executable, CHAT, runs / "base", *SHORT]
    options = {"capture_output": True, "timeout": PATIENCE, "check": True}
    done = subprocess.run(command, input=b"\n".join(typed), **options)
    errors = done.stderr.decode().splitlines()
    assert len([line for line in errors if line.startswith("error: ")]) == 4, errors
    assert b"Traceback" not in done.stderr
    assert done.stdout.decode().splitlines()[-2] == OF_BASE


def test_an_answer_is_about_the_image_before_its_prompt(net_tiny):
    tiny = net_tiny("vlm")
    paths = sorted((tiny / "data" / "images").glob("*.png"))[:2]
    typed = ["/image none.png"]
    for path in paths:
        typed += ["/reset", f"/image {path}", "What is it?"]
    done = script("chat", tiny / "model", *SHORT, input="\n".join(typed), code=0)
    assert "none.png" in done.output.split("Image 1 of")[0]
    first, second = (text.strip() for text in re.split("Image 1 of .*\n", done.output)[1:])
    words = ["--image", paths[1], "--prompt", "What is it?"]
    told = script("generate", tiny / "model", *SHORT, *words, code=0).output
    assert first != second == told.partition("> What is it?\n")[2].strip()


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [(["{tmp}/none"], 64, "none"), (["{model}", "--with_base"], 65, "--with_base")],
)
def test_a_wrong_call_is_one_line(words, code, word, tiny, tmp_path):
    words = [each.format(tmp=tmp_path, model=tiny / "model") for each in words]
    done = script("chat", *words, input="", code=code)
    assert word in done.output and len(done.output.splitlines()) == 1, done.output


def test_a_port_that_is_taken_is_one_line(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = errors_of(script("chat", tiny / "model", "--web", "--port", port, code=64))
    assert f"--port {port}" in line


# ---- In a terminal ----
class Typist:
    """Types into a chat that runs in a terminal of its own, and reads what it shows."""

    def __init__(self, *arguments):
        words = [str(word) for word in (INTERPRETER, CHAT, *arguments)]
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.execve(INTERPRETER, words, environment())
        self.shown = ""

    def sees_more(self, seconds=PATIENCE):
        """Read what is shown within some seconds; whether there was any."""
        if not select.select([self.terminal], [], [], seconds)[0]:
            return False
        self.shown += os.read(self.terminal, 4096).decode(errors="replace")
        return True

    def wait_for(self, text):
        """Read until a text is shown, and return all that was shown until then."""
        while text not in self.shown:
            assert self.sees_more(), self.shown
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text):
        os.write(self.terminal, text.encode())

    def leave_by(self, key):
        """Press a key at the prompt; return the exit code of the chat, and what it showed at last.

        The key is pressed again after a while: readline overlooks a signal in the moment in which
        it begins to wait.
        """
        self.type(key)
        with contextlib.suppress(OSError):  # How Linux says that the other end is closed
            while True:
                if not self.sees_more(20):
                    self.type(key)
        _, status = os.waitpid(self.process, 0)
        self.process = None
        return os.waitstatus_to_exitcode(status), self.shown

    def close(self):
        if self.process is not None:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self.terminal)


@pytest.fixture
def typist():
    typists = []

    def start(*arguments):
        typists.append(Typist(*arguments))
        return typists[-1]

    yield start
    for one in typists:
        one.close()


CTRL_C = "\x03"
CTRL_D = "\x04"
UP = "\x1b[A"


def test_a_conversation_in_a_terminal(runs, typist):
    user = typist(runs / "base", *SHORT)
    assert "/help" in user.wait_for("> ")
    user.type("Who are you?\n")
    assert OF_BASE in user.wait_for("> ")
    user.type(UP + "\n")  # the line before, which only line editing brings back
    assert f"Who are you?\r\n{OF_BASE}" in user.wait_for("> ")
    code, last = user.leave_by(CTRL_D)
    assert code == 0 and "Traceback" not in last


@pytest.fixture(scope="module")
def endless(once):
    """An untrained model, which answers for minutes."""
    return once("chat_endless", make_endless) / "model"


def test_ctrl_c_stops_an_answer_keeps_it_and_leaves_at_the_prompt(endless, typist, tmp_path):
    rows = tmp_path / "rows.jsonl"
    user = typist(endless, "--max_new_tokens", "100000", "--save_to", rows)
    user.wait_for("> ")
    user.type("Tell me a story.\n")
    user.wait_for("story.\r\n")
    assert user.shown or user.sees_more()  # the answer has begun
    user.type(CTRL_C)
    user.wait_for("[stopped]")
    user.wait_for("> ")
    user.type("/save\n")
    assert "only complete answers are trained on" in user.wait_for("> ")
    assert not rows.exists()
    code, last = user.leave_by(CTRL_C)
    assert code == 0 and "Traceback" not in last
