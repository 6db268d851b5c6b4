# SPDX-License-Identifier: Apache-2.0
"""A Mixtral, and the rows of the llama maker.

A token takes two of the --num_local_experts experts of each layer, each --intermediate_size wide.
"""

from dataclasses import replace

from tiny import llama
from tiny.maker import DECODER

SHAPE = DECODER | {"intermediate_size": 192, "num_local_experts": 4}
MAKER = replace(llama.MAKER, model_type="mixtral", shape=SHAPE)
make_rows = llama.make_rows
