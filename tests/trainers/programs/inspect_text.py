"""Prints everything that is in the logs of a folder. Argument: the folder."""

import sys
from pathlib import Path

import zipfile_zstd as zipfile  # of inspect-ai, whose logs are compressed by zstd

for file in Path(sys.argv[1]).glob("*.eval"):
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            sys.stdout.buffer.write(archive.read(name) + b"\n")
