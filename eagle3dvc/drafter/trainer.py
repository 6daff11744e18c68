"""speculators' Trainer with a loop that counts steps: exact, resumable, and choosing by acceptance length.

The library builds the optimizers and schedules, wraps the model for several processes and computes the loss; this subclass
feeds it packed batches, accumulates gradients, checks every step, evaluates by the exact walk and writes checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from speculators.train import trainer as library
from speculators.train.trainer import Trainer, TrainerConfig, _all_reduce_metrics
from speculators.train.utils import normalize_counted_metrics

from eagle3dvc import stage
from eagle3dvc.drafter import optimizers
from eagle3dvc.drafter.acceptance import Acceptance, checked, count, merge
from eagle3dvc.drafter.checkpoints import Store
from eagle3dvc.drafter.data import Loader, Plan
from eagle3dvc.errors import UserError

metric_logger = logging.getLogger("speculators.metrics")


@dataclass(frozen=True)
class Settings:
    """What the library's TrainerConfig does not hold. steps: optimizer steps in total. accumulation: micro-batches a step over
    all processes. eval_every, checkpoint_every, log_every: steps. patience: evaluations without improvement before stopping."""

    steps: int
    accumulation: int
    ttt_steps: int
    max_grad_norm: float
    eval_every: int
    checkpoint_every: int
    log_every: int
    patience: int | None
    on_policy: bool
    bfloat16: bool
    workers: int


@dataclass
class Clock:
    """Where the time of this process went: seconds in steps, waiting for data (within), validating and saving; tokens and steps
    done."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wait: float = 0.0
    validating: float = 0.0
    saving: float = 0.0


@dataclass
class Figures:
    """What a step gave, on its way from the device. values: loss, gradient norm, then the metrics of `names`, float32 in host
    memory; whole: when they are there (None at once). losses: each micro-batch's share of the loss, on the device."""

    step: int
    values: torch.Tensor
    whole: Any
    names: list[str]
    rates: dict[str, float]
    losses: list[torch.Tensor]
    batches: list[list[int]]
    log: bool


