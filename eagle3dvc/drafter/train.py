"""The train stage: from data/hidden_states, data/prompts and data/verifier to models/drafter.

    models/drafter/best/    the checkpoint with the best acceptance length on the held-out samples (speculators layout, float32)
    models/drafter/last/    the weights after the last step
    models/drafter/vocab.safetensors, training.json
    metrics/train_curves/   curves for `dvc plots`

Everything resumable lies outside the outputs, see checkpoints.py. Several processes run this same module under torchrun.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from eagle3dvc import params as params_module
from eagle3dvc import stage
from eagle3dvc import verifier as verifier_module
from eagle3dvc.drafter import checkpoints, guards, layouts, model, vocab
from eagle3dvc.drafter.curves import CurvesHandler
from eagle3dvc.drafter.data import Plan, survey, usable
from eagle3dvc.errors import UserError
from eagle3dvc.hidden_states.reader import HiddenStates
from eagle3dvc.params import Params

FORMAT = 1
CURVES = "metrics/train_curves"
# On matrices this narrow a second thread waits more than it computes (demo drafter: 114 CPU seconds with one, 300 with two)
SMALL = 512
# torchrun, which ends with the stage that started it: else its processes would keep the GPUs. It tells them its pid, since one that
# was still importing when torchrun was killed would take the process that adopted it for its parent.
PARENT = "EAGLE3DVC_TORCHRUN"
TORCHRUN = (
    f"import os; os.environ['{PARENT}'] = str(os.getpid()); from eagle3dvc import stage; stage.die_with_parent(); "
    "from torch.distributed.run import main; main()"
)
# parameters that change how a run is carried out, not what it gives: they do not name another run
HOW = {"gpus", "num_workers", "checkpoint_every", "verify_checksums", "loggers", "fsdp", "gradient_checkpointing", "compile"}
HOW |= {"attention"}
# the code that dvc.yaml names for this stage: what DVC runs again for is not answered from the resume area
CODE = [
    Path(__file__).with_name(f"{name}.py")
    for name in ("train", "trainer", "data", "optimizers", "model", "vocab", "acceptance", "checkpoints", "curves", "guards")
]
OF = "OF"  # in a run's folder: its Inputs.digest


def build(
    params: Params,
    out: str | Path = "models/drafter",
    hidden: str | Path = "data/hidden_states",
    prompts: str | Path = "data/prompts",
    verifier: str | Path = "data/verifier",
    log: Any = None,
    curves: str | Path = CURVES,
) -> dict[str, Any]:
    """Train a drafter and write it to `out` (whole or not at all); returns the stage's metrics and fills `log`.

    Starts torchrun where train.gpus asks for several; continues an interrupted run of the same inputs. Raises UserError, and
    stage.Interrupted after a signal.
    """
    guards.check_version()
    for name in params.train.loggers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"train.loggers names {name}, which is not installed: run `pip install {name}` or take it out")
    log = {} if log is None else log
    paths = {"out": str(out), "hidden": str(hidden), "prompts": str(prompts), "verifier": str(verifier), "curves": str(curves)}
    processes = 1 if "LOCAL_RANK" in os.environ else gpus(params)
    if processes > 1:
        return torchrun(params, paths, processes, log)
    with guards.process_group() as (rank, world):
        return _train(params, paths, rank, world, log)


def gpus(params: Params) -> int:
    """How many processes to train with; raises UserError where train.gpus asks for what is not there or cannot share a step."""
    there, wanted = torch.cuda.device_count(), params.train.gpus
    batches = params.train.gradient_accumulation_steps
    if wanted == "auto":
        usable_gpus = max((n for n in range(1, max(there, 1) + 1) if batches % n == 0), default=1)
        if usable_gpus < there:
            print(
                f"train: using {usable_gpus} of {there} GPUs, since train.gradient_accumulation_steps = {batches} micro-batches a "
                f"step cannot be shared by more: set it to a multiple of {there} to use them all",
                flush=True,
            )
        return usable_gpus
    if wanted > max(there, 1):
        raise UserError(
            f"train.gpus = {wanted}, but this machine has {there} GPUs: set train.gpus to auto or at most {max(there, 1)}"
        )
    if batches % wanted:
        raise UserError(
            f"train.gradient_accumulation_steps = {batches} micro-batches a step cannot be shared by train.gpus = {wanted}: set it "
            f"to a multiple of {wanted}"
        )
    return wanted


def torchrun(params: Params, paths: dict[str, str], processes: int, log: Any) -> dict[str, Any]:
    """Run :func:`build` in `processes` processes of this machine; signals are passed on. Raises what rank 0 reported."""
    with tempfile.TemporaryDirectory(prefix="eagle3dvc-train-") as folder:
        job = Path(folder)
        stage.write_json(job / "job.json", {"params": params.model_dump(mode="json"), "paths": paths})
        command = [sys.executable, "-c", TORCHRUN, "--standalone", f"--nproc-per-node={processes}"]
        # torchrun would give each process one thread; reading, checking and moving a large verifier's head want their share
        threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
        environment = {"OMP_NUM_THREADS": threads, **os.environ}
        child = subprocess.Popen([*command, "-m", "eagle3dvc.drafter.train", str(job)], env=environment)
        try:
            code = child.wait()
        except BaseException:  # a signal for the stage: the processes save and end
            child.send_signal(signal.SIGTERM)
            child.wait()
            raise
        read = {f.stem: json.loads(f.read_text(encoding="utf-8")) for f in sorted(job.glob("*.json"))}
    found = read.get("result")
    if found is None:  # whichever process failed first takes the others down, which then report a signal
        said = [read[name] for name in ("error", "interrupted") if name in read]
        raise UserError(said[0] if said else f"torchrun ended with status {code} (its output is above)")
    log.update(found["log"])
    return found["metrics"]


def main() -> None:
    """One process of a run of several: `python -m eagle3dvc.drafter.train JOB` under torchrun, started by :func:`torchrun`."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    log: dict[str, Any] = {}
    try:
        metrics = join(params_module.parse(job["params"]), job["paths"], log)
        if os.environ["RANK"] == "0":
            stage.write_json(folder / "result.json", {"metrics": metrics, "log": log})
    except BaseException as e:
        if (text := stage.sentence(e)) is not None:
            stage.write_json(folder / f"{'interrupted' if isinstance(e, stage.Interrupted) else 'error'}.json", text)
        if isinstance(e, (UserError, stage.Interrupted)):
            raise SystemExit(128 + e.signum if isinstance(e, stage.Interrupted) else 1) from None
        raise


