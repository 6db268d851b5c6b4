# SPDX-License-Identifier: Apache-2.0
"""What the core calls of this extra (core/extras.py)."""

from dataclasses import dataclass
from typing import Any

from core.cli import free
from core.extras import InRun


@dataclass(kw_only=True)
class Arguments:
    """The copy of the run's folder."""

    output_url: str | None = free(
        None,
        "copy of --output_dir in an object store, as s3://BUCKET/RUN or gs://BUCKET/RUN: each "
        "checkpoint and the result are uploaded, and a run whose folder is lost continues from "
        "there [no copy]",
    )


def in_run(args: Any) -> InRun | None:
    """Return the copy of a run, or None without --output_url."""
    if not args.output_url:
        return None
    from extras.object_store.store import ObjectStore  # fsspec is not needed without a URL

    store = ObjectStore(args)
    return None if args.dry_run else store
