"""Muon's orthogonalization of one step's matrices: torch's own, and the one of the train stage, ms and distance from the definition.

    python bench/muon.py                    # the matrices of an 8B verifier's drafter; wants a GPU
    python bench/muon.py --scale 16         # all sides divided by 16

The definition is the same polynomial in float64. Gradients are random with singular values that fall as 1 / sqrt(k).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from eagle3dvc.drafter.optimizers import COEFFICIENTS, orthogonalize

#: rows, columns, how many: gate and up, down, fc, q, o, k and v
SHAPES = [(14336, 4096, 2), (4096, 14336, 1), (4096, 12288, 1), (4096, 8192, 1), (4096, 4096, 1), (1024, 8192, 2)]


def gradient(rows: int, columns: int, device: str) -> torch.Tensor:
    x = torch.randn(rows, columns, device=device)
    k = min(rows, columns)
    weights = torch.arange(1, k + 1, device=device) ** -0.5
    return 1e-4 * (x * weights if columns == k else (x.T * weights).T)


def definition(update: torch.Tensor) -> torch.Tensor:
    x = update.double() / update.double().norm()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def timed(function, update: torch.Tensor, device: str) -> float:
    """ms of the best of five."""
    best = float("inf")
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        function(update)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 1000 * best


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scale", type=int, default=1)
    scale = p.parse_args().scale
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.float16 if device == "cuda" else torch.float32
    sides = {
        "torch.optim.Muon": lambda u: _zeropower_via_newtonschulz(u, COEFFICIENTS, 5, 1e-7),
        "ours": lambda u: orthogonalize(u, 5, half),
    }
    total = dict.fromkeys(sides, 0.0)
    print("matrix          count   " + "".join(f"{name:>20}: ms, error " for name in sides))
    for rows, columns, count in SHAPES:
        update = gradient(rows // scale, columns // scale, device)
        wanted = definition(update)
        text = ""
        for name, function in sides.items():
            error = float((function(update).double() - wanted).norm() / wanted.norm())
            ms = timed(function, update, device)
            total[name] += count * ms
            text += f"{ms:>22.2f}  {error:.4f} "
        print(f"{rows // scale:>6} x {columns // scale:<6} {count:>5}   {text}", flush=True)
    torchs, ours = total.values()
    print(f"all of a step: {torchs:.1f} ms and {ours:.1f} ms, ratio {torchs / ours:.2f}")


if __name__ == "__main__":
    main()
