# SPDX-License-Identifier: Apache-2.0
"""A merge holds one file of the base and one layer in memory, and not the whole model."""

import os
import subprocess
import sys

import pytest

from adapter_folders import make_base, write_adapters
from launching import REPO

# Merges in a process of its own, and prints the bytes that its private memory grew by at its peak
PROBE = """
import sys, threading, time
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
import torch
from merging import shards, writing
from merging.adapter import read_adapter_folder
from merging.plan import make_plan
from merging.skeleton import read_skeleton

torch.ones(300, 300) @ torch.ones(300, 300)  # what a first product allocates for good
adapter = read_adapter_folder(sys.argv[3])
files = shards.find_files(adapter.base, "main")
plan = make_plan(adapter, read_skeleton(adapter), files.names)

def private_memory():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

peak = before = private_memory()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, private_memory())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
output = Path(sys.argv[4])
output.mkdir()
dtype = torch.float32
writing.write_weights(output, adapter, plan, files, False, dtype)
done = True
thread.join()
print(peak - before)
"""


def test_the_peak_is_the_largest_file_and_one_layer(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("private memory is read from /proc")
    shape = "--hidden_size 512 --intermediate_size 1024 --num_hidden_layers 8".split()
    base = make_base(tmp_path / "base", "llama", *shape, shard="10MB")
    adapters = write_adapters(tmp_path / "adapters", base, target_modules="all-linear")
    sizes = [path.stat().st_size for path in (base / "model").glob("*.safetensors")]
    layer = 512 * 1024 * 4  # bytes of the largest parameter in fp32
    assert len(sizes) >= 6
    words = [sys.executable, "-c", PROBE, REPO / "scripts", REPO / "recipes", adapters]
    words.append(tmp_path / "merged")
    # Otherwise glibc would keep what is freed, and the peak would be that of its habits
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    # Two copies of a layer: what the adapter adds, and the sum; and what the allocator keeps
    assert 0.5 * max(sizes) < grown < max(sizes) + 3 * layer + 4 * 2**20, (grown, sizes)
    assert grown < 0.5 * sum(sizes)