def join(params: Params, paths: dict[str, str], log: dict[str, Any]) -> dict[str, Any]:
    """Take part in a run that torchrun started, without writing what a stage writes."""
    stage.die_with_parent()
    if PARENT in os.environ and os.getppid() != int(os.environ[PARENT]):
        raise UserError("the torchrun that started this process is gone: run `dvc repro` again")
    signal.signal(signal.SIGTERM, stage._on_signal)
    return build(params, log=log, **paths)


@dataclass
class Inputs:
    """All that a run is made from."""

    info: Any
    head: Any
    data: HiddenStates
    layer_ids: list[int]
    found: Any
    train: Any
    heldout: Any
    vocab: vocab.DraftVocab
    warm: Path | None
    on_policy: bool
    digest: str  # of all the above and the settings
    sharded: bool  # weights and optimizer over several processes

    @property
    def key(self) -> str:
        """32 hex digits that name the run in the resume area: what one version of the code computed, another must not continue, and
        checkpoints of shards are others."""
        return hashlib.sha256(f"{self.digest} {CODE_HASH}{' sharded' if self.sharded else ''}".encode()).hexdigest()[:32]


def _inputs(params: Params, paths: dict[str, str]) -> Inputs:
    t = params.train
    info = verifier_module.load_info(paths["verifier"])
    data = HiddenStates(paths["hidden"], paths["prompts"], verify=t.verify_checksums)
    if data.identity != info.identity:
        raise UserError(
            f"{paths['hidden']} holds states of verifier {data.identity}, {paths['verifier']} is {info.identity}: run `dvc repro`"
        )
    layer_ids = verifier_module.layer_ids(info, params)
    if data.layer_ids != layer_ids:
        raise UserError(
            f"{paths['hidden']} holds the states of layers {data.layer_ids}, the parameters ask for {layer_ids} "
            "(extract.aux_layer_ids and, last, the verifier's layer count): run `dvc repro`"
        )
    head = verifier_module.load_head(paths["verifier"])
    found = survey(paths["prompts"], info.vocab_size, t.ttt_steps)
    train = usable(data, found, "train", t.tokens_per_batch)
    heldout = usable(data, found, "heldout", max(t.tokens_per_batch, int(data.lengths.max(initial=1))))[: t.eval_samples]
    for name, indices, key in (("training", train, "max_samples"), ("validation", heldout, "prepare.heldout_fraction")):
        if not len(indices):
            now = (
                params.max_samples
                if key == "max_samples"
                else f"{params.prepare.heldout_fraction}) or max_samples (now {params.max_samples}"
            )
            some = len(data.splits["train" if name == "training" else "heldout"])
            lower = f", or lower train.ttt_steps (now {t.ttt_steps}): the first ttt_steps - 1 tokens of a sample are not learnt"
            raise UserError(
                f"the {name} split has no sample with a token to learn ({paths['prompts']}): raise {key} (now {now})"
                f"{lower if some and t.ttt_steps > 1 else ''}"
            )
    warm = warm_folder(t.warm_start, layer_ids[:-1], info.name) if t.warm_start else None
    if warm is not None:
        raw, tensors = model.read_checkpoint(warm)
        draft_vocab = model.vocab_of(tensors, raw, warm)
        if draft_vocab.size != t.draft_vocab_size:
            raise UserError(
                f"train.warm_start {warm} has a draft vocabulary of {draft_vocab.size}, train.draft_vocab_size is "
                f"{t.draft_vocab_size}: a warm start keeps the checkpoint's vocabulary, set train.draft_vocab_size to {draft_vocab.size}"
            )
    else:
        counts = found.counts["train"]
        draft_vocab = vocab.choose(counts, t.draft_vocab_size, vocab.required_ids(paths["verifier"], counts))
    on_policy = params.prepare.responses == "verifier" and params.prepare.temperature == 0
    digest = _digest(params, paths, info, warm, on_policy)
    sharded = t.fsdp and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return Inputs(info, head, data, layer_ids, found, train, heldout, draft_vocab, warm, on_policy, digest, sharded)


