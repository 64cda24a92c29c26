"""Where the program ``agentrl`` begins. It lies outside the package so that it runs before the package is imported.

Importing agentrl takes a good part of a second, and a Ctrl-C in it is to end the program as quietly as any later one.
"""

import os
import signal


def main() -> int:
    """Run the command line; the exit code."""
    # A shell that starts the program in the background may have set it to ignore Ctrl-C: that stays.
    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answers:
        signal.signal(signal.SIGINT, _leave)
    from agentrl.cli import main as run

    if answers:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _leave(*_: object) -> None:
    # An exception would be raised in some library's import, which may swallow or print it. Nothing is open yet.
    os.write(2, b"agentrl: interrupted\n")
    os._exit(130)
