"""Everything here that leans on DVC's own Python modules (tried with 3.67), so that a change of theirs shows in one file.

DVC keeps a file of md5 `abcdef...` as `<cache>/files/md5/ab/cdef...`, in the cache and in a remote alike, and a directory
output as a JSON list [{"md5", "relpath"}] in an object whose name ends in `.dir`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from eagle3dvc import stage
from eagle3dvc.errors import UserError

#: folder beside `files/` in a remote that names finished shards before any commit exists: `<key>-<md5>`, empty objects
REMOTE_INDEX = "eagle3dvc-shards"


class Unreachable(UserError):
    """The default remote is not set or cannot be listed."""


class DvcRepo:
    """The DVC repository of the current folder (in `dvc exp run --temp`: the temporary copy, which shares the cache)."""

    def __init__(self, repo):
        self.repo = repo
        self.objects = Path(repo.cache.local.path)

    @classmethod
    def open(cls) -> DvcRepo | None:
        """None where the current folder is in no DVC repository; UserError where the one that is there cannot be opened."""
        here = Path.cwd()
        found = next((p for p in (here, *here.parents) if (p / ".dvc").is_dir()), None)
        # `dvc init` writes a config; without one it is only what stages keep their unfinished work in
        if found is None or not (found / ".dvc" / "config").is_file():
            return None
        try:
            from dvc.exceptions import DvcException, NotDvcRepoError
            from dvc.repo import Repo
        except ImportError as e:
            raise UserError(
                f"{found} is a DVC repository but DVC cannot be imported ({e}): install it (pip install dvc), or run the stages in "
                "a folder outside the repository"
            ) from None
        try:
            return cls(Repo())
        except NotDvcRepoError:
            return None
        except DvcException as e:  # no git around it, say, or a broken .dvc/config
            raise UserError(
                f"DVC cannot open the repository here ({str(e).splitlines()[0]}): `dvc status` shows the same error"
            ) from e

    def object_path(self, md5: str) -> Path:
        return self.objects / md5[:2] / md5[2:]

    def link_types(self) -> list[str]:
        return list(self.repo.cache.local.cache_types)

    def listings(self) -> Iterator[tuple[str, str]]:
        """(relpath, md5) of every file in every directory output that the cache knows; unreadable lists are passed over."""
        if not self.objects.is_dir():
            return
        for prefix in os.scandir(self.objects):
            if not prefix.is_dir():
                continue
            for entry in os.scandir(prefix.path):
                if entry.name.endswith(".dir"):
                    yield from read_listing(Path(entry.path))

    def save_md5(self, items: Iterable[tuple[Path, str]]) -> bool:
        """Tell DVC the md5 of files it has not hashed, so that committing them reads nothing.

        False where DVC's internals have changed: DVC then hashes the files itself, which is slower and just as right.
        """
        try:
            from dvc_data.hashfile.hash_info import HashInfo

            rows = [(os.path.abspath(p), HashInfo("md5", md5), None) for p, md5 in items]
            self.repo.state.save_many(rows, self.repo.fs)
            return True
        except (ImportError, AttributeError, TypeError) as e:
            print(f"note: this DVC takes no checksums from outside ({e}); it will hash the shards itself", file=sys.stderr)
            return False

    def known_md5(self, path: Path) -> str | None:
        """The md5 that DVC's state holds for an unchanged file (same inode, size and mtime)."""
        try:
            _, info = self.repo.state.get(os.path.abspath(path), self.repo.fs)
            return info.value if info is not None and info.name == "md5" else None
        except (AttributeError, TypeError):
            return None

    # ------------------------------------------------------------------ remote
    @cached_property
    def remote(self):
        """The default remote; raises Unreachable where none is set or it does not answer."""
        from dvc.config import ConfigError
        from dvc.exceptions import DvcException

        try:
            remote = self.repo.cloud.get_remote()
            self._reach(remote)
            return remote
        except (ConfigError, DvcException) as e:
            raise Unreachable(f"no usable default DVC remote ({str(e).splitlines()[0]})") from e
        except Exception as e:  # every storage library has its own errors
            raise Unreachable(f"the default DVC remote does not answer ({type(e).__name__}: {str(e).splitlines()[0]})") from e

    @staticmethod
    def _reach(remote) -> None:
        fs, path = remote.fs, remote.path
        if fs.protocol in ("file", "local"):
            # DVC makes a missing folder at the first push, so a remote that was never used is empty, not out of reach
            if not os.path.isdir(path) and not os.path.isdir(os.path.dirname(path.rstrip("/"))):
                raise FileNotFoundError(path)
            return
        try:
            fs.ls(path, detail=False)
        except FileNotFoundError:
            bucket = fs.parts(path)[0]
            fs.ls(bucket, detail=False)  # an empty prefix is fine, a missing bucket is not

    def fetch(self, md5s: Iterable[str]) -> set[str]:
        """Bring objects from the remote into the cache; returns those that are there afterwards. Raises Unreachable.

        With `verify = true` on the remote each is hashed on arrival and a damaged one is dropped.
        """
        wanted = [m for m in dict.fromkeys(md5s) if not self.object_path(m).exists()]
        if not wanted:
            return set()
        remote, cache = self.remote, self.repo.cache.local
        try:
            there = set(remote.odb.list_oids_exists(wanted, jobs=remote.fs.jobs))
            present = [m for m in wanted if m in there]
            if present:
                cache.add(
                    [remote.odb.oid_to_path(m) for m in present],
                    remote.fs,
                    present,
                    verify=remote.odb.verify,
                    check_exists=False,
                    batch_size=remote.fs.jobs,
                    on_error=lambda oid, e: print(f"note: {oid} could not be fetched: {e}", file=sys.stderr),
                )
        except Exception as e:
            raise Unreachable(f"the default DVC remote failed while fetching ({type(e).__name__}: {e})") from e
        return {m for m in present if self.object_path(m).exists()}

    def remote_shards(self) -> dict[str, str]:
        """key -> md5 of shards that a run streamed to the remote. Raises Unreachable."""
        fs = self.remote.fs
        try:
            names = [fs.name(p) for p in fs.ls(fs.join(self.remote.path, REMOTE_INDEX), detail=False)]
        except FileNotFoundError:
            return {}
        except Exception as e:
            raise Unreachable(f"the default DVC remote failed while listing ({type(e).__name__}: {e})") from e
        return dict(n.split("-", 1) for n in names if n.count("-") == 1)

    def push(self, path: Path, key: str, md5: str) -> None:
        """Upload a finished shard as the object DVC would name, then its entry in the index. Raises what the storage raises."""
        fs, odb = self.remote.fs, self.remote.odb
        odb.add(os.path.abspath(path), self.repo.fs, md5, verify=False)
        folder = fs.join(self.remote.path, REMOTE_INDEX)
        fs.makedirs(folder, exist_ok=True)
        fs.pipe_file(fs.join(folder, f"{key}-{md5}"), b"")


