r"""Solves a problem with a Python tool: an agent written with OpenAI's library, which knows nothing of agentrl."""

import json
import os
import subprocess
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and return what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def run(arguments: str) -> str:
    """Run the program in a call's arguments."""
    try:
        code = json.loads(arguments)["code"]
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10)
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout.strip() or done.stderr.strip()[-300:] or "The program printed nothing."


def main() -> None:
    """Ask the model, and run what it calls, until it calls nothing any more."""
    client = OpenAI()
    messages = [
        {"role": "system", "content": r"Answer in \boxed{}."},
        {"role": "user", "content": os.environ["AGENTRL_PROMPT"]},
    ]
    for _ in range(4):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})


main()
