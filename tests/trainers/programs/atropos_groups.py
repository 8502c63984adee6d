"""Has Atropos process two groups with the environment of a page. Argument: the program's file."""

import asyncio
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import transformers

# The managed server for OpenAI endpoints has placeholders for tokens; only Atropos' own log decodes them.
transformers.AutoTokenizer.from_pretrained = lambda *arguments, **options: SimpleNamespace(decode=str)

os.environ["ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"] = "1"
environment_class = runpy.run_path(sys.argv[1])["Toolathlon"]
config, servers = environment_class.config_init()
config.ensure_scores_are_not_same = False
config.data_path_to_save_groups = "groups.jsonl"
config.include_messages = False
env = environment_class(config, servers, testing=False)
env.n_groups_to_process, env.group_size_to_process = 2, 2
asyncio.run(env.process_manager())
for line in Path(config.data_path_to_save_groups).read_text("utf-8").splitlines():
    group = json.loads(line)
    print(group["scores"], [len(tokens) for tokens in group["tokens"]])  # noqa: T201
