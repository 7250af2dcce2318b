"""The bytes of a model's tokens, for what constrains output. They are read from its files by `tokenizer_ids.py`.

The runtime sees no text: it never encodes a prompt or decodes an answer. What a constraint is about are the bytes that
ids stand for.
"""

from __future__ import annotations

from inference_engine.models.gguf_vocabulary import GgufVocabulary, TokenType
from inference_engine.types import TokenBytes


def bytes_of(vocabulary: GgufVocabulary, *, is_byte_level: bool) -> TokenBytes:
    """is_byte_level: texts are spelled in the alphabet of byte-level BPE; else spaces are U+2581, bytes `<0x0A>`."""
    alphabet = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokens = []
    for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True):
        if kind == TokenType.UNUSED:
            tokens.append(b"")
        elif is_byte_level and kind == TokenType.NORMAL and all(character in alphabet for character in text):
            tokens.append(bytes(alphabet[character] for character in text))
        elif not is_byte_level and kind == TokenType.BYTE:
            tokens.append(bytes([int(text[3:-1], 16)]))
        else:
            tokens.append((text if is_byte_level else text.replace("\u2581", " ")).encode())
    return TokenBytes(tokens=tuple(tokens), specials=tuple(vocabulary.specials()))


def _byte_alphabet() -> list[str]:
    """The characters by which GPT-2's vocabulary spells bytes: printable ones stand for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]
