# SPDX-License-Identifier: Apache-2.0
"""scripts/chat.py in the terminal and through a pipe, with what the recipe trained."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from chatting_runs import OF_ADAPTERS, OF_BASE, environment, make_endless, train_runs
from launching import INTERPRETER, REPO, run

CHAT = REPO / "scripts" / "chat.py"
SHORT = ["--max_new_tokens", "40"]
PATIENCE = 60  # seconds until a line has to come, on a busy machine


def chat(*arguments, **options):
    return run(sys.executable, CHAT, *arguments, **options)


@pytest.fixture(scope="module")
def runs(once):
    return once("chat_runs", train_runs)


# ---- Through a pipe ----
def test_prompts_through_a_pipe_are_answered_in_turn(runs):
    done = chat(runs / "base", *SHORT, input="Who are you?\nAnd now?\n")
    assert done.returncode == 0
    assert done.output.splitlines() == [OF_BASE, OF_BASE, ""]


def test_adapters_and_their_base_answer_side_by_side(runs):
    names = [runs / "first", runs / "second"]
    done = chat(*names, "--with_base", *SHORT, input="Who are you?\n")
    assert done.returncode == 0, done.output
    answers = [*OF_ADAPTERS, OF_BASE]
    assert [line for line in done.output.splitlines() if line in answers] == answers


def test_a_saved_conversation_is_a_row_that_the_recipe_trains_on(runs, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    typed = f"Who are you?\n/model 2\nAnd now?\n/save {rows}\n"
    done = chat(runs / "first", runs / "second", *SHORT, "--system", "Be brief.", input=typed)
    assert f"{rows} has 2 rows." in done.output, done.output
    saved = json.loads(rows.read_text().splitlines()[1])["messages"]
    assert [message["role"] for message in saved] == ["system"] + 2 * ["user", "assistant"]
    assert saved[-1]["content"] == OF_ADAPTERS[1]
    words = ["--model_name_or_path", runs / "base", "--dataset_name", rows, "--dry_run"]
    recipe = [sys.executable, REPO / "recipes" / "llama.py", *words]
    assert run(*recipe, "--output_dir", tmp_path / "run").returncode == 0


def test_what_goes_wrong_in_a_conversation_is_a_line_and_does_not_end_it(runs):
    typed = [b"/nothing", b"word " * 500, b"\xff\xfe", b"/save /none/rows.jsonl", b"Who are you?"]
    command = [sys.executable, CHAT, runs / "base", *SHORT]
    options = {"capture_output": True, "timeout": PATIENCE, "check": True}
    done = subprocess.run(command, input=b"\n".join(typed), **options)
    errors = done.stderr.decode().splitlines()
    assert len([line for line in errors if line.startswith("error: ")]) == 3, errors
    assert b"Traceback" not in done.stderr
    assert done.stdout.decode().splitlines()[-2] == OF_BASE


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["{tmp}/none"], 64, "none"),
        (["{model}", "--temperature", "-1"], 64, "--temperature"),
        (["{model}", "{model}"], 64, "twice"),
        (["{model}", "--port", "80"], 64, "--web"),
        (["{model}", "--save_to", "rows.txt"], 64, ".jsonl"),
        (["{model}", "--chat_template_kwargs", "1"], 64, "JSON"),
        (["{model}", "--with_base"], 65, "--with_base"),
    ],
)
def test_a_wrong_call_is_one_line(arguments, code, word, tiny, tmp_path):
    words = [each.format(tmp=tmp_path, model=tiny / "model") for each in arguments]
    done = chat(*words, input="")
    assert done.returncode == code and word in done.output, done.output
    assert len(done.output.splitlines()) == 1


def test_a_page_without_gradio_is_one_line_with_the_fix(tiny):
    """An environment without it is one whose search for packages does not find it."""
    hide = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: (\n"
        "    None if name == 'gradio' else find(name, *rest))\n"
        f"sys.argv = ['chat.py', {str(tiny / 'model')!r}, '--web']\n"
        f"sys.path.insert(0, {str(CHAT.parent)!r})\n"
        f"runpy.run_path({str(CHAT)!r}, run_name='__main__')\n"
    )
    done = run(sys.executable, "-c", hide)
    assert done.returncode == 64 and "requirements-chat.txt" in done.output
    assert "Traceback" not in done.output


# ---- In a terminal ----
class Typist:
    """Types into a chat that runs in a terminal of its own, and reads what it shows."""

    def __init__(self, *arguments):
        self.terminal, inner = pty.openpty()
        words = [INTERPRETER, CHAT, *arguments]
        self.process = subprocess.Popen(
            [str(word) for word in words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment(),
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(inner)
        self.shown = ""

    def wait_for(self, text):
        """Read until a text is shown, and return all that was shown until then."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.terminal], [], [], 1)[0]:
                self.shown += os.read(self.terminal, 4096).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait_for_anything(self):
        """Wait until more is shown than what was waited for."""
        if not self.shown:
            assert select.select([self.terminal], [], [], PATIENCE)[0]
            self.shown = os.read(self.terminal, 4096).decode(errors="replace")

    def type(self, text):
        os.write(self.terminal, text.encode())

    def leave_by(self, key):
        """Press a key at the prompt; return the exit code of the chat, and what it showed at last.

        The key is pressed again after a while: readline overlooks a signal in the moment in which
        it begins to wait.
        """
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        code = self.process.poll()
        last = self.shown
        try:
            while chunk := os.read(self.terminal, 4096):
                last += chunk.decode(errors="replace")
        except OSError:  # how Linux reports that the other end of a terminal is closed
            pass
        return code, last

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


def take_terminal():
    """Make the terminal that of the new session, so that Ctrl-C in it is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


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
    user.type("/system Be\\\n")
    user.wait_for(". ")
    user.type("brief.\n")
    user.wait_for("> ")
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
    user.wait_for_anything()  # the answer has begun
    user.type(CTRL_C)
    user.wait_for("[stopped]")
    user.wait_for("> ")
    user.type("/save\n")
    assert "only complete answers are trained on" in user.wait_for("> ")
    assert not rows.exists()
    code, last = user.leave_by(CTRL_C)
    assert code == 0 and "Traceback" not in last