def _digest(params: Params, paths: dict[str, str], info: Any, warm: Path | None, on_policy: bool) -> str:
    """32 hex digits that name a run by all that its result depends on but the code."""

    def content(folder: Path, pattern: str) -> str:
        h = xxhash.xxh3_128()
        for file in sorted(folder.glob(pattern)):
            h.update(file.name.encode() + b"\0")
            with open(file, "rb") as f:
                while chunk := f.read(1 << 22):
                    h.update(chunk)
        return h.hexdigest()

    what = {
        "format": FORMAT,
        "speculators": version("speculators"),
        "seed": params.seed,
        "train": {k: v for k, v in params.train.model_dump(mode="json").items() if k not in HOW},
        "on_policy": on_policy,
        "verifier": info.identity,
        "states": sorted(f.name for f in Path(paths["hidden"]).glob("*.safetensors")),  # names end in content keys
        "prompts": content(Path(paths["prompts"]), "*.parquet"),
        "warm": content(warm, "*.safetensors") if warm else None,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def code(files: Iterable[Path]) -> str:
    """Hash of Python files that comments, docstrings and layout do not change."""
    h = hashlib.sha256()
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(getattr(node, "body", None), list):
                node.body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        h.update(ast.dump(tree).encode())
    return h.hexdigest()


CODE_HASH = code(CODE)  # of the code in memory: the files may change while it runs


def _say_if_left(folder: Path, digest: str) -> None:
    """Mark the run's folder with what it is made from; say so where it begins anew beside an unfinished run of the same."""
    (folder / checkpoints.FINISHED).unlink(missing_ok=True)  # it is at work again: no other run may remove the folder
    (folder / OF).write_text(digest, encoding="utf-8")
    if _reached(folder):
        return
    for other in sorted(folder.parent.iterdir()):
        try:
            same = other != folder and (other.name == digest or (other / OF).read_text(encoding="utf-8") == digest)
            step = _reached(other) if same and not (other / checkpoints.FINISHED).exists() else 0
        except OSError:  # it has no mark, or another run removes it
            continue
        if step:
            print(
                f"note: {other} has an unfinished run with the same data and settings at step {step}, by other code of training or "
                "with train.fsdp on several GPUs where this has not (or the other way), so this one begins anew; unless it is at work "
                "elsewhere, go back to that code or setting to continue it, or delete the folder",
                file=sys.stderr,
                flush=True,
            )


def _reached(folder: Path) -> int:
    """Step of a run's highest complete checkpoint, 0 where there is none."""
    return max((step for step, path in checkpoints.numbered(folder, "step") if checkpoints.complete(path)), default=0)


def warm_folder(where: str, aux_layer_ids: list[int], verifier: str) -> Path:
    """The checkpoint folder (speculators layout) that train.warm_start names: a folder of that layout or of EAGLE's, the
    models/drafter of another checkout, or a git revision of this one. A checkpoint in EAGLE's layout that does not say its layer
    ids or its verifier is taken to have this run's. Raises UserError."""
    path = Path(where)
    if not path.is_dir():
        path = _from_revision(where)
    if not (path / "config.json").is_file() and (path / "best" / "config.json").is_file():
        path = path / "best"
    raw = path / "config.json"
    if not raw.is_file():
        raise UserError(f"train.warm_start = {where}: {path} has no config.json, it is not a drafter checkpoint")
    if json.loads(raw.read_text(encoding="utf-8")).get("speculators_model_type") == layouts.ALGORITHM:
        return path
    from eagle3dvc.drafter.convert import convert

    out = stage.work_dir("train-warm") / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    shutil.rmtree(out, ignore_errors=True)
    convert(path, "speculators", out, layer_ids=aux_layer_ids, verifier_name=verifier)
    return out


def _from_revision(revision: str) -> Path:
    repo = str(stage.root())
    commit = stage.commit_of(revision, repo)
    if commit is None:
        raise UserError(
            f"train.warm_start = {revision} is neither a folder nor a git revision or experiment of this repository"
        )
    out = stage.work_dir("train-warm") / commit
    if not out.exists():
        part = out.with_name(f"{commit}.part")
        shutil.rmtree(part, ignore_errors=True)
        if why := stage.dvc_get(repo, "models/drafter", commit, part):
            raise UserError(f"train.warm_start = {revision}: models/drafter of that revision cannot be read ({why})")
        part.rename(out)
    return out


def _warm(draft: Any, folder: Path) -> None:
    """Put a checkpoint's weights into the drafter; raises UserError where the two would compute different things."""
    raw, tensors = model.read_checkpoint(folder)
    own = json.loads(json.dumps(draft.config.to_dict()))
    theirs, ours = raw["transformer_layer_config"], draft.config.transformer_layer_config.to_dict()
    for key in model.SAME_FUNCTION:
        if (raw.get(key) or False) != (own.get(key) or False):
            raise UserError(
                f"train.warm_start {folder} has {key} = {raw.get(key)}, this run has {own.get(key)}: use its setting"
            )
    for key in model.SAME_LAYER:
        if key in theirs and json.loads(json.dumps(theirs[key])) != json.loads(json.dumps(ours.get(key))):
            raise UserError(
                f"train.warm_start {folder} has {key} = {theirs[key]}, this run has {ours.get(key)}: set it in train.draft_config"
            )
    if model.own_embedding(tensors, draft.embed_tokens.weight) is not None:
        raise UserError(
            f"train.warm_start {folder} has an embedding of its own, a drafter trained here shares the verifier's: it cannot be "
            "continued without losing what it learnt; take another checkpoint"
        )
    with torch.no_grad():
        model.put_weights(draft, tensors, folder)


def _attention(train: Any, device: torch.device) -> str:
    if train.attention == "auto":
        return "simple_flex_attention" if device.type == "cuda" and train.compile else "sdpa"
    if train.attention == "flex_attention":
        if device.type != "cuda" or not train.compile:
            raise UserError("train.attention = flex_attention needs a GPU and train.compile: use auto, sdpa or eager")
        return "simple_flex_attention"
    return train.attention


def _fresh(t: Any, inputs: Inputs, device: torch.device) -> Any:
    """A drafter that has learnt nothing; raises UserError where the settings of its layers do not go together."""
    names = (
        "draft_layers",
        "draft_heads",
        "draft_kv_heads",
        "draft_head_dim",
        "draft_intermediate_size",
        "draft_config",
        "sliding_window",
    )
    try:
        config = model.draft_config(inputs.info, t, inputs.layer_ids)
        if config.transformer_layer_config.num_hidden_layers < 1:
            raise ValueError("a drafter has at least one layer")
        return model.instantiate(config, inputs.head, inputs.vocab, _attention(t, device))
    except Exception as e:
        chosen = [f"train.{n} = {getattr(t, n)}" for n in names if getattr(t, n) not in (None, {})]
        if isinstance(e, UserError | RuntimeError | MemoryError):
            raise
        said = next((line.strip() for line in reversed(str(e).splitlines()) if line.strip()), "")
        raise UserError(f"{', '.join(chosen)} do not make a draft layer: {type(e).__name__}: {said}") from e


def _trainer(params: Params, inputs: Inputs, device: torch.device, store: checkpoints.Store, on_history: Any):
    """The model and the trainer of this process."""
    from speculators.losses import resolve_loss_config
    from speculators.train.trainer import TrainerConfig

    from eagle3dvc.drafter.trainer import DrafterTrainer, Settings

    t = params.train
    torch.manual_seed(params.seed)
    draft = _fresh(t, inputs, device)
    if inputs.warm is not None:
        _warm(draft, inputs.warm)
    draft.lm_head.weight.requires_grad_(t.train_lm_head)
    if t.gradient_checkpointing:
        model.checkpoint_gradients(draft)
    plan = Plan(
        inputs.train, inputs.data.lengths[inputs.train], inputs.found.targets[inputs.train], t.tokens_per_batch, params.seed
    )
    per_epoch = max(1, round(len(plan) / t.gradient_accumulation_steps))
    steps = t.max_steps or t.epochs * per_epoch
    guards.no_waiting()
    compiled = device.type == "cuda" and t.compile
    if device.type == "cuda":  # the library compiles its forward wherever there is a GPU
        torch.compiler.set_stance("default" if compiled else "force_eager")
        # DDP's graph splitter cannot split around flex attention; the forward is a graph of its own either way
        torch._dynamo.config.optimize_ddp = False
        # each TTT step is compiled as such: with its number as a variable, the library's names of metrics split the graph, and the
        # part outside it waits for the GPU
        torch._dynamo.config.specialize_int = True
        # each step in training and in validation; past the limit flex attention would run uncompiled
        torch._dynamo.config.recompile_limit = max(32, 4 * t.ttt_steps)
    try:
        loss = resolve_loss_config(t.loss, guards.loss_implementation(device, compiled))
    except ValueError as e:
        raise UserError(f"train.loss = {t.loss!r}: {e}") from None
    weights = [weight for _, weight in loss.values()]
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise UserError(f"train.loss = {t.loss!r}: its weights must be finite, none of them negative and not all 0")
    call = {"ttt_steps": t.ttt_steps, "ttt_step_loss_decay": t.ttt_step_loss_decay, "loss_config": loss}
    config = TrainerConfig(
        lr=t.learning_rate,
        num_epochs=t.epochs,
        save_path=str(store.folder),
        train_call_kwargs=call,
        val_call_kwargs=call,
        optimizer=t.optimizer,
        weight_decay=t.weight_decay,
        muon_lr=t.muon_learning_rate,
        muon_weight_decay=t.weight_decay,
        scheduler_type=t.scheduler,
        scheduler_warmup_steps=int(t.warmup_fraction * steps),
        scheduler_total_steps=steps,
        hidden_states_dtype=torch.bfloat16 if t.precision == "bfloat16" else torch.float32,
        fsdp_shard=t.fsdp,
        max_steps=steps,
    )
    settings = Settings(
        steps=steps,
        accumulation=t.gradient_accumulation_steps,
        ttt_steps=t.ttt_steps,
        max_grad_norm=t.max_grad_norm,
        eval_every=t.eval_every or max(1, steps // 10),
        checkpoint_every=t.checkpoint_every,
        log_every=max(1, steps // 200),
        patience=t.early_stop_patience,
        on_policy=inputs.on_policy,
        bfloat16=t.precision == "bfloat16",
        workers=t.num_workers if t.num_workers or device.type == "cpu" else 2,
    )

    def heldout(part: int, parts: int) -> Iterator[Any]:
        for i in islice(inputs.heldout.tolist(), part, None, parts):
            yield inputs.data[i]
            inputs.data.release(i)

    return DrafterTrainer(
        draft,
        config,
        settings=settings,
        data=inputs.data,
        plan=plan,
        heldout=heldout,
        head=inputs.head,
        store=store,
        device=device,
        on_history=on_history,
    )


def _train(params: Params, paths: dict[str, str], rank: int, world: int, log: Any) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    inputs = _inputs(params, paths)
    if device.type == "cpu" and inputs.info.hidden_size < SMALL:
        torch.set_num_threads(1)
    folder = stage.work_dir("train") / inputs.key
    store = checkpoints.Store(folder)
    if world > 1:
        keys = [""] * world
        dist.all_gather_object(keys, inputs.key)
        if len(set(keys)) > 1:
            raise UserError(
                "the training processes do not see the same code and data: wait until nothing changes them, then run again"
            )
    if rank == 0:
        _say_if_left(folder, inputs.digest)
    handler = CurvesHandler(paths["curves"])
    logger = logging.getLogger("speculators.metrics")
    others = [name for name in params.train.loggers if name != "dvclive"]
    if others:
        from speculators.train.logger import setup_metric_logger

        setup_metric_logger(others, run_name=inputs.digest[:12], output_dir=str(stage.root() / "logs" / "train"))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    show = rank == 0 and "dvclive" in params.train.loggers
    if show:
        logger.addHandler(handler)
    trainer = None
    try:
        trainer = _trainer(params, inputs, device, store, handler.restart if show else lambda rows: None)
        trainer.run_training()
    except RuntimeError as e:  # torch.OutOfMemoryError is one; a CPU's failed allocation has no class of its own
        if not isinstance(e, torch.OutOfMemoryError) and "can't allocate memory" not in str(e):
            raise
        raise UserError(
            f"the {'GPU' if device.type == 'cuda' else 'machine'}'s memory is too small after step "
            f"{trainer.global_step if trainer else 0}: lower train.tokens_per_batch (now {params.train.tokens_per_batch}), "
            "train.ttt_steps, train.draft_vocab_size or train.draft_intermediate_size, set train.gradient_checkpointing, or end what "
            "else uses that memory; the last checkpoint is kept"
        ) from None
    finally:
        for h in (handler, *logger.handlers):
            logger.removeHandler(h)
            h.flush()
            h.close()
    metrics = _finish(params, paths, inputs, trainer) if rank == 0 else {}
    if rank == 0:
        store.finish()
        checkpoints.remove_finished(folder.parent, folder)
    c = trainer.clock
    log["processes"] = world
    log["steps_computed"] = c.steps
    log["drafter_parameters"] = sum(p.numel() for p in trainer.raw_model.parameters() if p.requires_grad)
    if c.seconds:
        log["seconds"] = round(c.seconds, 3)
        log["steps_per_second"] = round(c.steps / c.seconds, 3)
        log["tokens_per_second"] = round(c.tokens * world / c.seconds, 1)
        log["data_wait_fraction"] = round(c.wait / c.seconds, 5)
        log["seconds_validation"], log["seconds_checkpoints"] = round(c.validating, 3), round(c.saving, 3)
    if device.type == "cuda":
        log["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    else:
        import resource

        log["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return metrics


def _finish(params: Params, paths: dict[str, str], inputs: Inputs, trainer: Any) -> dict[str, Any]:
    """Write models/drafter beside and rename it; returns the metrics."""
    history = trainer.history
    best = next(r["heldout"] for r in history if r["step"] == trainer.best_step and "heldout" in r)
    losses = [r["train"]["loss"] for r in history if "train" in r]
    metrics = {
        "steps": trainer.global_step,
        "best_step": trainer.best_step,
        "acceptance_length": best["acceptance_length"],
        "heldout_loss": best["loss"],
        "train_loss": losses[-1] if losses else None,
        "train_samples": len(inputs.train),
        "heldout_samples": len(inputs.heldout),
        "supervised_tokens": int(inputs.found.counts["train"].sum()),
        "draft_vocab_size": inputs.vocab.size,
        "draft_vocab_coverage": inputs.vocab.coverage(inputs.found.counts["train"]),
        "draft_vocab_coverage_heldout": inputs.vocab.coverage(inputs.found.counts["heldout"]),
    }
    out = Path(paths["out"])
    tmp = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)  # of a run that was killed here
    tmp.mkdir(parents=True)
    try:
        draft = trainer.raw_model
        model.save(draft, tmp / "best", trainer.store.load_best(trainer.best_step))
        model.save(draft, tmp / "last", trainer.final)
        inputs.vocab.save(tmp / "vocab.safetensors")
        record = {
            "format": FORMAT,
            "settings": {k: v for k, v in params.train.model_dump(mode="json").items() if k not in HOW},
            "seed": params.seed,
            "verifier": {"name": inputs.info.name, "revision": inputs.info.revision, "identity": inputs.info.identity},
            "layer_ids": inputs.layer_ids,
            "on_policy": inputs.on_policy,
            "run": inputs.digest,
            "versions": {"speculators": version("speculators")},
            "metrics": metrics,
            "history": history,
        }
        stage.write_json(tmp / "training.json", record)
        stage.put_folder(tmp, out)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    return metrics


if __name__ == "__main__":
    main()
