"""The environments that come with agentrl; each is reached by its id, such as ``agentrl/Arithmetic-v0``."""

import gymnasium

from agentrl.envs.reasoning_gym.names import TASKS

_BUILTIN: dict[str, tuple[str, dict[str, object]]] = {
    "agentrl/Arithmetic-v0": ("generated.arithmetic:Arithmetic", {}),
    "agentrl/Calculus-v0": ("generated.calculus:Calculus", {}),
    "agentrl/Code-v0": ("code.env:Code", {}),
    "agentrl/Countdown-v0": ("generated.countdown:Countdown", {}),
    "agentrl/Harbor-v0": ("adapters.harbor.env:Harbor", {}),
    "agentrl/LinearSystems-v0": ("generated.linear_systems:LinearSystems", {}),
    "agentrl/Math-v0": ("math.env:Math", {}),
    "agentrl/MathPython-v0": ("math.env:Math", {"tool": True}),
    "agentrl/OpenEnv-v0": ("adapters.openenv:OpenEnv", {}),
    "agentrl/Verifiers-v0": ("adapters.verifiers:Verifiers", {}),
    **{f"reasoning-gym/{name}-v0": ("reasoning_gym.env:ReasoningGym", {"name": name}) for name in TASKS},
}
"""For each id the class, under ``agentrl.envs``, and the arguments that the id stands for."""


def register_builtin() -> None:
    """Register these environments with Gymnasium, importing none. Calling it again changes nothing."""
    for env_id, (entry_point, kwargs) in _BUILTIN.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, entry_point=f"agentrl.envs.{entry_point}", kwargs=kwargs)
