"""Make the API reference from the docstrings, as HTML; a module or name that can't be resolved is an error."""

import argparse
import pkgutil
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pdoc

import agentrl

ROOT = Path(__file__).resolve().parents[1]
# vLLM has an environment of its own, and what is inside a sandbox runs only there.
WITHOUT_PAGE = r"agentrl\.(__main__|engines\.vllm.*|sandboxes\.inside.*)"


def list_submodules() -> None:
    """Add its submodules to each package's ``__all__``: pdoc takes what is not in it for private."""
    for module in pkgutil.walk_packages(agentrl.__path__, "agentrl."):
        package, _, name = module.name.rpartition(".")
        if hasattr(sys.modules[package], "__all__") and not re.fullmatch(WITHOUT_PAGE, module.name):
            sys.modules[package].__all__ += [name]


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
    list_submodules()
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"agentrl {agentrl.__version__}")
    pdoc.pdoc("agentrl", f"!{WITHOUT_PAGE}", output_directory=arguments.out)
    print(arguments.out / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
