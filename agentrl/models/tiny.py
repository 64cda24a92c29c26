"""A tiny model and tokenizer of our own: enough to learn a tool on a laptop, built as the real ones are.

The architecture is Qwen3's, adapted to make copying easy to learn: rotary embeddings that tell near positions apart,
and biases, so that a head can attend to a position whatever its token. The tokenizer is a byte-level BPE with one token
per digit, and a chat template and special tokens of its own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import ConfigError
from agentrl.models.attention import NAME
from agentrl.models.linear import use_fast_linear
from agentrl.models.norm import use_fast_norms

# Of published models it is 10,000 and more, and most of a head's angles hardly turn within an episode as short as ours.
_ROPE_BASE = 10.0
# Suits a width near 100. With the usual 0.02, made for thousands, attention adds next to nothing at first.
_INITIAL_STD = 0.06
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(texts: Iterable[str], *, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on ``texts``.

    Every text can be written in it, each digit is one token, and the special tokens are ChatML's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int = 128, layers: int = 4, heads: int = 4
) -> Qwen3Config:
    """Make the configuration of a tiny Qwen3 model for ``tokenizer``.

    Args:
        tokenizer: has the vocabulary and the special tokens.
        hidden: width of the model and of its feed-forward layers: a wide one learns by heart what is to be copied.
        layers: how many.
        heads: query heads; there is one key head for every two of them.

    Raises:
        ConfigError: the width can't be cut into heads of even size, or the heads into pairs.
    """
    if hidden % (2 * heads) or (heads > 1 and heads % 2):
        raise ConfigError(
            f"a tiny model can't have model.tiny.heads={heads} in model.tiny.hidden={hidden}: use 1 head or an even "
            "number of them, and a width that is a multiple of twice that"
        )
    special: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(name) for name in (PAD, END)}
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        initializer_range=_INITIAL_STD,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_BASE},
        tie_word_embeddings=True,
        pad_token_id=special[PAD],
        eos_token_id=special[END],
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, **sizes: int) -> PreTrainedModel:
    """Make a Qwen3 model with random weights, seeded by ``seed``; the rest is as for :func:`tiny_config`."""
    config = tiny_config(tokenizer, **sizes)
    # Seeded without touching the generator that the caller draws from.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(NAME)
    use_fast_linear(model)
    use_fast_norms(model)
    return model
