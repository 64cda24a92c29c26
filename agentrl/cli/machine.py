"""``agentrl doctor | sandbox``: diagnose this machine, and build the sandboxes' image."""

import argparse
import json
import sys
from typing import Any

from agentrl.cli.command import add_command

_DOCTOR = """examples:
  agentrl doctor
  agentrl doctor --sandbox
  agentrl doctor --sandbox --json
  agentrl doctor --sandbox mine:sandbox
"""
_SANDBOX = """examples:
  agentrl sandbox build-image
"""


def add_commands(commands: Any) -> None:
    """Add the commands of this family to argparse's subparsers."""
    doctor = add_command(commands, "doctor", _doctor, "report what works on this machine, and what does not", _DOCTOR)
    only = "test only the sandboxes; with a name, one of your own too"
    doctor.add_argument("--sandbox", nargs="?", const="", metavar="MODULE:NAME", help=only)
    doctor.add_argument("--json", action="store_true", help="write JSON")
    sandbox = add_command(commands, "sandbox", _sandbox, "prepare the sandboxes of the docker back end", _SANDBOX)
    sandbox.add_argument("action", choices=["build-image"], help="build the image that the docker back end runs")
    sandbox.add_argument("--packages", nargs="+", default=[], help="further packages that programs may import")


def _doctor(arguments: argparse.Namespace) -> int:
    from agentrl.cli import doctor
    from agentrl.runs.progress import Display

    diagnosis = doctor.diagnose(sandbox=arguments.sandbox, say=lambda text: print(text, file=sys.stderr))
    if arguments.json:
        print(json.dumps(diagnosis.row()))
    else:
        doctor.show(diagnosis, Display(sys.stdout))
    return 0 if diagnosis.ok else 1


def _sandbox(arguments: argparse.Namespace) -> int:
    from agentrl.sandboxes.docker.image import build_image

    print(build_image(packages=arguments.packages))
    return 0
