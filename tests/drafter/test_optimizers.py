"""Muon's orthogonalization against its definition in float64, and the optimizers against torch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as by_torch

from eagle3dvc.drafter import optimizers

SHAPES = [(128, 448), (448, 128), (128, 128), (151, 98), (151, 38)]
SPECTRA = {
    "slow": lambda k: torch.arange(1, k + 1).double() ** -0.5,
    "fast": lambda k: 1 / torch.arange(1, k + 1).double(),
    "one direction": lambda k: torch.cat([torch.ones(1), torch.full((k - 1,), 1e-3)]).double(),
    "almost singular": lambda k: torch.logspace(0, -6, k).double(),
}


def with_spectrum(shape: tuple[int, int], values) -> torch.Tensor:
    generator, k = torch.Generator().manual_seed(0), min(shape)
    left, right = (torch.linalg.qr(torch.randn(n, k, generator=generator).double())[0] for n in shape)
    return ((left * values(k)) @ right.T).float()


def by_definition(update: torch.Tensor) -> torch.Tensor:
    """U p(p(...p(S / |S|))) V^T with p(x) = a x + b x^3 + c x^5, five times."""
    u, s, v = torch.linalg.svd(update.double(), full_matrices=False)
    a, b, c = 3.4445, -4.7750, 2.0315
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted).norm() / wanted.norm())


@pytest.fixture(params=[64, 10**6], ids=["halves", "whole"])
def halves(request, monkeypatch):
    monkeypatch.setattr(optimizers, "HALVES_FROM", request.param)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalize_is_the_polynomial_of_the_singular_values(halves, shape, spectrum):
    update = with_spectrum(shape, SPECTRA[spectrum])
    wanted = by_definition(update)
    assert error(optimizers.orthogonalize(update), wanted) < 2e-4
    # in half precision it is nearer than torch's own, which is in bfloat16
    half = error(optimizers.orthogonalize(update, dtype=torch.float16), wanted)
    assert half < 0.5 * error(by_torch(update.clone(), optimizers.COEFFICIENTS, 5, 1e-7), wanted)


def test_gradients_that_float16_cannot_hold(halves):
    update = with_spectrum((128, 384), SPECTRA["slow"])
    wanted = optimizers.orthogonalize(update, dtype=torch.float16)
    for scale in (2.0**-20, 2.0**30):
        assert error(optimizers.orthogonalize(update * scale, dtype=torch.float16), wanted.double()) < 1e-4
    single = torch.zeros(128, 384)
    single[3, 5] = 1e6  # all in one entry: the largest Gram matrix there can be
    found = optimizers.orthogonalize(single, dtype=torch.float16)
    assert error(found, by_definition(single)) < 1e-2
    assert not optimizers.orthogonalize(torch.zeros(128, 384), dtype=torch.float16).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_update_of_nothing_moves_nothing(dtype):
    """Below eps an update is not blown up to a whole one, however small it gets: gradients end, and the momentum fades away."""
    update = with_spectrum((32, 96), SPECTRA["slow"])
    update /= update.norm()
    sizes = [float(optimizers.orthogonalize(update * s, dtype=dtype).norm()) for s in (1e-6, 1e-9, 1e-14, 1e-24, 1e-40)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 3 and sizes[2] < 1e-3 and sizes[-1] < 1e-10
    theirs = by_torch((update * 1e-9).clone(), optimizers.COEFFICIENTS, 5, 1e-7)
    assert sizes[1] == pytest.approx(float(theirs.norm()), rel=0.02)
    p = torch.nn.Parameter(torch.ones(8, 32))
    optimizer = optimizers.Muon([p], lr=0.01, weight_decay=0.0)
    p.grad = torch.ones(8, 32)
    for step in range(3000):
        optimizer.step()
        if step == 0:
            p.grad.zero_()
    assert torch.isfinite(p).all()


def test_fewer_steps_than_the_restart():
    update = with_spectrum((64, 96), SPECTRA["slow"])
    once = by_torch(update.double(), optimizers.COEFFICIENTS, 1, 1e-7)  # rounds to bfloat16
    assert error(optimizers.orthogonalize(update, steps=1), once.double()) < 1e-2
    assert error(optimizers.orthogonalize(update, steps=2), by_definition(update)) > 0.1


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, m, generator=generator)) for n, m in [(48, 96), (96, 48), (32, 32)]]


@pytest.mark.parametrize("how", [None, "match_rms_adamw"])
def test_muon_steps_as_torchs(how):
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": how}
    both = []
    for make in (torch.optim.Muon, optimizers.Muon):
        params, generator = weights(), torch.Generator().manual_seed(2)
        optimizer = make(params, **settings)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        both.append((params, optimizer.state_dict()))
    (theirs, state), (ours, own) = both
    for a, b, start in zip(theirs, ours, weights(), strict=True):
        assert error(b - start, (a - start).detach().double()) < 0.03  # torch's are in bfloat16
    for i, s in state["state"].items():
        assert torch.equal(s["momentum_buffer"], own["state"][i]["momentum_buffer"])
    assert state["param_groups"] == own["param_groups"]


def test_every_matrix_has_one_owner_and_the_work_is_shared(monkeypatch):
    optimizer = optimizers.Muon(weights())
    params = [torch.empty(n, m, device="meta") for n, m in [(14336, 4096)] * 3 + [(4096, 12288), (4096, 8192), (4096, 4096)]]
    assert optimizer._owners(params) == [0] * 6
    monkeypatch.setattr(optimizers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(optimizers.dist, "get_world_size", lambda: 2)
    owners = optimizer._owners(params)
    load = [sum(p.numel() for p, o in zip(params, owners, strict=True) if o == r) for r in (0, 1)]
    assert set(owners) == {0, 1} and max(load) < 1.15 * min(load)


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"lm_head": torch.nn.Linear(8, 32), "fc": torch.nn.Linear(24, 8, bias=False)})


@pytest.mark.parametrize(("fsdp", "processes"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_build_divides_the_parameters_as_the_library_does(fsdp, processes, monkeypatch):
    from speculators.train.trainer import TrainerConfig

    sharded = fsdp and processes > 1
    monkeypatch.setattr(optimizers.dist, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(optimizers.dist, "get_world_size", lambda: processes)

    settings = {"lr": 1e-3, "num_epochs": 1, "save_path": "unused", "muon_lr": 0.02, "weight_decay": 0.3, "fsdp_shard": fsdp}
    config = TrainerConfig(**settings, optimizer="muon")
    net = model()
    muon, adamw = optimizers.build(net, config, torch.device("cpu"))
    assert type(muon) is (torch.optim.Muon if sharded else optimizers.Muon)
    assert [p is net["fc"].weight for p in muon.param_groups[0]["params"]] == [True]
    assert len(adamw.param_groups[0]["params"]) == 2 and not adamw.param_groups[0]["fused"]
    assert muon.param_groups[0]["lr"] == 0.02 and adamw.param_groups[0]["weight_decay"] == 0.3
    (only,) = optimizers.build(net, TrainerConfig(**settings, optimizer="adamw"), SimpleNamespace(type="cuda"))
    assert only.param_groups[0]["fused"] and len(only.param_groups[0]["params"]) == 3
