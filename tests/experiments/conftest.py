"""The modules of experiments, which are scripts and no package."""

from functools import partial

from ..conftest import load_script

load = partial(load_script, folder="experiments")
