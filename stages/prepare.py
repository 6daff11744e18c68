"""prepare: conversations of every source into prompt shards with loss masks (data/prompts)."""

from eagle3dvc import prompts, stage


def main(params, log):
    return prompts.build(params, "data/verifier", "data/prompts", log=log)


if __name__ == "__main__":
    stage.run("prepare", main)
