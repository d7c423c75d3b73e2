"""A byte-level tokenizer without merges, made on the spot, and chat templates of the main families."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<end_of_turn>", "<|user|>", "<|assistant|>"]

CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
{% else %}{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Qwen3: reasoning leaves earlier turns, and the last turn gets an empty reasoning block.
THINKING = """{% for message in messages %}{% set text = message['content'].split('</think>')[-1].lstrip('\n') -%}
<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' and loop.last %}<think>

</think>

{% endif %}{{ text }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As DeepSeek-R1: the generation prompt opens the reasoning, which history does not keep.
FORCED_THINKING = """<s>{% for message in messages %}{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}
{%- else %}<|assistant|>{{ message['content'].split('</think>')[-1] }}</s>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
{% endif %}"""

# As Llama 3 and Gemma: contents are trimmed, and roles must alternate.
TRIMMED = """<s>{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start>' + message['role'] + '\n\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}<start>assistant

{% endif %}"""

# As Mistral: no generation prompt.
INSTRUCT = """<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]
{%- else %} {{ message['content'] }}</s>{% endif %}{% endfor %}"""

# As GLM: the next role's token ends the turn.
ROLE_ENDS = """{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

SHOUTING = """{% for message in messages %}{{ message['content'] | replace('\u241f', '') }}{% endfor %}"""


def small_tokenizer(chat_template: str | None = CHATML) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = chat_template
    wrapped.name_or_path = "small"
    return wrapped
