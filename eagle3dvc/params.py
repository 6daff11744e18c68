"""The schema of params.yaml: every parameter of every stage, checked before any work starts.

One block a stage, named as the stage; `max_samples` and `seed` stand at top level so that
`dvc exp run -S max_samples=50000` works. Unknown keys, wrong types and impossible combinations raise
:class:`UserError` naming the key, the value and the nearest valid one.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3dvc.errors import UserError, yaml_problem

MOST_DRAFT_TOKENS = 64
Positive = Annotated[int, Field(ge=1, le=2**53)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve() == folder.resolve() or folder.resolve() in path.resolve().parents


def _require_watched(block: Any, name: str, local: list[str]) -> Any:
    """`block` itself; ValueError where a local input lies outside the path that DVC watches."""
    for path in local:
        if not _inside(Path(path), Path(block.watch)):
            raise ValueError(
                f"{name} reads the local {path} but {name}.watch = {block.watch} does not hold it: set {name}.watch to {path} "
                "(or a folder that holds all local inputs), so that DVC re-runs when they change"
            )
    return block


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DemoVerifier(Block):
    """The small Llama that `verifier.model: demo` trains; sizes in units, steps of optimisation."""

    layers: Annotated[int, Field(ge=7)] = 8
    hidden_size: Annotated[int, Field(ge=32)] = 128
    heads: Annotated[int, Field(ge=2)] = 4
    intermediate_size: Positive = 384
    vocab_size: Annotated[int, Field(ge=300)] = 1024
    steps: Positive = 600
    batch_size: Positive = 4

    @model_validator(mode="after")
    def _heads(self):
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"verifier.demo.heads = {self.heads} does not divide half of hidden_size = {self.hidden_size}")
        return self


class Verifier(Block):
    model: str = "demo"
    revision: str | None = None
    name: str | None = None
    watch: str = "eagle3dvc/demo_verifier.py"
    trust_remote_code: bool = False
    demo: DemoVerifier = DemoVerifier()

    @model_validator(mode="after")
    def _watch(self):
        if not self.model.strip():
            raise ValueError("verifier.model is empty: give `demo`, a folder or a hub id")
        folder = Path(self.model)
        if self.model == "demo" or not folder.is_dir():
            return self
        if not _inside(Path(self.watch), folder):
            raise ValueError(
                f"verifier.model = {self.model} is a local folder but verifier.watch = {self.watch} lies outside it: "
                f"set verifier.watch to {self.model} (or a file in it), so that DVC re-runs when the verifier changes"
            )
        return self


class Source(Block):
    """One source of conversations: `demo`, a file or folder path, or a Hugging Face dataset id."""

    path: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = True
    name: str | None = None


class Prepare(Block):
    sources: Annotated[list[Source], Field(min_length=1)] = [Source(path="demo")]
    watch: str = "eagle3dvc/prompts/demo.py"
    max_length: Annotated[int, Field(ge=2)] = 2048
    heldout_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    samples_per_shard: Positive = 100
    shuffle_buffer: Annotated[int, Field(ge=0)] = 0
    max_rejected_fraction: Fraction = 0.1
    system_prompt: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    responses: Literal["dataset", "verifier"] = "dataset"
    max_new_tokens: Positive = 512
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    thinking: bool | None = None
    keep_truncated: bool = True

    @model_validator(mode="after")
    def _watch(self):
        local = [s.path for s in self.sources if s.path != "demo" and Path(s.path).exists()]
        if self.chat_template and Path(self.chat_template[:255]).exists():
            local.append(self.chat_template)
        return _require_watched(self, "prepare", local)


class Extract(Block):
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    aux_layer_ids: list[int] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    stored_dtype: Literal["bfloat16", "float32", "float16", "float8_e4m3fn"] = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    batch_tokens: Positive = 8192
    tensor_parallel_size: Positive = 1
    enable_expert_parallel: bool = False
    max_num_batched_tokens: Positive | None = None
    max_num_seqs: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    enforce_eager: bool = False
    shards_in_flight: Positive = 6
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}
    push_while_extracting: bool = False
    allow_recompute: bool = False
    workers: Positive = 1

    @model_validator(mode="after")
    def _environment(self):
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    f"extract.env names {name!r}: a name is not empty and has no =, and neither it nor its value a NUL"
                )
        return self

    @model_validator(mode="after")
    def _ascending(self):
        ids = self.aux_layer_ids
        if ids is not None and (not ids or ids != sorted(set(ids)) or ids[0] < 1):
            raise ValueError(
                f"extract.aux_layer_ids = {ids} must be strictly ascending ids from 1 up "
                f"(nearest valid: {sorted({max(1, i) for i in ids}) or [2, 4, 5]})"
            )
        return self


class Train(Block):
    draft_layers: Positive = 1
    draft_heads: Positive | None = None
    draft_kv_heads: Positive | None = None
    draft_head_dim: Positive | None = None
    draft_intermediate_size: Positive | None = None
    draft_config: dict[str, Any] = {}
    draft_vocab_size: Positive = 512
    ttt_steps: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = 3
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    loss: str = "kl_div"
    norms: Literal["portable", "speculators"] = "portable"
    sliding_window: Positive | None = None
    train_lm_head: bool = True
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Rate = 4e-3
    muon_learning_rate: Rate = 0.02
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    scheduler: Literal["linear", "cosine", "none"] = "cosine"
    warmup_fraction: Fraction = 0.05
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    gradient_accumulation_steps: Positive = 1
    epochs: Positive = 3
    max_steps: Positive | None = None
    tokens_per_batch: Annotated[int, Field(ge=2)] = 512
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    compile: bool = True
    attention: Literal["auto", "eager", "sdpa", "flex_attention"] = "auto"
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    gpus: Literal["auto"] | Positive = "auto"
    fsdp: bool = False
    eval_every: Positive | None = None
    eval_samples: Positive = 64
    early_stop_patience: Positive | None = None
    checkpoint_every: Positive = 100
    verify_checksums: bool = True
    warm_start: str | None = None
    loggers: list[Literal["dvclive", "wandb", "tensorboard", "mlflow"]] = ["dvclive"]

    @model_validator(mode="after")
    def _folder(self):
        if self.warm_start is not None and (not self.warm_start.strip() or "\0" in self.warm_start):
            raise ValueError(f"train.warm_start = {self.warm_start!r} names no folder or revision; null begins afresh")
        return self


class Export(Block):
    layouts: Annotated[list[Literal["speculators", "sglang"]], Field(min_length=1)] = ["speculators", "sglang"]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class Evaluate(Block):
    draft_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = 3
    samples: Positive = 200
    engine: Literal["none", "vllm"] = "none"
    batch_sizes: Annotated[list[Annotated[int, Field(ge=1, le=65536)]], Field(min_length=1)] = [1]
    sweep_draft_tokens: list[Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)]] = []
    prompts: list[str] = []
    watch: str = "stages/evaluate.py"
    max_new_tokens: Positive = 128
    alone: bool = False
    exact: bool = False
    baseline: str | None = None
    bootstrap: Annotated[int, Field(ge=1, le=1_000_000)] = 1000

    @model_validator(mode="after")
    def _watch(self):
        if self.baseline is not None and (not self.baseline.strip() or "\0" in self.baseline):
            raise ValueError(f"evaluate.baseline = {self.baseline!r} names no folder or revision; null compares with nothing")
        for name in ("alone", "exact", "prompts", "batch_sizes", "max_new_tokens"):
            if self.engine == "none" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"evaluate.{name} needs an engine: set evaluate.engine to vllm")
        return _require_watched(self, "evaluate", [p for p in self.prompts if Path(p).exists()])


class Params(Block):
    max_samples: Positive
    seed: Annotated[int, Field(ge=0)] = 0
    verifier: Verifier = Verifier()
    prepare: Prepare = Prepare()
    extract: Extract = Extract()
    train: Train = Train()
    export: Export = Export()
    evaluate: Evaluate = Evaluate()


def _fields_at(loc: tuple) -> list[str]:
    """Field names of the block that holds the key at `loc` (list indices are skipped)."""
    model: Any = Params
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return []
        model = field.annotation
        while not isinstance(model, type) and (args := getattr(model, "__args__", None)):
            model = args[0]
        if hasattr(model, "__args__") and model.__args__:
            model = model.__args__[0]
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _path(loc: tuple, data: Any) -> tuple:
    """The part of an error's location that is in the data (pydantic adds the branches of unions), and a missing key."""
    path: list = []
    for i, part in enumerate(loc):
        held = isinstance(part, int) and isinstance(data, list) or isinstance(data, dict) and part in data
        if not held and i < len(loc) - 1 or not isinstance(data, dict | list):
            break
        path.append(part)
        data = data[part] if held else None
    return tuple(path)


