"""A conversation is written down as transformers would write it, and what cannot be is an error that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_templates
import pytest
import tokenizers
from loading_helpers import default_gguf
from transformers import PreTrainedTokenizerFast

from fastgraph.errors import ModelError, RequestError
from fastgraph.loading import gguf
from fastgraph.loading.chat_template import ChatTemplate, find_chat_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{% if tools is not none %}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{% endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GENERATION = """{% for message in messages %}
    {% set who = message.role %}
    {% if who == 'assistant' %}
        {% generation %}
{{ who }} no. {{ loop.index }} says: {{ message.content }}{{ eos_token }}
        {% set who = 'nobody' %}
        {% endgeneration %}
    {% else %}
{{ who }} asks: {{ message.content }}
    {% endif %}
{{ who }}
{% endfor %}
{% if documents %}{{ documents | length }} documents{% endif %}
"""

LOOPS = """{%- set ns = namespace(turns=0, names=[]) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if ns.turns == 2 %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- dict(role=message.role, text=message.content) | tojson(true, sort_keys=true, separators=(',', ':')) }}
{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }} / {{ pad_token }}
"""

GRAMMAR = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}{{ m.role | upper }}: {{ m.content }}
{% endfor %}"""

ONE = [{"role": "user", "content": 'Hi <b> & "you"  '}]
MANY = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "Was heißt „Straße“ auf 日本語? 😀"},
    {"role": "assistant", "content": "道\n"},
    {"role": "user", "content": "{{ not a template }} {% nor this %}"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "<|im_end|></s>"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> in a Straße",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = [
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"place": "Paris", "n": 1.5}}}
        ],
    },
    {"role": "tool", "content": '{"sky": "clear"}'},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return gguf.convert(default_gguf(), "bfloat16", lambda phase, share: None)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", [ONE, MANY], ids=["one", "many"])
@pytest.mark.parametrize("name", ["default", "CHATML", "LLAMA3", "GENERATION", "LOOPS"])
def test_renders_as_transformers_does(
    reference: Any, folder: Path, name: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    source = globals().get(name) or find_chat_template(folder, None)
    expected = reference.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=prompt, tokenize=False
    )
    assert ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=prompt) == expected
    assert expected


def test_tools_and_variables_reach_the_template_as_in_transformers(reference: Any) -> None:
    ours = ChatTemplate(LLAMA3, SPECIAL)
    for messages in (ONE, CALL):
        for variables in ({}, {"date_string": "1 Jan 2000"}, {"bos_token": "<other>"}):
            expected = reference.apply_chat_template(
                messages, chat_template=LLAMA3, tools=[TOOL], add_generation_prompt=True, tokenize=False, **variables
            )
            assert ours.render(messages, tools=[TOOL], **variables) == expected
    documents = [{"title": "a", "text": "b"}]
    expected = reference.apply_chat_template(ONE, chat_template=GENERATION, documents=documents, tokenize=False)
    assert ChatTemplate(GENERATION, SPECIAL).render(ONE, add_generation_prompt=False, documents=documents) == expected


THOUGHTS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "7", "reasoning_content": "4 + 3"},
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": " What is this? "}, {"type": "image"}]},
]
# Messages that a family's template takes, and the variables that it knows.
FAMILIES = [
    *(("GEMMA", messages, {}) for messages in (ONE, MANY, PARTS)),
    *(("QWEN3", messages, {"tools": tools}) for messages in (ONE, MANY, CALL, THOUGHTS) for tools in (None, [TOOL])),
    *(("QWEN3", messages, {"enable_thinking": on}) for messages in (ONE, THOUGHTS, CALL) for on in (True, False)),
    *(("MISTRAL", messages, {"tools": tools}) for messages in (ONE, MANY, CALL) for tools in (None, [TOOL, TOOL])),
    *(("PHI", messages, {"tools": tools}) for messages in (ONE, MANY) for tools in (None, [TOOL])),
]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(("name", "messages", "variables"), FAMILIES)
def test_each_familys_conversations_are_written_as_in_transformers(
    reference: Any, name: str, messages: list[dict[str, Any]], variables: dict[str, Any], prompt: bool
) -> None:
    source = getattr(family_templates, name)
    expected = reference.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=prompt, tokenize=False, **variables
    )
    assert ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=prompt, **variables) == expected
    said = [part for m in messages for part in (m["content"] if isinstance(m["content"], list) else [])]
    for text in [m["content"] for m in messages if m["role"] == "user" and not said]:
        assert text.strip() in expected


