"""Chat templates with tools that behave like those of public models, and tokenizers for them."""

from __future__ import annotations

from typing import Any

from tests.data.helpers import byte_tokenizer

_CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>"
)
_HERMES_TOOLS = (
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    'Write <tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call> to call one.'
)
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)

QWEN25 = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You are a helpful assistant.{% endif %}"
    "{% if tools %}\n\n" + _HERMES_TOOLS + "{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) or "
    "(m.role == 'assistant' and not m.tool_calls) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant"
    "{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}\n" + _CALL + "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _RESULTS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Adds a system text if there is none, and groups tool results in a user turn."""

QWEN3 = (
    "{% if tools or messages[0].role == 'system' %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{% if tools %}" + _HERMES_TOOLS + "{% endif %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(query=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.query and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}"
    + _CALL
    + "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _RESULTS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""Drops reasoning before the last question of the user."""

LLAMA31 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if tools %}Environment: ipython\n{% endif %}Today Date: 26 Jul 2024\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% set ns = namespace(first=true) %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|start_header_id|>user<|end_header_id|>\n\n"
    "{% if tools and ns.first %}Answer with a call of one of these functions, as "
    '{"name": function name, "parameters": dictionary}.\n\n'
    "{% for tool in tools %}{{ tool | tojson }}\n\n{% endfor %}{% endif %}"
    "{% set ns.first = false %}"
    "{{ m.content | trim }}<|eot_id|>"
    "{% elif m.role == 'assistant' %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only single tool calls') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Puts tools into the first question, trims contents, quotes tool results, allows single calls."""

MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS]["
    '{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception("id") }}{% endif %}'
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    '{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% endif %}{% endfor %}"
)
"""Puts tools before the last question, and requires call ids of nine characters."""

_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"]
_LLAMA += ["<|end_header_id|>", "<|python_tag|>"]
_MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
_MISTRAL += ["[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]

_ALL = {"qwen25": QWEN25, "qwen3": QWEN3, "llama31": LLAMA31, "mistral": MISTRAL}

# transformers removes a line break that directly follows a block.
TEMPLATES = {name: text.replace("%}\n", "%}{{ '\\n' }}") for name, text in _ALL.items()}


def tool_tokenizer(family: str) -> Any:
    """Return a byte tokenizer with the template and the control tokens of a family of models."""
    template = TEMPLATES[family]
    if family.startswith("qwen"):
        return byte_tokenizer(_CHATML, template, eos_token="<|im_end|>", pad_token=_CHATML[0])
    if family == "llama31":
        return byte_tokenizer(_LLAMA, template, bos_token=_LLAMA[0], eos_token="<|eot_id|>")
    return byte_tokenizer(_MISTRAL, template, bos_token="<s>", eos_token="</s>")
