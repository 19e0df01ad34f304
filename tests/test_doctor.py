"""The doctor's report, on healthy and on broken machines."""

import sys

import jax
import pytest

import jaxq
from jaxq import _ffi
from jaxq.cli import doctor, main


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """The printed report: section -> row -> value."""
    assert main(["doctor"]) == 0
    sections: dict[str, dict[str, str]] = {}
    title = ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  "):
            name, value = line.strip().split("  ", 1)
            sections[title][name] = value.strip()
        elif line:
            title = line
            sections[title] = {}
    return sections


def test_report_has_versions_devices_and_every_operation(capsys):
    sections = report(capsys)
    assert sections["versions"]["jaxq"].startswith(jaxq.__version__)
    assert sections["versions"]["jax"] == jax.__version__
    assert sections["devices"]["default backend"] == jax.default_backend()
    operations = {name for name in dir(jaxq) if name.endswith("_matmul")} | {"quantize_per_token", "dequantize"}
    assert set(sections["operations"]) == operations


def test_report_says_why_there_are_no_kernels(capsys, monkeypatch):
    monkeypatch.setattr(_ffi, "status", lambda: "the moon is full")
    monkeypatch.setattr(_ffi, "has_cuda", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sections = report(capsys)
    assert sections["extension"]["kernels"] == "do not run here: the moon is full"
    assert set(sections["operations"].values()) == {"reference, slowly: the moon is full"}


def test_report_says_where_the_kernels_run(capsys, monkeypatch):
    monkeypatch.setattr(_ffi, "has_cuda", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert set(report(capsys)["operations"].values()) == {"cuda"}


def test_a_broken_backend_is_a_row_of_the_report(capsys, monkeypatch):
    def broken() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", broken)
    sections = report(capsys)
    assert sections["devices"] == {"error": "RuntimeError: Unable to initialize backend 'cuda'"}
    assert "error" in sections["operations"]
    assert sections["versions"]["jax"] == jax.__version__


def test_commands_are_imported_when_asked_for(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "jaxq.cli.demo", raising=False)
    assert main(["doctor"]) == 0
    assert "jaxq.cli.demo" not in sys.modules


@pytest.mark.parametrize("argv", [[], ["dance"], ["doctor", "--loud"]])
def test_wrong_usage_exits_with_a_message(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "usage: python -m jaxq" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert "doctor" in out
    assert "demo" in out
    with pytest.raises(SystemExit, match="0"):
        doctor.main(["--help"])
    assert "python -m jaxq doctor" in capsys.readouterr().out
