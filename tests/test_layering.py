"""The import rules, read from the source: which room may know which."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PYTHON = sorted((ROOT / "jaxq").rglob("*.py"))
CUDA = sorted(path for path in (ROOT / "cuda").rglob("*") if path.suffix in {".h", ".cuh", ".cc", ".cu"})

# Rooms from the bottom up. A module imports from lower floors, or from its own room; those on one floor do not know one
# another unless PEERS says so.
FLOORS = [
    {"packing", "_cuda"},
    {"qtensor"},
    {"quantizers"},
    {"reference", "_ffi"},
    {"checks", "partitioning"},
    {"primitive"},
    {"gradients"},
    {"ops"},
    {"dense", "checkpoints"},
    {"nnx", "linen"},
    {"rules"},
    {"models"},
    {"cli"},
]
FLAX_ROOMS = {"nnx", "linen", "models", "calibrate", "cli"}
CUDA_BELOW = {  # folder -> folders whose headers it may include
    "arch": set(),
    "convert": {"arch"},
    "gemm": {"arch", "convert"},
    "quant": {"arch", "convert", "gemm"},
    "ffi": {"gemm", "quant"},
}


def room(path: pathlib.Path) -> str:
    """The module or package directly below jaxq that a file belongs to."""
    return path.relative_to(ROOT / "jaxq").parts[0].removesuffix(".py")


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names that a file imports, at any depth; ``from a import b`` gives ``a.b``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively; write the whole name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_imported(path: pathlib.Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("jaxq.")}


def code(path: pathlib.Path) -> str:
    """A C++ file without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check():
    assert len(PYTHON) > 10
    assert len(CUDA) > 10


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_imports_only_downwards(path: pathlib.Path):
    here = room(path)
    if here in {"__init__", "__main__"}:  # the roof: they may name every room
        return
    floor = next((i for i, rooms in enumerate(FLOORS) if here in rooms), None)
    assert floor is not None, f"{name_of(path)} is in no room; give it one in FLOORS"
    below = {here}.union(*FLOORS[:floor])
    above = rooms_imported(path) - below
    assert not above, f"{name_of(path)} may import {sorted(below)}, not {sorted(above)}"


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_flax_and_the_extension_stay_in_their_rooms(path: pathlib.Path):
    names = imports(path)
    if room(path) not in FLAX_ROOMS:
        assert not [name for name in names if name.split(".")[0] == "flax"], f"{name_of(path)} imports flax"
    if room(path) != "_ffi":
        assert "jaxq._cuda" not in names, f"{name_of(path)} imports the extension"


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_product_code_does_not_import_tests(path: pathlib.Path):
    assert not [name for name in imports(path) if name.split(".")[0] in {"tests", "benchmarks", "pytest"}]


@pytest.mark.parametrize("path", CUDA, ids=name_of)
def test_cuda_includes_only_downwards(path: pathlib.Path):
    folder = path.relative_to(ROOT / "cuda").parts[0]
    for header in re.findall(r'#include "([^"]+)"', code(path)):
        other = header.split("/")[-2] if "/" in header else folder
        assert other in {folder} | CUDA_BELOW[folder], f"{name_of(path)} includes {header}"
    if folder != "ffi":
        assert not re.search(r"xla|nanobind|Python\.h", code(path)), f"{name_of(path)} knows XLA or Python"


@pytest.mark.parametrize("path", CUDA, ids=name_of)
def test_asm_and_launches_stay_in_their_rooms(path: pathlib.Path):
    folder = path.relative_to(ROOT / "cuda").parts[0]
    if folder != "arch":
        assert not re.search(r"\b(asm|__asm__)\b", code(path)), f"{name_of(path)} holds inline assembly"
    if folder not in {"gemm", "quant"}:
        assert "<<<" not in code(path), f"{name_of(path)} launches a kernel"
    if folder != "arch":
        assert "__CUDA_ARCH__" not in code(path), f"{name_of(path)} branches on the architecture"


def test_every_file_has_a_job_for_a_name():
    bad = [name_of(path) for path in PYTHON + CUDA if path.stem in {"utils", "util", "common", "helpers", "misc"}]
    assert not bad


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=name_of)
def test_benchmarks_use_public_names(path: pathlib.Path):
    private = [name for name in imports(path) if name.startswith("jaxq.") and "._" in name]
    assert not private, f"{name_of(path)} imports {private}"
