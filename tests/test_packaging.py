"""What the installed package offers, and that its documents say what it does."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib
import types
import zipfile

import pytest

import jaxq
from jaxq import _ffi

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
DOCUMENTS = [path for path in ROOT.rglob("*.md") if not set(path.relative_to(ROOT).parts) & {"build", ".venv"}]

PUBLIC = {
    *("EXPORT_CHECKS", "QTensor", "Rule", "SCHEMES", "dequantize", "has_cuda", "matmul", "quantize"),
    *("quantize_per_token", "quantize_tensor", "w4a16_matmul", "w4a8_matmul", "w8a16_matmul", "w8a8_matmul"),
    *("checkpoints", "linen", "models", "nnx"),
}


def run(code: str) -> str:
    """What a fresh interpreter prints; no plugin or device is needed for it."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_public_names_are_there_and_documented():
    for name in PUBLIC:
        assert getattr(jaxq, name) is not None
        if name not in {"EXPORT_CHECKS", "SCHEMES"}:
            assert getattr(jaxq, name).__doc__, f"jaxq.{name} has no docstring"


def test_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'jaxq' has no attribute 'quantise'"):
        _ = jaxq.quantise


def test_import_is_lean():
    loaded = run("import sys, jaxq; print(*{'flax', 'jaxq.models', 'jaxq.cli'} & set(sys.modules))")
    assert loaded == ""


def test_import_starts_no_backend():
    code = "import jaxq; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert run(code) == "False"


def test_version_is_that_of_the_installed_package():
    try:
        installed = importlib.metadata.version("jaxq")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxq runs from its source, it is not installed")
    assert jaxq.__version__ == installed


def test_extension_and_registrations_agree():
    if _ffi._extension is None:
        pytest.skip(f"no extension: {_ffi.status()}")
    from jaxq import primitive

    targets = {
        op.primitive.name for op in (*primitive.GEMMS.values(), primitive.DEQUANTIZE, primitive.QUANTIZE_PER_TOKEN)
    }
    assert set(_ffi._extension.registrations()) == targets
    assert _ffi._extension.ffi_version == (0, 3)  # of the jaxlib that build-system.requires names


def test_wheel_holds_the_package_its_data_and_its_licence(tmp_path):
    # Without CMake: what Python files and data it packs does not depend on the extension.
    settings = {"wheel.cmake": "false", "wheel.py-api": "py3"}
    code = f"import sys, scikit_build_core.build as build; build.build_wheel(sys.argv[1], {settings})"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        prose = archive.read("jaxq/cli/prose.txt")
    info = f"jaxq-{jaxq.__version__}.dist-info"
    assert names >= {f"{info}/METADATA", f"{info}/licenses/LICENSE"}
    source = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxq").rglob("*") if path.suffix in {".py", ".txt"}}
    assert {name for name in names if not name.startswith(info)} == source
    assert len(prose) > 1000


def test_readme_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example.replace("4096", "256"), "README.md", "exec"), {})
    ratio, correlation = map(float, capsys.readouterr().out.split())
    assert ratio < 0.14  # 4 of 32 bits, and a bfloat16 scale for each 128 weights
    assert correlation > 0.98


def test_readme_commands_name_extras_that_exist():
    commands = re.findall(r"^pip install -e '\.\[([\w,]+)\]' && python -m (\w+)", README, flags=re.MULTILINE)
    assert [module for _, module in commands] == ["jaxq", "pytest"]
    extras = {extra for names, _ in commands for extra in names.split(",")}
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_readme_matrix_has_every_scheme_with_its_default():
    defaults = dict(re.findall(r"^\| `(\w+)` \|.*\((per channel|\d+)\)", README, flags=re.MULTILINE))
    assert defaults == {name: str(scheme.group_size or "per channel") for name, scheme in jaxq.SCHEMES.items()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: pathlib.Path):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text())
    broken = [link for link in links if not (path.parent / link).exists()]
    assert not broken


def test_every_design_note_is_listed_and_complete():
    notes = sorted((ROOT / "docs/design").glob("[0-9]*.md"))
    index = (ROOT / "docs/design/README.md").read_text()
    assert notes
    for note in notes:
        assert note.name in index
        headings = re.findall(r"^## (.*)", note.read_text(), flags=re.MULTILINE)
        assert headings[:2] == ["Context", "Decision"], note.name
        assert {"Measured", "Rejected"} & set(headings), note.name


@pytest.mark.parametrize(
    "architectures, capability, message",
    [
        ("80 86 89 90a", (9, 0), None),
        ("80", (8, 9), None),
        ("90a", (8, 0), r"capability 8\.0, the extension was compiled for sm 90a .*pip install"),
        ("86", (8, 0), r"capability 8\.0, the extension was compiled for sm 86"),
        ("80 86 89 90a", (7, 5), r"device 0 has compute capability 7\.5; the kernels need 8\.0 to 9\.0"),
        ("80 86 89 90a", (10, 0), r"capability 10\.0; the kernels need 8\.0 to 9\.0"),
    ],
)
def test_an_extension_knows_the_gpus_it_was_compiled_for(monkeypatch, architectures, capability, message):
    extension = types.SimpleNamespace(
        architectures=architectures, device_count=lambda: 1, compute_capability=lambda device: capability
    )
    monkeypatch.setattr(_ffi, "_extension", extension)
    monkeypatch.setattr(_ffi, "_refusal", None)
    _ffi.status.cache_clear()
    try:
        status = _ffi.status()
    finally:
        _ffi.status.cache_clear()
    assert (status is None) if message is None else re.search(message, status)
