"""Seeds the random generators that a program starts with."""

import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
import types
from functools import partial


def seed(number: int) -> None:
    """Seed ``random``, and ``numpy.random`` as soon as it is there."""
    random.seed(number)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SeedsNumpy)]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % (1 << 32))
    else:
        sys.meta_path.insert(0, _SeedsNumpy(number % (1 << 32)))


class _SeedsNumpy(importlib.abc.MetaPathFinder):
    """Seeds ``numpy.random`` when a program imports it that did not find it imported."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(
        self, fullname: str, path: object, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "numpy.random":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = None if spec is None else spec.loader
        if loader is not None:
            vars(loader)["exec_module"] = partial(self._execute, loader)
        return spec

    def _execute(self, loader: importlib.abc.Loader, module: types.ModuleType) -> None:
        # An ordinary loader again, for this module and for whoever looks at it.
        del vars(loader)["exec_module"]
        loader.exec_module(module)
        module.seed(self._seed)
