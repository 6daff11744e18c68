"""Prompts: from rows in files and datasets to token shards with loss masks.

`sources` reads rows, `conversations` turns each into a normalised conversation, `render` into tokens and a loss mask,
`shards` stores them, `prepare.build` does it all for the stage. `demo` makes conversations out of nothing.
"""

from __future__ import annotations


def build(*args, **kwargs):
    """Build data/prompts; see :func:`eagle3dvc.prompts.prepare.build`."""
    from eagle3dvc.prompts.prepare import build as run

    return run(*args, **kwargs)
