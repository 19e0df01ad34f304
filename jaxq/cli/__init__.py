"""The commands of ``python -m jaxq``: one module each, with a ``main(argv) -> status``, imported when asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "demo": "quantize a small language model and compare its text and its perplexity with the original's",
    "doctor": "print versions, devices, and which operation runs which way here: paste it into a bug report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the command's name and its arguments; None takes them from ``sys.argv``.

    Returns:
      The exit status: 0 for success, 1 if the command lacks a package.
    """
    commands = "\n".join(f"  {name:8} {summary}" for name, summary in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m jaxq",
        description="Quantized matmul CUDA kernels for JAX.",
        epilog=f"commands (each has its own --help):\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    args = parser.parse_args(argv)
    try:
        module = importlib.import_module(f"jaxq.cli.{args.command}")
    except ModuleNotFoundError as error:
        remedy = "run: pip install 'jaxq[models]' (in a checkout: pip install -e '.[models]')"
        print(f"error: {args.command} cannot start ({error}); {remedy}", file=sys.stderr)
        return 1
    status: int = module.main(args.arguments)
    return status
