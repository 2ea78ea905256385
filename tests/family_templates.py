"""Chat templates that do what those of these families do, in words of our own: the idioms and refusals are theirs."""

from __future__ import annotations

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set before = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set before = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set before, turns = '', messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles take turns') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\\n' }}
    {{- before if loop.first }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}
            {{ part['text'] | trim if part['type'] == 'text' else '<start_of_image>' }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('no content') }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{{ '<start_of_turn>model\\n' if add_generation_prompt }}"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- 'Functions, one a line:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- set found = namespace(last=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- if found.looking and message.role == 'user' and message.content is string %}
        {%- set found.looking = false %}
        {%- set found.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | default('', true) %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > found.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false }}
{%- endif %}"""

MISTRAL = """{%- set rest = messages %}
{%- if messages[0]["role"] == "system" %}
    {%- set first, rest = messages[0]["content"], messages[1:] %}
{%- endif %}
{%- set asked = rest | selectattr("role", "equalto", "user") | list %}
{%- set seen = namespace(index=0) %}
{%- for message in rest if message.role in ("user", "assistant") and message.tool_calls is undefined %}
    {%- if (message.role == "user") != (seen.index % 2 == 0) %}
        {{- raise_exception("after " ~ loop.index0 ~ " turns comes another") }}
    {%- endif %}
    {%- set seen.index = seen.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is defined and tools is not none and message == asked[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != "return" %}
                    {{- '"' + key + '": ' + ('"' + value + '"' if value is string else value | tojson) }}
                    {{- ", " if not loop.last }}
                {%- endfor %}
                {{- "}}" + (", " if not loop.last else "]") }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + (first ~ "\\n\\n" if loop.last and first is defined else "") + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + (', "id": "' + call.id + '"}' if call.id is defined else "}") }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("what is a " + message["role"] + "?") }}
    {%- endif %}
{%- endfor %}"""

PHI = """{% for message in messages %}
{% if message['role'] == 'system' and message['content'] and tools is not none %}
{{'<|system|>' + message['content'] + '<|tool|>' + tools | string + '<|/tool|>' + '<|end|>'}}
{% elif message['role'] in ('system', 'user', 'assistant') %}
{{'<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n'}}
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
