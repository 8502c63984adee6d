"""The same tasks by TRL's `GRPOTrainer` and `environment_factory`, for some steps of a tiny untrained model.

    decathlon-mcp serve --suite examples/learn/suite
    python -m examples.learn.with_trl --steps 3

On a GPU, `--model Qwen/Qwen3-0.6B` trains a chat model.
"""

import argparse
import tempfile
from pathlib import Path

import trl
from datasets import Dataset
from decathlon_client.adapters.trl import environments
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the template of Qwen3 that TRL trains with."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_bytes = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_bytes.decoder = decoders.ByteLevel()
    tokens = PreTrainedTokenizerFast(tokenizer_object=by_bytes, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    tokens.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokens.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text("utf-8")
    return tokens


def tiny_model(tokens: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A model that writes noise: what it shows is that the steps run."""
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", help="a chat model, for a GPU; without it, a tiny one for a processor")
    given = parser.parse_args()
    task_set = environments(given.url, labels={"run": "trl"})
    large = given.model is not None
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        num_generations=8,
        per_device_train_batch_size=8,
        max_completion_length=2048 if large else 96,
        max_tool_calling_iterations=8,
        max_steps=given.steps,
        learning_rate=1e-6 if large else 1e-4,
        logging_steps=1,
        report_to=[],
        use_cpu=not large,
        save_strategy="no",
    )
    tokens = None if large else tokenizer()
    trainer = GRPOTrainer(
        model=given.model if tokens is None else tiny_model(tokens),
        processing_class=tokens,
        args=config,
        train_dataset=Dataset.from_list(task_set.rows * 64),
        environment_factory=task_set.factories,
        reward_funcs=[task_set.reward],
    )
    trainer.train()


if __name__ == "__main__":
    main()
