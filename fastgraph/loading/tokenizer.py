"""Text to token ids and back, over the `tokenizers` library and a folder's `tokenizer.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from fastgraph.errors import ModelError, RequestError
from fastgraph.loading.files import read_json

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer.

    `tokenizer.json` is the authority, as in transformers 5: whether a text gets BOS or EOS is its post-processor's
    matter, and `add_bos_token` in `tokenizer_config.json` is not looked at.
    """

    vocab_size: int  # ids the tokenizer knows: the highest one + 1. A model's embedding may have more rows
    bos_id: int | None
    eos_ids: frozenset[int]  # every id that ends a text, by config.json, generation_config.json or the tokenizer
    special_tokens: Mapping[str, str]  # "bos_token" and the like -> text, for chat templates
    special_ids: frozenset[int]  # ids that `skip_special_tokens` leaves out
    leading: bytes  # what decoding cuts, once, from the start of a text

    def __init__(self, folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
        self._tokenizer = _load(folder)
        settings = _settings(folder)
        self.special_tokens = settings if settings is not None else {}
        ids = {name: self._tokenizer.token_to_id(text) for name, text in self.special_tokens.items()}
        self._tokenizer.add_special_tokens(
            [
                tokenizers.AddedToken(text, special=True, normalized=False)
                for name, text in self.special_tokens.items()
                if ids[name] is not None and ids[name] not in self._tokenizer.get_added_tokens_decoder()
            ]
        )
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        # A tokenizer that says it has no BOS has none, whatever number the model's config holds.
        self.bos_id = config.get("bos_token_id") if settings is None else ids.get("bos_token")
        self.eos_ids = _ids(config.get("eos_token_id"), generation_config.get("eos_token_id"), ids.get("eos_token"))
        self.special_ids = frozenset(
            number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._decoder = _decoder(self._tokenizer, folder)
        self.leading = self._decoder.leading
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. With `add_special_tokens`, BOS or EOS where the tokenizer wants them."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts at once, on all cores and without the interpreter's lock."""
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the library raises for anything but whole Unicode text
            raise RequestError("a prompt must be text of whole characters (no lone surrogates)") from error
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD; ids the tokenizer does not know add nothing.

        As transformers does it, but that an unfinished character spoils no whole ones beside it where those are
        spelled in byte tokens.
        """
        skip = self.special_ids if skip_special_tokens else ()
        data = b"".join([self.token_bytes(number) for number in ids if number not in skip])
        return data.removeprefix(self.leading).decode("utf-8", "replace")

    def token_bytes(self, number: int) -> bytes:
        """What a token adds to a text, in UTF-8: often only a part of a character."""
        known = self._bytes.get(number)
        if known is None:
            known = self._bytes[number] = self._spell(number)
        return known

    def _spell(self, number: int) -> bytes:
        token = self._tokenizer.id_to_token(number) if 0 <= number < self.vocab_size else None
        if token is None:
            return b""
        if self._decoder.byte_level:
            if all(letter in _LETTER_BYTES for letter in token):
                return bytes(_LETTER_BYTES[letter] for letter in token)
            return str(token).encode()
        if self._decoder.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return str(token).replace(*self._decoder.replace).encode()


def _load(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        what = f"only {', '.join(others)}" if others else "no tokenizer"
        raise ModelError(
            f"{folder} has {what}; a tokenizer.json is needed. transformers writes one: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _settings(folder: Path) -> dict[str, str] | None:
    """The named special tokens, or None when the folder says nothing of them.

    Older folders have them in special_tokens_map.json, which then wins (as in transformers).
    """
    config, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    if not config.is_file() and not older.is_file():
        return None
    settings = read_json(config)
    if "added_tokens_decoder" not in settings:
        settings |= read_json(older)
    return {
        key: value["content"] if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, (str, Mapping))
    }


def _ids(*values: int | Sequence[int] | None) -> frozenset[int]:
    groups = [[value] if isinstance(value, int) else value or [] for value in values]
    return frozenset(number for group in groups for number in group if number >= 0)


class _Decoder(NamedTuple):
    """How tokens are spelled. The library's decoders take whole sequences; this much of them works token by token."""

    byte_level: bool  # in GPT-2's alphabet of bytes
    byte_fallback: bool  # <0x0A> is the byte 10
    replace: tuple[str, str]
    leading: bytes  # cut once from the start of a text


def _decoder(tokenizer: Any, folder: Path) -> _Decoder:
    # Its pickled form is the "decoder" of tokenizer.json; the library has no other way to look into one.
    spec: Any = {"type": None} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    byte_level, byte_fallback, replace, leading = False, False, ("▁", "▁"), b""
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replace = (old, new)
            case {"type": "Strip", "content": letter, "start": 0 | 1 as start, "stop": 0}:
                leading = letter.encode() * start
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse" | None}:
                pass
            case _:
                raise ModelError(f"{folder / 'tokenizer.json'} has a decoder that is not supported: {step}")
    return _Decoder(byte_level, byte_fallback, replace, leading)


def _letter_bytes() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable Latin-1 letters stand for themselves, the others are counted from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in letters]
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_LETTER_BYTES = _letter_bytes()
