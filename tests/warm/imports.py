# SPDX-License-Identifier: Apache-2.0
"""What the server of warm starts imports: the libraries of the recipes, but no project files."""

import ast
import contextlib
import importlib
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

# Modules that recipes and their libraries import while they run. A missing entry only costs time.
LATER = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.nn.attention.varlen",
    "numpy.ctypeslib",
    "einops",
    "hjson",
    "msgpack",
    "pydantic",
    "encodings.idna",
    "bitsandbytes",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
    "transformers.integrations.bitsandbytes",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
)
LATER_WITH_DEEPSPEED = (
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_experts",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._subclasses.schema_check_mode",
)


def import_libraries_of(recipes: Path, others: Iterable[Path]) -> None:
    """Import what the files of a folder import, except project files.

    Args:
        others: more folders of project files.
    """
    own = set()
    for folder in (recipes, *others):
        own |= names_in(folder)
    with without_warnings():
        for path in sorted(recipes.rglob("*.py")):
            for statement in library_imports(path, own):
                with contextlib.suppress(ImportError):
                    exec(statement, {})


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name, except those that are not installed."""
    with without_warnings():
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


@contextlib.contextmanager
def without_warnings() -> Generator[None]:
    """Ignore the warnings of imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def names_in(folder: Path) -> set[str]:
    """Return the names by which the modules and packages of a folder are imported."""
    modules = {path.stem for path in folder.glob("*.py")}
    packages = {path.name for path in folder.iterdir() if path.is_dir()}
    return modules | packages


def library_imports(path: Path, own: set[str]) -> Iterator[str]:
    """Yield the statements by which a file imports libraries, as source text.

    Args:
        own: names of modules and packages of the project.
    """
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            names = [statement.module]
        elif isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            continue
        roots = {name.partition(".")[0] for name in names}
        if not roots & own:
            yield ast.unparse(statement)


def number_of_threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))
