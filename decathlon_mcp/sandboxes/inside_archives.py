"""Functions of programs that providers run in a sandbox: unpack and pack archives there.

Sent to the sandbox as text, before the text of the program itself: Python 3.10, standard library. See
`prime/inside.py` and `gvisor/inside.py`.
"""

import os

CHUNK = 1 << 16


def unpack_archive(stream, root):
    """Unpack the tar that `stream` has into `root`, created if missing; follows no links below it."""
    # Imported here, as below: most runs need it not, and importing it takes as long as the rest.
    import tarfile

    os.makedirs(root, exist_ok=True)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if member.isdir():
                descriptor = enter(root, parts)
                os.fchmod(descriptor, member.mode & 0o7777)
                os.utime(descriptor, (member.mtime, member.mtime))
                os.close(descriptor)
                continue
            parent = enter(root, parts[:-1])
            try:
                unpack_member(archive, member, root, parts[-1], parent)
            finally:
                os.close(parent)


def enter(top, parts):
    """A descriptor of a folder below `top`, created where it is missing; follows no links."""
    descriptor = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            os.mkdir(part, 0o755, dir_fd=descriptor)
        except FileExistsError:
            pass
        try:
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = child
    return descriptor


def unpack_member(archive, member, root, name, parent):
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=parent)
    elif member.islnk():
        target = [part for part in member.linkname.split("/") if part not in ("", ".")]
        source = enter(root, target[:-1])
        try:
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        body = archive.extractfile(member)
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
            while data := body.read(CHUNK):
                file.write(data)
            os.fchmod(file.fileno(), member.mode & 0o7777)
        os.utime(name, (member.mtime, member.mtime), dir_fd=parent)


def pack_archive(root, target):
    """Write the tar of what is in `root` to `target`, a file or what has its `write`.

    It has no members if `root` is no folder. What cannot be read is left out.
    """
    import tarfile

    archive = tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT)
    if os.path.isdir(root):
        for top, folders, files in os.walk(root):
            relative = os.path.relpath(top, root)
            here = "." if relative == "." else f"./{relative}"
            links = [name for name in folders if os.path.islink(f"{top}/{name}")]
            pack_member(archive, top, here)
            for name in sorted(files + links):
                pack_member(archive, f"{top}/{name}", f"{here}/{name}")
    archive.close()


def pack_member(archive, path, name):
    try:
        member = archive.gettarinfo(path, name)
        if member is None:  # a socket
            return
        if member.isreg():
            with open(path, "rb") as file:
                # It may have become shorter or longer meanwhile.
                member.size = os.fstat(file.fileno()).st_size
                archive.addfile(member, Padded(file, member.size))
            return
    except OSError:
        return
    archive.addfile(member)


class Padded:
    """Exactly `size` bytes of a file, with zeros after its end."""

    def __init__(self, file, size):
        self.file, self.remaining = file, size

    def read(self, size):
        size = min(size, self.remaining)
        data = self.file.read(size)
        self.remaining -= size
        return data + bytes(size - len(data))
