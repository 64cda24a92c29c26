"""Read settings from presets, TOML files and ``--set section.key=value``; a mistake is explained in one sentence."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pydantic

from agentrl.config.settings import (
    Config,
    DriverSettings,
    EngineSettings,
    EnvSettings,
    MixedEnv,
    PlanSettings,
    in_full,
)
from agentrl.errors import ConfigError, UnknownNameError, UsageError, nearest

_NAMES = "('[^']*'(, | or )?)+"
_VALUE_KINDS = "Input should be text, a number, true or false, or a list of whole numbers or of texts"


def presets() -> dict[str, str]:
    """Return the TOML text of every preset, by name."""
    folder = resources.files("agentrl") / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load_config(*, preset: str | None = None, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a config.

    Args:
        preset: a preset to begin with.
        path: a TOML file, laid over the preset.
        overrides: ``section.key=value`` each, laid over both; values are TOML, or plain text.

    Raises:
        UnknownNameError: there is no such preset, or a value is none of the names that a setting can have.
        ConfigError: a key is unknown, a value is invalid, or the text is not TOML.
        UsageError: the file can't be read.
    """
    data: dict[str, Any] = {}
    if preset is not None:
        data = _preset(preset)
    if path is not None:
        # A run's config.toml is allowed too: it ends with the versions of the software, which are no settings.
        data = _laid_over(data, {name: value for name, value in read_toml(Path(path)).items() if name != "versions"})
    return parse_config(_overridden(data, overrides))


def _preset(name: str) -> dict[str, Any]:
    """Read a preset, laid over the one that its ``base`` names."""
    texts = presets()
    if name not in texts:
        raise UnknownNameError("preset", name, texts)
    data = tomllib.loads(texts[name])
    base = data.pop("base", None)
    return data if base is None else _laid_over(_preset(base), data)


def parse_config(data: Mapping[str, Any]) -> Config:
    """Make a config from plain data.

    Raises:
        ConfigError: a key is unknown, a value is invalid, the split is among an environment's arguments, or there is
            one environment beside a mix of several.
    """
    try:
        config = Config.model_validate(data)
    except pydantic.ValidationError as error:
        faults = error.errors()
        # Where a setting allows several types there is a fault for each: that of the value's own type says most.
        same = [fault for fault in faults if fault["loc"][:2] == faults[0]["loc"][:2]]
        of_type = [fault for fault in same if not fault["type"].endswith("_type")]
        raise _explained((of_type or same)[0]) from error
    if config.env.mix and (config.env.args or config.env.id != EnvSettings().id):
        raise ConfigError("env.mix names the environments: give each its id and args there, and no env.id or env.args")
    for name, env in config.env.played.items():
        if "split" in env.args:
            table = f"env.mix.{name}" if name else "env"
            raise ConfigError(
                f"setting '{table}.args.split' has no effect: training plays 'train', and evaluation the split of "
                "eval.split"
            )
    return config


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config with each ``section.key=value`` laid over it.

    Raises:
        ConfigError: a key is unknown or a value is invalid.
    """
    return parse_config(_overridden(config.model_dump(mode="json"), overrides))


def parse_env(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``ID?key=value&key=value`` into an environment's id and its arguments; values are TOML, or plain text.

    Raises:
        ConfigError: a key has no value, or the value of a table is not TOML.
    """
    env_id, _, options = text.partition("?")
    arguments: dict[str, Any] = {}
    for option in filter(None, options.split("&")):
        if "=" not in option:
            raise ConfigError(f"{option!r} in {text!r} sets nothing: write ID?key=value&key=value")
        arguments = _merged(arguments, _parsed(f"args.{option}")["args"])
    return env_id, arguments


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UsageError: the file can't be read.
        ConfigError: it is not TOML.
    """
    try:
        return parse_toml(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"the config {str(path)!r} can't be read: {error.strerror}") from error


def parse_toml(data: bytes, name: str) -> dict[str, Any]:
    """Parse the bytes of a TOML file.

    Raises:
        ConfigError: they are not TOML; the message has the file's ``name``.
    """
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {name!r} is not TOML: {error}") from error


_DEFAULT_NAMES: Mapping[str, str] = {
    "engine": EngineSettings().name,
    "driver": DriverSettings().name,
    "plan": PlanSettings().name,
}


def _overridden(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    new: dict[str, Any] = {}
    for override in overrides:
        new = _merged(new, in_full(_parsed(override)))
    return _laid_over(data, new)


def _laid_over(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings; the options of one engine, driver or plan do not hold for another."""
    return _merged(in_full(base), in_full(new), _DEFAULT_NAMES)


