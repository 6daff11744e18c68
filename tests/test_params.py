"""Wrong parameters are named, with their value and the nearest valid one, before any work starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from eagle3dvc import params
from eagle3dvc.errors import UserError


def test_params_yaml_names_every_key_and_repeats_the_defaults():
    """`dvc exp run -S key=value` and DVC's own key lists need each key to be there; a reader needs the default to be true."""
    text = YAML(typ="safe").load(Path("params.yaml"))
    p = params.load("params.yaml")
    assert p == params.Params(max_samples=1000)
    for name in params.Params.model_fields:
        block = getattr(p, name)
        if isinstance(block, params.Block):
            assert set(text[name]) == set(type(block).model_fields) - {"demo"}, name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_sample": 3}, r"max_sample = 3 is not a parameter; did you mean max_samples\?"),
        ({"max_samples": "x"}, r"max_samples = 'x' must be a valid integer"),
        ({"max_samples": 0}, r"max_samples = 0 must be greater than or equal to 1"),
        ({"max_samples": True}, r"max_samples = True must be a valid integer"),
        ({"train": {"lerning_rate": 1}}, r"train.lerning_rate = 1 is not a parameter; did you mean train.learning_rate\?"),
        ({"extract": {"engine": "vlm"}}, r"extract.engine = 'vlm' must be one of .*nearest: vllm"),
        (
            {"extract": {"aux_layer_ids": [4, 2]}},
            r"aux_layer_ids = \[4, 2\] must be strictly ascending.*nearest valid: \[2, 4\]",
        ),
        ({"extract": {"aux_layer_ids": [0, 2]}}, r"aux_layer_ids = \[0, 2\] must be strictly ascending ids from 1"),
        ({"prepare": {"max_length": 0}}, r"prepare.max_length = 0 must be greater"),
        ({"prepare": {"sources": []}}, r"prepare.sources = \[\]"),
        (
            {"prepare": {"sources": [{"pth": "x"}]}},
            r"sources\[0\].pth = 'x' is not a parameter; did you mean prepare.sources\[0\].path\?",
        ),
        ({"prepare": {"sources": [{"path": "README.md"}]}}, r"set prepare.watch to README.md"),
        ({"verifier": {"model": "stages"}}, r"set verifier.watch to stages"),
        ({"verifier": {"model": " "}}, r"verifier.model is empty"),
        ({"verifier": {"demo": {"heads": 7}}}, r"heads = 7 does not divide"),
        ({"train": {"gpus": "x"}}, r"train.gpus = 'x' must be one of 'auto' or must be a valid integer"),
        ({"train": 3}, r"train = 3 must be a valid"),
        ({"train": {"learning_rate": float("nan")}}, r"train.learning_rate = nan must be a finite number"),
        ({"train": {"learning_rate": 1e39}}, r"train.learning_rate = 1e\+39 must be less than or equal to"),
        ({"train": {"max_steps": 10**400}}, r"train.max_steps = 1000*.* must be less than or equal to"),
        ({"train": {"num_workers": 10**9}}, r"train.num_workers = 1000000000 must be less than or equal to 256"),
        ({"train": {"warm_start": ""}}, r"train.warm_start = '' names no folder or revision"),
        ({"evaluate": {"draft_tokens": 100000}}, r"evaluate.draft_tokens = 100000 must be less than or equal to 64"),
        ({"evaluate": {"bootstrap": 2**33}}, r"evaluate.bootstrap = 8589934592 must be less than or equal to 1000000"),
        ({"evaluate": {"baseline": ""}}, r"evaluate.baseline = '' names no folder or revision"),
        ({"prepare": {"temperature": float("inf")}}, r"prepare.temperature = inf must be a finite number"),
        ({"extract": {"env": {"A=B": "1"}}}, r"extract.env names 'A=B': a name is not empty and has no ="),
        ({"extract": {"env": {"": "1"}}}, r"extract.env names ''"),
        ({"extract": {"env": {"A": "1\0"}}}, r"extract.env names 'A'.* a NUL"),
    ],
)
def test_bad_value(data, message):
    with pytest.raises(UserError, match=message):
        params.parse({"max_samples": 5, **data})


def test_valid_edges():
    p = params.parse({"max_samples": 1, "verifier": {"model": "stages", "watch": "stages/extract.py"}})
    assert p.verifier.watch == "stages/extract.py"
    assert params.parse({"max_samples": 1, "train": {"gpus": 2, "learning_rate": 1}}).train.gpus == 2


@pytest.mark.parametrize("text", ["[1", "- 2", "", "max_samples: 3\nmax_samples: 4", "a: \x00"])
def test_not_a_mapping(tmp_path, text):
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError, match=r"params\.yaml"):
        params.load(tmp_path / "params.yaml")


def test_a_duplicate_key_is_named(tmp_path):
    (tmp_path / "params.yaml").write_text("max_samples: 3\ntrain:\n  epochs: 1\n  epochs: 2\n")
    with pytest.raises(UserError, match=r'params\.yaml is not valid YAML: line 4: found duplicate key "epochs"'):
        params.load(tmp_path / "params.yaml")


def test_missing_file_and_exit_status(tmp_path):
    run = subprocess.run([sys.executable, "-m", "eagle3dvc.cli", "params"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and "params.yaml does not exist" in run.stderr and "Traceback" not in run.stderr
