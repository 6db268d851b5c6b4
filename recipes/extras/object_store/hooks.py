# SPDX-License-Identifier: Apache-2.0
"""What the core calls of this extra (core/extras.py)."""

from typing import Any

from core.extras import InRun


def in_run(args: Any) -> InRun | None:
    """Return the copy of a run, or None without --output_url.

    Raises:
        ValueError: if no store can be at that URL, or its package is missing.
    """
    if not args.output_url:
        return None
    from extras.object_store.store import ObjectStore  # fsspec is not needed without a URL

    store = ObjectStore(args)
    return None if args.dry_run else store
