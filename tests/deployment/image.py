"""Builds the Dockerfile's image on a bare Debian, without Docker, and asks its server a question.

    python -m tests.deployment.image                    # root; needs mmdebstrap and buildah
    python -m tests.deployment.image --keep FOLDER      # keeps layers there, for the next time

mmdebstrap makes the base image, since no image registry is asked, and buildah carries out the
Dockerfile. Then the image's command runs as Kubernetes would run it: as process 1, as the image's
user, on a file system that cannot be written to except for the mounted folders. Where pip needs to
be told about an index or a certificate, `--volume` mounts what says so: `--volume
pip.conf:/etc/pip.conf`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from src.core.settings import CHECKOUT
from tests.deployment import dockerfile
from tests.http.processes import free_port

SUITE: Final = "bookworm"
BASE: Final = "localhost/debian-bare"
IMAGE: Final = "localhost/slipstream"
START_SECONDS: Final = 600.0
QUESTION: Final = "What is 17 + 25?"


class Builder:
    """buildah with all that it stores in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, *arguments: str, capture: bool = True) -> str:
        """Run one command; its output goes to the terminal unless it is captured."""
        folders = ("--root", str(self._folder / "store"), "--runroot", str(self._folder / "run"))
        done = subprocess.run(
            ["buildah", *folders, *arguments],
            check=True,
            text=True,
            stdout=subprocess.PIPE if capture else None,
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
        )
        return done.stdout.strip() if capture else ""

    def import_base(self, archive: Path) -> None:
        """Make an image of an archive of a root file system."""
        container = self.run("from", "scratch")
        self.run("add", "--quiet", container, str(archive), "/")
        self.run("commit", "--quiet", "--rm", container, BASE)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """The image's root file system."""
        container = self.run("from", IMAGE)
        try:
            yield Path(self.run("mount", container))
        finally:
            self.run("rm", container)


def bare_root(archive: Path) -> None:
    """The smallest Debian, from its package registry."""
    nice = ["nice", "-n", "5"]
    subprocess.run([*nice, "mmdebstrap", "--variant=minbase", SUITE, str(archive)], check=True)


def build(builder: Builder, volumes: Sequence[str]) -> None:
    """Carry out the Dockerfile. Only pip's own configuration says where torch is found."""
    builder.run(
        *("build", "--layers", "--file", str(dockerfile.PATH), "--tag", IMAGE),
        *("--build-arg", f"BASE={BASE}", "--build-arg", "TORCH_INDEX="),
        *(word for volume in volumes for word in ("--volume", f"{volume}:ro")),
        str(CHECKOUT),
        capture=False,
    )


class Server:
    """The image's command in namespaces of its own for processes and mounts."""

    def __init__(self, root: Path, image: dict[str, Any], port: int, log: Path) -> None:
        self._log = log
        self._port = port
        self._root = root
        self._image = image
        instead = {"8000": str(port), "0.0.0.0": "127.0.0.1"}
        command = [instead.get(word, word) for word in self.command]
        # As a pod has it: nothing but these folders can be written to.
        steps = [
            f"mount --rbind {root} {root}",
            *(f"mount -t tmpfs -o mode=1777 none {root}/{name}" for name in ("cache", "tmp")),
            f"mount --bind {CHECKOUT}/configs/demo {root}/models",
            f"mount -t proc none {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -o remount,bind,ro {root}",
            shlex.join(["exec", *self.inside(*command)]),
        ]
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "sh", "-ec", "\n".join(steps)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    @property
    def command(self) -> list[str]:
        """Entry point and arguments."""
        words: list[str] = [*self._image["Entrypoint"], *self._image["Cmd"]]
        return words

    def inside(self, *command: str) -> list[str]:
        """A command with the image's user, variables and folder."""
        folder = f'cd {self._image["WorkingDir"]} && exec "$@"'
        return [
            *("chroot", f"--userspec={self._image['User']}", str(self._root)),
            *("/usr/bin/env", "-i", *self._image["Env"], "HOME=/cache"),
            *("/bin/sh", "-c", folder, "sh", *command),
        ]

    def health_check(self) -> int:
        """The exit code of HEALTHCHECK's command."""
        words = json.loads(re.findall(r"CMD (\[.*\])", dockerfile.only("HEALTHCHECK").text)[0])
        command = [word.replace(":8000", f":{self._port}") for word in words]
        return subprocess.run(
            self.inside(*command), stderr=subprocess.DEVNULL, check=False
        ).returncode

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The body of an answer with status 200."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def wait_ready(self) -> None:
        """Until it is ready; its log is the error where it does not get there."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.ask("/ready")
            except (urllib.error.URLError, ConnectionError):
                pass
            else:
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not get ready:\n{self._log.read_text()}")
            time.sleep(0.1)

    def stop(self) -> int:
        """SIGTERM to process 1, and its exit code."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        (first,) = children.read_text().split()
        os.kill(int(first), signal.SIGTERM)
        return self._process.wait(60)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            # Process 1 of a namespace takes all others with it.
            for child in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
                for pid in child.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            self._process.wait()


