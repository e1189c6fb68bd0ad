"""Chat templates of ten families, shortened to how they write an answer; special tokens are `tiny_tokenizer`'s."""

from tests.support.tiny import CHATML

HEAD = "<|im_start|>{{ message['role'] }}\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LLAMA_3 = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "<|head|>{{ message['role'] }}<|/head|>\n\n"
    "{% if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{% else %}{{ message['content'] | trim }}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = '<<SYS>>\n' + "
    "messages[0]['content'] + '\n<</SYS>>\n\n' %}{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST]{{ message['content'] }}[/INST]{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"
)
QWEN3 = (  # thoughts of the last answer only, an empty one where it has none; tools
    "{%- set ns = namespace(last=-1) %}{%- if tools %}{{- '<tools>' + tools | tojson + '</tools>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set r = '' %}{%- set c = m.content %}"
    "{%- if m.reasoning_content is string %}{%- set r = m.reasoning_content %}{%- elif '</think>' in c %}"
    "{%- set r = c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or r) %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + r.strip('\\n') + '\\n</think>\\n\\n' + c.lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + c }}{%- endif %}{%- if m.tool_calls %}{%- for t in m.tool_calls %}"
    "{{- '\\n<tool_call>\\n' + (t.function | tojson) + '\\n</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
R1 = (  # the prompt opens a thought, and history keeps what follows it alone
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{%- set c = m.content %}{%- if '</think>' in c %}"
    "{%- set c = c.split('</think>')[-1] %}{%- endif %}{{ '<|Assistant|>' + c + eos_token }}"
    "{%- else %}{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{%- endif %}"
)
QWEN3_THINKING = (  # the prompt opens a thought, and a finished answer repeats that
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set r = '' %}{%- set c = m.content %}"
    "{%- if '</think>' in c %}{%- set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- if loop.last %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + r + '\\n</think>\\n\\n' + c + '<|im_end|>' }}"
    "{%- else %}{{- '<|im_start|>assistant\\n' + c + '<|im_end|>' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
HARMONY = (  # as gpt-oss: channels, and another end where the chat continues
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- if m.thinking and loop.last %}"
    "{{- '<|im_start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|im_start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|im_end|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"
)
GEMMA_4 = (  # the prompt closes an empty thought, unless thoughts are switched on; finished answers have none
    "{%- for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{%- if m.role == 'assistant' %}{{ m.content.split('<channel|>')[-1] }}{%- else %}{{ m.content }}{%- endif %}"
    "{%- for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{<|q|>{{ c.function.arguments.values() | join }}"
    "<|q|>}<tool_call|>{%- endfor %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>model\n"
    "{%- if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{%- endif %}{%- endif %}"
)
MAGISTRAL = (  # a system message of its own, which speaks of the marks of thoughts
    "{{ bos_token }}{%- if messages[0].role != 'system' %}[SYS]Think in [THINK] and [/THINK].[/SYS]{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'system' %}[SYS]{{ m.content }}[/SYS]{%- elif m.role == 'user' %}"
    "[INST]{{ m.content }}[/INST]{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{%- else %}{{ m.content }}{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{%- endfor %}{{ eos_token }}{%- endif %}{%- endfor %}"
)
GLM = (  # the token that begins the next message ends an answer; earlier thoughts are dropped
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|assistant|>' }}{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{%- else %}{{ '<think></think>' }}{%- endif %}{{ m.content }}"
    "{%- for c in m.tool_calls %}<tool_call>{{ c.function.name }}</tool_call>{%- endfor %}"
    "{%- elif m.role == 'tool' %}{{ '<|observation|>\n<result>' + m.content + '</result>' }}"
    "{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
DATED = "Today is {{ strftime_now('%d %b %Y') }}\n" + CHATML  # as Llama-3.3
FAMILIES = {
    "chatml": CHATML, "llama-3": LLAMA_3, "llama-2": LLAMA_2, "mistral": MISTRAL,
    "qwen3": QWEN3, "deepseek-r1": R1, "qwen3-thinking": QWEN3_THINKING, "gpt-oss": HARMONY, "llama-3.3": DATED,
}  # fmt: skip
