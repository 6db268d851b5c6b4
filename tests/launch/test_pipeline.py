# SPDX-License-Identifier: Apache-2.0
"""A dry run of recipes/llama_pipeline.py, and what cannot be cut into stages.

The numbers of pipelines are in test_cells.py, stopped runs in test_chains.py.
"""

import shutil

from transformers import AutoConfig, AutoModelForCausalLM

import net
from net import Cell

STAGES = Cell("pp", "llama_pipeline", ranks=2, sharing=2)


def test_a_dry_run_describes_the_whole_model_and_writes_nothing(net_tiny, tmp_path):
    tiny = net_tiny("llama")
    done = net.launch(STAGES, tiny, tmp_path / "run", "--dry_run").expect(0)
    said = " ".join(done.output.split())
    assert "2 stages of 1 + 1 layers on 2 ranks" in said
    assert "3 rows x 4 accumulated x 1 in parallel = 12 rows per step" in said
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    assert f"{model.num_parameters():,} parameters" in said
    assert "Loading weights" not in said and not (tmp_path / "run").exists()


def test_a_model_of_a_family_that_cannot_be_cut_is_refused(net_tiny, tmp_path):
    tiny = shutil.copytree(net_tiny("llama"), tmp_path / "tiny")
    vocabulary = AutoConfig.from_pretrained(tiny / "model").vocab_size
    AutoConfig.for_model("gpt2", vocab_size=vocabulary).save_pretrained(tiny / "model")
    done = net.launch(STAGES, tiny, tmp_path / "run").expect(64)
    assert "GPT2LMHeadModel" in done.output and "Loading weights" not in done.output
