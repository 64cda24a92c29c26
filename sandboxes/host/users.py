"""Finds users for the sessions, one for each: pipes, descriptors under way and queued signals are counted by user."""

import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agentrl.sandboxes.inside import rootfs
from agentrl.sandboxes.inside.launcher import Users

_FIRST: Final = 0x70000000
"""The first of the users that root takes: nobody else assigns them, says systemd's UIDS-GIDS."""
_COUNT: Final = 0x10000000
_FEWEST: Final = 1000


def of_sessions(plan: rootfs.MountPlan) -> Users | None:
    """Return users and groups that sessions may have, or ``None`` where all have the same one.

    Args:
        plan: What sessions must be able to read.
    """
    if os.geteuid() == 0:
        mapped = all(_is_mapped(kind) for kind in ("uid", "gid"))
        return {"uid": _FIRST, "gid": _FIRST, "count": _COUNT} if mapped else None
    # Other users than this one read what everybody may.
    if not all(_is_public(source) for source, _ in plan["binds"]):
        return None
    if not all(shutil.which(f"new{kind}map", path=os.defpath) for kind in ("uid", "gid")):
        return None
    uid, gid = (next(_granted(Path(f"/etc/sub{kind}")), (0, 0)) for kind in ("uid", "gid"))
    count = min(uid[1], gid[1])
    return {"uid": uid[0], "gid": gid[0], "count": count} if count >= _FEWEST else None


def _is_mapped(kind: str) -> bool:
    """Return whether this user namespace has root's range, as the machine's own and no container's has."""
    rows = (map(int, line.split()) for line in Path(f"/proc/self/{kind}_map").read_text().splitlines())
    return any(start <= _FIRST and start + count >= _FIRST + _COUNT for start, _, count in rows)


def _is_public(path: str) -> bool:
    mode = os.stat(path).st_mode
    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & needed == needed


def _granted(path: Path) -> Iterator[tuple[int, int]]:
    """Return the ranges that a file grants this user: the first id and how many."""
    if path.exists():
        names = {str(os.geteuid()), *(entry.pw_name for entry in pwd.getpwall() if entry.pw_uid == os.geteuid())}
        for line in path.read_text().splitlines():
            name, *numbers = line.split(":")
            if name in names and len(numbers) == 2:
                yield int(numbers[0]), int(numbers[1])
