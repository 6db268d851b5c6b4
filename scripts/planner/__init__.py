# SPDX-License-Identifier: Apache-2.0
"""How much memory a training run takes, worked out before anything is loaded.

The package answers one question for `scripts/plan_memory.py`: what does each GPU hold at the worst
moment of an optimizer step, and why? It answers by two methods, which are compared with each other
and with real tensors:

- the closed form follows a step op by op over sizes only, as autograd, DDP, FSDP and DeepSpeed
  allocate and free tensors. It takes about a second for any model and any number of ranks;
- the trace runs the real model on fake tensors and fake ranks, and records every allocation.

The modules in reading order; each imports only modules above it:

    errors        how the planner refuses: one line and an exit code
    mesh          the mesh, and what cannot run on it
    recipe        what the planner needs from the recipes
    yaml_files    what the planner needs from accelerate configs
    request       a call of plan_memory.py, and the micro-batch to plan for
    cards         the memory of GPUs, and what a process takes besides tensors
    shapes        the model on the meta device: shapes without bytes
    plan          what determines memory: arguments, engine, sharding, precision

    ledger        bytes held now and at the peak
    autograd      ops, graphs and backward passes over sizes
    decoder       which weights a decoder has, and what each is for
    splits        what a rank has of them under tensor or expert parallelism
    mixture       the experts of a layer, and the loss of their routers
    loss          the recipe's loss, computed at once or in pieces
    blocks        the forward pass of a decoder
    ranks         what a rank holds: replicas, and what all sharded engines share
    fsdp          FSDP2 and FSDP1
    zero          DeepSpeed ZeRO, stages 0 to 2
    zero3         DeepSpeed ZeRO-3
    closed_form   one optimizer step, in a ledger
    stages        the stages of a pipeline, driven by torch's schedules
    pipeline      the same step on each rank of a pipeline

    trackers      torch's memory trackers, adapted
    patches       what the trace changes in other libraries
    fake_ranks    the ranks of a plan in name only
    trace         the same step, traced on fake tensors

    saving        the host memory of saving a checkpoint

    cost          what a step costs, for ranking only
    search        the largest number that fits
    candidates    every way to run on a card, and how far it goes
    remedies      what to change if nothing fits
    commands      the command that launches a way to run

    output        a plan as text and as JSON
    table         ways to run as text and as JSON
    plot          pictures of plans
    answer        from a request to its answer

"""

import paths  # noqa: F401  recipes/ becomes importable
