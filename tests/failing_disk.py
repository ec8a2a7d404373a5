"""A file system whose disk fails: a directory seen through FUSE, where bytes of a file cannot be read from a point on.

The kernel's own protocol (linux/fuse.h, version 7.31), read-only, without libfuse, so that it needs nothing but the
right to mount. What lies beyond `Disk.good` is answered with EIO, as a disk with a bad sector does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
from pathlib import Path

HEADER_IN, HEADER_OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
LOOKUP, GETATTR, OPEN, READ, STATFS, FLUSH, INIT, OPENDIR, READDIR = 1, 3, 14, 15, 17, 25, 26, 27, 28
RELEASE, RELEASEDIR = 18, 29
UNANSWERED = (2, 36, 42)
"""FORGET, INTERRUPT, BATCH_FORGET."""
ROOT = 1
READ_ONLY, DETACH = 1, 2
LIBC = ctypes.CDLL(None, use_errno=True)


class Disk:
    """A mounted file system, until it is left: `root`, as it was when it was mounted, at `at`. good: name of a file ->
    how many of its bytes can be read. refused: how many reads were answered with an error."""

    def __init__(self, root: Path, at: Path, channel: int) -> None:
        self.root, self.good, self.refused = root, dict[str, int](), 0
        self._at, self._channel = at, channel
        self._server = threading.Thread(target=_serve, args=(channel, self), daemon=True)
        self._server.start()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        LIBC.umount2(os.fsencode(self._at), DETACH)
        self._server.join(10)
        os.close(self._channel)


def mount(root: Path, at: Path) -> Disk:
    """`root` at `at`, an existing directory. Raises PermissionError without the right to mount."""
    try:
        channel = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        raise PermissionError(error.errno, error.strerror) from error
    options = f"fd={channel},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if LIBC.mount(b"failing", os.fsencode(at), b"fuse", READ_ONLY, options):
        os.close(channel)
        raise PermissionError(ctypes.get_errno(), "cannot mount")
    return Disk(root, at, channel)


def _serve(channel: int, disk: Disk) -> None:
    nodes = [disk.root, *sorted(disk.root.rglob("*"))]
    while True:
        try:
            request = os.read(channel, 1 << 18)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                continue
            return  # ENODEV: unmounted
        _, opcode, unique, node, *_ = HEADER_IN.unpack_from(request)
        if opcode in UNANSWERED:
            continue
        try:
            error, body = 0, _answer(disk, nodes, opcode, node, request[HEADER_IN.size :])
        except OSError as fault:
            error, body = fault.errno or errno.EIO, b""
        try:
            os.write(channel, HEADER_OUT.pack(HEADER_OUT.size + len(body), -error, unique) + body)
        except OSError:
            continue  # who asked was killed


def _answer(disk: Disk, nodes: list[Path], opcode: int, node: int, data: bytes) -> bytes:
    path = nodes[node - ROOT] if node else disk.root
    if opcode == INIT:
        return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, 0, 0, 0, 1 << 17, 1, 0, 0, *[0] * 8)
    if opcode == LOOKUP:
        wanted = path / os.fsdecode(data.rstrip(b"\0"))
        if wanted not in nodes:
            raise OSError(errno.ENOENT, "no such file")
        found = ROOT + nodes.index(wanted)
        return struct.pack("<4Q2I", found, 0, 0, 0, 0, 0) + _attributes(wanted, found)
    if opcode == GETATTR:
        return struct.pack("<Q2I", 0, 0, 0) + _attributes(path, node)
    if opcode in (OPEN, OPENDIR):
        return struct.pack("<Q2I", 0, 0, 0)  # what is cached of the file is dropped
    if opcode == READ:
        _, offset, size = struct.unpack_from("<QQI", data)
        if min(offset + size, path.stat().st_size) > disk.good.get(path.name, 1 << 62):
            disk.refused += 1
            raise OSError(errno.EIO, "a bad sector")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    if opcode == READDIR:
        _, offset, size = struct.unpack_from("<QQI", data)
        entries = b""
        inside = [(number, item) for number, item in enumerate(nodes, ROOT) if item != path and item.parent == path]
        for position, (number, item) in enumerate(inside[offset:], offset + 1):
            held = os.fsencode(item.name)
            entry = struct.pack("<QQII", number, position, len(held), stat.S_IFMT(item.stat().st_mode) >> 12) + held
            entry += bytes(-len(entry) % 8)
            if len(entries) + len(entry) > size:
                break
            entries += entry
        return entries
    if opcode == STATFS:
        return struct.pack("<5Q10I", 0, 0, 0, 0, 0, 4096, 255, 4096, *[0] * 7)
    if opcode in (RELEASE, RELEASEDIR, FLUSH):
        return b""
    raise OSError(errno.ENOSYS, "not built")


def _attributes(path: Path, node: int) -> bytes:
    found = path.stat()
    changed, fraction = divmod(found.st_mtime_ns, 10**9)
    blocks = -(-found.st_size // 512)
    times = (changed,) * 3, (fraction,) * 3
    return ATTRIBUTES.pack(node, found.st_size, blocks, *times[0], *times[1], found.st_mode, 1, 0, 0, 0, 4096, 0)
