r"""Solves a problem with a Python tool: an agent written with LangGraph, which knows nothing of agentrl."""

import os
import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def python(code: str) -> str:
    """Run a Python program and return what it prints."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10)
    except (ValueError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip() or done.stderr.strip()[-300:] or "The program printed nothing."


def main() -> None:
    """Let the agent work."""
    agent = create_react_agent(ChatOpenAI(model="policy"), [python], prompt=r"Answer in \boxed{}.")
    agent.invoke({"messages": [("user", os.environ["AGENTRL_PROMPT"])]}, config={"recursion_limit": 9})


main()
