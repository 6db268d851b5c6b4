# SPDX-License-Identifier: Apache-2.0
"""A loaded model as lm-eval asks it: with the tokens and the end of an answer of the recipes."""

import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from core.chat import ChatTemplate
from core.data import tokenize_text
from core.generation import answer_in, around_answer, greedy_options
from evaluation.contestants import Contestant
from generation.answering import Answerer


class AskedModel(HFLM):
    """A model of transformers or peft that also scores tokens which are given as such.

    Its progress bars are only shown on a terminal: lm-eval ignores tqdm's TQDM_DISABLE.

    Attributes:
        template: that of a model that is asked as a chat, or None.
    """

    template: ChatTemplate | None = None

    def loglikelihood_of_tokens(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of tokens in nats, and whether each is the likeliest.

        Args:
            requests: with the text of the prompt, the tokens before, and those to score.
        """
        pairs = []
        for request in requests:
            text, before, tokens = request.args
            pairs.append(((text, ""), before, tokens))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each request, without what a chat template writes around it."""
        answers = super().generate_until(requests, disable_tqdm or is_silent())
        if self.template is None or not any(around_answer(self.template)):
            return answers
        return [answer_in(self.template, answer) for answer in answers]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text in nats."""
        return super().loglikelihood_rolling(requests, disable_tqdm or is_silent())

    def _model_generate(self, *args: Any, **options: Any) -> Any:
        # Not by the generation config of the base, which may punish words that are repeated
        return super()._model_generate(*args, **greedy_options(self.model) | options)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        return super()._loglikelihood_tokens(requests, disable_tqdm or is_silent(), override_bs)


def is_silent() -> bool:
    """Return whether there is no terminal that could show progress."""
    return not sys.stderr.isatty()


def as_chat(model: Any, contestant: Contestant, batch_size: int, longest: int | None) -> AskedModel:
    """Return a model that is asked what a chat template rendered.

    The text has all special tokens, so the tokenizer adds none; an answer ends with the turn.

    Args:
        longest: the most tokens of a prompt and its answer; None as lm-eval finds them.
    """
    answerer = Answerer(model, contestant.template, temperature=0, max_new_tokens=1)
    model.generation_config.eos_token_id = answerer.stop_tokens
    asked = ask(model, contestant, batch_size, max_length=longest, add_bos_token=False)
    asked.template = contestant.template
    return asked


def as_text(model: Any, contestant: Contestant, batch_size: int) -> AskedModel:
    """Return a model that is asked plain text, with the special tokens of its tokenizer."""
    tokenizer = contestant.tokenizer
    tokens = tokenize_text("a", tokenizer)
    if tokens != tokenizer("a")["input_ids"]:  # It appends an end, and lm-eval continues the text
        tokenizer.add_bos_token = tokens[0] == tokenizer.bos_token_id
        tokenizer.add_eos_token = False
    return ask(model, contestant, batch_size)


def ask(model: Any, contestant: Contestant, batch_size: int, **options: Any) -> AskedModel:
    """Return a model for lm-eval, which computes likelihoods in fp32 whatever its weights are.

    The weights stay as they were loaded. lm-eval ties those of each model that it is given
    (lm_eval/models/huggingface.py, HFLM.__init__, seen in lm-eval 0.4.13). transformers did so
    while it loaded the model, but for an output head with values of its own, which lm-eval would
    replace by the embeddings. Where the head is a whole module beside adapters, lm-eval would end
    with a KeyError.
    """
    model.tie_weights = tie_nothing
    try:
        return AskedModel(
            pretrained=model,
            backend="causal",
            tokenizer=contestant.tokenizer,
            batch_size=batch_size,
            softmax_dtype="float32",
            trust_remote_code=False,
            chat_template_args=contestant.settings,
            **options,
        )
    finally:
        del model.tie_weights


def tie_nothing() -> None:
    """Stand in for a model's tie_weights."""
