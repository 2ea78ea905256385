"""Thoughts: what a model writes down for itself before it answers, told apart from the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_CLOSING = re.compile(r"([<\[])/([\w:]*(?:think|reason)[\w:]*)([>\]])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model's chat template marks thoughts. They are part of the answer's text, between the two tags."""

    opens: str  # like <think>
    closes: str
    switch: str | None  # the template's variable that turns thinking on and off, if it has one
    answers: str = ""  # what marks an answer that comes without thoughts, if anything does
    sent_back: bool = True  # in an answer's content, for the template to treat; some refuse it there

    @property
    def tags(self) -> tuple[str, str]:
        return self.opens, self.closes

    def split(self, text: str) -> tuple[str, str]:
        """The thoughts in a whole text, and the answer."""
        splitter = ThoughtSplitter(self)
        pieces = [*splitter.push(text), *splitter.finish()]
        thoughts, answer = ("".join(text for text, thought in pieces if thought is kind) for kind in (True, False))
        return thoughts, answer


# gpt-oss: https://cookbook.openai.com/articles/openai-harmony
_FINAL = "<|channel|>final<|message|>"
_HARMONY = Thinking(
    opens="<|channel|>analysis<|message|>",
    closes=f"<|end|><|start|>assistant{_FINAL}",
    switch=None,
    answers=_FINAL,
    sent_back=False,
)


def find_thinking(template: str) -> Thinking | None:
    """What a chat template says of thoughts; None if it knows of none."""
    if _HARMONY.opens in template:
        return _HARMONY
    found = _CLOSING.search(template)
    if found is None:
        return None
    switch = "enable_thinking" if re.search(r"\benable_thinking\b", template) else None
    if switch is None and re.search(r"\bthinking is (not )?defined\b", template):
        switch = "thinking"
    return Thinking("".join(found.groups()), found[0], switch)


class ThoughtSplitter:
    """Tells thoughts from answer while a text comes. A tag counts only where the text begins; later it is text."""

    def __init__(self, thinking: Thinking | None, begun: bool = False) -> None:
        """`begun` if the prompt has opened the thoughts already."""
        self._thinking = thinking
        self._held = ""  # what may yet turn out to be a tag, or space around one
        # None until it is known whether the text begins with thoughts.
        self.in_thoughts: bool | None = False if thinking is None else True if begun else None
        self._between = False  # thoughts have ended, and the answer has not begun

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Take in text; give what is certain, each piece with whether it is a thought."""
        self._held += text
        if self._thinking is None:
            yield from self._give(len(self._held))
            return
        opens, closes, answers = self._thinking.opens, self._thinking.closes, self._thinking.answers
        if self.in_thoughts is None:
            start = self._held.lstrip()
            if start.startswith(opens):
                self._held, self.in_thoughts = start[len(opens) :], True
            elif answers and start.startswith(answers):
                self._held, self.in_thoughts = start[len(answers) :], False
            elif not opens.startswith(start) and not answers.startswith(start):
                self.in_thoughts = False
        if self.in_thoughts:
            end = self._held.find(closes)
            if end < 0:
                sure = len(self._held)
                yield from self._give(next(i for i in range(sure + 1) if closes.startswith(self._held[i:])))
            else:
                yield from self._give(end)
                self._held, self.in_thoughts, self._between = self._held[len(closes) :], False, True
        if self.in_thoughts is False:
            if self._between:
                self._held = self._held.lstrip()
                self._between = not self._held
            yield from self._give(len(self._held))

    def finish(self) -> Iterator[tuple[str, bool]]:
        """What was held back. No more text may follow."""
        yield from self._give(len(self._held))

    def _give(self, length: int) -> Iterator[tuple[str, bool]]:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            yield text, bool(self.in_thoughts)
