"""The playbook is up to date, deterministic, complete, and stale as soon as an input changes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from eagle3dvc.cli import app
from eagle3dvc.errors import UserError
from eagle3dvc.fleet import doctor, playbook
from eagle3dvc.fleet import measurement as M

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of everything the playbook reads and writes; the current folder."""
    for name in ("profiles", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("params.yaml", "learnings.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_committed_playbook_is_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "up to date" in playbook.check()


def test_rendering_is_the_same_in_another_process_and_hash_seed(project):
    code = "from eagle3dvc.fleet import playbook as p; import sys; sys.stdout.write(p.render(p.Inputs()))"
    texts = set()
    for seed in ("0", "1"):
        env = {"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": str(ROOT)}
        texts.add(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout)
    assert texts == {playbook.render(playbook.Inputs())}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("learnings.yaml", "never run `dvc gc -c`", "never ever run `dvc gc -c`"),
        ("profiles/kimi-k2.5-b300.yaml", "max_samples: 100000", "max_samples: 60000"),
        ("docs/hero-run.md", "Rehearse", "Skip"),
    ],
)
def test_a_changed_input_makes_it_stale(project, file, old, new):
    assert "up to date" in playbook.check()
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))
    with pytest.raises(UserError, match="stale"):
        playbook.check()
    playbook.write()
    assert "up to date" in playbook.check()


def test_own_measurement_and_hardware_are_remembered(project):
    shutil.copy(M.HARDWARE / "b300x8.yaml", "mine.yaml")
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("[30, 50]", "[10, 11]"))
    playbook.write(hardware="mine.yaml")
    assert "$10 - $11 an hour" in Path("docs/hero-run.md").read_text()
    assert "up to date" in playbook.check()
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("[10, 11]", "[10, 12]"))
    with pytest.raises(UserError, match="stale"):
        playbook.check()


def test_a_measurement_without_a_published_figure(project):
    text = (M.MEASUREMENTS / "kimi-k2.5-local.yaml").read_text()
    Path("mine.yaml").write_text("\n".join(x for x in text.splitlines() if "published_tokens_per_second" not in x))
    playbook.write(measurement="mine.yaml")
    document = Path("docs/hero-run.md").read_text()
    assert "Measured acceptance lengths" in document and "acceptance length for" not in document
    rows = document.split("| machine | tok/s without")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 4 and {row.count("|") for row in rows[1:]} == {5}


def test_what_the_document_cannot_keep_is_refused(project):
    before = Path("docs/hero-run.md").read_text()
    Path("my machine.yaml").write_text((M.HARDWARE / "h200x8.yaml").read_text())
    with pytest.raises(UserError, match="without spaces"):
        playbook.write(hardware="my machine.yaml")
    with pytest.raises(UserError, match="--check takes"):
        CliRunner().invoke(app, ["playbook", "--check", "--hardware", "h200x8"], catch_exceptions=False)
    assert Path("docs/hero-run.md").read_text() == before


def test_missing_document(project):
    Path("docs/hero-run.md").unlink()
    with pytest.raises(UserError, match="does not exist"):
        playbook.check()
    assert "wrote" in playbook.write()


def test_it_holds_every_guard_and_every_lesson(project):
    from eagle3dvc.drafter.guards import HOLES

    text = Path("docs/hero-run.md").read_text()
    for hole in HOLES:
        assert hole.guard.replace("|", "\\|") in text
    for lesson in playbook.learnings():
        assert lesson.symptom.replace("|", "\\|") in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {date: 2026-01-01, symptom: s, cause: c, fix: f}", "entry 1 version"),
        ("- {date: soon, symptom: s, cause: c, fix: f, version: v}", "entry 1 date"),
        ("- {date: 2026-01-01, symptom: '', cause: c, fix: f, version: v}", "entry 1 symptom"),
        ("- [", "not valid YAML"),
        ("date: 2026-01-01", "learnings.yaml: Input should be a valid list"),
    ],
)
def test_bad_lessons_are_named(project, text, message):
    Path("learnings.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        playbook.learnings()


def test_files_that_are_no_text_are_one_sentence(project):
    Path("docs/hero-run.md").write_bytes(b"\xff")
    with pytest.raises(UserError, match="stale"):
        playbook.check()
    Path("learnings.yaml").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not valid YAML"):
        playbook.check()


def commands(text):
    """Every `eagle3dvc ...` and `make ...` in code blocks and inline code."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S) + re.findall(r"`((?:eagle3dvc|make) [^`]+)`", text)
    for block in blocks:
        for line in re.split(r"\n|&&|;", block):
            if (line := line.strip().split(" #")[0]).startswith(("eagle3dvc ", "make ")):
                yield line.split()


DOCUMENTS = [p for p in ("docs/hero-run.md", "docs/plan.md", "docs/fleet.md") if (ROOT / p).is_file()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_the_documents_exists(document):
    cli = get_command(app)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    found = list(commands((ROOT / document).read_text()))
    assert found
    for words in found:
        if words[0] == "make":
            assert words[1] in targets, words
            continue
        command = cli
        for word in words[1:]:
            if not hasattr(command, "commands"):
                break
            assert word in command.commands, words
            command = command.commands[word]
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        for word in words[1:]:
            if word.startswith("--"):
                assert word.split("=")[0] in options, words
        for i, word in enumerate(words):
            if word == "--only":
                assert words[i + 1] in doctor.CHECKS, words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
        assert (ROOT / document).parent.joinpath(link).exists(), link
