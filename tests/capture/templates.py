"""Chat templates in the manner of public models, written for these tests: headers, end marks and quirks are theirs."""

CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: The same text, with marks around what the assistant says.
CHATML_MARKED = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}{{ '\n' }}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{%- else %}{{ '\n' + m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Tools in the first user's turn, contents trimmed, and another end for calls than for answers.
LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + (m.role if m.role != 'tool' else 'ipython') + '<|end_header_id|>\n\n' }}
{%- set users = messages[:loop.index] | selectattr('role', 'equalto', 'user') | list | length %}
{%- if tools and m.role == 'user' and users == 1 %}
{{- 'Given the following functions:\n' }}
{%- for t in tools %}{{- t | tojson }}{{- '\n\n' }}{%- endfor %}
{%- endif %}
{%- if m.tool_calls %}
{{- m.tool_calls[0].function | tojson }}{{- '<|eom_id|>' }}
{%- else %}
{{- m.content | trim }}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

#: Thinking stays only in the last answers; without thinking an empty block is given to the model.
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}
{%- for t in tools %}{{- t | tojson }}{{- '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' + (m.content or '').lstrip('\n') }}
{%- else %}{{- m.content or '' }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""

#: Another name for the assistant, the system in the first user's turn, and roles that must alternate.
GEMMA = """{{- bos_token }}
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (first if loop.first else '') + m.content | trim }}{{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

#: No generation prompt, and the same token ends every turn of the assistant's.
MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + '</s>' }}{%- endif %}
{%- endfor %}"""

MARKS = (
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "</s>",
)  # fmt: skip

_ASKED = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

#: Contents as parts only, as templates of vision models have it.
PARTS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
) + _ASKED

#: Contents as text or as parts.
TEXT_OR_PARTS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
) + _ASKED

#: One call for each turn, no word beside it; the system only before a turn to be answered; no tool's turns.
FORGETFUL = (
    "{%- for m in messages %}{%- if m.role == 'user' %}<|im_start|>user\n"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }}<|im_end|>\n"
    "{% elif m.tool_calls %}<|im_start|>assistant\n{{ m.tool_calls[0].function | tojson }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
) + _ASKED

#: A tool's answer stands inside the turn of the assistant that has asked for it, before what that one says.
ANSWER_WITHIN = (
    "{%- for m in messages %}{%- if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}\n{% endfor %}"
    "{%- if m.tool_calls and not loop.last %}= {{ loop.nextitem.content }}\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
) + _ASKED

DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') }}\n" + CHATML
