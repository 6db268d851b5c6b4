# SPDX-License-Identifier: Apache-2.0
"""What a run has saved, loaded as a user would, without the recipe that trained it."""

import json

import torch

import llama
from components.chat_template import ChatTemplate


def loss_of_saved(output_dir, kind, tiny):
    """Load a result of recipes/llama.py in this process, and return its loss on the rows to
    evaluate.

    Args:
        kind: of weights, a key of WEIGHTS in evidence/proof/jobs.py.
        tiny: the folder of the model and the rows with which it was trained.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    quantization = {
        "int8 LoRA": BitsAndBytesConfig(load_in_8bit=True),
        "nf4 LoRA": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype="float32",
            bnb_4bit_quant_storage="float32",
        ),
    }.get(kind)
    folder = output_dir if kind == "full" else tiny / "model"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", quantization_config=quantization
    )
    model = model if kind == "full" else PeftModel.from_pretrained(model, output_dir)
    model.eval()
    assert all(not parameter.is_meta for parameter in model.parameters())
    if kind != "full":
        lora_b = [weight for name, weight in model.named_parameters() if "lora_B" in name]
        assert lora_b and all(
            weight.abs().sum() > 0 for weight in lora_b
        )  # the trained adapters, not new ones
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    loss, count = 0.0, 0
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # bitsandbytes' own bf16 path would round
    with torch.no_grad():
        for line in (tiny / "data" / "test.jsonl").read_text().splitlines():
            row = llama.tokenize_row(json.loads(line), ChatTemplate(tokenizer), 1024)
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            loss += model(input_ids=ids, labels=labels, num_items_in_batch=1).loss.item()
            count += (labels[:, 1:] != -100).sum().item()
    return loss / count
