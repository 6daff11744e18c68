"""Acceptance length of the exported drafter on held-out samples and, where an engine is asked for, its speed."""

from eagle3dvc.evaluate import build
from eagle3dvc.stage import run

if __name__ == "__main__":
    run("evaluate", build)
