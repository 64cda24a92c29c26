from types import SimpleNamespace as AgentInfo  # noqa: F401
from types import SimpleNamespace as TraceTask  # noqa: F401

from verifiers.v1 import Trace as Trace
