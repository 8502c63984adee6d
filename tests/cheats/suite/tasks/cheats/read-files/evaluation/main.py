"""Passes if the workspace's file `total` has the groundtruth's number. Reads it without any precautions.

It reads many formats in the ways of Toolathlon's evaluators, with the workspace as its current folder, and
imports the modules only when it needs them.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp

from utils.arguments import read_arguments


def main():
    arguments = read_arguments()
    expected = float((Path(arguments.groundtruth_workspace) / "total.txt").read_text())
    os.chdir(arguments.agent_workspace)
    files = [file for file in Path(".").rglob("*") if file.name.startswith("total.")]
    if not files:
        sys.exit("there is no file `total`")
    totals = [READERS[file.suffix](file) for file in files]
    sys.exit(0 if all(float(total) == expected for total in totals) else 1)


def read_json(file):
    return json.loads(file.read_text())["total"]


def read_csv(file):
    import csv

    with file.open() as lines:
        return list(csv.reader(lines))[0][0]


def read_xml(file):
    from xml.etree import ElementTree

    return ElementTree.parse(file).getroot().text


def read_xlsx(file):
    import openpyxl

    return openpyxl.load_workbook(file, data_only=True).active["A1"].value


def read_zip(file):
    import zipfile

    folder = Path(mkdtemp())
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return (folder / "total.txt").read_text()


def read_tar(file):
    import tarfile

    folder = Path(mkdtemp())
    with tarfile.open(file) as archive:
        archive.extractall(folder)
    return (folder / "total.txt").read_text()


def read_db(file):
    import sqlite3

    with sqlite3.connect(file) as database:
        return database.execute("SELECT total FROM totals").fetchone()[0]


def read_png(file):
    from PIL import Image

    return Image.open(file).convert("L").getpixel((0, 0))


READERS = {
    ".json": read_json,
    ".csv": read_csv,
    ".xml": read_xml,
    ".xlsx": read_xlsx,
    ".zip": read_zip,
    ".tar": read_tar,
    ".db": read_db,
    ".png": read_png,
}

main()
