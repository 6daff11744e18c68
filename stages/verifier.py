"""Identity, native config, tokenizer and head of the verifier; for `verifier.model: demo` it is trained first -> data/verifier."""

import sys

from eagle3dvc import verifier
from eagle3dvc.stage import run


def main(params, log):
    def progress(step: int, loss: float) -> None:
        steps = params.verifier.demo.steps
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"demo verifier: step {step + 1} of {steps}, loss {loss:.3f}", file=sys.stderr, flush=True)

    info = verifier.build(params, "data/verifier", progress)
    log["identity"] = info.identity
    return {
        "name": info.name,
        "identity": info.identity,
        "num_layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "vocab_size": info.vocab_size,
        "tied_embeddings": info.tied_embeddings,
    }


if __name__ == "__main__":
    run("verifier", main)
