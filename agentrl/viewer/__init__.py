"""The viewer: one self-contained HTML page that shows what a run did, from the files in its folder."""

from agentrl.viewer.page import write_report

__all__ = ["write_report"]
