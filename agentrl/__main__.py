"""``python -m agentrl``: the command line, where no program is installed."""

import sys

from agentrl.cli import main

sys.exit(main())
