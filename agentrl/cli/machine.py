"""``agentrl doctor | sandbox``: diagnose this machine, build the sandboxes' image, and serve sandboxes."""

import argparse
import asyncio
import dataclasses
import json
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from agentrl.cli.command import add_command
from agentrl.errors import UsageError
from agentrl.sandboxes import BACKENDS, Limits, open_sandbox
from agentrl.sandboxes.remote.address import KEY, PREFIX, find_key

_DOCTOR = """examples:
  agentrl doctor
  agentrl doctor --sandbox
  agentrl doctor --sandbox --json
  agentrl doctor --sandbox mine:sandbox
  agentrl doctor --sandbox remote:http://sandboxes:8700
"""
_SANDBOX = """examples:
  agentrl sandbox build-image
  agentrl sandbox serve --host 0.0.0.0
"""
_BUILD = """examples:
  agentrl sandbox build-image
  agentrl sandbox build-image --packages pandas
"""
_SERVE = """examples:
  agentrl sandbox serve
  agentrl sandbox serve --host 0.0.0.0 --port 8700 --limit 64 --key-file key
  agentrl sandbox serve --backend docker --runtime runsc --limits memory_bytes=1073741824 cpu_s=10

The key is that of --key-file, AGENTRL_SANDBOX_KEY or AGENTRL_SANDBOX_KEY_FILE, or a new one, which is printed. Ctrl-C
ends all sandboxes. Key and programs travel in clear: use a trusted network, or a proxy that speaks TLS.
"""


def add_commands(commands: Any) -> None:
    """Add the commands of this family to argparse's subparsers."""
    doctor = add_command(commands, "doctor", _doctor, "report what works on this machine, and what does not", _DOCTOR)
    only = "test only the sandboxes; also one called module:name or remote:URL"
    doctor.add_argument("--sandbox", nargs="?", const="", metavar="NAME", help=only)
    doctor.add_argument("--json", action="store_true", help="write JSON")
    sandbox = commands.add_parser(
        "sandbox",
        help="build the docker back end's image, or serve sandboxes to other machines",
        epilog=_SANDBOX,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = sandbox.add_subparsers(metavar="action", required=True)
    build = add_command(actions, "build-image", _build_image, "build the image that the docker back end runs", _BUILD)
    serve = add_command(actions, "serve", _serve, "serve sandboxes of this machine to other machines", _SERVE)
    for command in (build, serve):
        command.add_argument("--packages", nargs="+", default=[], help="further packages that programs may import")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8700, help="port to listen on (default: 8700; 0 takes a free one)")
    serve.add_argument("--key-file", default="", help="a file that holds the key, at least 16 characters")
    serve.add_argument("--limit", type=int, default=128, help="most sandboxes at a time (default: 128)")
    serve.add_argument("--silence", type=float, default=60, help="seconds until a silent client's sandboxes are closed")
    serve.add_argument("--backend", choices=BACKENDS, default="auto", help="back end (default: the first that works)")
    serve.add_argument("--runtime", help="container runtime of the docker back end, such as runsc")
    serve.add_argument("--ready", type=int, help="sandboxes to keep made in advance")
    serve.add_argument(
        "--limits", nargs="+", default=[], metavar="NAME=VALUE", help="limits of each sandbox, such as cpu_s=10"
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from agentrl.cli import doctor
    from agentrl.runs.progress import Display

    diagnosis = doctor.diagnose(sandbox=arguments.sandbox, say=lambda text: print(text, file=sys.stderr))
    if arguments.json:
        print(json.dumps(diagnosis))
    else:
        doctor.show(diagnosis, Display(sys.stdout))
    return 0 if diagnosis["ok"] else 1


def _build_image(arguments: argparse.Namespace) -> int:
    from agentrl.sandboxes.docker.image import build_image

    print(build_image(packages=arguments.packages))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from agentrl.sandboxes.remote.server import SandboxServer, serve_until_stopped

    key = find_key(arguments.key_file)
    if not (arguments.limit >= 1 and arguments.silence > 0):
        raise UsageError("--limit and --silence must be positive")

    def announce(url: str) -> None:
        print(f"at most {arguments.limit} sandboxes at {url}: {server.terms.version}")
        print(f"a run uses them with --set env.sandbox={PREFIX}{url}", flush=True)

    packages: list[str] = arguments.packages
    with open_sandbox(
        arguments.backend,
        runtime=arguments.runtime,
        limits=_limits(arguments.limits),
        ready=arguments.ready,
        packages=packages,
    ) as sandbox:
        if not key:
            key = secrets.token_hex(16)
            print(f"clients need the key: export {KEY}={key}")
        server = SandboxServer(sandbox, key, limit=arguments.limit, packages=packages, silence_s=arguments.silence)
        try:
            asyncio.run(serve_until_stopped(server, arguments.host, arguments.port, announce))
        except (OSError, OverflowError) as error:
            raise UsageError(f"can't listen on {arguments.host} port {arguments.port}: {error}") from error
    return 0


def _limits(settings: Sequence[str]) -> Limits:
    kinds = {name: type(value) for name, value in dataclasses.asdict(Limits()).items()}
    try:
        return Limits(**{name: kinds[name](text) for name, _, text in (text.partition("=") for text in settings)})
    except (KeyError, ValueError) as error:
        raise UsageError(f"--limits takes NAME=VALUE with the names {', '.join(kinds)}; it got {error}") from error
