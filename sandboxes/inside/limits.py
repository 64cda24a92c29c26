"""The limits of one session."""

from dataclasses import dataclass

MIB = 1 << 20
QUEUED_SIGNALS = 256
"""Signals that may wait for a program's processes together, as all programs of a user share the machine's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one session; a cell that goes beyond is stopped.

    Raises:
        ValueError: A limit is not positive.
    """

    cpu_s: float = 5.0
    """CPU seconds of one cell, of all its processes; ``run(timeout=...)`` replaces it."""
    wall_factor: float = 3.0
    """Wall seconds allowed for each CPU second: the backstop against sleeping and waiting. Time in which the session is
    ready to run and gets no core does not count, until ten times as much has passed; gVisor can't distinguish such
    time and even counts it as CPU time."""
    memory_bytes: int = 512 * MIB
    """Resident memory of all processes of a session together, and address space that one process may add [bytes]."""
    processes: int = 48
    """Processes and threads of a session at any instant."""
    open_files: int = 128
    """Descriptors of one process."""
    file_bytes: int = 32 * MIB
    """Largest file a program may write [bytes]."""
    tmp_bytes: int = 64 * MIB
    """Size of ``/tmp`` [bytes]."""
    tmp_inodes: int = 4096
    """Files and directories in ``/tmp``."""
    shm_bytes: int = 16 * MIB
    """Size of ``/dev/shm`` [bytes]."""
    output_kept_bytes: int = 64 << 10
    """Kept of each of stdout and stderr: the head and the tail [bytes]."""
    output_kill_bytes: int = 16 * MIB
    """Output of one cell after which it is stopped [bytes]."""
    value_chars: int = 20_000
    """Kept of the repr of the last expression [characters]."""
    traceback_chars: int = 8_000
    """Kept of a traceback [characters]."""
    code_bytes: int = MIB
    """Longest source of one cell [bytes]."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value: float = object.__getattribute__(self, name)
            if not value > 0:
                raise ValueError(f"Limits.{name} must be positive, not {value!r}")