class DrafterTrainer(Trainer):
    """See the module. data, plan: the reader and the batches; heldout: its validation items; head: the verifier's Head.

    `run_training` returns when the last step is done or the patience is spent; it raises UserError where loss or gradient are not
    finite, and stage.Interrupted after a signal, with a checkpoint written.
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        settings: Settings,
        data: Any,
        plan: Plan,
        heldout: Callable[[int, int], Iterator[Any]],
        head: Any,
        store: Store,
        device: torch.device,
        on_history: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    ):
        self.settings, self.data, self.plan, self.heldout, self.head, self.store = settings, data, plan, heldout, head, store
        self.device, self.on_history = device, on_history
        self.clock = Clock()
        self.history: list[dict[str, Any]] = []
        self.best_step, self.best_length, self.stale, self.evaluated = -1, -math.inf, 0, -1
        self.last: Acceptance | None = None
        self.final: dict[str, torch.Tensor] = {}  # the trained tensors after the last step
        self._signal: int | None = None
        self._pending: Figures | None = None
        super().__init__(model, config, plan)

    # what the library's constructor calls

    def setup_trainer(self) -> None:
        self.local_rank, self.device_type = self.device, self.device.type
        self.world = dist.get_world_size() if self.is_distributed else 1
        self.current_epoch = self.global_step = 0
        if self.settings.accumulation % self.world:
            raise UserError(
                f"train.gradient_accumulation_steps = {self.settings.accumulation} micro-batches a step cannot be shared by "
                f"{self.world} processes: set it to a multiple of {self.world}"
            )
        # signals are agreed on through host memory: through the GPU every step would wait for it
        self._host_group = dist.new_group(backend="gloo") if self.is_distributed and self.device.type == "cuda" else None

    def setup_optimizer(self) -> None:
        theirs = library.build_optimizers
        library.build_optimizers = lambda model, config: optimizers.build(model, config, self.device)
        try:
            super().setup_optimizer()  # the schedules are the library's
        finally:
            library.build_optimizers = theirs

    # state

    @property
    def raw_model(self) -> Any:
        return getattr(self.model, "module", self.model)

    def _trained(self) -> dict[str, torch.Tensor]:
        """Copies of all trained tensors on the CPU; collective under FSDP."""
        if self.config.fsdp_shard and self.is_distributed:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            names = {n for n, p in self.model.named_parameters() if p.requires_grad}
            return {k: v.contiguous() for k, v in state.items() if k in names}
        params = self.raw_model.named_parameters()
        return {n: p.detach().to("cpu", copy=True).contiguous() for n, p in params if p.requires_grad}

    def _optimizer_state(self) -> dict[str, Any]:
        if self.config.fsdp_shard and self.is_distributed:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            optimizers: Any = get_optimizer_state_dict(self.model, self.optimizers, options=options)
        else:
            optimizers = [o.state_dict() for o in self.optimizers]
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return {"optimizers": optimizers, "schedulers": [s.state_dict() for s in self.schedulers], "rng": rng}

    def save(self) -> None:
        """Write a checkpoint of the present step (all processes must call it)."""
        self._drain()
        self._check_weights()
        tensors, optimizer = self._trained(), self._optimizer_state()
        if self.rank == 0:
            state = {
                "step": self.global_step,
                "batches": self.global_step * self.settings.accumulation,
                "best_step": self.best_step,
                "best_length": self.best_length if self.best_step >= 0 else None,
                "stale": self.stale,
                "evaluated": self.evaluated,
                "history": self.history,
            }
            self.store.save(self.global_step, tensors, optimizer, state)
        if self.is_distributed:
            dist.barrier()

    def resume(self) -> int:
        """Continue from the newest complete checkpoint; returns its step, 0 where there is none."""
        found = self.store.load()
        if found is None:
            return 0
        tensors, optimizer, state = found
        if self.config.fsdp_shard and self.is_distributed:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            set_model_state_dict(self.model, tensors, options=options)
            set_optimizer_state_dict(self.model, self.optimizers, optimizer["optimizers"], options=options)
        else:
            own = dict(self.raw_model.named_parameters())
            with torch.no_grad():
                for name, value in tensors.items():
                    own[name].copy_(value)
            for o, s in zip(self.optimizers, optimizer["optimizers"], strict=True):
                for group, saved in zip(o.param_groups, s["param_groups"], strict=True):
                    saved["fused"] = group.get("fused")  # as this machine has it
                o.load_state_dict(s)
        for scheduler, s in zip(self.schedulers, optimizer["schedulers"], strict=True):
            scheduler.load_state_dict(s)
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        torch.set_rng_state(optimizer["rng"]["cpu"])
        if "cuda" in optimizer["rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(optimizer["rng"]["cuda"], self.device)
        self.global_step, self.evaluated, self.stale = state["step"], state["evaluated"], state["stale"]
        self.best_step = state["best_step"]
        self.best_length = state["best_length"] if self.best_step >= 0 else -math.inf
        self.history = state["history"]
        return self.global_step

    # the loop

    def run_training(self) -> None:
        s = self.settings
        resumed = self.resume()
        if self.rank == 0:
            self.on_history(self.history)
            if resumed:
                print(f"train: continuing from step {resumed} of {s.steps}", flush=True)
        loader = Loader(
            self.data,
            self.plan,
            device=self.device,
            dtype=self._batch_dtype(),
            ttt_steps=s.ttt_steps,
            start=self.global_step * s.accumulation,
            rank=self.rank,
            world=self.world,
            workers=s.workers,
        )
        try:
            with self._deferred_signals():
                self._loop(loader)
            self.final = self._trained()
        finally:
            loader.close()

    def _batch_dtype(self) -> torch.dtype:
        stored = self.data.hidden_dtype if hasattr(self.data, "hidden_dtype") else self.data[0].hidden_states.dtype
        return stored if self.settings.bfloat16 else torch.float32

    def _loop(self, loader: Loader) -> None:
        s = self.settings
        saved = self.global_step
        while True:
            due = self.global_step % s.eval_every == 0 or self.global_step == s.steps
            if due and self.evaluated != self.global_step:
                began = time.perf_counter()
                self._evaluate()
                self.clock.validating += time.perf_counter() - began
                self._stop_if_asked(saved)
            ended = self.global_step >= s.steps or (s.patience is not None and self.stale >= s.patience)
            if (ended or self.global_step % s.checkpoint_every == 0) and saved != self.global_step:
                began = time.perf_counter()
                self.save()
                self.clock.saving += time.perf_counter() - began
                saved = self.global_step
            if ended:
                return self._drain()
            self.train_step(loader)
            self._stop_if_asked(saved)

    def _stop_if_asked(self, saved: int) -> None:
        asked = self._signal or 0
        if self.is_distributed:  # torchrun signals the processes one after the other
            flag = torch.tensor([asked])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._host_group)
            asked = int(flag)
        if asked:
            if saved != self.global_step:
                self.save()
            raise stage.Interrupted(asked)

    @contextlib.contextmanager
    def _deferred_signals(self) -> Iterator[None]:
        """A signal takes effect between two steps, where weights and optimizer agree."""

        def note(signum, frame):
            self._signal = signum

        previous = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def train_step(self, loader: Loader) -> None:
        """One optimizer step: this process's micro-batches, each weighted by its share of the step's supervised targets, so that
        the gradient is that of the whole batch however it is divided.

        The step's figures are looked at one step later, or before anything is evaluated or saved: waiting for them here would leave
        the GPU without work.
        """
        s, began = self.settings, time.perf_counter()
        first = self.global_step * s.accumulation
        wanted = sum(self.plan.batch_targets(n) for n in range(first, first + s.accumulation))
        mine = s.accumulation // self.world
        metrics: dict[str, torch.Tensor] = {}
        losses: list[torch.Tensor] = []
        batches: list[list[int]] = []
        tokens = 0
        for k in range(mine):
            batch = next(loader)
            batches.append(batch.samples)
            tokens += batch.tokens
            self.clock.wait += batch.wait
            last = k == mine - 1
            with self._sync(last), self._autocast():
                _, loss, found = self.model(**batch.inputs, **(self.config.train_call_kwargs or {}))
                share = loss * (batch.targets / wanted)
                (share * self.world).backward()
            losses.append(share.detach())
            for name, value in found.items():
                metrics[name] = metrics[name] + value.detach() if name in metrics else value.detach()
        norm = torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], s.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        loss_sum = torch.stack(losses).sum()
        if self.is_distributed:
            dist.all_reduce(loss_sum)
        log = (self.global_step + 1) % s.log_every == 0 or self.global_step + 1 == s.steps
        if log and self.is_distributed:
            metrics = _all_reduce_metrics(metrics)
        found = [v.float().reshape(()) for v in metrics.values()] if log else []
        values, whole = self._to_host(torch.stack([loss_sum, norm.to(loss_sum), *found]))
        self._settle()
        rates = {type(o).__name__: o.param_groups[0]["lr"] for o in self.optimizers}
        self._optimizers_step()
        self._schedulers_step()
        self._optimizers_zero_grad()
        self.global_step += 1
        self._pending = Figures(self.global_step, values, whole, list(metrics) if log else [], rates, losses, batches, log)
        self.clock.steps += 1
        self.clock.tokens += tokens
        self.clock.seconds += time.perf_counter() - began

    def _to_host(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(copy in host memory, event after which it is whole); nothing waits here."""
        if values.device.type != "cuda":
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        whole = torch.cuda.Event()
        whole.record()
        return host, whole

    def _settle(self) -> None:
        """Look at the last step's figures (all processes come here at the same step): end the run where they are not finite, else
        log them if they are due."""
        figures, self._pending = self._pending, None
        if figures is None:
            return
        if figures.whole is not None:
            figures.whole.synchronize()
        loss, norm, *metrics = figures.values.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._not_finite(figures, loss, norm)
        if figures.log:
            found = normalize_counted_metrics(dict(zip(figures.names, metrics, strict=True)), self.world)
            accuracy = {k: v for k, v in found.items() if k.startswith("cond_acc_")}
            self._emit({"train": {"loss": loss, "grad_norm": norm, **accuracy}, "lr": figures.rates}, figures.step)

    def _sync(self, last: bool):
        """Gradients travel between processes with the last micro-batch of a step only."""
        if last or not self.is_distributed or not hasattr(self.model, "no_sync"):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _autocast(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.settings.bfloat16)

    def _drain(self) -> None:
        """:meth:`_settle` outside a step; what the device still had to do counts as the step's time."""
        began = time.perf_counter()
        self._settle()
        self.clock.seconds += time.perf_counter() - began

    def _check_weights(self) -> None:
        """Raise UserError where an update left weights that are not finite, though loss and gradient were (all processes come
        here)."""
        with torch.no_grad():
            params = [p for p in self.raw_model.parameters() if p.requires_grad]
            own = [p.to_local() if hasattr(p, "to_local") else p for p in params]  # of a shard only its part
            wrong = torch.stack([(~torch.isfinite(p)).any() for p in own]).any().to(torch.int32)
        if self.is_distributed:
            dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        if wrong:
            raise UserError(
                f"the weights are not finite after step {self.global_step}, though loss and gradient are: lower train.learning_rate, "
                "train.muon_learning_rate or train.weight_decay; nothing of it is kept, the last checkpoint is"
            )

    def _not_finite(self, figures: Figures, loss: float, norm: float) -> None:
        """Raise UserError naming the samples of the micro-batches at fault in all processes (all of them come here), or those of
        the whole step where only the gradient is not finite."""
        pairs = zip(figures.batches, figures.losses, strict=True)
        wrong = [b for b, v in pairs if math.isfinite(loss) or not torch.isfinite(v)]
        names = [self.data[i].sample_id for b in wrong for i in b]
        if self.is_distributed:
            parts: list[list[str]] = [names] * self.world
            dist.all_gather_object(parts, names)
            names = [name for part in parts for name in part]
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        raise UserError(
            f"{what} at step {figures.step}, nothing of which is kept; samples in the batch: {', '.join(names)}; "
            "the last checkpoint is kept: lower train.learning_rate or train.max_grad_norm, or look at these samples with "
            "`eagle3dvc inspect`"
        )

    def _emit(self, row: dict[str, Any], step: int) -> None:
        """Keep the row (a resumed run shows the whole curve) and hand it to every logger of speculators.metrics. What differs
        from run to run goes to the loggers only."""
        if self.rank:
            return
        self.history.append({"step": step, **row})
        c = self.clock
        profile = {"tokens": c.tokens * self.world, "seconds": c.seconds, "data_wait_seconds": c.wait}
        if self.device.type == "cuda":
            profile["memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        metric_logger.info({**row, "profile": profile}, extra={"step": step})

    # evaluation

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Acceptance length by the exact walk on the validation samples; the best weights so far are kept."""
        self._drain()
        self._check_weights()
        self.model.eval()
        whole = self.config.fsdp_shard or not self.is_distributed  # sharded weights need every process in every pass
        part = (0, 1) if whole else (self.rank, self.world)
        with self._autocast():
            found = count(
                self.model if self.config.fsdp_shard else self.raw_model,
                self.head,
                self.heldout(*part),
                self.settings.ttt_steps,
                self.settings.on_policy,
                loss_kwargs={k: v for k, v in (self.config.val_call_kwargs or {}).items() if k != "ttt_steps"},
            )
        self.model.train()
        if not whole:
            parts: list[Acceptance] = [found] * self.world
            dist.all_gather_object(parts, found)
            found = merge(parts)
        found = checked(found)
        self.last = found
        self.evaluated = self.global_step
        if found.acceptance_length > self.best_length:
            self.best_length, self.best_step, self.stale = found.acceptance_length, self.global_step, 0
            tensors = self._trained()
            if self.rank == 0:
                self.store.save_best(self.global_step, tensors)
        else:
            self.stale += 1
        by_position = {f"acceptance_at_{j}": r for j, r in enumerate(found.rate_by_position, 1)}
        self._emit(
            {"heldout": {"loss": found.loss, "acceptance_length": found.acceptance_length, **by_position}}, self.global_step
        )
