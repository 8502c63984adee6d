"""A step of GRPO over two tasks, the generator replaced by an oracle: `URL ENDPOINT`.

The trainer, its environments, its loop of tool calls, its rewards and its step are TRL's own. The model is
tiny and untrained; what it is said to have generated comes from the endpoint.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import trl
from datasets import Dataset
from decathlon_client.adapters.trl import environments
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


class OracleTrainer(GRPOTrainer):
    oracle: OpenAI

    def _generate_single_turn(self, prompt_ids, *args, **more):
        texts = [self.processing_class.decode(ids) for ids in prompt_ids]
        said = [self.processing_class.encode(self._said(text), add_special_tokens=False) for text in texts]
        return said, None

    def _said(self, text: str) -> str:
        names = re.findall(r'"name": "(\w+)", "description"', text)
        answered = [{"role": "tool", "content": ""}] * text.count("<tool_response>")
        message = (
            self.oracle.chat.completions.create(
                model="oracle",
                messages=[{"role": "user", "content": text}, *answered],
                tools=[{"type": "function", "function": {"name": name}} for name in names],
            )
            .choices[0]
            .message
        )
        if not message.tool_calls:
            return f"{message.content}<|im_end|>"
        function = message.tool_calls[0].function
        call = json.dumps({"name": function.name, "arguments": json.loads(function.arguments)})
        return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and Qwen3's template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token=MARKS[0], eos_token=MARKS[2])
    made.add_special_tokens({"additional_special_tokens": MARKS})
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text("utf-8")
    return made


def main(url: str, endpoint: str) -> None:
    found = environments(url, tasks=["audit-expenses", "tune-reactor"])
    rewards: set[str] = set()

    def reward(environments, task, **row):
        told = found.reward(environments, task=task, **row)
        rewards.update(f"{each} {reward}" for each, reward in zip(task, told, strict=True))
        return told

    tokens = tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1 << 16,
    )
    trainer = OracleTrainer(
        model=Qwen3ForCausalLM(config),
        processing_class=tokens,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=2,
            num_generations=2,
            generation_batch_size=4,
            max_completion_length=30_000,
            max_tool_calling_iterations=30,
            max_steps=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(found.rows),
        environment_factory=found.factories,
        reward_funcs=[reward],
    )
    trainer.oracle = OpenAI(base_url=endpoint, api_key="none")
    trainer.train()
    print(", ".join(sorted(rewards)))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