def test_thinking_is_turned_off_and_old_thoughts_are_left_out() -> None:
    template = ChatTemplate(family_templates.QWEN3, SPECIAL)
    assert template.render(ONE, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert "think" not in template.render(ONE, enable_thinking=True)
    text = template.render(THOUGHTS, add_generation_prompt=False)
    assert "Easy" not in text
    assert "4 + 3" in text


def test_the_default_model_is_greeted_with_its_system_prompt(folder: Path) -> None:
    source = find_chat_template(folder, None)
    assert source is not None
    text = ChatTemplate(source, SPECIAL).render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_what_a_template_refuses_is_an_error_of_the_request_with_its_words() -> None:
    template = ChatTemplate(GRAMMAR, SPECIAL)
    assert template.render(ONE).startswith("USER: Hi")
    with pytest.raises(RequestError, match="roles must alternate user/assistant"):
        template.render([{"role": "assistant", "content": "?"}])
    with pytest.raises(RequestError, match="only supports single tool-calls"):
        ChatTemplate(LLAMA3, SPECIAL).render([{"role": "assistant", "tool_calls": [1, 2]}])


@pytest.mark.parametrize(
    "source", ["{{ missing.attribute }}", "{{ 1 + 'a' }}", "{{ messages[0].content.no() }}", "{{ 1 // 0 }}"]
)
def test_a_template_that_fails_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template fails on these messages"):
        ChatTemplate(source, SPECIAL).render(ONE)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update(role='x') %}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__code__.co_code }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, SPECIAL).render(ONE)


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(ModelError, match=r"line 3: .*endif"):
        ChatTemplate("{% if a %}\n{% for b in c %}{% endfor %}\n{% endfi %}", SPECIAL)
    with pytest.raises(ModelError, match=r"line 2: .*nothing_such"):
        ChatTemplate("a\n{{ b | nothing_such }}", SPECIAL)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "one at least"),
        (5, "one at least"),
        (iter([{"role": "user", "content": "x"}]), "one at least"),
        ("Hi", "list of messages"),
        ({"role": "user", "content": "Hi"}, "list of messages"),
        (["Hi"], "message 0 has no role"),
        ([{"content": "Hi"}], "message 0 has no role"),
        ([*ONE, {"role": "user"}], "message 1 .user. has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 3}], "has no content"),
        ([{"role": "user", "content": "Hi", "extra": object()}], "must be made of text"),
    ],
)
def test_messages_without_role_or_content_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(CHATML, SPECIAL).render(messages)


def test_messages_are_not_changed_by_rendering() -> None:
    messages = json.loads(json.dumps(CALL))
    ChatTemplate(LLAMA3, SPECIAL).render(messages)
    assert messages == CALL


class TestFinding:
    def test_order_of_the_places_where_templates_are_kept(self, tmp_path: Path) -> None:
        assert find_chat_template(tmp_path, None) is None
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps({"eos_token": "x"}))
        assert find_chat_template(tmp_path, None) is None
        config.write_text(json.dumps({"chat_template": "one"}))
        assert find_chat_template(tmp_path, None) == "one"
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
        config.write_text(json.dumps({"chat_template": named}))
        assert find_chat_template(tmp_path, None) == "two"
        config.write_text(json.dumps({"chat_template": named[:1]}))
        assert find_chat_template(tmp_path, None) is None
        (tmp_path / "chat_template.jinja").write_text("three\n", encoding="utf-8")
        assert find_chat_template(tmp_path, None) == "three\n"

    def test_an_override_is_a_file_or_the_template(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("own")
        (tmp_path / "mine.jinja").write_text("mine {{ é }}", encoding="utf-8")
        assert find_chat_template(tmp_path, str(tmp_path / "mine.jinja")) == "mine {{ é }}"
        assert find_chat_template(tmp_path, "{{ messages }}") == "{{ messages }}"

    def test_an_override_that_is_neither_is_an_error(self, tmp_path: Path) -> None:
        for nowhere in ("nowhere.jinja", "~nobody-here/x"):
            with pytest.raises(ModelError, match=f"'{nowhere}' is neither a file"):
                find_chat_template(tmp_path, nowhere)

    def test_a_broken_tokenizer_config_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text("[1")
        with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
            find_chat_template(tmp_path, None)