def _merged(base: Mapping[str, Any], new: Mapping[str, Any], names: Mapping[str, str] = {}) -> dict[str, Any]:
    merged = dict(base)
    for key, value in new.items():
        old = merged.get(key)
        if not isinstance(old, dict) or not isinstance(value, Mapping):
            merged[key] = value
            continue
        name = old.get("name", names.get(key))
        if key in names and value.get("name", name) != name:
            old = {inner: setting for inner, setting in old.items() if inner != "options"}
        merged[key] = _merged(old, value, names)
    return merged


def _parsed(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not override.isprintable():
        raise ConfigError(f"{override!r} holds a character that can't be printed")
    if not equals or "." not in key:
        sections = [section for section in Config.model_fields if key in _keys([section])]
        example = f"did you mean {sections[0]}.{override}?" if sections and equals else "for example optim.steps=20"
        raise ConfigError(f"{override!r} sets nothing: write section.key=value, {example}")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        # A table in JSON's or Python's syntax must not become a text, which an environment may take for a file's name.
        if value.lstrip()[:1] in ("[", "{"):
            raise ConfigError(f'{override!r} is not TOML: write tables as {{key = "value"}}, text in quotes') from error
        parsed = value
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed


def _explained(fault: Mapping[str, Any]) -> UsageError:
    # The types that pydantic has tried are no parts of the setting's name.
    name = [str(part) for part in fault["loc"] if not re.match(r"constrained-|literal\[", str(part))]
    depth = {"env.mix": 3, "rollout.plan": 2}.get(".".join(name[:2]), 1)
    if name[depth:] and name[depth].rpartition("_")[2] in ("args", "options", "to") and len(name) > depth + 2:
        table = ", or a table of these" if name[depth] == "args" else ""
        return ConfigError(f"setting {'.'.join(name[: depth + 2])!r} is {fault['input']!r}: {_VALUE_KINDS}{table}")
    if fault["type"] == "extra_forbidden":
        inside: Mapping[str, Any] = fault["input"] if isinstance(fault["input"], Mapping) else {}
        section = name[:-1]
        remedy = _hint([*name, *inside]) or nearest(name[-1], _keys(section), prefix=".".join([*section, ""]))
        return ConfigError(f"unknown setting {'.'.join(name)!r}; {remedy}")
    if fault["type"] == "literal_error" and name[-1] != "[key]" and re.fullmatch(_NAMES, fault["ctx"]["expected"]):
        kind = name[-2] if name[-1] in ("name", "mode", "kind") else name[-1]
        return UnknownNameError(kind, fault["input"], re.findall("'([^']*)'", fault["ctx"]["expected"]))
    return ConfigError(
        f"setting {'.'.join(name)!r} is {fault['input']!r}: {fault['msg']}; agentrl config {name[0]} says more"
    )


def _keys(section: Sequence[str]) -> list[str]:
    model: type[pydantic.BaseModel] = Config
    if section[:2] == ["env", "mix"]:
        return list(MixedEnv.model_fields)
    for part in section:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
        model = annotation
    return list(model.model_fields)


def _hint(names: Iterable[str]) -> str:
    """Return the hint for a setting that does not exist; empty where there is none.

    Args:
        names: its section and key, and the keys in it.
    """
    words = {word for name in names for word in re.split(r"[^a-z]+", name.lower())}
    hints = tomllib.loads((resources.files("agentrl.config") / "hints.toml").read_text(encoding="utf-8"))
    return next((hint for triggers, hint in hints.items() if words & set(triggers.split())), "")
