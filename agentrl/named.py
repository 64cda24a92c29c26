"""What a setting names: a row of a table, or with ``module:name`` a function or class of the user's own.

Importing a module runs it: whoever writes such a name chooses what runs, as with an environment's id.
"""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError, UnknownNameError, nearest


def check_name(kind: str, table: Mapping[str, object], name: str) -> None:
    """Check that a name is in its table, or that its module is installed, without importing it.

    Args:
        kind: the word for what is named, such as ``"loss"``.
        table: what can be named without a module.
        name: a name of ``table``, or ``module:name``.

    Raises:
        UnknownNameError: it is no name of the table.
        ConfigError: it is no ``module:name`` either, or there is no such module.
    """
    if name in table:
        return
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownNameError(kind, name, table)
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f"{kind} {name!r} names nothing of your own: write module:name")
    if not installed(top := module.partition(".")[0]):
        raise _lacking(kind, table, name, top)


def installed(module: str) -> bool:
    """Return True if a top-level module is here."""
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None


def resolve(kind: str, table: Mapping[str, object], name: str) -> Any:
    """Return the function or class that a name stands for; see :func:`find`.

    Raises:
        UnknownNameError: it is no name of the table.
        ConfigError: as ``find`` raises it, or what ``module:name`` names can't be called.
    """
    target = find(kind, table, name)
    if isinstance(table.get(name, name), str) and not callable(target):
        shown = type(target).__name__
        raise ConfigError(f"{kind} {name!r} is of type {shown}, which can't be called: name a function or a class")
    return target


def find(kind: str, table: Mapping[str, object], name: str) -> Any:
    """Return what a name stands for.

    Args:
        kind: the word for what is named, such as ``"loss"``.
        table: what can be named without a module; a text among its values is a ``module:name`` itself.
        name: a name of ``table``, or ``module:name``.

    Raises:
        UnknownNameError: it is no name of the table.
        ConfigError: its module can't be imported, or has nothing of that name.
    """
    check_name(kind, table, name)
    target = table.get(name, name)
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    try:
        facts = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise _lacking(kind, table, name, str(error.name)) from error
    except (Exception, SystemExit) as error:  # somebody's module may raise anything, and may even end the process
        raise ConfigError(f"{kind} {name!r} can't be imported: {error!r}") from error
    if attribute not in facts:
        names = [public for public in facts if not public.startswith("_")]
        raise ConfigError(f"{kind} {name!r} is not in {module}; {nearest(attribute, names)}")
    return facts[attribute]


def make_named(kind: str, table: Mapping[str, object], name: str, options: Mapping[str, Any], *parts: Any) -> Any:
    """Make what a setting names: call it with ``parts`` and with the ``options`` of its section.

    Raises:
        UnknownNameError: there is no such name.
        ConfigError: it can't be imported, or does not take one of the options, or not such a value.
    """
    function = resolve(kind, table, name)
    try:
        return function(*parts, **options)
    except ModuleNotFoundError as error:
        raise _lacking(kind, table, name, str(error.name)) from error
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r} can't be made with {kind}.options: {error}") from error


def _lacking(kind: str, table: Mapping[str, object], name: str, module: str) -> ConfigError:
    # Python looks in the current folder for `python -m agentrl`, not for an installed command.
    remedy = f"pip install 'agentrl[{name}]'" if name in table else "install it, or put its folder into PYTHONPATH"
    return ConfigError(f"{kind} {name!r} needs {module}: {remedy}")
