# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and how its answers and its failures are read."""

import socket

import pytest

from chat_server import completion, serving
from served.client import API_KEY, Server, normalize_url, to_reply

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


def test_variables_of_the_template_are_only_sent_where_there_are_some(stand_in):
    client_of(stand_in).ask(HELLO, 5, {})
    assert "chat_template_kwargs" not in stand_in.questions[0]


def test_a_key_is_sent_where_one_is_set(stand_in, monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)
    client_of(stand_in).ask(HELLO, 5, {})
    monkeypatch.setenv(API_KEY, "secret")
    client_of(stand_in).ask(HELLO, 5, {})
    assert stand_in.keys == [None, "Bearer secret"]


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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>welcome</html>", "not JSON: <html>welcome</html>"),
        (b"", "not JSON: nothing"),
        (b'{"choices": []}', "no chat completion"),
        (b"[1]", "no chat completion"),
        (b'{"choices": [{"message": {"content": ["a"]}}]}', "no chat completion"),
        (b'{"choices": [{"message": "a"}]}', "no chat completion"),
    ],
)
def test_what_is_no_chat_completion_is_refused_in_one_line(body, says, stand_in, capsys):
    stand_in.body = body
    code, line = refusal(capsys, lambda: client_of(stand_in).ask(HELLO, 5, {}))
    assert code == 69 and says in line


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


def test_a_server_that_does_not_answer_is_given_up(stand_in, capsys):
    stand_in.go_on.clear()
    code, line = refusal(capsys, lambda: client_of(stand_in, timeout=0.2).ask(HELLO, 5, {}))
    assert code == 69 and "no answer within 0.2 seconds" in line and "--timeout" in line


def test_where_no_server_listens_one_line_says_so(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Server(f"http://127.0.0.1:{free.getsockname()[1]}/v1", "mine", 5)
        # The port is taken, but no process listens at it
        code, line = refusal(capsys, lambda: server.ask(HELLO, 5, {}))
    assert code == 69 and "refused" in line and "start the server" in line


def test_models_are_listed(stand_in, capsys):
    stand_in.body = b'{"data": [{"id": "one"}, {"id": "two"}]}'
    assert client_of(stand_in).list_models() == ["one", "two"]
    stand_in.body = b'{"models": []}'
    code, line = refusal(capsys, client_of(stand_in).list_models)
    assert code == 69 and "no list of models" in line
    stand_in.status = 500
    code, line = refusal(capsys, client_of(stand_in).list_models)
    assert code == 69 and "name the model by --model" in line


def test_what_a_server_does_not_say_is_unknown():
    reply = to_reply({"choices": [{"message": {"content": None}}]})
    assert reply.text == "" and reply.end is None and reply.logprobs is None
    assert reply.num_prompt_tokens is None and not reply.split_off
    content = completion()
    content["usage"]["prompt_tokens"] = 0
    assert to_reply(content).num_prompt_tokens is None


def test_log_probabilities_are_read_where_there_are_some():
    tokens = [{"token": " a", "logprob": -0.5}, {"token": " b", "logprob": -1}]
    assert to_reply(completion(logprobs={"content": tokens})).logprobs == [-0.5, -1.0]
    assert to_reply(completion(logprobs=None)).logprobs is None


@pytest.mark.parametrize(
    ("key", "says"), [("reasoning_content", "reasoning"), ("reasoning", "reasoning")]
)
def test_what_a_parser_split_off_is_named(key, says):
    assert to_reply(completion(message={"content": "b", key: "a"})).split_off == (says,)
    called = completion(message={"content": None, "tool_calls": [{"function": {}}]})
    assert to_reply(called).split_off == ("calls of tools",)


@pytest.mark.parametrize(
    ("url", "normalized"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("https://host/some/api", "https://host/some/api"),
    ],
)
def test_an_address_without_a_path_is_that_of_version_1(url, normalized):
    assert normalize_url(url) == normalized


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc/hosts", "http://", "runs/tiny"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="not an address"):
        normalize_url(url)
