"""``agentrl compare | replay | probe``: look at episodes again."""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.command import add_command
from agentrl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentrl.eval.pages import Section
    from agentrl.eval.replay import Replayed

_COMPARE = """examples:
  agentrl compare before.jsonl after.jsonl
  agentrl compare runs/otb runs/group_mean --html difference.html
  agentrl compare greedy.jsonl.zst sampled.jsonl.zst --json
"""
_REPLAY = """examples:
  agentrl replay evals/first
  agentrl replay runs/first --id train-1:7 --tools recorded
  agentrl replay evals/first --regrade --json
  agentrl replay runs/agent --agent runs/agent

The recorded turns are played again in the environment that the file names. The exit code is 0 if nothing changed, and
1 otherwise. With --regrade only grades are compared, and tools answer as recorded. A file from somebody else chooses
an environment and its arguments. Where these could name a file or a module, the command says so and needs --trust.

With --agent the program that played the episodes starts again, in its sandbox. The recorded turns answer its requests.
"""
_PROBE = """examples:
  agentrl probe evals/first
  agentrl probe runs/first --json
  agentrl probe runs/first --judge kind --gold correct
  agentrl probe runs/first --ask letters:JUDGE

It lists wins that a person should look at, the gravest first, and losses that other graders would call wins. The right
answers come from the environment that the file names, which is made as for agentrl replay.
"""


def add_commands(commands: Any) -> None:
    """Add the commands of this family to argparse's subparsers."""
    text = "compare two agents on the same tasks, episode by episode"
    compare = add_command(commands, "compare", _compare, text, _COMPARE)
    for name in ("a", "b"):
        compare.add_argument(name, metavar=name.upper(), type=Path, help="an episodes file, a folder of such, or a run")
    compare.add_argument("--html", metavar="FILE", type=Path, help="write a page as well")
    compare.add_argument("--json", action="store_true", help="write JSON")
    replay = add_command(commands, "replay", _replay, "play recorded actions again and report what changes", _REPLAY)
    _episodes_arguments(replay)
    replay.add_argument("--tools", choices=("live", "recorded"), help="run the tools again, or serve recorded answers")
    replay.add_argument("--agent", type=Path, metavar="SETTINGS", help="start the program of this run or file again")
    replay.add_argument("--regrade", action="store_true", help="compare grades: score with today's grader")
    probe = add_command(commands, "probe", _probe, "audit rewards: find wins that were not earned", _PROBE)
    _episodes_arguments(probe)
    probe.add_argument(
        "--judge", metavar="PART", help="compare this part of the reward, a judge's, with --gold instead"
    )
    probe.add_argument(
        "--gold", metavar="PART", default="correct", help="exact grades, or a second judge's (%(default)s)"
    )
    probe.add_argument(
        "--ask", metavar="MODULE:JUDGE", help="ask this judge about trivial answers, and about pairs in both orders"
    )


def _episodes_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("episodes", type=Path, help="an episodes file, a folder of such, or a run")
    command.add_argument("--id", action="append", default=[], metavar="TASK", help="only this task's; may be repeated")
    command.add_argument("--trust", action="store_true", help="allow any environment and arguments")
    command.add_argument("--json", action="store_true", help="write JSON")


def _compare(arguments: argparse.Namespace) -> int:
    from agentrl.eval.compare import compare, sections
    from agentrl.eval.pages import write_page

    comparison = compare(arguments.a, arguments.b)
    title = f"{arguments.a.name} against {arguments.b.name}"
    if arguments.html is not None:
        write_page(arguments.html, title, sections(comparison))
    return _show(arguments, title, comparison, sections(comparison))


def _replay(arguments: argparse.Namespace) -> int:
    from agentrl.eval.episodes import load, named
    from agentrl.eval.replay import replay, sections
    from agentrl.runs.progress import Display

    regrade, display = arguments.regrade, Display()
    records = named(load(arguments.episodes), arguments.id)
    if arguments.agent is not None:
        from agentrl.eval.replay_agent import agent_config, replay_agents

        if regrade or arguments.tools:
            raise UsageError("an agent's program runs its tools itself: leave out --tools and --regrade")
        episodes = replay_agents(records, agent_config(arguments.agent))
    else:
        tools = arguments.tools or ("recorded" if regrade else "live")
        episodes = replay(records, tools=tools, trusted=arguments.trust, regrade=regrade, say=display.say)
    replayed: list[Replayed] = []
    with display.phase("replaying", len(records)) as bar:
        for episode in episodes:
            replayed.append(episode)
            bar.advance("episodes")
    _show(arguments, str(arguments.episodes), replayed, sections(replayed, regrade=regrade))
    return int(any(episode.regraded or episode.now is None if regrade else episode.change for episode in replayed))


def _probe(arguments: argparse.Namespace) -> int:
    from agentrl.eval import judged
    from agentrl.eval.episodes import load, named
    from agentrl.eval.probe import probe, sections
    from agentrl.runs.progress import Display

    records = named(load(arguments.episodes), arguments.id)
    if arguments.judge is not None or arguments.ask is not None:
        shares = judged.compare_parts(records, arguments.judge, arguments.gold) if arguments.judge is not None else []
        if arguments.ask is not None:
            shares += asyncio.run(judged.ask(judged.find_judge(arguments.ask), records))
        return _show(arguments, str(arguments.episodes), shares, judged.sections(shares))
    audit = probe(records, trusted=arguments.trust, say=Display().say)
    return _show(arguments, str(arguments.episodes), audit, sections(audit))


def _show(arguments: argparse.Namespace, title: str, result: Any, sections: "Iterable[Section]") -> int:
    """Print a result, a dataclass or a list of such, as JSON or as sections."""
    from agentrl.eval.pages import markdown
    from agentrl.runs.progress import Display

    if arguments.json:
        print(json.dumps([asdict(row) for row in result] if isinstance(result, list) else asdict(result)))
    else:
        Display(sys.stdout).say(markdown(title, sections))
    return 0
