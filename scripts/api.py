"""Make the API reference from the docstrings, as HTML; a module or name that can't be resolved is an error."""

import argparse
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pdoc

import agentrl

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = (
    "!agentrl[.]__main__",
    "!agentrl[.]engines[.]vllm.*",  # it has an environment of its own
    "!agentrl[.]sandboxes[.](inside|conformance).*",  # programs that run in a sandbox
)
"""Patterns of modules without a page, as pdoc takes them."""


def modules() -> Iterator[str]:
    """Yield the package, and modules that pdoc would not find: a package's ``__all__`` hides its submodules."""
    yield "agentrl"
    for module in pkgutil.walk_packages(agentrl.__path__, "agentrl."):
        if hasattr(sys.modules[module.name.rpartition(".")[0]], "__all__"):
            yield module.name


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reference; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "api", help="folder (default: %(default)s)")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Couldn't import agentrl.engines.vllm")
    # Before Python 3.13 this is a function, and "| None" behind it means something to type checkers only.
    warnings.filterwarnings("ignore", "Error parsing type annotation threading.Lock")
    # The public names are imported lazily, and pdoc sees only those that are there.
    for name in agentrl.__all__:
        getattr(agentrl, name)
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"agentrl {agentrl.__version__}")
    pdoc.pdoc(*modules(), *LEFT_OUT, output_directory=arguments.out)
    print(arguments.out / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
