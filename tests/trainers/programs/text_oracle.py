"""A model without tool calls of its own: it writes the oracle's next call as text, in Hermes' format."""

import json
import re

from openai import OpenAI


def complete(oracle: OpenAI, text: str) -> str:
    """The continuation of a conversation's text, which has the tools as JSON and a mark for each reply."""
    names = re.findall(r'"name": "(\w+)", "description"', text)
    tool_messages = [{"role": "tool", "content": ""}] * text.count("<tool_response>")
    completion = oracle.chat.completions.create(
        model="oracle",
        messages=[{"role": "user", "content": text}, *tool_messages],
        tools=[{"type": "function", "function": {"name": name}} for name in names],
    )
    message = completion.choices[0].message
    if not message.tool_calls:
        return str(message.content)
    function = message.tool_calls[0].function
    call = json.dumps({"name": function.name, "arguments": json.loads(function.arguments)})
    return f"{message.content}\n<tool_call>\n{call}\n</tool_call>"


def byte_tokenizer(template: str):
    """A tokenizer of transformers with one token per byte and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    end, start, stop = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=end, eos_token=stop)
    tokenizer.add_special_tokens({"additional_special_tokens": [end, start, stop]})
    tokenizer.chat_template = template
    return tokenizer
