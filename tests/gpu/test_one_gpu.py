"""Each strategy trains in bf16 on one real GPU; flash attention and the levers give the loss without them."""

import sys

import pytest
import torch
from launching import CONFIGS, RECIPE, REPO, data_of, read_metrics, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")
QLORA = ["--use_peft", "--load_in_4bit", "--dtype", "bfloat16"]
ONE_RANK = sorted(path.stem for path in CONFIGS.glob("*.yaml") if "hybrid" not in path.stem)  # hybrid needs four


def train(config, tiny, output_dir, *options):
    command = [sys.executable, REPO / "scripts" / "rehearse.py", "--config_file", CONFIGS / f"{config}.yaml"]
    command += ["--device", "cuda", "--num_processes", 1, RECIPE, *data_of(tiny)]
    job = ["--max_steps", 20, "--learning_rate", "1e-3", "--per_device_train_batch_size", 16]
    done = run(*command, *job, "--output_dir", output_dir, *options)
    assert done.returncode == 0, done.output[-3000:]
    return [line["loss"] for line in read_metrics(output_dir)[0]]


@pytest.mark.parametrize("config", ONE_RANK)
@pytest.mark.parametrize("options", [[], QLORA], ids=["full", "qlora"])
def test_every_strategy_trains_on_a_gpu(config, options, tiny, tmp_path):
    if options and config in ("fsdp1_no_shard", "fsdp1_shard_grad_op"):
        pytest.skip("the recipe refuses a 4-bit base there")
    losses = train(config, tiny, tmp_path / "run", *options)
    assert losses[-1] < losses[0]


def test_flash_attention_gives_the_loss_of_sdpa(tiny, tmp_path):
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    sdpa = train("single", tiny, tmp_path / "sdpa")
    flash = train("single", tiny, tmp_path / "flash", "--attn_implementation", "flash_attention_2")
    assert flash == pytest.approx(sdpa, rel=2e-2)  # bf16 keeps eight bits


@pytest.mark.parametrize("flags", [["--packing", "--max_length", 128], ["--padding_free"]], ids=["packed", "free"])
def test_rows_in_one_line_of_flash_attention_give_the_loss_of_block_masks(flags, tiny, tmp_path):
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    sdpa = train("single", tiny, tmp_path / "sdpa", *flags)
    flash = train("single", tiny, tmp_path / "flash", *flags, "--attn_implementation", "flash_attention_2")
    assert flash == pytest.approx(sdpa, rel=2e-2)


@pytest.mark.parametrize("flags", [["--torch_compile", "--packing", "--max_length", 128], ["--max_logits_mib", 0.02],
                                   ["--logging_steps", 5]], ids=lambda flags: flags[0])
def test_levers_give_the_loss_without_them(flags, tiny, tmp_path):
    packed = flags[1:] if "--packing" in flags else []
    plain = train("single", tiny, tmp_path / "plain", *packed)
    assert train("single", tiny, tmp_path / "lever", *flags) == pytest.approx(
        plain if "--logging_steps" not in flags else plain[4::5], rel=2e-2)
