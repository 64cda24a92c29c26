r"""Solves a problem with a Python tool: an agent written with Anthropic's library, which knows nothing of agentrl."""

import os
import subprocess
import sys

import anthropic

TOOL = {
    "name": "python",
    "description": "Run a Python program and return what it prints.",
    "input_schema": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}


def run(code: str) -> str:
    """Run a program."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10)
    except (TypeError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip() or done.stderr.strip()[-300:] or "The program printed nothing."


def main() -> None:
    """Ask the model, and run what it calls, until it calls nothing any more."""
    client = anthropic.Anthropic()
    messages = [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]
    for _ in range(4):
        answer = client.messages.create(
            model="policy", max_tokens=1000, system=r"Answer in \boxed{}.", tools=[TOOL], messages=messages
        )
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": run(block.input.get("code", ""))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})


main()
