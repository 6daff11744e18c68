"""Profiles: overlays that turn params.yaml into the settings of one kind of run, with the file's comments kept.

A profile is a YAML file in profiles/ that holds only the parameters it sets. Mappings are merged, lists and scalars replaced.
"""

from __future__ import annotations

import copy
import difflib
import io
import os
from pathlib import Path
from typing import Any

from eagle3dvc import params as params_module
from eagle3dvc.errors import UserError, yaml_problem

FOLDER = Path("profiles")


def available(folder: Path = FOLDER) -> dict[str, Path]:
    """Profile names and files, sorted."""
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def find(name: str, folder: Path = FOLDER) -> Path:
    """A profile's file by name, or any YAML file by path; raises UserError with the nearest name."""
    found = available(folder)
    if name in found:
        return found[name]
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return Path(name)
    near = difflib.get_close_matches(name, found, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"no profile {name!r}: {hint}give one of {', '.join(found) or '(none in ' + str(folder) + ')'} or a YAML file"
    )


def summary(path: Path) -> str:
    """The first comment line of a profile."""
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _yaml():
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096  # never fold a long line of the user's
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), lambda r, _: r.represent_scalar("tag:yaml.org,2002:null", "null"))
    return yaml


def _read(path: Path) -> Any:
    from ruamel.yaml.error import YAMLError

    try:
        data = _yaml().load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {yaml_problem(e)}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of parameters, found {type(data).__name__}")
    return data


def _last_leaf(node: Any, key: Any) -> tuple[Any, Any]:
    """The block and key of the last leaf under node[key]: ruamel hangs the comments that stand before the NEXT key there."""
    while isinstance(value := node[key], dict | list) and value and not value.fa.flow_style():
        node, key = value, next(reversed(value)) if isinstance(value, dict) else len(value) - 1
    return node, key


def _comment(node: Any, key: Any) -> Any:
    """The token of the comments after a leaf, or None: slot 2 of a mapping's entry, slot 0 of a sequence's."""
    entry = node.ca.items.get(key)
    return entry[2 if isinstance(node, dict) else 0] if entry else None


def _replace(mapping: Any, key: str, new: Any) -> None:
    """Set mapping[key] = new, and keep the comments that the old value's last leaf carried for what comes next.

    A new key goes to the end of the mapping: the comments there belong to what follows the mapping.
    """
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    kept = ""
    there = key if key in mapping else next(reversed(mapping), None)
    if there is not None and (token := _comment(*_last_leaf(mapping, there))) is not None:
        own, _, kept = token.value.partition("\n")  # a comment on the old leaf's own line goes with it
        token.value = f"{own}\n"
    mapping[key] = copy.deepcopy(new)
    if not kept:
        return
    node, leaf = _last_leaf(mapping, key)
    token = _comment(node, leaf)
    own = token.value.partition("\n")[0] if token is not None else ""
    slots = node.ca.items.setdefault(leaf, [None, None, None, None] if isinstance(node, dict) else [None, None])
    slots[2 if isinstance(node, dict) else 0] = CommentToken(f"{own}\n{kept}", CommentMark(0), None)


def merge(base: Any, overlay: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Write `overlay` into `base` in place; {dotted key: (old, new)} of what changed."""
    changed: dict[str, tuple[Any, Any]] = {}
    for key, new in overlay.items():
        dotted = f"{where}{key}"
        old = base.get(key)
        if isinstance(new, dict) and isinstance(old, dict) and new and old:
            changed |= merge(old, new, f"{dotted}.")
        elif key not in base or old != new:
            _replace(base, key, new)
            changed[dotted] = (_plain(old), _plain(new))
    return changed


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def overlaid(name: str, path: Path = Path("params.yaml"), folder: Path = FOLDER) -> params_module.Params:
    """The parameters that applying a profile would give; writes nothing."""
    data = _read(path)
    merge(data, _read(find(name, folder)))
    return params_module.parse(_reload(data), f"{path} with profile {name}")


def _reload(data: Any) -> Any:
    """Plain Python values, as the schema sees them when the file is read back."""
    from ruamel.yaml import YAML

    out = io.StringIO()
    _yaml().dump(data, out)
    return YAML(typ="safe").load(out.getvalue())


def apply(name: str, path: str | Path = "params.yaml", folder: Path = FOLDER) -> dict[str, tuple[Any, Any]]:
    """Write a profile into a params file; {dotted key: (old, new)}. Raises UserError and writes nothing if the result is invalid."""
    overlay_path = find(name, folder)
    return write(_read(overlay_path), path, f"profile {overlay_path}")


def write(overlay: dict[str, Any], path: str | Path, what: str) -> dict[str, tuple[Any, Any]]:
    """Write `overlay`, called `what` in messages, into a params file, whole or not at all; {dotted key: (old, new)}."""
    path = Path(path)
    data = _read(path)
    changed = merge(data, overlay)
    params_module.parse(_reload(data), f"{path} with {what}")
    if not changed:
        return changed
    target = path.resolve()  # a linked params.yaml stays a link
    tmp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(tmp, "w", encoding="utf-8") as f:
            _yaml().dump(data, f)
            f.flush()
            os.fsync(f.fileno())
        tmp.chmod(target.stat().st_mode & 0o7777)
        os.replace(tmp, target)
    finally:
        tmp.unlink(missing_ok=True)
    return changed