def _dotted(path: tuple) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def _complaint(error: dict, path: tuple) -> tuple[str, str]:
    """(subject, predicate) of one pydantic error."""
    subject = f"{_dotted(path)} = {error['input']!r}"
    if error["type"] == "extra_forbidden":
        names = _fields_at(path)
        near = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {_dotted((*path[:-1], near[0]))}?" if near else f"valid keys here: {', '.join(names)}"
        return subject, f"is not a parameter; {hint}"
    if error["type"] == "value_error":
        return "", error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        options = expected.replace("'", "").replace(" or ", ", ").split(", ")
        near = difflib.get_close_matches(str(error["input"]), options, n=1, cutoff=0.4)
        return subject, f"must be one of {expected}" + (f" (nearest: {near[0]})" if near else "")
    if error["type"] == "missing":
        return _dotted(path), "is missing"
    return subject, f"{error['msg'][0].lower()}{error['msg'][1:]}".replace("input should be", "must be")


def parse(data: Any, where: str = "params.yaml") -> Params:
    """Validate a mapping; raises UserError naming every bad key, its value and the nearest valid one."""
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a mapping of parameters, found {type(data).__name__}")
    try:
        return Params.model_validate(data)
    except ValidationError as e:
        said: dict[str, list[str]] = {}
        for error in e.errors():
            subject, predicate = _complaint(error, _path(error["loc"], data))
            said.setdefault(subject, []).append(predicate)
        texts = [f"{subject} {' or '.join(dict.fromkeys(p))}".strip() for subject, p in said.items() if subject]
        raise UserError(f"{where}: " + "; ".join(texts + said.get("", []))) from None


def load(path: str | Path = "params.yaml") -> Params:
    """Read and validate a params file; raises UserError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    path = Path(path)
    try:
        data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run this in the folder of the project, beside dvc.yaml") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {yaml_problem(e)}") from None
    return parse(data, str(path))
