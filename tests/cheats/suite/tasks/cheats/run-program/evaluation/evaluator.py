"""Runs the agent's program and checks its output."""

import subprocess
import sys


def evaluate(workspace):
    numbers = ("3", "21", "-8")
    return {"doubles": sum(output(workspace, number) == str(2 * int(number)) for number in numbers) / 3}


def output(workspace, number):
    program = [sys.executable, "-I", "double.py"]
    result = subprocess.run(program, cwd=workspace, input=number, capture_output=True, text=True)
    return result.stdout.strip()
