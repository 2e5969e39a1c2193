"""What the core has of mypyc, which compiles it; without an effect where it runs uncompiled. This module is never compiled.

`mypyc_attr` has instructions for classes:

* `acyclic=True`: an object is never part of a reference cycle, so the garbage collector need not look at it. A
  shard with 100,000 requests has a million such objects.
* `free_list_len=1`: the memory of the last object that was freed is used for the next one. For objects that live
  for one rank.

`vec[float]` is an array of numbers (`librt.vecs`), for what is read or changed in loops: compiled, such a loop takes a tenth
of the time that it takes over a list, whose items are objects. Uncompiled it is a list, which is faster there.
`append` returns the array with one more item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from librt.vecs import append, vec
else:

    class vec:  # noqa: N801  # as in librt
        """A list, whatever its items are."""

        def __class_getitem__(cls, item: Any) -> type[list]:
            return list

    def append(items: list, item: Any) -> list:
        """Return the list with one more item."""
        items.append(item)
        return items


__all__ = ["append", "mypyc_attr", "vec"]
