"""Runs the agent's program, as evaluators do that are about programs."""

import subprocess
import sys


def evaluate(workspace):
    asked = ("3", "21", "-8")
    return {"doubles": sum(answer(workspace, number) == str(2 * int(number)) for number in asked) / 3}


def answer(workspace, number):
    program = [sys.executable, "-I", "double.py"]
    done = subprocess.run(program, cwd=workspace, input=number, capture_output=True, text=True)
    return done.stdout.strip()
