"""Runs the agent loop of a page with an oracle as verl's server of tokens. Argument: the program's file.

The loop, its tokens, masks and parser are verl's own. The tokenizer has one token per byte.
"""

import asyncio
import runpy
import sys
from typing import Any

from decathlon_client import ClientError
from omegaconf import OmegaConf
from openai import OpenAI
from text_oracle import byte_tokenizer, complete
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LOG_PROBABILITY = -0.5


class OracleServer:
    """Answers with the tokens of the oracle's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._oracle = tokenizer, OpenAI()

    async def generate(self, *, prompt_ids: list[int], **options: Any) -> TokenOutput:
        text = await asyncio.to_thread(complete, self._oracle, self._tokenizer.decode(prompt_ids))
        ids = self._tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        return TokenOutput(token_ids=ids, log_probs=[LOG_PROBABILITY] * len(ids))


async def rollout(loop_class: type, task: str, turns: int = 100) -> AgentLoopOutput:
    multi_turn = {"max_user_turns": None, "max_assistant_turns": turns, "max_parallel_calls": 1}
    multi_turn |= {"max_tool_response_length": 256, "tool_response_truncate_side": "middle"}
    multi_turn |= {"format": "hermes"}
    rollout = {"prompt_length": 1 << 16, "response_length": 1 << 18, "full_determinism": False}
    rollout |= {"multi_turn": multi_turn}
    tokenizer = byte_tokenizer(TEMPLATE)
    loop = loop_class(
        trainer_config=DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})),
        server_manager=OracleServer(tokenizer),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=object,
        data_config=DictConfigWrap(OmegaConf.create({})),
    )
    output = await loop.run({}, raw_prompt=[], extra_info={"task": task})
    tokens = zip(output.response_logprobs, output.response_mask, strict=True)
    generated = {logprob for logprob, mask in tokens if mask == 1}
    assert generated == {LOG_PROBABILITY}, "a token of the model lost its log-probability"
    assert 0 in output.response_mask, "replies are not masked"
    return output


async def main() -> None:
    loop_class = runpy.run_path(sys.argv[1])["ToolathlonLoop"]
    outputs = await asyncio.gather(
        rollout(loop_class, "tune-reactor"),
        rollout(loop_class, "audit-expenses"),
        rollout(loop_class, "tune-reactor", turns=2),
    )
    print([output.reward_score for output in outputs])  # noqa: T201
    try:
        await rollout(loop_class, "no-such-task")
    except ClientError:
        print("no task, no reward")  # noqa: T201


asyncio.run(main())
