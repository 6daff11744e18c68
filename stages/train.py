"""Train the drafter on data/hidden_states and choose its best checkpoint by acceptance length -> models/drafter."""

import os

from eagle3dvc import params as params_module
from eagle3dvc import stage


def main(params, log):
    from eagle3dvc.drafter.train import build

    return build(params, log=log)


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        stage.run("train", main)
    else:  # another process under torchrun: rank 0 writes the metrics and the log
        from eagle3dvc.drafter.train import join

        join(params_module.load(), {}, {})
