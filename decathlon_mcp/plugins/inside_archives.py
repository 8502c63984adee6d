"""Functions of programs that plug-ins run in a sandbox: unpack and pack archives, drop capabilities there.

Sent to the sandbox as text, before the text of the program itself: Python 3.10, standard library. See
`prime/inside.py` and `gvisor/inside.py`.
"""

import ctypes
import os
import struct

CHUNK = 1 << 16
MAX_LEVELS = 1000
"""How deep folders may lie, as in `archives.packing`."""
PR_CAPBSET_DROP = 24
CAPSET = {"x86_64": 126, "aarch64": 91}


def program_inside(package: str) -> str:
    """The source of `inside.py` in a plug-in's package, which runs in its sandboxes. For the server."""
    from importlib.resources import files

    parts = (("decathlon_mcp.plugins", "inside_archives.py"), (package, "inside.py"))
    return "\n".join(files(name).joinpath(file).read_text("utf-8") for name, file in parts)


def libc_call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def drop_capabilities():
    for capability in range(64):
        try:
            libc_call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            break
    header = struct.pack("Ii", 0x20080522, 0)
    libc_call("syscall", CAPSET[os.uname().machine], header, bytes(24))


def unpack_archive(stream, root):
    """Unpack the tar that `stream` has into `root`, created if missing; follows no links below it."""
    # Imported here, as below: most runs need it not, and importing it takes as long as the rest.
    import resource
    import tarfile

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.makedirs(root, exist_ok=True)
    target, source = FolderCursor(root), FolderCursor(root)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if member.isdir():
                descriptor = target.enter(parts)
                os.fchmod(descriptor, member.mode & 0o7777)
                os.utime(descriptor, (member.mtime, member.mtime))
            else:
                unpack_member(archive, member, source, parts[-1], target.enter(parts[:-1]))


class FolderCursor:
    """A folder at or below `top`; follows no links.

    The folders above it stay open: to enter the next folder of an archive from `top` takes as many calls as
    it is deep, for every member.
    """

    def __init__(self, top):
        self.parts = []
        self.descriptors = [os.open(top, os.O_RDONLY | os.O_DIRECTORY)]

    def enter(self, parts):
        """The descriptor of another folder, created if missing; it is closed by the next call."""
        common = 0
        while common < min(len(parts), len(self.parts)) and parts[common] == self.parts[common]:
            common += 1
        while len(self.descriptors) > common + 1:
            os.close(self.descriptors.pop())
        for part in parts[common:]:
            try:
                os.mkdir(part, 0o755, dir_fd=self.descriptors[-1])
            except FileExistsError:
                pass
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            self.descriptors.append(os.open(part, flags, dir_fd=self.descriptors[-1]))
        self.parts = parts
        return self.descriptors[-1]


def unpack_member(archive, member, source, name, parent):
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=parent)
    elif member.islnk():
        target = [part for part in member.linkname.split("/") if part not in ("", ".")]
        folder = source.enter(target[:-1])
        os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        body = archive.extractfile(member)
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
            while data := body.read(CHUNK):
                file.write(data)
            os.fchmod(file.fileno(), member.mode & 0o7777)
        os.utime(name, (member.mtime, member.mtime), dir_fd=parent)


def pack_archive(root, target, max_entries, max_name_bytes):
    """Write the tar of what is in `root` to `target`, a file or what has its `write`.

    It has no members if `root` is no folder. What cannot be read is left out. Raises OverflowError if folders
    are more than MAX_LEVELS deep, or for more entries or bytes of names. Changes the current folder.
    """
    import tarfile

    archive = tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT)
    # Not by `os.walk`, which before Python 3.12 fails at a thousand folders in each other.
    pending = [(root, ".")] if os.path.isdir(root) else []
    budget = Budget(max_entries, max_name_bytes)
    while pending:
        top, here = pending.pop()
        archive.members.clear()  # which tarfile keeps, and needs to read only
        pack_member(archive, top, here)
        if here.count("/") > MAX_LEVELS:
            raise OverflowError(f"folders are more than {MAX_LEVELS} levels deep")
        for name, is_folder in enter_folder(top, budget):
            if is_folder:
                pending.append((f"{top}/{name}", f"{here}/{name}"))
            else:
                pack_member(archive, name, f"{here}/{name}")
    archive.close()


class Budget:
    """Counts entries and the bytes of their names before they are kept."""

    def __init__(self, max_entries, max_name_bytes):
        self.entries, self.name_bytes = max_entries, max_name_bytes
        self.max_entries, self.max_name_bytes = max_entries, max_name_bytes

    def count(self, name):
        self.entries -= 1
        self.name_bytes -= len(name.encode("utf-8", "surrogateescape"))
        if self.entries < 0:
            raise OverflowError(f"there are more than {self.max_entries} files and folders")
        if self.name_bytes < 0:
            raise OverflowError(f"their names have more than {self.max_name_bytes} bytes")


def enter_folder(path, budget):
    """Make a folder the current one, by whose name paths are short.

    Returns the names of its entries, and whether each is a folder and no link; none if it cannot be read.
    """
    found = []
    try:
        os.chdir(path)
        with os.scandir() as entries:
            for entry in entries:
                budget.count(entry.name)
                found.append((entry.name, entry.is_dir(follow_symlinks=False)))
    except OSError:
        return []
    return sorted(found)


def pack_member(archive, path, name):
    try:
        member = archive.gettarinfo(path, name)
        if member is None:  # a socket
            return
        member.mtime = int(member.mtime)  # a fraction takes 1 KiB more
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
