"""Finding finished shards, so that only new ones are ever computed.

A shard's name ends in its content key (format.shard_key). A shard with a wanted key is looked for, in this order,

1. among the work of interrupted runs: `<DVC_ROOT>/.dvc/tmp/eagle3dvc/shards`, outside every DVC output,
2. in DVC's object cache, through the lists of directory outputs there,
3. in the default remote: what any dvc.lock of this repository names, and what a run streamed there before any commit.

A found shard is hard-linked into the output: same inode, so DVC neither copies it nor (its md5 being known) reads it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from eagle3dvc import stage
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states import dvc_repo
from eagle3dvc.hidden_states.format import SUFFIX, FinishedShard, key_of_name

_FICLONE = 0x40049409
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)


class Store:
    """Finished shards by key.

    out: the DVC output that holds them. allow_recompute: compute shards anew even where dvc.lock says they exist in a
    remote that cannot be reached.
    """

    def __init__(self, out: str = "data/hidden_states", allow_recompute: bool = False):
        self.out, self.allow_recompute = out, allow_recompute
        self.partial = stage.work_dir("shards")
        self.dvc = dvc_repo.DvcRepo.open()
        self.cached: dict[str, str] = {}
        self.fetched: set[str] = set()
        self._scan()
        self._sweep()

    def _scan(self) -> None:
        if self.dvc:
            self.cached |= {key: md5 for name, md5 in self.dvc.listings() if (key := key_of_name(name))}

    def _sweep(self) -> None:
        """Drop work that DVC has since taken into its cache, and temporary files of processes that are gone."""
        for f in self.partial.iterdir():
            if f.suffix == ".tmp":
                pid = f.suffixes[-2].lstrip(".") if len(f.suffixes) > 1 else ""
                if not (pid.isdigit() and os.path.exists(f"/proc/{pid}")):
                    f.unlink(missing_ok=True)
            elif (key := key_of_name(f.name)) and self._cached_path(key):
                f.unlink(missing_ok=True)

    def _cached_path(self, key: str) -> Path | None:
        md5 = self.cached.get(key)
        path = self.dvc.object_path(md5) if md5 and self.dvc else None
        return path if path is not None and path.exists() else None

    def path(self, key: str) -> Path:
        """Where a newly computed shard is to be written."""
        return self.partial / f"{key}{SUFFIX}"

    def find(self, key: str) -> tuple[str, Path] | None:
        """("partial" | "cache" | "remote", path) of a finished, openable shard, or None.

        A shard whose header or index is damaged is reported, removed (cache included: DVC would keep the damaged object for
        the recomputed one) and treated as missing.
        """
        from eagle3dvc.hidden_states.reader import Damaged, Shard

        for origin, path in (("partial", self.path(key)), ("cache", self._cached_path(key))):
            if path is None or not path.exists():
                continue
            try:
                if Shard(path).header["key"] == key:
                    return ("remote" if origin == "cache" and key in self.fetched else origin), path
            except Damaged as e:
                print(f"warning: {e}; removed, it will be computed again", file=sys.stderr, flush=True)
            path.unlink(missing_ok=True)
        return None

    def find_all(self, keys: Iterable[str]) -> dict[str, tuple[str, Path]]:
        """key -> what `find` gives, of every shard that exists anywhere reachable; the remote is asked only for what is not here.

        Raises UserError as `fetch` does.
        """
        keys = list(dict.fromkeys(keys))
        found = {k: hit for k in keys if (hit := self.find(k))}
        missing = [k for k in keys if k not in found]
        if missing:
            self.fetch(missing)  # even where nothing moves, lists that came may name objects that are here
            found |= {k: hit for k in missing if (hit := self.find(k))}
        return found

    def fetch(self, missing: list[str]) -> int:
        """Bring shards that are not here from the remote into the cache; returns how many came.

        Raises UserError where dvc.lock names shards that may be the missing ones and the remote cannot be asked.
        """
        if not self.dvc:
            return 0
        locked = dvc_repo.locked_dirs(self.out)
        unread = [m for m in locked if not self.dvc.object_path(m).exists()]
        expected = [k for k in missing if k in self.cached]
        try:
            self.dvc.fetch(unread)
            self._scan()
            lost = [m for m in unread if not self.dvc.object_path(m).exists()]
            streamed = self.dvc.remote_shards()
            for key in missing:
                if key in streamed:
                    self.cached.setdefault(key, streamed[key])
            wanted = {k: self.cached[k] for k in missing if k in self.cached}
            came = self.dvc.fetch(wanted.values())
        except dvc_repo.Unreachable as e:
            if not (unread or expected) or self.allow_recompute:
                return 0
            what = f"{len(expected)} of the missing shards" if expected else f"{self.out} ({unread[0]})"
            raise UserError(
                f"{len(missing)} shards are missing here, dvc.lock names {what}, and {e}: configure or repair the remote, or set "
                "extract.allow_recompute to true to compute them again"
            ) from e
        # a streamed entry may name an object that a later run replaced; what counts is what can be opened
        self.fetched |= {k for k, md5 in wanted.items() if md5 in came}
        for key in wanted.keys() - self.fetched:
            if not self._cached_path(key):
                del self.cached[key]
        if lost:
            print(
                f"warning: dvc.lock names {self.out} {lost[0]}, which neither the cache nor the remote has (was it pushed?)",
                file=sys.stderr,
                flush=True,
            )
        return len(self.fetched)

    def place(self, path: Path, dst: Path) -> None:
        """Make the finished shard at `path` appear as `dst`: hard link, else reflink, else what DVC's cache.type allows."""
        link(path, dst, symlink=self.dvc is not None and "symlink" in self.dvc.link_types() and self._is_cached(path))

    def _is_cached(self, path: Path) -> bool:
        return self.dvc is not None and self.dvc.objects in path.parents

    def md5_of(self, path: Path) -> str | None:
        """The md5 of a found shard without reading it, None where it is not known.

        Taken from DVC's state, which holds it only while inode, size and mtime are those of the file that was hashed: the name
        of a cache object alone would vouch for an object that was damaged since.
        """
        return self.dvc.known_md5(path) if self.dvc else None

    def remember(self, shard: FinishedShard) -> None:
        """Keep the md5 of a just written shard for a later run, should this one be killed before DVC commits."""
        if self.dvc:
            self.dvc.save_md5([(shard.path, shard.md5)])


def link(src: Path, dst: Path, symlink: bool = False) -> None:
    """Hard link, reflink, (where allowed) symlink or copy src to dst; dst must not exist. Atomic: no half-written dst."""
    try:
        os.link(src, dst)
        return
    except OSError as e:
        if e.errno not in _NO_LINK:
            raise
    tmp = dst.with_name(f".{dst.name}.{os.getpid()}.tmp")
    try:
        with open(src, "rb") as a, open(tmp, "xb") as b:
            try:
                fcntl.ioctl(b.fileno(), _FICLONE, a.fileno())
            except OSError as e:
                if e.errno not in _NO_LINK:
                    raise
                if symlink:
                    os.symlink(os.path.abspath(src), dst)
                    return
                shutil.copyfileobj(a, b, 8 << 20)
        os.replace(tmp, dst)
    finally:
        tmp.unlink(missing_ok=True)
