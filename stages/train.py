"""Train the drafter on data/hidden_states and choose its best checkpoint by acceptance length -> models/drafter."""

from eagle3dvc import stage


def main(params, log):
    from eagle3dvc.drafter.train import build

    return build(params, log=log)


if __name__ == "__main__":
    stage.run("train", main)
