"""The best checkpoint as the layouts engines load, each reloaded and compared with what was trained."""

from eagle3dvc.drafter.export import build
from eagle3dvc.stage import run

if __name__ == "__main__":
    run("export", lambda params, log: build(params, log=log))
