r"""Solves a problem with a Python tool: an agent written with OpenAI's Agents SDK, which knows nothing of agentrl."""

import os
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def python(code: str) -> str:
    """Run a Python program and return what it prints."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10)
    except (ValueError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip() or done.stderr.strip()[-300:] or "The program printed nothing."


def main() -> None:
    """Let the agent work."""
    set_tracing_disabled(True)
    agent = Agent(name="solver", instructions=r"Answer in \boxed{}.", model="policy", tools=[python])
    Runner.run_sync(agent, os.environ["AGENTRL_PROMPT"], max_turns=4)


main()
