"""The verifier: what it is, and the little of it that the rest of the pipeline needs.

`build` turns `verifier.model` (the demo, a local folder or a hub id) into one folder with the identity, a native config of
the text model, the tokenizer, and the three tensors around the decoder layers: token embedding, final norm, lm_head.
Preparing, training and exporting then need neither the full weights nor any remote code. Nothing is guessed: a tensor
that is missing, quantised or of another shape is an error, because a drafter trained with a wrong head loads and
accepts nothing.

Layer ids follow vLLM: id k is the residual stream after k decoder layers, which is Hugging Face's `hidden_states[k]` for
1 <= k < N; id N is the input of the final norm.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3dvc.errors import UserError
from eagle3dvc.stage import put_folder, write_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from eagle3dvc.params import Params

FORMAT = 1
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"
# what AutoTokenizer may read, remote tokenizer code included: copied as it is, and part of the identity
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer*.model*",
    "tokenization_*.py",
    "tool_declaration_*.py",
    "chat_template*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
)
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")

# Families whose logits are lm_head(RMSNorm(h) * weight), with no scale, cap or bias, and whose embedding is not scaled.
# Others exist (Gemma: weight + 1 and scaled embeddings; Cohere, GPT-NeoX: LayerNorm; Granite: scaled logits), and a
# drafter built on the plain formula would be wrong for them without any error, so only these are taken.
PLAIN_HEADS = frozenset(
    """
    arcee cwm deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe exaone4 glm4 glm4_moe gpt_oss llama llama4_text ministral
    ministral3 mistral mixtral minimax_m2 olmo2 olmo3 olmoe phi3 qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3
    qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3
    """.split()
)
# text models that are another family's network under a name of their own
SAME_AS = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}
# settings that change the formula even in a plain family, with the value that leaves it plain
NEUTRAL = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
}
BODIES = (  # where the text model may stand inside a checkpoint, most specific first
    "language_model.model.",
    "model.language_model.",
    "thinker.model.",
    "model.",
    "",
)


@dataclass(frozen=True)
class VerifierInfo:
    """What verifier.json says; `folder` is where it was read from (never written)."""

    source: str  # demo, local or hub
    name: str  # public id, never a path
    revision: str | None  # commit, for hub
    identity: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool
    dtype: str
    default_aux_layer_ids: list[int] | None
    folder: Path = field(compare=False)


@dataclass(frozen=True)
class Head:
    """Float32 CPU tensors: embed [V, H], lm_head [V, H] (the same tensor when tied), norm [H]."""

    embed: torch.Tensor
    lm_head: torch.Tensor
    norm: torch.Tensor
    eps: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pre-norm hidden states of layer id N, [..., H] in any float dtype -> float32 logits [..., V]."""
        import torch

        h = hidden.to(torch.float32)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * self.norm) @ self.lm_head.T


@dataclass(frozen=True)
class Checkpoint:
    """A verifier's files on this machine: a complete local folder, or what was fetched of a hub repository."""

    where: str  # how messages call it
    folder: Path
    config: PreTrainedConfig  # native config of the text model
    tied: bool
    tensors: dict[str, str]  # our name (EMBED, NORM, HEAD) -> name in the checkpoint
    files: dict[str, str]  # name in the checkpoint -> file


# ---------------------------------------------------------------- reading what build wrote


def load_info(folder: str | Path = "data/verifier") -> VerifierInfo:
    """Read verifier.json of a folder that `build` wrote; raises UserError if it is missing or of another format."""
    path = Path(folder) / "verifier.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run `dvc repro verifier` first") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid JSON ({e}): run `dvc repro --force verifier`") from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}: run `dvc repro --force verifier`")
    try:
        return VerifierInfo(**data, folder=Path(folder))
    except TypeError as e:
        raise UserError(f"{path} has missing or unknown fields ({e}): run `dvc repro --force verifier`") from None


