"""What the endpoint costs beside sampling: requests of growing histories, over HTTP and by plain calls of the policy.

    python scripts/benchmarks/endpoint.py --model models/smollm2-135m --turns 200 --turn 200 --sessions 64

The engine says a script at once, so all that is measured is ours: the client's JSON, HTTP, reading, matching, rendering
and recording. Each turn's text has ``--turn`` tokens, and a tool's answer as many.
"""

import argparse
import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from agentrl.endpoint.server import Endpoint
from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.render.loading import load_tokenizer
from agentrl.render.renderer import Renderer
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits, Player
from agentrl.rollout.policy import Policy

CALL = '{text}\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "ls {number}"}}}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer")
    parser.add_argument("--turns", type=int, default=200, help="turns of a session")
    parser.add_argument("--turn", type=int, default=200, help="tokens of a turn, and of a tool's answer")
    parser.add_argument("--sessions", type=int, default=1, help="sessions at once")
    options = parser.parse_args()
    renderer = Renderer(load_tokenizer(options.model))
    asyncio.run(compare(renderer, options.turns, options.turn, options.sessions))


async def compare(renderer: Renderer, turns: int, turn: int, sessions: int) -> None:
    """Play the same sessions over HTTP and by plain calls."""
    words = " ".join(["word"] * turn)
    endpoint = Endpoint()
    await endpoint.start()
    print(f"{'turn':>6} {'tokens':>8} {'body KB':>8} {'HTTP ms':>8} {'plain ms':>9}")
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=sessions)) as client:
        began = time.perf_counter()
        over_http = await asyncio.gather(
            *(
                speak(client, endpoint, policy_of(renderer, words, turns), number, words, turns)
                for number in range(sessions)
            )
        )
        seconds = time.perf_counter() - began
    plain = await call(policy_of(renderer, words, turns), words, turns)
    await endpoint.stop()
    for start in range(0, turns, max(1, turns // 10)):
        rows = range(start, min(turns, start + max(1, turns // 10)))
        http = statistics.median(costs[row][0] for costs in over_http for row in rows)
        size = statistics.median(over_http[0][row][1] for row in rows)
        alone = statistics.median(plain[row] for row in rows)
        print(f"{rows[-1] + 1:6d} {rows[-1] * 2 * turn:8d} {size / 1000:8.1f} {1000 * http:8.2f} {1000 * alone:9.2f}")
    print(f"{sessions} sessions at once: {1000 * seconds / turns / sessions:.2f} ms of wall time a request")


def policy_of(renderer: Renderer, words: str, turns: int) -> Policy:
    """Return a policy that calls a tool in each turn."""
    bounds = EpisodeLimits(episode_tokens=10**7, total_tokens=10**8)
    player = Player(limits=bounds, threads=ThreadPoolExecutor(1))
    script = [renderer.turn(CALL.format(text=words, number=number), answered_by="tool") for number in range(turns)]
    return Policy(
        ScriptedEngine(script), renderer, EpisodeSpec(task_id="t", seed=5), Sampling(max_tokens=10**5), player
    )


async def speak(
    client: httpx2.AsyncClient, endpoint: Endpoint, policy: Policy, seed: int, words: str, turns: int
) -> list[tuple[float, int]]:
    """Return the seconds of each request, and the bytes of its body."""
    ticket = endpoint.open(policy, "hermes", seed)
    url, costs = f"{endpoint.url}/s/{ticket.name}/v1/chat/completions", list[tuple[float, int]]()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    for _ in range(turns):
        began = time.perf_counter()
        answer = await client.post(
            url,
            json={"model": "m", "messages": messages, "tools": TOOLS},
            headers={"authorization": f"Bearer {ticket.key}"},
        )
        costs.append((time.perf_counter() - began, len(answer.request.content)))
        message = answer.raise_for_status().json()["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call_id, "content": words}]
    await endpoint.close(ticket)
    return costs


async def call(policy: Policy, words: str, turns: int) -> list[float]:
    """Return the seconds of each turn of a policy that is called without HTTP."""
    costs, messages = list[float](), [{"role": "user", "content": "Begin."}]
    for _ in range(turns):
        began = time.perf_counter()
        text = await policy.turn(messages, TOOLS)  # pyright: ignore[reportArgumentType]
        costs.append(time.perf_counter() - began)
        result = {"role": "tool", "name": "bash", "tool_call_id": "call_0", "content": words}
        messages += [{"role": "assistant", "content": text}, result]
    return costs


if __name__ == "__main__":
    main()
