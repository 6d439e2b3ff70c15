"""The filters of chat templates that Jinja's own are too costly or too different for."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

import jinja2
from jinja2.filters import FILTERS

from pagetide_models.template_budget import Budget, Counted

__all__ = ["MAX_FORMAT_WIDTH", "BoundedFilters", "charge_replace"]

MAX_FORMAT_WIDTH: Final = 1000


def charge_replace(budget: Budget, text: Any, old: Any, new: Any) -> None:
    """Pay for replacing before it is done: each occurrence brings a whole `new`."""
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        budget.charge(len(text) + text.count(old) * len(new))


class BoundedFilters:
    """Filters that pay from one budget before they make anything large."""

    def __init__(self, budget: Budget, getitem: Callable[[Any, Any], Any]) -> None:
        self.budget = budget
        self.getitem = getitem

    def by_name(self) -> dict[str, Callable[..., Any]]:
        return {
            "_loop": lambda iterable: Counted(iterable, self.budget),
            "_made": self.budget.charge_value,
            "_concat": self.concat,
            "e": self.escape,
            "escape": self.escape,
            "indent": self.indent,
            "int": self.to_int,
            "join": self.join,
            "replace": self.replace,
            "round": self.round,
            "safe": lambda value: value,
            "sum": self.sum,
            "tojson": self.tojson,
        }

    def concat(self, items: list[Any]) -> str:
        return "".join(str(self.budget.charge_value(item)) for item in items)

    def escape(self, value: Any) -> str:
        return html.escape(str(self.budget.charge_value(value)))

    def indent(
        self, text: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        prefix = " " * min(width, MAX_FORMAT_WIDTH) if isinstance(width, int) else width
        self.budget.charge(len(text) + (text.count("\n") + 1) * len(prefix))
        lines = text.split("\n")
        indented = [
            prefix + line if (line or blank) and (index or first) else line
            for index, line in enumerate(lines)
        ]
        return "\n".join(indented)

    def to_int(self, value: Any, default: Any = 0, base: Any = 10) -> Any:
        self.budget.charge()
        if isinstance(value, (str, bytes)) and len(value) > MAX_FORMAT_WIDTH:
            return default
        result: int = FILTERS["int"](value, default, base)
        return result

    def join(self, values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
        items = list(Counted(values, self.budget))
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self.budget.charge(self.budget.measure(items)[0] + len(items) * len(str(between)))
        return str(between).join(str(item) for item in items)

    def replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = (str(self.budget.charge_value(value)) for value in (text, old, new))
        charge_replace(self.budget, text, old, new)
        return text.replace(old, new, -1 if count is None else count)  # type: ignore[no-any-return]

    def round(self, value: float, precision: int = 0, method: str = "common") -> float:
        self.budget.charge()
        if not -20 <= precision <= 20:
            raise jinja2.TemplateError("round takes a precision from -20 to 20")
        result: float = FILTERS["round"](value, precision, method)
        return result

    def sum(self, values: Iterable[Any], attribute: str | None = None, start: float = 0) -> float:
        total = start
        for item in Counted(values, self.budget):
            number = item if attribute is None else self.getitem(item, attribute)
            if not isinstance(number, (int, float)) or not isinstance(total, (int, float)):
                raise jinja2.TemplateError("sum adds numbers only")
            total += number
        return total

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Not Jinja's own: that one escapes for HTML, and models were trained without it.
        size, depth = self.budget.measure(value)
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
            raise jinja2.TemplateError("tojson takes an indent from 0 to 16")
        if separators is not None and any(len(separator) > 8 for separator in separators):
            raise jinja2.TemplateError("tojson takes separators of up to 8 characters")
        self.budget.charge(size * (1 + (indent or 0) * depth))
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
