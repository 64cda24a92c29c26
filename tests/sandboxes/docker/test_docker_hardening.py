"""How containers are hardened: what the engine was told, and what a program finds."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentrl.sandboxes import Limits, Sandbox
from agentrl.sandboxes.docker.container import ContainerSpec, hardening
from agentrl.sandboxes.docker.engine import DockerEngine, Image, owner
from agentrl.sandboxes.docker.image import from_host
from agentrl.sandboxes.docker.sandbox import DockerSandbox


def inspect(engine: DockerEngine) -> dict[str, Any]:
    (container, *_) = [container_id for container_id, name in engine.owned().items() if name == owner()]
    return json.loads(subprocess.check_output(["docker", "inspect", container]))[0]


def test_what_the_engine_was_told(engine: DockerEngine, own: Callable[..., Sandbox]) -> None:
    own()
    inspected = inspect(engine)
    host, config = inspected["HostConfig"], inspected["Config"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["Privileged"]) == ("none", True, False)
    assert (host["CapDrop"], host["CapAdd"], host["SecurityOpt"]) == (["ALL"], None, ["no-new-privileges"])
    assert (host["IpcMode"], host["PidMode"], host["Binds"], host["Devices"]) == ("private", "", None, None)
    assert (host["PidsLimit"], host["ShmSize"]) == (64, 16 << 20)
    assert host["Memory"] == host["MemorySwap"] == (2 * 512 + 64 + 16 + 384) << 20
    assert host["Tmpfs"]["/tmp"] == "rw,exec,nosuid,nodev,size=67108864,nr_inodes=4096,mode=1777"
    assert (host["AutoRemove"], host["LogConfig"]["Type"]) == (True, "none")
    user, _, group = config["User"].partition(":")
    assert user == group and 20_000 <= int(user) < 60_000


def test_gvisor_has_room_for_its_own_threads() -> None:
    image = Image(id="", python="")
    spec = ContainerSpec(image=image, runtime="runsc", limits=Limits(), cpus=1)
    assert hardening(spec)["pids_limit"] == 1024
    assert hardening(replace(spec, runtime=None))["pids_limit"] == 64


def test_each_container_has_its_own_user(sandbox: Sandbox) -> None:
    with sandbox.session() as session, sandbox.session() as other:
        users = [opened.run("import os\nos.getuid()").value for opened in (session, other)]
    assert users[0] != users[1] and "0" not in users


def test_the_image_is_built_from_this_machines_python(engine: DockerEngine) -> None:
    # The engine may serve another run of the tests as well.
    tag = f"agentrl-sandbox:test-{os.getpid()}"
    from_host(engine, tag, ["sortedcontainers"])
    try:
        image = engine.image(tag)
        assert image.python.startswith("/")
        script = "import numpy, sympy, ssl, sqlite3, ctypes, zlib, bz2, lzma; print(sympy.factorint(91))"
        command = ["docker", "run", "--rm", "--network=none", "--user=12345", tag, "python3", "-c", script]
        assert subprocess.check_output(command, text=True) == "{7: 1, 13: 1}\n"
        with DockerSandbox(Limits(), image=tag, ready=1) as sandbox:
            assert sandbox.run("import sortedcontainers as s\n[*s.SortedSet('ba')]").value == "['a', 'b']"
    finally:
        subprocess.run(["docker", "rmi", tag], check=True, capture_output=True)
