"""Tools: functions with a schema, calls with a time limit, the ``python`` tool and those of MCP servers."""
