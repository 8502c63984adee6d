"""Runs a training program with GRPO, but takes the completions from an oracle. Argument: the program's file.

Everything except the generation of completions is TRL's own code. The model is tiny and untrained; the oracle
is an OpenAI endpoint.
"""

import runpy
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import ClassVar

import trl
from openai import OpenAI
from text_oracle import byte_tokenizer, complete
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer


class OracleTrainer(GRPOTrainer):
    oracle: OpenAI

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts = [self.processing_class.decode(ids) for ids in prompt_ids]
        completions = [
            self.processing_class.encode(f"{complete(self.oracle, text)}<|im_end|>", add_special_tokens=False)
            for text in texts
        ]
        return completions, None


class TinyTrainer(OracleTrainer):
    """The trainer of the documented program, with a tiny model and small batches."""

    rewarded: ClassVar[set[str]] = set()

    def __init__(self, model, args, reward_funcs, **kwargs):
        (reward,) = reward_funcs

        def recorded_reward(environments, task, **row):
            rewards = reward(environments, task=task, **row)
            self.rewarded.update(f"{name} {value}" for name, value in zip(task, rewards, strict=True))
            return rewards

        small_config = GRPOConfig(
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
        template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
        tokens = byte_tokenizer(template.read_text("utf-8"))
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
        super().__init__(tiny, [recorded_reward], small_config, processing_class=tokens, **kwargs)
        self.oracle = OpenAI()


trl.GRPOTrainer = TinyTrainer
trl.GRPOConfig = partial(GRPOConfig, use_cpu=True, output_dir=tempfile.mkdtemp())
runpy.run_path(sys.argv[1], run_name="__main__")
print(", ".join(sorted(TinyTrainer.rewarded)))  # noqa: T201
