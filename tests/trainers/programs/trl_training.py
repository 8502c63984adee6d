"""A program that trains by GRPO, its generator replaced by an oracle: `FILE`.

Everything but the generator is TRL's own. The model is tiny and untrained; its completions come from the
endpoint.
"""

import json
import re
import runpy
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import ClassVar

import trl
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


class OracleTrainer(GRPOTrainer):
    oracle: OpenAI

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts = [self.processing_class.decode(ids) for ids in prompt_ids]
        completions = [
            self.processing_class.encode(self._complete(text), add_special_tokens=False) for text in texts
        ]
        return completions, None

    def _complete(self, text: str) -> str:
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
    """One token per byte, with Qwen3's chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token=MARKS[0], eos_token=MARKS[2])
    fast.add_special_tokens({"additional_special_tokens": MARKS})
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text("utf-8")
    return fast


class PagesTrainer(OracleTrainer):
    """The page's trainer with a tiny model and small sizes."""

    rewarded: ClassVar[set[str]] = set()

    def __init__(self, model, args, reward_funcs, **kwargs):
        (reward,) = reward_funcs

        def rewarding(environments, task, **row):
            rewards = reward(environments, task=task, **row)
            self.rewarded.update(f"{name} {value}" for name, value in zip(task, rewards, strict=True))
            return rewards

        small = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=2,
            num_generations=2,
            generation_batch_size=4,
            max_completion_length=args.max_completion_length,
            max_tool_calling_iterations=args.max_tool_calling_iterations,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
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
        tiny = Qwen3ForCausalLM(config)
        super().__init__(tiny, [rewarding], small, processing_class=tokens, **kwargs)
        self.oracle = OpenAI()


trl.GRPOTrainer = PagesTrainer
trl.GRPOConfig = partial(GRPOConfig, use_cpu=True, output_dir=tempfile.mkdtemp())
runpy.run_path(sys.argv[1], run_name="__main__")
print(", ".join(sorted(PagesTrainer.rewarded)))  # noqa: T201
