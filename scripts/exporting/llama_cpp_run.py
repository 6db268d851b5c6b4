# SPDX-License-Identifier: Apache-2.0
"""A GGUF that llama.cpp runs, as a contestant of a receipt, through llama-cpp-python."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exits import Exit, first_line, stop
from merging.contestants import Asking, Contestant

INSTALL = "pip install -r requirements-llama-cpp.txt"
F32 = 0  # GGML_TYPE_F32: keys and values that are not rounded, as in transformers


def is_installed() -> bool:
    """Return whether llama-cpp-python is there."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCpp:
    """A GGUF that is loaded in llama.cpp."""

    def __init__(self, path: Path, longest: int) -> None:
        """Load a GGUF; exit with 65 if llama.cpp refuses it.

        Args:
            longest: the most tokens of a prompt and its answer.
        """
        import llama_cpp

        self._library = llama_cpp
        try:
            self._model = llama_cpp.Llama(
                str(path),
                n_ctx=longest,
                n_batch=longest,
                logits_all=True,
                type_k=F32,
                type_v=F32,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            stop(Exit.DATA, f"{path}: llama.cpp cannot load it: {first_line(error)}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model.model)

    @property
    def adds_bos(self) -> bool:
        """Return whether llama.cpp puts the beginning of a text before each prompt."""
        return bool(self._library.llama_vocab_get_add_bos(self._vocabulary))

    def stop_tokens(self) -> frozenset[int]:
        """Return the tokens at which llama.cpp ends an answer."""
        found = set()
        for token in range(self._model.n_vocab()):
            if self._library.llama_vocab_is_eog(self._vocabulary, token):
                found.add(token)
        return frozenset(found)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text that names special tokens, without any that it adds."""
        return self._model.tokenize(text.encode(), add_bos=False, special=True)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits at each token, [tokens, vocabulary], in fp32."""
        self._model.reset()
        self._model.eval(tokens)
        return torch.from_numpy(np.array(self._model.scores[: len(tokens)], dtype=np.float32))

    def answer(self, prompt: Sequence[int], ends: frozenset[int], longest: int) -> list[int]:
        """Return the likeliest tokens after a prompt, up to the first that ends the answer."""
        self._model.reset()
        self._model.eval(prompt)
        answer: list[int] = []
        while len(answer) < longest:
            place = self._model.n_tokens - 1
            token = int(np.argmax(self._model.scores[place]))
            answer.append(token)
            if token in ends:
                break
            self._model.eval([token])
        return answer


def ask(
    name: str,
    path: Path,
    asking: Asking,
    render: Callable[[Any], str],
    reference: Contestant,
    dtype: str,
) -> Contestant:
    """Return a GGUF as a contestant.

    Args:
        render: returns the text that the model sees of a prompt.
        dtype: of its weights, for the table.
    """
    rendered = [render(prompt) for prompt in asking.prompts]
    longest = asking.max_new_tokens + max(len(prompt) for prompt in reference.prompts) + 8
    model = LlamaCpp(path, 2 * longest)
    ends = model.stop_tokens()
    prompts = []
    answers = []
    logits = []
    for place, text in enumerate(rendered):
        tokens = model.tokenize(text)
        prompts.append(tokens)
        answers.append(model.answer(tokens, ends, asking.max_new_tokens))
        whole = [*tokens, *list(reference.tokens[place])[:-1]]
        kept = min(asking.max_new_tokens, len(whole))
        logits.append(model.logits(whole)[-kept:])
    return Contestant(name, dtype, rendered, prompts, answers, logits, ends)
