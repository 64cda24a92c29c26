"""The viewer: one self-contained HTML page that shows what runs did, from the files in their folders."""

from agentrl.runs.report.page import write_report, write_view

__all__ = ["write_report", "write_view"]
