# SPDX-License-Identifier: Apache-2.0
"""How a tiny chat model writes a conversation: its special tokens and its chat template."""

PAD = "<|pad|>"
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
END_OF_TURN = "<|end_of_turn|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
NAMED_TOKENS = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
SPECIAL_TOKENS = [PAD, BOS, EOS, END_OF_TURN, *ROLES]
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)  # a token for each byte, so that any text can be encoded

# A role token, the text, an end-of-turn token; `generation` marks what the assistant says
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end_of_turn|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end_of_turn|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
