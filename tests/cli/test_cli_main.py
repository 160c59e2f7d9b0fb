"""The frame of all commands: help, version, exit codes, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer

from packhorse import __version__
from packhorse.cli import doctor, schema
from packhorse.cli.main import app, run_arguments, spell_resume
from packhorse.errors import (
    DoesNotFitError,
    NonFiniteError,
    PackhorseError,
    RecipeError,
    StoppedError,
)

COMMANDS = (
    "init", "doctor", "probe", "data", "plan", "explain", "lower", "check", "simulate",
    "schedule", "train", "compare", "clean", "schema",
)  # fmt: skip


def list_commands():
    return {info.name: info.callback for info in app.registered_commands}


def test_every_command_is_there_and_takes_json():
    assert tuple(list_commands()) == COMMANDS
    group = typer.main.get_command(app)
    for name in COMMANDS:
        options = [option for parameter in group.commands[name].params for option in parameter.opts]
        assert "--json" in options, name


def test_help_shows_every_command_in_a_whole_line(shell):
    done = shell("--help")
    assert (done.code, done.err) == (0, "")
    for name in COMMANDS:
        assert f"\n  {name} " in done.out
    assert "..." not in done.out.partition("Commands:")[2]
    assert shell().out == done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(shell, name):
    done = shell(name, "--help")
    assert done.code == 0
    assert done.out.startswith(f"Usage: packhorse {name}")


def test_version(shell):
    done = shell("--version")
    assert (done.code, done.out) == (0, f"packhorse {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lowr"], "lowr"),
        (["lower"], "PLAN"),
        (["lower", "plan.json", "--kin", "save"], "--kin"),
        (["lower", "plan.json", "--kind", "sav"], "sav"),
        (["data", "recipe.yaml", "--show", "-1"], "--show"),
    ],
)
def test_a_wrong_command_line_ends_with_2(shell, arguments, said):
    done = shell(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert said in done.err.splitlines()[0]
    assert "--help` shows what it takes" in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("a key is wrong", where="recipe: key", fix="right it"), 2),
        (DoesNotFitError("it does not fit"), 3),
        (NonFiniteError("the loss became nan"), 4),
        (StoppedError("stopped by SIGTERM"), 75),
    ],
)
def test_errors_for_people_have_their_codes_and_no_traceback(shell, monkeypatch, error, code):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("packhorse.machine.doctor.examine_machine", fail)
    done = shell("doctor")
    assert (done.code, done.out) == (code, "")
    head = "" if isinstance(error, StoppedError) else "error: "
    assert done.err == f"{head}{error}\n"
    done = shell("doctor", "--json")
    assert done.code == code
    assert done.document == {
        "error": {
            "error": type(error).__name__,
            "exit_code": code,
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
        }
    }


def test_a_mistake_of_ours_names_the_report_with_the_traceback(shell, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("packhorse.machine.doctor.examine_machine", lambda *_, **__: 1 / 0)
    done = shell("doctor")
    assert (done.code, done.out) == (1, "")
    (report,) = tmp_path.iterdir()
    assert str(report) in done.err
    assert "ZeroDivisionError: division by zero" in done.err
    assert "Traceback" not in done.err
    text = report.read_text()
    assert "Traceback" in text
    assert "arguments: doctor" in text
    done = shell("doctor", "--json")
    assert done.document["error"]["exit_code"] == 1


def test_a_missing_package_is_one_line_with_its_command(shell, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    monkeypatch.setattr("packhorse.machine.doctor.examine_machine", fail)
    done = shell("doctor")
    assert done.code == 2
    assert "this needs torch, which is not installed" in done.err
    assert "pip install 'packhorse[train]'" in done.err


def test_ctrl_c_says_stopped(shell, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("packhorse.machine.doctor.examine_machine", stop)
    done = shell("doctor")
    assert (done.code, done.err.strip()) == (130, "stopped")


def test_a_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "packhorse", "schema"],
            stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_without_unicode_is_no_bug():
    script = (
        "import sys; from packhorse.cli import main;"
        "main.run_arguments = lambda _: 0 * sys.stdout.write('caf\\u00e9 \\u2026\\n');"
        "main.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf? ?\n", "")


def test_json_on_stdout_is_one_document(shell):
    for command in ("doctor", "schema"):
        done = shell(command, "--json")
        assert done.code == 0
        assert isinstance(done.document, dict)
    assert shell("schema").out == json.dumps(shell("schema", "--json").document, indent=2) + "\n"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train r.yaml --resume", "train r.yaml --resume=newest"),
        ("train --resume r.yaml", "train --resume=newest r.yaml"),
        ("train --resume --audit r.yaml", "train --resume=newest --audit r.yaml"),
        ("train r.yaml --resume runs/a/checkpoint-2", "train r.yaml --resume runs/a/checkpoint-2"),
        ("train r.yaml", "train r.yaml"),
    ],
)
def test_resume_may_have_a_path_or_none(typed, meant):
    assert spell_resume(typed.split()) == meant.split()


def test_codes_of_errors_are_those_of_the_contract():
    def walk(kind: type[PackhorseError]) -> set[int]:
        return {kind.exit_code}.union(*(walk(each) for each in kind.__subclasses__()))

    assert walk(PackhorseError) == {1, 2, 3, 4, 75}


def test_doctor_counts_what_is_wrong(shell):
    done = shell("doctor", "--json")
    findings = done.document["findings"]
    levels = [finding["level"] for finding in findings]
    assert done.document["warnings"] == levels.count("warning")
    shown = shell("doctor").out
    assert findings[0]["what"] in shown
    assert doctor.report_health.__doc__
    assert schema.print_schema.__doc__


def test_schema_goes_to_a_file(shell, tmp_path):
    done = shell("schema", "--out", tmp_path / "new" / "recipe.schema.json")
    assert (done.code, done.out) == (0, "")
    content = json.loads((tmp_path / "new" / "recipe.schema.json").read_text())
    assert "model_name_or_path" in content["properties"]


def test_an_output_that_is_a_folder_is_refused(shell, tmp_path):
    done = shell("schema", "--out", tmp_path)
    assert done.code == 2
    assert "is a folder, not a file" in done.err


def test_arguments_are_taken_as_given():
    assert run_arguments(["--version"]) == 0
