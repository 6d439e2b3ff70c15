"""Typed reading of config.json and GGUF keys: every complaint names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagetide_models.errors import ModelFormatError

__all__ = ["Fields"]


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping read from a file, asked for one typed key at a time.

    A key that is absent or null gives the default, and is an error where there is none.
    """

    values: Mapping[str, object]
    path: Path
    prefix: str = ""

    def fail(self, key: str, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {self.prefix}{key} {problem}")

    def get(self, key: str) -> object:
        return self.values.get(self.prefix + key)

    def section(self, key: str) -> Fields | None:
        """The object under `key`, or None if it is absent, null or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"should be an object, not {value!r:.60}")
        return Fields(value, self.path)

    def optional_integer(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"should be an integer, not {value!r:.60}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.optional_integer(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"should be a number, not {value!r:.60}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"should be true or false, not {value!r:.60}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if not isinstance(value, str):
            raise self.fail(key, f"should be a string, not {value!r:.60}")
        return value

    def token_id(self, key: str) -> int | None:
        """A token id, or None if it is absent, null or the customary -1."""
        value = self.optional_integer(key)
        return None if value is None or value < 0 else value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, in order and without repetition."""
        value = self.get(key)
        entries = value if isinstance(value, list) else [value]
        ids = []
        for entry in entries:
            if entry is None:
                continue
            if isinstance(entry, bool) or not isinstance(entry, int):
                raise self.fail(key, f"should hold token ids, not {entry!r:.60}")
            if entry >= 0:
                ids.append(entry)
        return tuple(dict.fromkeys(ids))
