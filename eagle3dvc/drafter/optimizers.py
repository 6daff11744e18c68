"""The optimizers of a training run: torch's AdamW and Muon over the parameters that speculators gives to each, made faster on GPUs.

Muon orthogonalizes every matrix's update by five Newton-Schulz steps, for an 8B verifier's drafter a quarter of the time of a
training step of 8,192 tokens. Here the steps are taken on the small Gram matrix of the update (`orthogonalize`), and under DDP each
matrix is orthogonalized by one process instead of by all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

#: of the quintic of a step, as in torch.optim.Muon: x becomes a x + b x^3 + c x^5, for each singular value x
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: after so many steps the Gram matrix is computed anew: rounding gives it negative eigenvalues, which then would grow
RESTART = 2
#: what is in half precision is kept at so many times its size, where float16 has all its digits and is far from overflow
SCALE = 8.0
#: Gram matrices with more rows are computed in halves, their upper right quarter is copied: for fewer that is no gain
HALVES_FROM = 2048
#: matrices with less than so many times as many columns as rows (or the other way) are cheaper to iterate on themselves
WIDE = 1.7


def _gram(x: torch.Tensor, tall: bool) -> torch.Tensor:
    """x @ x.T, [m, m]; x.T @ x where x is tall."""
    left, right = (x.T, x) if tall else (x, x.T)
    m = left.shape[0]
    if m <= HALVES_FROM:
        return left @ right
    h, out = m // 2, x.new_empty(m, m)
    torch.mm(left[:h], right[:, :h], out=out[:h, :h])
    torch.mm(left[h:], right, out=out[h:])
    out[:h, h:] = out[h:, :h].T
    return out


def orthogonalize(
    update: torch.Tensor,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    eps: float = 1e-7,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
) -> torch.Tensor:
    """What torch.optim.Muon makes of an update [n, m]: its singular vectors, with singular values near 1. Returns `dtype`.

    Where the update is wide or tall, its Gram matrix, m x m or n x n, goes through the Newton-Schulz steps in its place: the same
    polynomial of it in two thirds of the work ("Gram Newton-Schulz", dao-lab.ai/blog/2026/gram-newton-schulz; DeepSpeed's default).
    All matrices of the steps are polynomials of the Gram matrix, so they are symmetric and commute. An update whose norm is below
    `eps` is taken to have that norm, so that one of nothing moves nothing.
    """
    a, b, c = coefficients
    b, c = b / SCALE**2, c / SCALE**4  # Gram matrices are SCALE^2 times their size
    tall = update.shape[0] > update.shape[1]
    size = update.norm().clamp(min=eps)  # the spectral norm is at most this
    x = torch.mul(update, SCALE / size, out=torch.empty(update.shape, dtype=dtype, device=update.device))
    if max(x.shape) < WIDE * min(x.shape):
        for _ in range(steps):
            gram = _gram(x, tall)
            z = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, x, z, beta=a) if tall else torch.addmm(x, z, x, beta=a)
        return x.div_(SCALE)
    gram, q = _gram(x, tall), None
    for step in range(1, steps + 1):
        z = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        if q is None:
            q = z.clone()
            q.diagonal().add_(a)
        else:
            q = torch.addmm(q, z, q, beta=a)
        if step == steps:
            q.div_(SCALE)
        if step in (RESTART, steps):
            x = x @ q if tall else q @ x
        if step == RESTART < steps:
            gram, q = _gram(x, tall), None
        elif step < steps:
            gram = torch.addmm(gram, z, gram, beta=a)
            gram = torch.addmm(gram, z, gram, beta=a)
    return x


class Muon(torch.optim.Muon):
    """torch.optim.Muon with `orthogonalize`, in float16 on GPUs and float32 elsewhere. Where several processes hold the same weights
    each orthogonalizes its share and sends it to the others; momenta, and so the state, are the same in all."""

    def _owners(self, params: list[torch.Tensor]) -> list[int]:
        """The process of each matrix, the largest first to the least loaded."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        load, owners = [0] * world, [0] * len(params)
        for i in sorted(range(len(params)), key=lambda i: -params[i].numel()):
            owners[i] = load.index(min(load))
            load[owners[i]] += params[i].numel() * min(params[i].shape)
        return owners

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, together = (dist.get_rank(), dist.get_world_size() > 1) if dist.is_initialized() else (0, False)
        for group in self.param_groups:
            params: list[torch.Tensor] = []
            grads: list[torch.Tensor] = []
            momenta: list[torch.Tensor] = []
            self._init_group(group, params, grads, momenta)
            updates, sent = [], []
            for p, grad, momentum, owner in zip(params, grads, momenta, self._owners(params), strict=True):
                momentum.lerp_(grad, 1 - group["momentum"])
                dtype = torch.float16 if p.device.type == "cuda" else torch.float32
                if owner == rank:
                    update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                    updates.append(orthogonalize(update, group["ns_steps"], dtype, group["eps"], group["ns_coefficients"]))
                else:
                    updates.append(torch.empty(p.shape, dtype=dtype, device=p.device))
                if together:
                    sent.append(dist.broadcast(updates[-1], owner, async_op=True))
            for work in sent:
                work.wait()
            for p, update in zip(params, updates, strict=True):
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-_rate(group["lr"], group["adjust_lr_fn"], p.shape))


def _rate(lr: float, how: str | None, shape: torch.Size) -> float:
    from torch.optim._muon import _adjust_lr

    return _adjust_lr(lr, how, shape)


def build(model: Any, config: Any, device: torch.device) -> list[torch.optim.Optimizer]:
    """What speculators.train.optimizers.build_optimizers builds from the same TrainerConfig: AdamW, or Muon for the matrices of the
    layers and AdamW for the rest. Weights that FSDP shards keep torch's Muon, which works on the shards."""
    from speculators.train.optimizers import build_optimizers

    found = build_optimizers(model, config)
    sharded = config.fsdp_shard and dist.is_initialized() and dist.get_world_size() > 1
    for i, o in enumerate(found):
        if type(o) is torch.optim.Muon and not sharded:
            found[i] = Muon(o.param_groups)
        elif type(o) is torch.optim.AdamW and device.type == "cuda":
            found[i] = torch.optim.AdamW([{**g, "fused": True} for g in o.param_groups], fused=True)
    return found
