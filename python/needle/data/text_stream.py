"""Decoding ids to text as they come, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_BYTES = 4  # of a character, at most
_WINDOW = 16  # ids that are decoded again with each new one, at least; twice as many at most


class TextStream:
    """Turns ids into text of which nothing is taken back: a character of several tokens is given with its last token.

    decode: ids -> text. Only the last ids are decoded again, so a token costs the same however long the text is. before: the ids of
    the text that goes before: some decoders leave out a space at the beginning of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()):
        self._decode = decode
        self._ids: list[int] = [int(i) for i in before[-_WINDOW:]]
        self._given = len(decode(self._ids)) if self._ids else 0  # characters of the text of _ids that have been given out
        self._unfinished = 0  # ids since the text last ended in a whole character

    def put(self, token: int) -> str:
        """The text that the next token makes certain, perhaps none."""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        # For an unfinished character byte-level decoders write one mark. Others (ByteFallback) write one for each byte, also for
        # those of the whole characters before it, so such a text is not looked at until the character may be whole.
        self._unfinished = self._unfinished + 1 if text.endswith(UNFINISHED) else 0
        if 0 < self._unfinished < _BYTES:
            return ""
        certain = text[self._given : len(text) - text.endswith(UNFINISHED)]
        self._given += len(certain)
        if len(self._ids) >= 2 * _WINDOW:
            self._forget(text)
        return certain

    def end(self) -> str:
        """What is left: marks for bytes that never became a character."""
        rest = self._decode(self._ids)[self._given :]
        self._ids, self._given, self._unfinished = [], 0, 0
        return rest

    def _forget(self, text: str) -> None:
        """Drops the first ids, if there is a place at which both parts decode to what they are in the whole, and the first has been
        given out.
        """
        for cut in range(_WINDOW, len(self._ids)):
            rest = self._decode(self._ids[cut:])
            gone = len(text) - len(rest)  # some decoders leave out a space at the beginning
            whole = not rest.startswith(UNFINISHED) and text.endswith(rest)
            if gone <= self._given and (whole or self._decode(self._ids[:cut]) + rest == text):
                self._ids, self._given = self._ids[cut:], self._given - gone
                return
