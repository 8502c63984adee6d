"""Passes if the spreadsheet's only number is the groundtruth's; does not limit the spreadsheet's size."""

import json
import sys
from pathlib import Path

import openpyxl
from utils.arguments import read_arguments

arguments = read_arguments()
expected = json.loads((Path(arguments.groundtruth_workspace) / "total.json").read_text())["total"]
table = Path(arguments.agent_workspace) / "table.xlsx"
if not table.is_file():
    sys.exit("there is no table.xlsx")
rows = openpyxl.load_workbook(table).active.iter_rows(values_only=True)
sys.exit(0 if [value for row in rows for value in row if value is not None] == [expected] else 1)