def read_listing(path: Path) -> list[tuple[str, str]]:
    """(relpath, md5) pairs of a `.dir` object; empty where it is damaged."""
    try:
        return [(e["relpath"], e["md5"]) for e in json.loads(path.read_bytes())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def locked_dirs(out: str) -> list[str]:
    """md5s (`....dir`) that dvc.lock gives for the output `out`: in the workspace first, then at every git ref.

    Another branch or experiment may hold the very shards that are wanted.
    """
    texts = []
    if os.path.exists("dvc.lock"):
        texts.append(Path("dvc.lock").read_text(encoding="utf-8"))
    texts += _lock_texts_of_refs(stage.root())
    found = []
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    for text in texts:
        if f"path: {out}" not in text:
            continue
        try:
            lock = YAML(typ="safe").load(text)
            outs = [o for s in lock["stages"].values() for o in s.get("outs", []) if o["path"] == out]
        except (YAMLError, KeyError, TypeError, AttributeError):
            continue  # a merge conflict, say; the workspace's own lock file is DVC's to judge
        found += [o["md5"] for o in outs if str(o.get("md5", "")).endswith(".dir")]
    return list(dict.fromkeys(found))


def _lock_texts_of_refs(root: Path) -> list[str]:
    def git(*args: str, text: str = "") -> str:
        try:
            r = subprocess.run(["git", "-C", str(root), *args], input=text, capture_output=True, text=True)
        except FileNotFoundError:  # no git on this machine: no refs to ask
            return ""
        return r.stdout if r.returncode == 0 else ""

    prefix = git("rev-parse", "--show-prefix").strip()
    refs = dict.fromkeys(git("for-each-ref", "--format=%(objectname)").split())
    blobs = git("cat-file", "--batch-check=%(objectname) %(objecttype)", text="".join(f"{r}:{prefix}dvc.lock\n" for r in refs))
    ids = dict.fromkeys(line.split()[0] for line in blobs.splitlines() if line.endswith(" blob"))
    return [git("cat-file", "blob", i) for i in ids]
