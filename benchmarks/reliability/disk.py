"""A file system of its own in an image file, whose power can be cut. Needs root, Linux and free loop devices.

The cut is the ioctl FS_IOC_SHUTDOWN without a flush of the log, then unmounting and mounting again: what was not forced to
the disk is gone, and the journal is replayed. What the disk itself would lose from its own cache is not modelled: the
kernel's flushes are taken to work.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}


def why_not(kind: str) -> str | None:
    """Why no such disk can be made here; None when it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root (loop device, mount): skipped"
    for tool in (_MAKE[kind][0], "losetup", "mount", "umount"):
        if shutil.which(tool) is None:
            return f"needs {tool}, which is not installed: skipped"
    if not os.path.exists("/dev/loop-control"):
        return "needs loop devices, and there is no /dev/loop-control: skipped"
    return None


class Disk:
    """`with Disk("ext4", 128) as disk:` gives the mounted directory `disk.path`; nothing of it is left after the block."""

    def __init__(self, kind: str, mebibytes: int, within: Path | None = None) -> None:
        self.kind, self.mebibytes, self._within = kind, mebibytes, within
        self._loop = ""
        self._mounted = False

    def __enter__(self) -> Disk:
        self._home = Path(tempfile.mkdtemp(prefix="meshtrain-disk-", dir=self._within))
        self.path = self._home / "mnt"
        try:
            self.path.mkdir()
            image = self._home / "image"
            with open(image, "wb") as file:
                file.truncate(self.mebibytes * 2**20)
            _run(*_MAKE[self.kind], str(image))
            self._loop = _run("losetup", "--find", "--show", str(image)).strip()
            self.mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(subprocess.CalledProcessError):
            self.unmount()
        if self._mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=False)
        if self._loop:
            subprocess.run(["losetup", "--detach", self._loop], check=False)
        shutil.rmtree(self._home, ignore_errors=True)

    def mount(self) -> None:
        """Mount it, which replays the journal."""
        _run("mount", "-t", self.kind, self._loop, str(self.path))
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it; a process that is just ending may hold it for a moment."""
        if not self._mounted:
            return
        for attempt in range(100):
            try:
                _run("umount", str(self.path))
                break
            except subprocess.CalledProcessError:
                if attempt == 99:
                    raise
                time.sleep(0.02)
        self._mounted = False

    def again(self) -> None:
        """What a machine does when the power is back."""
        self.unmount()
        self.mount()

    def open(self) -> int:
        """A descriptor for `cut`, to be had before it is needed."""
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write_back(self) -> None:
        """Have the system write everything that it holds, as it does on its own every few seconds."""
        descriptor = self.open()
        try:
            _syncfs(descriptor)
        finally:
            os.close(descriptor)


def cut(descriptor: int) -> None:
    """Cut the power of the file system of a descriptor."""
    fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))


def _syncfs(descriptor: int) -> None:
    import ctypes

    ctypes.CDLL(None, use_errno=True).syncfs(descriptor)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
