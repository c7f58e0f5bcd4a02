"""Small random models of transformers and their folders."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

SPECIAL = ("<unk>", "<s>", "</s>", "<|end|>")
TOKENS = 97
"""Ids of the tokenizer; the models have three rows more."""


def tokenizer_files(folder: Path) -> None:
    """A byte-level BPE tokenizer whose texts begin with <s>, with a chat template."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    letters = [c for c in alphabet if (c.isascii() and not c.isupper()) or c == "\u0120"]
    made.train_from_iterator(
        [],
        tokenizers.trainers.BpeTrainer(
            special_tokens=list(SPECIAL), initial_alphabet=sorted(letters), show_progress=False
        ),
    )
    made.add_tokens([f"word{i}" for i in range(TOKENS - made.get_vocab_size())])
    assert made.get_vocab_size() == TOKENS
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )


def llama(**fields: Any) -> "transformers.LlamaForCausalLM":
    """A random model, wide enough in its values that no two tokens are near equal."""
    config = {
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        **fields,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


def save(
    model: "transformers.PreTrainedModel",
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """What `save_pretrained` writes, with the tokenizer beside it."""
    model.to(dtype).save_pretrained(folder, **options)
    tokenizer_files(folder)
    return folder
