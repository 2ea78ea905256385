"""A context that runs out: the choice that was set is kept to, and nothing is cut in silence."""

from __future__ import annotations

import json
from pathlib import Path

from chat_helpers import FakeLLM, contents, converse

from fastgraph.chat.conversation import Conversation


def test_trimming_leaves_out_the_oldest_turns_and_says_so() -> None:
    llm = FakeLLM(["b " * 10, "d " * 10, "f " * 10, "h"], context=45)
    shown = converse(llm, "a", "c", "e", "g", overflow="trim", system="s")
    assert [message["role"] for message in llm.asked[-1]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert contents(llm.asked[-1])[1] == "c"
    assert "the oldest turn does not fit into the context any more" in " ".join(shown.split())


def test_trimming_leaves_room_for_the_answer_that_was_asked_for() -> None:
    llm = FakeLLM(["b " * 10, "d " * 10, "e"], context=40)
    converse(llm, "a", "c", "/set max_tokens=3", "x", overflow="trim")
    assert contents(llm.asked[-1]) == ["a", "b " * 10, "c", "d " * 10, "x"]
    assert llm.sampled[-1]["max_tokens"] == 3


def test_another_model_may_have_room_for_what_was_left_out() -> None:
    conversation = Conversation(FakeLLM(["b " * 20, "d " * 20, "f"], context=55), {}, overflow="trim")  # type: ignore[arg-type]
    for question in ("a", "c", "e"):
        conversation.ask(question, lambda piece, thought: None)
    assert conversation.left_out == 2
    larger = FakeLLM(["h"])
    conversation.use(larger)  # type: ignore[arg-type]
    conversation.ask("g", lambda piece, thought: None)
    assert len(larger.asked[0]) == 7


def test_what_was_left_out_is_still_saved_and_shown_in_stats(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    llm = FakeLLM(["b " * 20, "d " * 20, "f"], context=55)
    shown = converse(llm, "a", "c", "e", "/stats", f"/save {file}", overflow="trim", width=300)
    assert "1 of 3 turns" in shown
    assert len(json.loads(file.read_text())["messages"]) == 6


def test_a_question_that_is_too_long_by_itself_is_refused_when_trimming_too() -> None:
    llm = FakeLLM(["b"], context=10)
    shown = converse(llm, "a", "c " * 20, overflow="trim", width=200)
    assert "ask something shorter" in shown


def test_without_trimming_nothing_is_left_out_and_the_question_is_refused() -> None:
    llm = FakeLLM(["b " * 10], context=20)
    shown = converse(llm, "a", "c " * 10, width=400)
    assert "/clear begins a new conversation, /undo takes back the last turn" in shown
    assert len(llm.sampled) == 1


def test_a_context_that_holds_no_question_is_said_to_be_the_trouble() -> None:
    shown = converse(FakeLLM(["b"], context=5), "a", "/system c d e f", "a", width=400)
    assert "ask something" not in shown
    assert "the context is 5: no question fits: take a shorter system prompt, or more of --max-model-len" in shown
