"""The exception tree.

::

    AgentRLError
    ├── UsageError                 the user asked for something that is not there; exit code 2
    │   ├── ConfigError            an unknown or invalid setting
    │   ├── HubError               the Hugging Face hub can't be reached
    │   ├── UnknownNameError       an environment, preset, dialect, algorithm … that does not exist
    │   └── RunFolderError         the run folder can't be written, is in use, or holds another run
    ├── EnvContractError           an environment broke its contract
    ├── DialectError               a call that can't be written in a dialect
    ├── TokenLimitError            a history leaves no room for a turn
    ├── RenderError                a chat template can't be extended without changing earlier tokens
    ├── TrajectoryError            tokens, log-probs and rewards that do not fit together
    ├── InvariantError             training would be wrong: engine and trainer disagree, a ratio is not 1 …
    └── InfrastructureError        a sandbox, engine or server failed; never a reward
        ├── FaultRateError         too many infrastructure faults to continue
        └── RefusedError           a server refuses one request, as a content filter does

Sandbox faults have a branch of their own (``agentrl.sandboxes.SandboxError``), since that package stands alone; the
environments turn them into ``InfrastructureError``.
"""

import copyreg
import difflib
from collections.abc import Iterable

_MOST_NAMES = 20
"""Most names that an error lists: some environments come by the hundred."""
_PREFIX = 3
"""Fewest letters that count as the beginning of a name."""
_FEW_NAMES = 10
"""Up to this many names are listed even where one of them is close to the unknown one."""


class AgentRLError(Exception):
    """Base of every exception that agentrl raises on purpose."""


class UsageError(AgentRLError):
    """A request that can't be carried out as asked; the message says what to do."""


class ConfigError(UsageError):
    """A setting is unknown or its value is invalid."""


class HubError(UsageError):
    """Something is on the Hugging Face hub and not here, and the hub can't be reached."""


class UnknownNameError(UsageError):
    """A name that does not exist; the message suggests the nearest one that does."""

    def __init__(self, kind: str, name: str, names: Iterable[str]) -> None:
        ranked = sorted(names)
        suggestion = nearest(name, ranked)
        # The nearest name may be the wrong guess: a short list lets the user choose.
        if suggestion.endswith("?") and len(ranked) <= _FEW_NAMES:
            suggestion += f" There are {', '.join(ranked)}"
        super().__init__(f"no {kind} is called {name!r}; {suggestion}")

    def __reduce__(self) -> tuple[object, ...]:
        # An error of another process arrives by pickle, with the finished message as its only argument.
        return copyreg.__newobj__, (type(self), *self.args)  # pyright: ignore[reportAttributeAccessIssue]


class RunFolderError(UsageError):
    """A run folder can't be used as asked."""


class Terminated(KeyboardInterrupt):
    """SIGTERM asked a run to end: like Ctrl-C, but the exit code is 143."""


class EnvContractError(AgentRLError):
    """An environment broke the contract of ``ToolEnv``."""


class DialectError(AgentRLError, ValueError):
    """A call that a dialect can't write so that it reads the same call back."""


class TokenLimitError(AgentRLError):
    """A history leaves no room for a turn within the limits of an episode's tokens."""


class RenderError(AgentRLError):
    """A chat template that can't be rendered append-only."""


class TrajectoryError(AgentRLError, ValueError):
    """Tokens, log-probs and rewards that do not fit together."""


class InvariantError(AgentRLError):
    """A check that protects training failed."""


class InfrastructureError(AgentRLError):
    """A sandbox, engine or server failed. This is never the agent's fault and never becomes a reward."""


class FaultRateError(InfrastructureError):
    """There were more infrastructure faults than the run allows, or nothing is left that answers."""


class RefusedError(InfrastructureError):
    """A server refuses one request and takes others: asking again does not help."""


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, preceded by its type where the text may be a bare name."""
    line, *_ = str(error).splitlines() or [""]
    return line if line and isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__} {line}"


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Suggest, in half a sentence, which of ``names`` the user may have meant; ``prefix`` is put before it."""
    ranked = sorted(names)
    # The beginning of a name counts more than likeness: ppo means ppo_clip, however close another name is.
    longer = [full for full in ranked if len(str(name)) >= _PREFIX and full.startswith(str(name))]
    close = longer or difflib.get_close_matches(str(name), ranked, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    if len(ranked) > _MOST_NAMES:
        return f"choose one of {', '.join(ranked[:_MOST_NAMES])} … ({len(ranked)} in all)"
    return f"choose one of {', '.join(ranked)}" if ranked else "there are none yet"
