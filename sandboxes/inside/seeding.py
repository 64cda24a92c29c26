"""Seeds the random generators that a program starts with."""

import importlib.abc
import importlib.machinery
import importlib.util
import random
import sys
import types


def seed(number: int) -> None:
    """Seed ``random``, and ``numpy.random`` as soon as it is there."""
    random.seed(number)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SeedsNumpy)]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % (1 << 32))
    else:
        sys.meta_path.insert(0, _SeedsNumpy(number % (1 << 32)))


class _SeedsNumpy(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Seeds ``numpy.random`` when a program imports it that did not find it imported."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._real: importlib.abc.Loader | None = None

    def find_spec(
        self, fullname: str, path: object, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "numpy.random":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._real, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        assert self._real is not None
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert self._real is not None and module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        module.seed(self._seed)
