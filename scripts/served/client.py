# SPDX-License-Identifier: Apache-2.0
"""Questions to a server over HTTP, in the form of OpenAI's chat completions.

Only what all servers know is sent, and answers are not streamed. The form is that of
https://platform.openai.com/docs/api-reference/chat.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from core.chat import Message
from exits import Exit, first_line, stop

API_KEY = "OPENAI_API_KEY"  # variable with the key of a server that asks for one
MODELS = "/models"
LONGEST_SHOWN = 200  # characters of a server's own words in a message


@dataclass(frozen=True)
class Reply:
    """A server's answer to one conversation.

    Attributes:
        text: of the answer, without what the server split off.
        end: why it ended: "stop", or "length" at the most tokens; None if the server does not say.
        num_prompt_tokens: tokens of the conversation; None if the server does not say.
        logprobs: of each token of the answer, as natural logarithms; None if the server has none.
        split_off: what the server's parsers took out of the text, such as "reasoning".
    """

    text: str
    end: str | None = None
    num_prompt_tokens: int | None = None
    logprobs: Sequence[float] | None = None
    split_off: Sequence[str] = ()


@dataclass(frozen=True)
class Server:
    """A server, and the name under which it has a model.

    Attributes:
        url: without a slash at its end, such as http://127.0.0.1:8000/v1.
        timeout: seconds without an answer after which a question is given up.
    """

    url: str
    model: str
    timeout: float

    def ask(
        self, messages: Sequence[Message], max_new_tokens: int, settings: Mapping[str, Any]
    ) -> Reply:
        """Return the likeliest answer to a conversation.

        Raises SystemExit with 64 if the server rejects the question, with 69 if it has no answer.

        Args:
            settings: variables of the chat template.
        """
        question: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": max_new_tokens,
            "logprobs": True,  # Servers without them ignore it
        }
        if settings:
            question["chat_template_kwargs"] = dict(settings)
        content = self._exchange("/chat/completions", question)
        try:
            return to_reply(content)
        except (LookupError, TypeError, ValueError, AttributeError):
            self._give_up(f"this is no chat completion: {shorten(json.dumps(content))}")

    def list_models(self) -> list[str]:
        """Return the names of the models that a server lists.

        Raises SystemExit with 69 if it lists none.
        """
        content = self._exchange(MODELS, None)
        try:
            return [str(model["id"]) for model in content["data"]]
        except (LookupError, TypeError):
            self._give_up(f"this is no list of models: {shorten(json.dumps(content))}")

    def _exchange(self, path: str, question: Mapping[str, Any] | None) -> Any:
        """Return what the server answers, as JSON; without a question it is only asked for a page.

        Raises SystemExit as `ask` does.
        """
        request = Request(self.url + path, headers={"Content-Type": "application/json"})
        if question is not None:
            request.data = json.dumps(question).encode()
        if API_KEY in os.environ:
            request.add_header("Authorization", f"Bearer {os.environ[API_KEY]}")
        try:
            with build_opener(NoRedirects).open(request, timeout=self.timeout) as response:
                answer = response.read()
        except HTTPError as error:
            self._refuse(error, path)
        except TimeoutError:
            self._give_up(f"no answer within {self.timeout:g} seconds; give a longer --timeout")
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                self._give_up(f"no connection within {self.timeout:g} seconds")
            self._give_up(f"{reason}; start the server, or correct --url")
        try:
            return json.loads(answer)
        except ValueError:
            self._give_up(f"this is not JSON: {shorten(answer.decode(errors='replace'))}")

    def _refuse(self, error: HTTPError, path: str) -> NoReturn:
        """Exit with the code for an HTTP status, and with the server's own words."""
        try:
            words = error.read().decode(errors="replace")
        except (OSError, HTTPException) as cause:
            words = first_line(cause)
        what = f"{self.url}{path} answers with {error.code}: {shorten(words)}"
        if path == MODELS:
            stop(Exit.NO_HUB, f"{what}; name the model by --model")
        if error.code >= 500:
            stop(Exit.NO_HUB, f"{what}; its log says more")
        stop(Exit.USAGE, f"{what}; --model must be the name that the server knows, --url its API")

    def _give_up(self, reason: str) -> NoReturn:
        stop(Exit.NO_HUB, f"{self.url}: {reason}")


class NoRedirects(HTTPRedirectHandler):
    """Follows no redirects, since the key would be sent to another server too."""

    def redirect_request(self, *words: Any, **options: Any) -> None:
        """Return no request, so that the redirect is an error."""


def to_reply(content: Any) -> Reply:
    """Return a chat completion as a reply.

    Raises LookupError, TypeError, ValueError or AttributeError for what is none.
    """
    choice = content["choices"][0]
    message = choice["message"]
    text = message.get("content") or ""
    if not isinstance(text, str):
        raise TypeError("the content is not a text")
    usage = content.get("usage") or {}
    number = usage.get("prompt_tokens")
    logprobs = (choice.get("logprobs") or {}).get("content")
    if logprobs is not None:
        logprobs = [float(token["logprob"]) for token in logprobs]
    return Reply(
        text=text,
        end=choice.get("finish_reason"),
        num_prompt_tokens=number or None,  # Some servers write 0 for a prompt that they remember
        logprobs=logprobs or None,
        split_off=tuple(find_split_off(message)),
    )


def find_split_off(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a server's parsers took out of the text of an answer."""
    if message.get("reasoning_content") or message.get("reasoning"):
        yield "reasoning"
    if message.get("tool_calls"):
        yield "calls of tools"


def normalize_url(url: str) -> str:
    """Return the address of a server's API, where `/v1` is added to one without a path.

    Raises ValueError for what is no address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url}: not an address such as http://127.0.0.1:8000/v1")
    url = url.rstrip("/")
    if not parts.path.strip("/"):
        return f"{url}/v1"
    return url


def shorten(words: str) -> str:
    """Return the beginning of a server's words, in one line."""
    words = " ".join(words.split())
    if len(words) > LONGEST_SHOWN:
        return f"{words[:LONGEST_SHOWN]}..."
    return words or "nothing"
