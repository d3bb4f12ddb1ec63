"""The text that the examples train on: the language reference that comes with CPython, which `help()` prints."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt

Document = npt.NDArray[np.uint8]


def documents() -> tuple[list[Document], str]:
    """Return the documents as arrays of character numbers, and the characters. Their lengths differ a hundredfold."""
    texts = [text for _, text in sorted(topics.items())]
    characters = "".join(sorted(set("".join(texts))))
    number = {character: i for i, character in enumerate(characters)}
    return [np.array([number[character] for character in text], np.uint8) for text in texts], characters
