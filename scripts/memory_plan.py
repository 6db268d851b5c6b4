"""From a launch to a plan: the peak of a device's memory, by what holds it.

`plan_of` reads YAML and arguments, with the refusals of recipe and rehearsal; `closed_form` writes one optimizer step
into a ledger.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

import preflight
from components.config_strategy import strategy_of, strategy_run
from memory_blocks import PROJECTIONS, Forward, read
from memory_ledger import Autograd, Ledger, Weight
from memory_ranks import LOW, Fsdp1, Fsdp2, Whole
from memory_zero import Zero, Zero3
from model_shapes import Quantized, Unplannable, build


@dataclass
class Plan:
    """What decides about memory: the recipe's arguments, and what the YAML and the launcher say.

    engine: single, ddp, fsdp1, fsdp2 or zero. stage: ZeRO's. shards: ranks that share parameters. reshards: whether
    parameters are let go between forward and backward pass. mixed_precision: no, bf16 or fp16."""

    args: Namespace
    engine: str = "single"
    stage: int = 0
    ranks: int = 1
    shards: int = 1
    reshards: bool = True
    mixed_precision: str = "no"
    offloads_parameters: bool = False
    offloads_optimizer: bool = False
    wraps: bool = True  # FSDP: a layer is a unit; else the whole model is one
    prefetches: bool = (
        False  # FSDP1: gathers the next unit while one computes its backward pass (BACKWARD_PRE)
    )
    name: str = ""
    gathers_tail_first: bool = field(default=False, init=False)  # FSDP2 with tied embeddings, FSDP1

    @property
    def low(self):
        """Bytes an element of mixed precision, or None."""
        return LOW.get(self.mixed_precision)

    @property
    def autocasts(self):
        """accelerate autocasts the forward pass, but for DeepSpeed, which casts the model itself."""
        return self.mixed_precision if self.low and self.engine != "zero" else None

    @property
    def casts(self):
        """The dtype that DeepSpeed casts the model to, or None."""
        return (
            {"bf16": "bfloat16", "fp16": "float16"}.get(self.mixed_precision)
            if self.engine == "zero"
            else None
        )

    @property
    def keeps_gradients(self):
        return self.engine == "ddp"

    @property
    def offloads(self):
        return self.offloads_parameters


def layers_of(model):
    return next(
        module for module in model.base_model.children() if isinstance(module, torch.nn.ModuleList)
    )


def add_adapters(plan, model, decoder):
    """Give the projections their A [r, in] and B [out, r] in fp32, as peft does; return them by layer."""
    args, made = plan.args, []
    wanted = args.lora_target_modules
    for layer, module in zip(decoder.layers, layers_of(model), strict=True):
        own = []
        for path, one in module.named_modules():
            leaf = path.rpartition(".")[2]
            if (
                isinstance(one, torch.nn.Linear)
                and leaf in PROJECTIONS
                and (wanted == ["all-linear"] or leaf in wanted)
            ):
                width = plan.low if plan.low and plan.engine in ("fsdp1", "fsdp2", "zero") else 4
                a, b = (
                    Weight(args.lora_r * size, width, True, rows, stored=4, kind="adapters")
                    for size, rows in (
                        (one.in_features, args.lora_r),
                        (one.out_features, one.out_features),
                    )
                )
                layer.projections[PROJECTIONS[leaf]].adapters = a, b
                own += [a, b]
        made.append(own)
    if not any(made):
        raise Unplannable(f"--lora_target_modules {' '.join(wanted)}: no such layers in this model")
    return made


def plan_of(args, config, num_processes=None, num_machines=None, mixed_precision=None):
    """Return the Plan of the recipe's arguments under an accelerate config (config_reading.as_read).

    Raises Unplannable with what the recipe would refuse, or where the ranks cannot be had."""
    facts = strategy_of(config)
    engine, mesh = facts["engine"], facts["replicas"] * facts["shards"]
    ranks = (
        num_processes if num_processes is not None else max(config.get("num_processes") or 1, mesh)
    )
    machines = config.get("num_machines", 1) if num_machines is None else num_machines
    if ranks < 1 or machines < 1 or ranks % machines:
        raise Unplannable(
            f"--num_processes {ranks} on {machines} machines: must be 1 or more, and the same number on each"
        )
    if mesh and ranks != mesh:
        raise Unplannable(
            f"the config's mesh is {facts['replicas']} x {facts['shards']}: not {ranks} processes but {mesh}"
        )
    if engine == "single" and ranks > 1:
        raise Unplannable(
            f"the config is for one process: --num_processes {ranks} needs ddp.yaml or another"
        )
    if engine == "ddp" and ranks == 1:
        engine = "single"
    offload = set(facts["offload"])
    plan = Plan(
        args,
        engine,
        facts["stage"] if engine == "zero" else 0,
        ranks,
        ranks,
        mixed_precision=mixed_precision or config.get("mixed_precision", "no"),
        offloads_parameters=bool({"fsdp_offload_params", "offload_param_device"} & offload),
        offloads_optimizer=bool({"fsdp_offload_params", "offload_optimizer_device"} & offload),
        name={"single": "one process", "ddp": "DDP"}.get(
            engine, f"DeepSpeed ZeRO-{facts['stage']}"
        ),
    )
    if engine.startswith("fsdp"):
        shard(plan, config, facts, ranks // machines)
    if plan.mixed_precision not in ("no", *LOW):
        raise Unplannable(
            f"mixed_precision {plan.mixed_precision}: plans are for no, bf16 and fp16"
        )
    fsdp, zero = config.get("fsdp_config", {}), config.get("deepspeed_config", {})
    if engine.startswith("fsdp") and fsdp.get("fsdp_activation_checkpointing"):
        raise Unplannable(
            "fsdp_activation_checkpointing: plans are for --gradient_checkpointing, which does the same"
        )
    if engine.startswith("fsdp") and fsdp.get("fsdp_transformer_layer_cls_to_wrap"):
        raise Unplannable(
            "fsdp_transformer_layer_cls_to_wrap: plans are for the model's own layers, without that key"
        )
    if engine == "zero" and zero.get("deepspeed_config_file"):
        raise Unplannable(
            "deepspeed_config_file: plans are for DeepSpeed's own bucket sizes, by the YAML's keys"
        )
    problems = refusals(plan, fsdp.get("fsdp_use_orig_params", True) is not False)
    if problems:
        raise Unplannable("; ".join(problems))
    return plan


def shard(plan, config, facts, ranks_per_machine):
    """Put in how FSDP shards: into how many parts, of what, and when parameters are let go."""
    how = strategy_run(config)
    whole = {
        "NO_SHARD": 1,
        "HYBRID_SHARD": ranks_per_machine,
        "HYBRID_SHARD_ZERO2": ranks_per_machine,
    }
    plan.shards = (
        (facts["shards"] or plan.ranks) if plan.engine == "fsdp2" else whole.get(how, plan.ranks)
    )
    plan.reshards, plan.name = how in ("FULL_SHARD", "HYBRID_SHARD"), f"{plan.engine.upper()} {how}"
    if (
        plan.engine == "fsdp1" and plan.shards == 1
    ):  # which torch makes of each strategy over one rank
        plan.name = "FSDP1 NO_SHARD"
    plan.prefetches = config["fsdp_config"].get("fsdp_backward_prefetch") == "BACKWARD_PRE"
    policy = config["fsdp_config"].get("fsdp_auto_wrap_policy") or "NO_WRAP"
    plan.wraps = policy == "TRANSFORMER_BASED_WRAP"
    if not plan.wraps and (policy != "NO_WRAP" or plan.engine == "fsdp2"):
        raise Unplannable(f"fsdp_auto_wrap_policy {policy}: plans are for TRANSFORMER_BASED_WRAP")


def refusals(plan, use_orig_params=True):
    """What the recipe itself would refuse (preflight.py), as far as it does not depend on the machine."""
    accelerator = SimpleNamespace(
        mixed_precision=plan.mixed_precision,
        num_processes=plan.ranks,
        state=SimpleNamespace(
            deepspeed_plugin=SimpleNamespace(
                deepspeed_config={
                    "zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}
                }
            ),
            fsdp_plugin=SimpleNamespace(use_orig_params=use_orig_params),
        ),
    )
    version = {"fsdp1": 1, "fsdp2": 2}.get(plan.engine, 0)
    strategy = plan.name, version, plan.stage if plan.engine == "zero" else -1
    rules = [
        *preflight.rules_of_values(plan.args),
        *preflight.rules_of_strategy(plan.args, accelerator, strategy),
    ]
    return [
        problem
        for broken, problem in rules
        if broken and not problem.startswith(("--model_name_or_path", "DeepSpeed compiles"))
    ]


def strategy_for(plan, config):
    """Return (strategy, decoder): what a rank holds, and the pass it runs."""
    args = plan.args
    if args.use_peft and args.use_dora:
        raise Unplannable(
            "--use_dora: the closed form does not know its norms of weights: add --simulate"
        )
    model = build(Namespace(**vars(args) | {"use_peft": False}), config)
    made, sharded, quantized = (
        {},
        plan.engine in ("fsdp1", "fsdp2"),
        args.load_in_4bit or args.load_in_8bit,
    )

    def make(weight):
        if id(weight) not in made:
            trains, own = weight.requires_grad and not args.use_peft, weight.element_size()
            packed = quantized and weight.dtype == torch.int8
            width = (
                plan.low if plan.low and (sharded or plan.engine == "zero") and not packed else own
            )
            stored = (
                4
                if sharded and plan.low and trains and not args.load_in_4bit
                else own
                if sharded
                else width
            )
            made[id(weight)] = Weight(
                weight.numel(), width, trains, weight.shape[0] if weight.dim() else 1, stored
            )
        return made[id(weight)]

    decoder = read(model, config, make)
    decoder.embedding.embeds = True
    adapters = add_adapters(plan, model, decoder) if args.use_peft else [[] for _ in decoder.layers]
    scales = sum(
        buffer.nbytes
        for one in model.modules()
        if isinstance(one, Quantized)
        for buffer in one.buffers()
    )
    extra = {"quantization": scales} if scales else {}
    weights = [make(weight) for weight in dict.fromkeys(model.parameters())]
    if plan.engine in ("single", "ddp") or plan.engine == "zero" and plan.stage < 3:
        return (Zero if plan.engine == "zero" else Whole)(
            plan, weights + sum(adapters, []), extra
        ), decoder
    units = {"embedding": [] if decoder.tied else [decoder.embedding]}
    for layer, module, own in zip(decoder.layers, layers_of(model), adapters, strict=True):
        units[layer] = [make(weight) for weight in dict.fromkeys(module.parameters())] + own
    placed = {id(weight) for members in units.values() for weight in members}
    units["tail"] = [weight for weight in weights if id(weight) not in placed]
    if plan.engine == "fsdp1":  # its root holds embedding and head
        units["tail"] = units.pop("embedding") + units["tail"]
    if not plan.wraps:
        units = {"tail": sum(units.values(), [])}
    plan.gathers_tail_first = decoder.tied or plan.engine == "fsdp1"
    engine = {"fsdp1": Fsdp1, "fsdp2": Fsdp2, "zero": Zero3}[plan.engine]
    return engine(plan, weights + sum(adapters, []), extra, units), decoder


@dataclass
class Batch:
    """A micro-batch of one rank: lines of tokens, how many tokens of all are learnt, whether lines hold several
    rows."""

    lines: int
    tokens: int
    learnt: int
    packed: bool = False


def closed_form(plan, config, batch):
    """Return ({category: bytes} of the device at its peak, the same of the host) for one optimizer step of the
    recipe and, if it evaluates, a batch of that, with rows as long and as much of them learnt."""
    strategy, decoder = strategy_for(plan, config)
    device, host = strategy.at_rest()
    ledger = Ledger()
    for category, size in device.items():
        ledger.add(category, size)
    autograd = Autograd(ledger, plan.low if plan.autocasts else None)
    autograd.accumulate = strategy.begin(autograd)
    forward = Forward(autograd, decoder, batch.lines, batch.tokens, plan.args, batch.packed)
    steps = plan.args.gradient_accumulation_steps
    for number in range(1, min(steps, 3) + 1):
        strategy.begin_pass(last=number == min(steps, 3))
        loss, held = forward.run(batch.learnt, strategy.around)
        strategy.end_forward()
        autograd.backward(loss, autograd.new(1, 4))
        del held
        strategy.end_pass()
    strategy.step()
    if plan.args.eval_strategy != "no":
        rows = plan.args.per_device_eval_batch_size
        learnt = -(-rows * batch.learnt // batch.lines)
        autograd.evaluates = True
        strategy.begin_pass(last=True)
        Forward(autograd, decoder, rows, batch.tokens, plan.args, packed=False).run(
            learnt, strategy.around
        )
    return ledger.at_peak, host