def try_out(builder: Builder, folder: Path) -> list[str]:
    """Start the image's server, ask it, stop it; what was seen, as sentences."""
    image = json.loads(builder.run("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    seen = []
    with builder.mounted() as root, Server(root, image, free_port(), folder / "log") as server:
        began = time.monotonic()
        expect(server.health_check() != 0, "HEALTHCHECK says no while nothing listens")
        server.wait_ready()
        seen.append(f"ready after {time.monotonic() - began:.1f} s as user {image['User']}")
        expect(server.health_check() == 0, "HEALTHCHECK says yes when it is ready")
        (model,) = json.loads(server.ask("/v1/models"))["data"]
        body = {"model": model["id"], "messages": [{"role": "user", "content": QUESTION}]}
        answer = json.loads(server.ask("/v1/chat/completions", {**body, "temperature": 0}))
        text = answer["choices"][0]["message"]["content"]
        seen.append(f"{QUESTION} {text}")
        expect("42" in text, f"the answer is right: {text}")
        deadline = time.monotonic() + START_SECONDS
        while "slipstream_cpu_kernels_info{" not in (metrics := server.ask("/metrics")) or (
            'kernels="reference"' in metrics
        ):
            expect(time.monotonic() < deadline, "kernels come")
            time.sleep(0.2)
        seen += re.findall(r'kernels="([\w-]+)"', metrics)[:1]
        builds = re.findall(r"^slipstream_kernel_builds_total\S* (\S+)", metrics, re.MULTILINE)
        expect([float(value) for value in builds] == [0.0], f"kernels were prebuilt: {builds}")
        seen.append("no kernel was compiled")
        began = time.monotonic()
        code = server.stop()
        expect(code == 0, f"SIGTERM ends it with 0: {code}\n{(folder / 'log').read_text()}")
        seen.append(f"ended by SIGTERM with exit code 0 after {time.monotonic() - began:.1f} s")
    return seen


def expect(holds: bool, what: str) -> None:
    """Whatever Python's options are."""
    if not holds:
        raise RuntimeError(f"expected: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.deployment.image", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where layers stay")
    parser.add_argument("--volume", action="append", default=[], metavar="PATH:PLACE")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder: Path = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-image-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        builder = Builder(folder.absolute())
        began = time.monotonic()
        archive = folder / "base.tar"
        if not archive.is_file():
            bare_root(archive)
            builder.import_base(archive)
        based = time.monotonic()
        build(builder, options.volume)
        built = time.monotonic()
        sizes = json.loads(builder.run("images", "--json", IMAGE))
        seen = try_out(builder, folder)
    print(f"bare Debian in {(based - began) / 60:.1f} min, image in {(built - based) / 60:.1f} min")
    print(f"image of {sizes[0]['size']}, on a base of {archive_size(archive)}", *seen, sep="\n")


def archive_size(archive: Path) -> str:
    """In megabytes; what was kept in a temporary folder is gone by now."""
    return f"{archive.stat().st_size / 1e6:.0f} MB" if archive.is_file() else "debian minbase"


if __name__ == "__main__":
    sys.exit(main())
