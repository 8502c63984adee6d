"""Fuzzing of the readers of foreign bytes: short property tests in CI, and long forms guided by coverage.

    python -m tests.fuzz.server_line --minutes 30
    python -m tests.fuzz.driver_line --minutes 30
    python -m tests.fuzz.repository_files --minutes 30

The last one draws its inputs with hypothesis and tries them with git. The others need atheris, which is no
dependency because it is large and has wheels for few platforms: `pip install atheris`. They keep what they
find in `corpus/`.
"""