def layer_ids(info: VerifierInfo, params: Params) -> list[int]:
    """Layer ids to store, ascending: the auxiliary ones (`extract.aux_layer_ids` or the defaults), then N.

    Raises UserError unless 1 <= id < N for every auxiliary id and they ascend strictly.
    """
    n, ids = info.num_layers, params.extract.aux_layer_ids
    if ids is None:
        if info.default_aux_layer_ids is None:
            raise UserError(
                f"{info.name} has {n} decoder layers, too few for the default auxiliary layers [2, N//2, N-3]: "
                f"set extract.aux_layer_ids to ascending ids from 1 to {n - 1}"
            )
        ids = info.default_aux_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 1 or ids[-1] >= n:
        nearest = sorted({min(max(1, i), n - 1) for i in ids})
        raise UserError(
            f"extract.aux_layer_ids = {list(ids)} must be strictly ascending and lie in 1..{n - 1} for {info.name} with "
            f"{n} decoder layers (id k is the state after k layers; {n}, the last, is always stored as well): "
            f"nearest valid {nearest}"
        )
    return [*ids, n]


def model_path(params: Params, info: VerifierInfo) -> str:
    """Where an engine finds the full weights: data/verifier for the demo, else the local folder or the hub id."""
    return str(info.folder) if info.source == "demo" else params.verifier.model


def load_head(folder: str | Path = "data/verifier") -> Head:
    """Embedding, final norm and lm_head of a folder that `build` wrote, in float32 on the CPU."""
    import torch
    from safetensors import SafetensorError, safe_open

    info, path = load_info(folder), Path(folder) / "model.safetensors"
    try:
        with safe_open(path, "pt") as f:
            embed, norm = f.get_tensor(EMBED).to(torch.float32), f.get_tensor(NORM).to(torch.float32)
            lm_head = embed if info.tied_embeddings else f.get_tensor(HEAD).to(torch.float32)
    except (SafetensorError, FileNotFoundError) as e:
        raise UserError(f"{path} cannot be read ({e}): run `dvc repro --force verifier`") from None
    return Head(embed=embed, lm_head=lm_head, norm=norm, eps=info.norm_eps)


# ---------------------------------------------------------------- building


