# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and how its answers and its failures are read."""

import socket

import pytest

from chat_server import completion, serving
from served.client import API_KEY, Server, to_reply

HELLO = [{"role": "user", "content": "Hello"}]


def client_of(stand_in, timeout=10.0):
    return Server(f"http://127.0.0.1:{stand_in.server_port}/v1", "mine", timeout)


def refusal(capsys, call):
    """The code and the one line with which a call ends."""
    with pytest.raises(SystemExit) as ended:
        call()
    (line,) = capsys.readouterr().err.splitlines()
    return ended.value.code, line


def test_the_likeliest_answer_is_asked_for(stand_in):
    reply = client_of(stand_in).ask(HELLO, 5, {"enable_thinking": False})
    assert reply.text == " a b" and reply.end == "stop" and reply.num_prompt_tokens == 7
    (question,) = stand_in.questions
    assert question["model"] == "mine" and question["messages"] == HELLO
    assert question["temperature"] == 0 and question["max_tokens"] == 5
    assert question["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [(500, 69, "its log says more"), (503, 69, "log"), (404, 64, "--model"), (400, 64, "--model")],
)
def test_an_error_of_the_server_is_one_line_with_its_own_words(
    status, code, says, stand_in, capsys
):
    stand_in.status = status
    stand_in.body = b'{"detail":\n "the model is on fire"}'
    found, line = refusal(capsys, lambda: client_of(stand_in).ask(HELLO, 5, {}))
    assert found == code and says in line
    assert f"answers with {status}" in line and "the model is on fire" in line


def test_a_key_is_not_sent_to_where_a_server_redirects(stand_in, capsys, monkeypatch):
    monkeypatch.setenv(API_KEY, "secret")
    with serving() as other:
        stand_in.status = 307
        stand_in.location = f"http://127.0.0.1:{other.server_port}/v1/chat/completions"
        code, line = refusal(capsys, lambda: client_of(stand_in).ask(HELLO, 5, {}))
        assert code == 64 and "answers with 307" in line
        stand_in.models = ["mine"]
        code, line = refusal(capsys, client_of(stand_in).list_models)
        assert code == 69 and not other.keys


def test_where_no_server_listens_one_line_says_so(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Server(f"http://127.0.0.1:{free.getsockname()[1]}/v1", "mine", 5)
        # The port is taken, but no process listens at it
        code, line = refusal(capsys, lambda: server.ask(HELLO, 5, {}))
    assert code == 69 and "refused" in line and "start the server" in line


def test_log_probabilities_are_read_where_there_are_some():
    tokens = [{"token": " a", "logprob": -0.5}, {"token": " b", "logprob": -1}]
    assert to_reply(completion(logprobs={"content": tokens})).logprobs == [-0.5, -1.0]
    assert to_reply(completion(logprobs=None)).logprobs is None
