"""Thoughts are told from the answer by the model's own template, and go back to it as the template wants."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_helpers import FakeLLM, interrupt_after
from hypothesis import given
from hypothesis import strategies as st

import fastgraph
from fastgraph.chat.conversation import Conversation
from fastgraph.errors import RequestError
from fastgraph.loading.chat_template import ChatTemplate
from fastgraph.thinking import Thinking, ThoughtSplitter, find_thinking

THINK = Thinking("<think>", "</think>", "enable_thinking")

# As Qwen3's does it: thoughts of earlier answers are dropped, and the switch closes them beforehand.
TEMPLATE = """
{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content else m.content %}
{{- '<|' + m.role + '|>' + content + '\\n' }}
{%- endfor %}
{{- '<|assistant|>' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
"""


def split(text: str, step: int, begun: bool = False, thinking: Thinking | None = THINK) -> tuple[str, str]:
    splitter = ThoughtSplitter(thinking, begun)
    pieces = [piece for start in range(0, len(text), step) for piece in splitter.push(text[start : start + step])]
    pieces += splitter.finish()
    thoughts, answer = ("".join(text for text, thought in pieces if thought is kind) for kind in (True, False))
    return thoughts, answer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '</think>' }} {% if enable_thinking is defined %}", THINK),
        ("{{ '</think>' }}", Thinking("<think>", "</think>", None)),
        ("{% if not thinking is defined %}x{% endif %}</think>", Thinking("<think>", "</think>", "thinking")),
        ("[THINK]x[/THINK]", Thinking("[THINK]", "[/THINK]", None)),
        ("</seed:think>", Thinking("<seed:think>", "</seed:think>", None)),
        ("{{ messages }} <tool_call></tool_call>", None),
        ("", None),
    ],
)
def test_the_template_says_how_thoughts_are_marked(template: str, expected: Thinking | None) -> None:
    assert find_thinking(template) == expected


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "\nhm\n", "Yes."),
        ("\n<think>hm</think>Yes.", False, "hm", "Yes."),
        ("hm\n</think>\n\nYes.", True, "hm\n", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "\n\n", "Yes."),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("<thin", False, "", "<thin"),
        ("Use <think> and </think>.", False, "", "Use <think> and </think>."),
        ("<think>a</think>b <think>c</think>", False, "a", "b <think>c</think>"),
        ("<think>a < b </ c</think> ok", False, "a < b </ c", "ok"),
        ("", False, "", ""),
    ],
)
def test_thoughts_are_split_off_however_the_pieces_fall(
    step: int, text: str, begun: bool, thoughts: str, answer: str
) -> None:
    assert split(text, step, begun) == (thoughts, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "\n", " ", "a"])), st.integers(1, 9))
def test_any_text_is_split_as_a_search_in_the_whole_of_it_would(parts: list[str], step: int) -> None:
    text = "".join(parts)
    found = re.fullmatch(r"\s*<think>(.*?)(?:</think>\s*(.*))?", text, re.DOTALL)
    expected = (found[1], found[2] or "") if found else ("", text)
    assert split(text, step) == expected
    assert split(text, step, thinking=None) == ("", text)


def test_thoughts_are_shown_apart_and_stay_in_the_message_for_the_template_to_treat() -> None:
    llm = FakeLLM(["<think>\nhm hm\n</think>\n\nIt is Paris.", "Two million."], thinking=THINK)
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    shown: list[tuple[str, bool]] = []
    conversation.ask("What?", lambda text, thought: shown.append((text, thought)))
    assert "".join(text for text, thought in shown if thought).strip() == "hm hm"
    assert "".join(text for text, thought in shown if not thought) == "It is Paris."
    assert conversation.last_answer == ("\nhm hm\n", "It is Paris.")
    conversation.ask("How many?", lambda text, thought: None)
    rendered = ChatTemplate(TEMPLATE, {}).render(llm.asked[1])
    assert rendered == "<|user|>What?\n<|assistant|>It is Paris.\n<|user|>How many?\n<|assistant|>"


# As gpt-oss's does it, as far as it goes: thoughts are refused in an answer's content.
HARMONY_TEMPLATE = """
{%- for m in messages %}
{%- if "<|channel|>analysis<|message|>" in m.content or "<|channel|>final<|message|>" in m.content %}
{{- raise_exception("thoughts in the content") }}
{%- endif %}
{%- set channel = "<|channel|>final" if m.role == "assistant" else "" %}
{{- "<|start|>" + m.role + channel + "<|message|>" + m.content + "<|end|>" }}
{%- endfor %}
{{- "<|start|>assistant" }}"""
HARMONY = find_thinking(HARMONY_TEMPLATE)
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        (f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}Yes.", "hm", "Yes."),
        (f"{FINAL}Yes.", "", "Yes."),
        ("<|channel|>analysis<|message|>hm hm", "hm hm", ""),
        ("Yes.", "", "Yes."),
    ],
)
def test_channels_are_told_apart(text: str, thoughts: str, answer: str, step: int) -> None:
    assert split(text, step, thinking=HARMONY) == (thoughts, answer)


def test_a_template_that_refuses_thoughts_gets_answers_alone() -> None:
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}Paris."
    llm = FakeLLM([text, "<|channel|>analysis<|message|>hm hm hm", f"{FINAL}Yes."], thinking=HARMONY)
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    conversation.ask("What?", lambda text, thought: None)
    assert conversation.last_answer == ("hm", "Paris.")
    conversation.ask("How many?", interrupt_after(2))
    conversation.ask("So?", lambda text, thought: None)
    assert ChatTemplate(HARMONY_TEMPLATE, {}).render(llm.asked[2]) == (
        f"<|start|>user<|message|>What?<|end|><|start|>assistant{FINAL}Paris.<|end|>"
        f"<|start|>user<|message|>How many?<|end|><|start|>assistant{FINAL}<|end|>"
        "<|start|>user<|message|>So?<|end|><|start|>assistant"
    )


def test_thoughts_that_the_prompt_has_opened_are_thoughts_from_the_first_token_on() -> None:
    llm = FakeLLM(["hm\n</think>\n\nYes."], thinking=THINK, prompt_end="<|assistant|><think>\n")
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    shown: list[tuple[str, bool]] = []
    conversation.ask("What?", lambda text, thought: shown.append((text, thought)))
    assert shown[0][1]
    assert conversation.messages[1]["content"] == "<think>\nhm\n</think>\n\nYes."


def test_thoughts_that_were_interrupted_are_closed_so_that_they_do_not_go_back_as_an_answer() -> None:
    llm = FakeLLM(["<think> one two three four"], thinking=THINK)
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    reply = conversation.ask("What?", interrupt_after(2))
    assert reply.finish_reason == "abort"
    assert conversation.messages[1]["content"].strip().endswith("</think>")
    asked = [*conversation.messages, {"role": "user", "content": "Go on"}]
    assert "two" not in ChatTemplate(TEMPLATE, {}).render(asked)


@pytest.mark.parametrize("think", [True, False])
def test_the_templates_switch_is_set(think: bool) -> None:
    llm = FakeLLM(["Yes."], thinking=THINK)
    Conversation(llm, {}, think=think).ask("What?", lambda text, thought: None)  # type: ignore[arg-type]
    assert llm.told == [{"enable_thinking": think}]


def test_a_model_that_is_told_nothing_does_as_its_template_says() -> None:
    llm = FakeLLM(["Yes."], thinking=THINK)
    Conversation(llm, {}).ask("What?", lambda text, thought: None)  # type: ignore[arg-type]
    assert llm.told == [None]


@pytest.mark.parametrize(
    ("thinking", "message"), [(None, "knows of no thoughts"), (Thinking("<t>", "</t>", None), "has no switch")]
)
def test_a_model_without_the_choice_refuses_it(thinking: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Conversation(FakeLLM([], thinking=thinking), {}, think=False)  # type: ignore[arg-type]


def test_tags_that_are_special_tokens_are_text_all_the_same(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["[THINK]", "[/THINK]", "[OTHER]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 5, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    template = "{{ messages[0].content }} [THINK] [/THINK]"
    options = {"load_format": "dummy", "device": "cpu", "compile": "off", "dtype": "float32"}
    with fastgraph.load_model(str(tmp_path), chat_template=template, **options) as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode([2, 0, 3, 4, 1]) == "[THINK]a[/THINK]b"
