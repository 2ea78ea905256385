"""From a request's tokens to its text, as they come: characters made whole, and stop strings found."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from fastgraph.loading.tokenizer import Tokenizer


class TextStream:
    """The text of one request, of which no more is given out than is certain.

    What `push` and `finish` return, joined, is `tokenizer.decode` of all ids, cut where the first stop string to be
    completed begins (the longest, if several end together); how the ids are shared out among calls changes nothing.
    The work for a token does not grow with the text.
    """

    stopped: bool  # a stop string was found; it and all that follows is cut
    kept: int  # tokens taken in, up to and with the one that completed the stop string

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self.stopped = False
        self.kept = 0
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._leading = tokenizer.leading
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._searches = [_Search(text) for text in stop]
        self._held = ""  # the end of the text that may yet turn out to begin a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def push(self, ids: Sequence[int]) -> str:
        """Take in tokens; return the text that has become certain."""
        certain = []
        for number in ids:
            if self.stopped:
                break
            self.kept += 1
            if number in self._skip:
                continue
            data = self._tokenizer.token_bytes(number)
            if self._leading and data:
                data, self._leading = data.removeprefix(self._leading), b""
            certain.append(self._search(self._utf8.decode(data)))
        return self._give("".join(certain))

    def finish(self) -> str:
        """Return what was held back, an unfinished character as U+FFFD. No more tokens may follow."""
        if self.stopped:
            return ""
        certain = self._search(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return self._give(certain + held)

    def _search(self, text: str) -> str:
        """Add decoded text; return what cannot be part of a stop string any more."""
        self._held += text
        if not self._searches:
            certain, self._held = self._held, ""
            return certain
        for place, letter in enumerate(text, start=len(self._held) - len(text) + 1):
            ended = [search.length for search in self._searches if search.advance(letter)]
            if ended:
                self.stopped = True
                certain, self._held = self._held[: place - max(ended)], ""
                return certain
        split = len(self._held) - max(search.matched for search in self._searches)
        certain, self._held = self._held[:split], self._held[split:]
        return certain

    def _give(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text


class _Search:
    """Looks for one string in a text that comes letter by letter (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self.matched = 0  # letters of `text` that the end of what was seen agrees with
        self._text = text
        self._shorter = [0]  # for a match of n + 1 letters: the longest shorter match that it ends with
        for letter in text[1:]:
            self._shorter.append(self._step(self._shorter[-1], letter))

    def advance(self, letter: str) -> bool:
        """Take one letter; true when it completes the string."""
        self.matched = self._step(self.matched, letter)
        return self.matched == self.length

    def _step(self, matched: int, letter: str) -> int:
        while matched and letter != self._text[matched]:
            matched = self._shorter[matched - 1]
        return matched + (letter == self._text[matched])
