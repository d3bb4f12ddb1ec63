"""Pytrees: ids for their leaves, and what is wrong with a tree that is not like another."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from .. import _core


class Structure:
    """The structure of a tree, with an id for each leaf: its key path.

    Keys are joined by `/`; within a key, `~` is written `~0` and `/` is written `~1`, as in a JSON pointer (RFC 6901),
    so that different paths have different ids. Should two keys of one node read the same, such as the int 3 and the str
    "3", the id of the later leaf ends in `~2`, which no key does.
    """

    def __init__(self, tree: Any) -> None:
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        self._treedef: Any = treedef
        self.ids: list[str] = []
        times: dict[str, int] = {}
        for path, _ in paths:
            id = path_id(path)
            times[id] = times.get(id, 0) + 1
            self.ids.append(id if times[id] == 1 else f"{id}~{times[id]}")

    def flatten(self, tree: Any) -> list[Any]:
        """The leaves of a tree of this structure, in which None may stand for a leaf.

        Raises:
            GradaccError: It has another structure.
        """
        try:
            leaves: list[Any] = self._treedef.flatten_up_to(tree)
            return leaves
        except (ValueError, TypeError) as error:
            difference = None
            with contextlib.suppress(Exception):  # of a node that does not take ids for leaves
                difference = _difference(self.unflatten(self.ids), tree, ())
            raise _core.GradaccError(difference or f"expected another tree: {error}") from error

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """A tree of this structure, with other leaves."""
        return self._treedef.unflatten(leaves)


def path_id(path: Sequence[Any]) -> str:
    """The id of a leaf by its key path."""
    return "/".join(_text(key).replace("~", "~0").replace("/", "~1") for key in path)


def _text(key: Any) -> str:
    """A key as it reads: of a dict, an index, or the name of a field."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _difference(like: Any, tree: Any, path: tuple[Any, ...]) -> str | None:
    """Where a tree first differs from another, in words. Leaves of the other may be anything."""
    if jax.tree_util.all_leaves([like]):
        return None
    expected, structure = _children(like)
    got, other = _children(tree)
    if structure == other:
        pairs = zip(expected, got, strict=True)
        return next((found for (key, a), (_, b) in pairs if (found := _difference(a, b, (*path, key)))), None)
    where = f"in {path_id(path)!r}" if path else "at its root"
    keys, others = [path_id((key,)) for key, _ in expected], [path_id((key,)) for key, _ in got]
    odd = [f"{key!r} too many" for key in others if key not in keys] if type(like) is type(tree) else []
    odd += [f"{key!r} missing" for key in keys if key not in others] if type(like) is type(tree) else []
    if not odd and type(like) is type(tree):
        odd = [f"{other} in place of {structure}"]
    came = ", ".join(odd) or f"{_kind(tree)} in place of {_kind(like)}"
    return f"expected a tree like the one this is for, got another {where}: {came}"


def _kind(node: Any) -> str:
    return "None" if node is None else f"a {type(node).__name__}"


def _children(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """What lies directly below a node, with keys, and its structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return [(path[0], child) for path, child in paths if path], structure