def build(params: Params, out: str | Path = "data/verifier", progress=None) -> VerifierInfo:
    """Write the verifier folder for `params.verifier`; nothing of it is seen at `out` before it is complete.

    The same inputs give the same bytes: no path, time or version of a library is written. `progress(step, loss)` is
    called while the demo trains. Raises UserError naming what is wrong with the verifier.
    """
    settings = params.verifier
    with _new_folder(Path(out)) as tmp:
        if settings.model == "demo":
            from eagle3dvc import demo_verifier

            demo_verifier.build(settings.demo, tmp, progress)
            for name in ("config.json", "generation_config.json"):
                _copy_json(tmp / name, tmp / name)
            checkpoint = open_folder(tmp, "the demo verifier")
            source, revision, name = "demo", None, settings.name or "demo"
            identity = f"demo:{content_hash(checkpoint)}"
        else:
            source = source_of(settings.model)
            if source == "local":
                checkpoint = open_folder(Path(settings.model))
                revision, name = None, settings.name or _local_name(checkpoint)
                identity = f"local:{content_hash(checkpoint)}"
            else:
                checkpoint, revision = open_hub(settings.model, settings.revision)
                name = settings.name or settings.model
                identity = f"hub:{settings.model}@{revision}"
            _write_parts(checkpoint, tmp)
        check_tokenizer(tmp, checkpoint, settings.trust_remote_code)
        config = checkpoint.config
        n = config.num_hidden_layers
        defaults = [2, n // 2, n - 3]
        info = VerifierInfo(
            source=source,
            name=name,
            revision=revision,
            identity=identity,
            model_type=config.model_type,
            num_layers=n,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            tied_embeddings=checkpoint.tied,
            dtype=_dtype(config, tmp),
            default_aux_layer_ids=defaults if defaults == sorted(set(defaults)) and defaults[0] < defaults[1] else None,
            folder=Path(out),
        )
        fields = asdict(info)
        del fields["folder"]
        write_json(tmp / "verifier.json", {"format": FORMAT, **fields})
        for path in tmp.iterdir():
            path.chmod(0o644)  # safetensors writes 0600, which a shared DVC cache would keep
    return info


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that replaces it when the block ends well and vanishes when it does not."""
    tmp = out.parent / f".{out.name}.tmp"
    shutil.rmtree(tmp, ignore_errors=True)  # of a run that was killed here
    tmp.mkdir(parents=True)
    try:
        yield tmp
        put_folder(tmp, out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def source_of(model: str) -> str:
    """`demo`, `local` or `hub`; raises UserError when it can be none of them."""
    if model == "demo":
        return "demo"
    if Path(model).is_dir():
        return "local"
    if Path(model).is_file():
        raise UserError(
            f"verifier.model = {model} is a file: give the folder with config.json, tokenizer and safetensors weights"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model):
        raise UserError(f"verifier.model = {model} does not exist: give `demo`, an existing folder or a hub id (org/name)")
    return "hub"


def open_hub(model: str, revision: str | None) -> tuple[Checkpoint, str]:
    """Fetch config, tokenizer, index and only the shards that hold the three tensors; returns (checkpoint, commit).

    What is in the hub's local cache is used as it is, and with HF_HUB_OFFLINE=1 nothing else is.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    at = f"verifier.model = {model}" + (f" (revision {revision})" if revision else "")

    def fetch(patterns: tuple[str, ...], revision: str | None) -> Path:
        try:
            return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
        except GatedRepoError:
            raise UserError(f"{at} is gated: accept its terms on the hub and set HF_TOKEN") from None
        except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, httpx.HTTPError, OSError) as e:
            reason = str(e).strip().split("\n")[0]
            raise UserError(
                f"{at} is no folder here and cannot be fetched from the hub ({type(e).__name__}: {reason}): "
                "check the name, the revision, the network and HF_TOKEN"
            ) from None

    folder = fetch(("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES), revision)
    commit = folder.name  # a snapshot's folder is named by its commit
    config, tied = native_config(folder, at)
    if not (folder / INDEX).is_file():
        fetch(("model.safetensors",), commit)
    files = weight_files(folder, at)
    tensors = locate(files, tied, at)
    fetch(tuple(sorted({files[name] for name in tensors.values()})), commit)
    return _checked(Checkpoint(at, folder, config, tied, tensors, files), whole=False), commit


def open_folder(folder: Path, where: str | None = None) -> Checkpoint:
    """Read and check a local checkpoint: native config, names, complete files; raises UserError."""
    at = where or f"verifier.model = {folder}"
    config, tied = native_config(folder, at)
    files = weight_files(folder, at)
    return _checked(Checkpoint(at, folder, config, tied, locate(files, tied, at), files), whole=True)


def use(model: str, revision: str | None, name: str | None, path: str | Path) -> dict[str, tuple[Any, Any]]:
    """Make `model` the verifier of a params file, comments kept; {dotted key: (old, new)} of what changed.

    A local folder is checked first (config, weights' names and headers) and becomes `verifier.watch`, so that DVC re-runs
    when it changes. Raises UserError and writes nothing when the verifier or the resulting parameters are invalid.
    """
    from eagle3dvc import profiles
    from eagle3dvc.params import Verifier

    source = source_of(model)
    if revision and source != "hub":
        raise UserError(f"--revision {revision} goes with a hub id, and {model} is {source}")
    if source == "local":
        open_folder(Path(model))
    watch = model if source == "local" else Verifier.model_fields["watch"].default
    settings = {"model": model, "revision": revision, "name": name, "watch": watch}
    return profiles.write({"verifier": settings}, path, f"verifier.model = {model}")


# ---------------------------------------------------------------- config


def _read_json(path: Path, at: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{at} has no {path.name}: give a folder or hub id in Hugging Face's layout") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{at}: {path.name} is not valid JSON ({e})") from None
    if not isinstance(data, dict):
        raise UserError(f"{at}: {path.name} holds no JSON object")
    return data


def native_config(folder: Path, at: str) -> tuple[PreTrainedConfig, bool]:
    """(config of the text model as a class of transformers itself, whether lm_head is the embedding).

    Wrappers (vision or audio around a text model) are opened; remote code is never run: families that ship their own
    config class are read as the native family they are. Raises UserError for unknown families and heads.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    raw = _read_json(folder / "config.json", at)
    text = raw
    for key in ("thinker_config", "text_config", "language_config", "llm_config"):
        if isinstance(text.get(key), dict):
            text = text[key]
    kind = text.get("model_type") or raw.get("model_type")
    kind = SAME_AS.get(kind, kind)
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"{at}: config.json has model_type {kind!r}, which this transformers does not know natively: "
            "remote model code is not run, use a supported family or a newer transformers"
        )
    fields = {k: v for k, v in text.items() if k not in ("auto_map", "model_type", "quantization_config", "architectures")}
    try:
        if text is not raw and "model_type" not in text and kind == raw.get("model_type"):
            # an old wrapper that does not name its text model: only its own class knows
            config = CONFIG_MAPPING[kind].from_dict(raw).get_text_config(decoder=True)
        else:
            config = CONFIG_MAPPING[kind].from_dict(fields)
            config = config.get_text_config(decoder=True)
    except Exception as e:  # a config class may raise anything on bad fields
        raise UserError(f"{at}: config.json cannot be read as {kind} ({str(e).strip().splitlines()[0]})") from None
    kind = config.model_type
    if kind not in PLAIN_HEADS:
        raise UserError(
            f"{at}: the final norm and logits of model_type {kind!r} are not known to be a plain RMSNorm and an "
            f"unscaled lm_head, which the drafter's target would be computed with: use one of {', '.join(sorted(PLAIN_HEADS))}"
        )
    for key, neutral in NEUTRAL.items():
        if getattr(config, key, neutral) not in (neutral, None):
            raise UserError(f"{at}: {key} = {getattr(config, key)} in config.json is not supported, logits would differ")
    if not isinstance(getattr(config, "rms_norm_eps", None), float):
        raise UserError(f"{at}: config.json has no rms_norm_eps, the epsilon of the final norm")
    if getattr(config, "dtype", None) is None:
        config.dtype = raw.get("dtype") or raw.get("torch_dtype")
    # the wrapper ties, not the text model inside it, so its word counts first
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", config.tie_word_embeddings))
    config.tie_word_embeddings = bool(tied)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    return config, bool(tied)


# ---------------------------------------------------------------- weights


def weight_files(folder: Path, at: str) -> dict[str, str]:
    """Tensor name -> safetensors file, from the index or from the header of the one file; raises UserError."""
    if (folder / INDEX).is_file():
        files = _read_json(folder / INDEX, at).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise UserError(f"{at}: {INDEX} has no weight_map")
        return files
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if "model.safetensors" in found or len(found) == 1:
        name = "model.safetensors" if "model.safetensors" in found else found[0]
        return dict.fromkeys(_names(folder / name, at), name)
    if found:
        raise UserError(f"{at} has {len(found)} safetensors files but no {INDEX}: complete the checkpoint")
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern))
    if others:
        raise UserError(
            f"{at} has {others[0]} but no safetensors: pickled and GGUF weights are not read, "
            "save it with save_pretrained(safe_serialization=True)"
        )
    raise UserError(f"{at} has no safetensors weights")


def _names(path: Path, at: str) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            return list(f.keys())
    except FileNotFoundError:
        raise UserError(f"{at}: {path.name} is missing, the checkpoint is incomplete: fetch it again") from None
    except SafetensorError as e:
        raise UserError(f"{at}: {path.name} is damaged or cut off ({e}): fetch it again") from None


def locate(files: dict[str, str], tied: bool, at: str) -> dict[str, str]:
    """Our names of embedding, norm and (where the checkpoint has one) lm_head -> names in the checkpoint."""
    body = next((b for b in BODIES if f"{b}embed_tokens.weight" in files), None)
    if body is None:
        packed = [n for n in files if re.search(r"embed_tokens\.(weight_|qweight|scales)", n)]
        if packed:
            raise UserError(f"{at}: the token embedding is quantised ({packed[0]}), which is not supported")
        raise UserError(
            f"{at}: no token embedding among the weights (looked for {', '.join(b + 'embed_tokens.weight' for b in BODIES)})"
        )
    found = {EMBED: f"{body}embed_tokens.weight", NORM: f"{body}norm.weight"}
    if found[NORM] not in files:
        raise UserError(f"{at}: the final norm {found[NORM]} is missing from the weights")
    if f"{body}norm.bias" in files:
        raise UserError(f"{at}: the final norm has a bias, so it is no RMSNorm, which is all that is supported")
    outer = body.removesuffix("model.").removesuffix("model.language_model.")
    heads = list(dict.fromkeys((f"{outer}lm_head", "lm_head", f"{body}lm_head")))
    for head in heads:
        if f"{head}.bias" in files:
            raise UserError(f"{at}: {head} has a bias, which is not supported")
    if (name := next((f"{h}.weight" for h in heads if f"{h}.weight" in files), None)) is not None:
        found[HEAD] = name
    elif packed := [n for n in files if n.startswith(tuple(f"{h}." for h in heads))]:
        raise UserError(f"{at}: lm_head is quantised ({packed[0]}): use a checkpoint whose lm_head is left in bf16")
    elif not tied:
        raise UserError(
            f"{at}: {heads[0]}.weight is missing from the weights and config.json does not tie it to the embedding "
            "(tie_word_embeddings): complete the checkpoint"
        )
    return found


def _checked(checkpoint: Checkpoint, whole: bool) -> Checkpoint:
    """Every decoder layer is there; with `whole`, every file too; the three tensors have their shapes and are finite."""
    at, config = checkpoint.where, checkpoint.config
    body = checkpoint.tensors[EMBED].removesuffix("embed_tokens.weight")
    there = {int(m[1]) for n in checkpoint.files if (m := re.match(re.escape(body) + r"layers\.(\d+)\.", n))}
    if missing := sorted(set(range(config.num_hidden_layers)) - there):
        raise UserError(
            f"{at}: config.json says {config.num_hidden_layers} decoder layers but the weights lack layer {missing[0]}: "
            "complete the checkpoint"
        )
    if whole:
        by_file: dict[str, set[str]] = {}
        for name, file in checkpoint.files.items():
            by_file.setdefault(file, set()).add(name)
        for file, names in sorted(by_file.items()):
            if absent := sorted(names - set(_names(checkpoint.folder / file, at))):
                raise UserError(f"{at}: {file} lacks {absent[0]}, which {INDEX} says it holds: fetch it again")
    return checkpoint


def read_head(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The three tensors (two when tied) under our names, in the checkpoint's dtype; shapes and values checked."""
    import torch
    from safetensors import safe_open

    at, config = checkpoint.where, checkpoint.config
    shapes = {name: (config.vocab_size, config.hidden_size) for name in (EMBED, HEAD)} | {NORM: (config.hidden_size,)}
    tensors = {}
    for ours, name in checkpoint.tensors.items():
        path = checkpoint.folder / checkpoint.files[name]
        if name not in _names(path, at):
            raise UserError(f"{at}: {path.name} lacks {name}, which {INDEX} says it holds: fetch it again")
        with safe_open(path, "pt") as f:
            tensor = f.get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"{at}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, a quantised tensor: "
                "use a checkpoint whose embedding, final norm and lm_head are left in bf16, fp16 or fp32"
            )
        if tuple(tensor.shape) != shapes[ours]:
            raise UserError(f"{at}: {name} has shape {list(tensor.shape)} but config.json says {list(shapes[ours])}")
        if not torch.isfinite(tensor).all():
            raise UserError(f"{at}: {name} holds values that are not finite: the checkpoint is damaged, fetch it again")
        tensors[ours] = tensor
    if checkpoint.tied and HEAD in tensors and not torch.equal(tensors.pop(HEAD), tensors[EMBED]):
        raise UserError(
            f"{at}: config.json ties lm_head to the embedding (tie_word_embeddings) but the weights hold two different "
            "tensors, and engines disagree on which counts: correct one of them"
        )
    return tensors


def _write_parts(checkpoint: Checkpoint, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(read_head(checkpoint), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", checkpoint.config.to_dict())
    _copy_json(folder / "config.json", folder / "config.json")
    if (checkpoint.folder / "generation_config.json").is_file():
        _copy_json(checkpoint.folder / "generation_config.json", folder / "generation_config.json")
    for path in tokenizer_files(checkpoint.folder):
        shutil.copyfile(path, folder / path.name)


def _copy_json(source: Path, target: Path) -> None:
    """Copy a config without what names a machine or the version of a library: neither changes the model."""
    data = json.loads(source.read_text(encoding="utf-8"))
    for key in ("_name_or_path", "transformers_version", "auto_map", "quantization_config"):
        data.pop(key, None)
    write_json(target, data)


def _dtype(config: PreTrainedConfig, folder: Path) -> str:
    if config.dtype is not None:
        return str(config.dtype).removeprefix("torch.")
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as f:
        return str(f.get_tensor(EMBED).dtype).removeprefix("torch.")


def _local_name(checkpoint: Checkpoint) -> str:
    """The hub id the checkpoint was saved from when config.json says so, else the folder's name; never a path."""
    said = _read_json(checkpoint.folder / "config.json", checkpoint.where).get("_name_or_path") or ""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(said)) and not Path(said).exists():
        return said
    return checkpoint.folder.resolve().name


# ---------------------------------------------------------------- tokenizer and identity


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in a checkpoint folder, sorted by name."""
    return sorted(p for p in folder.iterdir() if p.is_file() and any(fnmatch(p.name, g) for g in TOKENIZER_FILES))


def check_tokenizer(folder: Path, checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """The tokenizer in `folder` loads and has no id outside the verifier's vocabulary; raises UserError."""
    from transformers import AutoTokenizer

    at, names = checkpoint.where, [p.name for p in tokenizer_files(folder)]
    if not any(fnmatch(name, pattern) for name in names for pattern in VOCABULARIES):
        raise UserError(f"{at} has no tokenizer (tokenizer.json or the files of a slow one): add it to the checkpoint")
    try:
        tok = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as e:  # whatever the tokenizer's own code raises
        reason = str(e).strip().splitlines()[0].replace(str(folder), "it") if str(e).strip() else type(e).__name__
        advice = (
            "set verifier.trust_remote_code: true if you trust its code"
            if not trust_remote_code and any(n.endswith(".py") for n in names)
            else "check its files"
        )
        raise UserError(f"{at}: the tokenizer does not load ({reason}): {advice}") from None
    token, highest = max(tok.get_vocab().items(), key=lambda item: item[1])
    if highest >= checkpoint.config.vocab_size:
        raise UserError(
            f"{at}: the tokenizer's token {token!r} has id {highest} but the verifier's vocabulary has "
            f"{checkpoint.config.vocab_size} tokens: the tokenizer belongs to another model"
        )


def content_hash(checkpoint: Checkpoint) -> str:
    """xxh3_128 over names and contents of config, tokenizer and weight files; of nothing else in the folder."""
    import xxhash

    folder = checkpoint.folder
    paths = {"config.json", *(p.name for p in tokenizer_files(folder)), *checkpoint.files.values()}
    if (folder / INDEX).is_file():
        paths.add(INDEX)

    def digest(name: str) -> str:
        h = xxhash.xxh3_128()
        with open(folder / name, "rb", buffering=0) as f:
            while block := f.read(1 << 24):
                h.update(block)
        return f"{name}\0{h.hexdigest()}\n"

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return xxhash.xxh3_128("".join(pool.map(digest, sorted(paths))).encode()).hexdigest()
