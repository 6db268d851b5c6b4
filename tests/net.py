"""What each recipe did before it was rewritten (at commit 62468fd), and how runs are compared.

A recording holds what must not change while code moves: the metrics of twenty steps, and hashes of
the final weights and of the tensors in each checkpoint. It goes when the rewrite is done.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

RECORDINGS = Path(__file__).with_name("recordings")
# Of the machine, not of the recipe
MEASURED = ("tokens_per_second", "images_per_second", "peak_memory_gib")
STEPS = [
    "--max_steps",
    "20",
    "--save_steps",
    "10",
    "--eval_strategy",
    "steps",
    "--eval_steps",
    "10",
]
CASES = {
    "llama": [],
    "llama-packing": ["--packing", "--gradient_accumulation_steps", "2", "--max_length", "128"],
    "llama-lora": ["--use_peft", "--lora_dropout", "0.1", "--padding_free"],
    "llama_dpo": [],
    "llama_dpo-lora": ["--use_peft", "--loss_type", "orpo"],
    "mistral_pretrain": ["--warmup_steps", "0.2"],
    "mixtral": ["--gradient_accumulation_steps", "2"],
    "t5": ["--train_sampling_strategy", "group_by_length", "--predict_with_generate"],
    "bert": ["--lr_scheduler_type", "cosine", "--weight_decay", "0.1"],
    "bert_ner": ["--label_all_tokens", "--weight_decay", "0.1"],
    "vit": ["--eval_on_start"],
}


def recipe_of(case):
    return case.partition("-")[0]


def words_of(case, data, output_dir):
    """The arguments of a case's run."""
    flags = [
        flag
        for flag in CASES[case]
        if flag != "--eval_on_start" or recipe_of(case) in ("bert", "vit")
    ]
    return [*map(str, data), *STEPS, *flags, "--output_dir", str(output_dir)]


def hash_of_tensors(path):
    """A hash of names, types, shapes and values of all tensors in a file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_of_this_machine():
    """A hash of what this processor makes of a training step: others may round in another order."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(96, 96)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    inputs = torch.randn(64, 96, generator=generator)
    torch.nn.functional.cross_entropy(layer(inputs), torch.arange(64)).backward()
    return hashlib.sha256(layer.weight.grad.numpy().tobytes()).hexdigest()


def read_run(folder):
    """What a run has left that must not change."""
    folder = Path(folder)
    metrics = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics.append(
            {key: value for key, value in json.loads(line).items() if key not in MEASURED}
        )
    checkpoints = {}
    for path in sorted(folder.glob("checkpoint-*")):
        checkpoints[path.name] = {
            "files": sorted(file.name for file in path.iterdir()),
            "tensors": hash_of_tensors(path / "state.safetensors"),
        }
    [weights] = [*folder.glob("model.safetensors"), *folder.glob("adapter_model.safetensors")]
    return {"metrics": metrics, "checkpoints": checkpoints, "weights": hash_of_tensors(weights)}
