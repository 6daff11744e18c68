"""Hidden states of the verifier for every prompt shard; what was computed before is found, not computed again."""

from eagle3dvc.hidden_states.extract import build
from eagle3dvc.stage import run

if __name__ == "__main__":
    run("extract", build)
