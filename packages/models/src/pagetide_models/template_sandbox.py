"""A Jinja environment in which every operation pays for what it makes, from one budget.

Jinja's sandbox keeps a template from Python's internals, but not from looping 10^15 times or
doubling a string 40 times. Here the parsed template is rewritten so that loops, calls, filters,
operators, literals, comparisons and output all charge a budget: one unit each and one for each
character or entry of the result, nested containers counted as if written out (so a list of lists
that share one list costs what printing it would). What can grow a value by a factor charges before
it runs. Filters outside `_FILTERS` and the few methods whose cost cannot be told beforehand do not
exist.
"""
# ruff: noqa: N802, N815 - Jinja finds visitor methods by the names of its nodes.

from __future__ import annotations

import datetime
import functools
import html
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, Final

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pagetide_models.errors import ChatTemplateError

__all__ = ["compile_template", "render"]

# Jinja's own filters whose cost is linear in what goes in and comes out.
_FILTERS: Final = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse",
    "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
_FORBIDDEN_METHODS: Final = frozenset({"translate", "expandtabs", "encode"})
_MAX_INTEGER_BITS: Final = 4096
_MAX_FORMAT_WIDTH: Final = 1000
_WIDE_FORMAT: Final = re.compile(r"\d{4,}|\*|\{[^{}]*\{")


class _BoundsExceededError(RuntimeError):
    pass


class _Budget:
    """Work that is left, and when to stop."""

    def __init__(self, work: int, seconds: float) -> None:
        self.left = work
        self.end = time.monotonic() + seconds
        self.seconds = seconds

    def charge(self, units: int = 1) -> None:
        self.left -= units
        if self.left < 0:
            raise _BoundsExceededError("it does more work than the messages can justify")
        if time.monotonic() > self.end:
            raise _BoundsExceededError(f"it takes more than {self.seconds:g} seconds")

    def charge_value(self, value: object) -> Any:
        """Pay for a value as if it were written out, and return it."""
        self.charge(self.measure(value)[0])
        return value

    def measure(self, value: object) -> tuple[int, int]:
        """Size and nesting depth of a value; stops with an error where it exceeds what is left."""
        size = depth = 0
        level = [value]
        while level:
            depth += 1
            below: list[object] = []
            for item in level:
                size += 1
                if isinstance(item, (str, bytes)):
                    size += len(item)
                elif isinstance(item, int):
                    size += item.bit_length() // 8
                elif isinstance(item, dict):
                    below += [*item.keys(), *item.values()]
                elif isinstance(item, (list, tuple, set, frozenset)):
                    below += item
                if size + len(below) > self.left:
                    self.charge(self.left + 1)
            level = below
        return size, depth


class _Counted:
    """An iterable whose every step is charged; as long as what it wraps, if that has a length."""

    def __init__(self, iterable: Iterable[Any], budget: _Budget) -> None:
        self.iterable = iterable
        self.budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            self.budget.charge()
            yield item

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]


class _OpaqueNamespace(Namespace):
    """Jinja's namespace, printed without its content: it could hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Rewriter(NodeTransformer):
    """Sends what Jinja would do natively through the environment's charging filters."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        # As constants, literal text passes through `finalize`: charged each time it is written.
        node.nodes = [
            nodes.Const(child.data) if isinstance(child, nodes.TemplateData) else child
            for child in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if node.ctx == "load" else node

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made")

    visit_List = visit_Dict = visit_Compare = visit_Test = _made


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text in some templates."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """One rendering's environment: it holds that rendering's budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, budget: _Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimiser would run filters and operators while compiling
            extensions=[_Generation, loopcontrols],
            finalize=pass_context(lambda _, value: budget.charge_value(value)),
        )
        self.budget = budget
        self.filters = {name: self._charged(FILTERS[name]) for name in _FILTERS}
        self.filters |= {
            "_loop": lambda iterable: _Counted(iterable, budget),
            "_made": budget.charge_value,
            "_concat": lambda items: "".join(str(budget.charge_value(item)) for item in items),
            "escape": lambda value: html.escape(str(budget.charge_value(value))),
            "indent": self._indent,
            "int": self._int,
            "join": self._join,
            "replace": self._replace,
            "round": self._round,
            "safe": lambda value: value,
            "sum": self._sum,
            "tojson": self._tojson,
        }
        self.filters["e"] = self.filters["escape"]
        del self.globals["lipsum"]
        self.globals["namespace"] = _OpaqueNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Rewriter().visit(super()._parse(source, name, filename))
        if not isinstance(tree, nodes.Template):
            raise ChatTemplateError("the chat template is empty of nodes")
        return tree

    def _charged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # also copies the mark that asks for a context or environment
        def charged(*args: Any, **kwargs: Any) -> Any:
            self.budget.charge()
            return self.budget.charge_value(function(*args, **kwargs))

        return charged

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self.budget
        budget.charge()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, (str, bytes)):
            __self._charge_method(owner, name, args)
            if name == "join" and args:
                args = (list(args[0]),)
                budget.charge(budget.measure(args[0])[0] + len(owner) * len(args[0]))
        if isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (_Counted(args[0], budget), *args[1:])
        return budget.charge_value(super().call(__context, __obj, *args, **kwargs))

    def _charge_method(self, owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
        if name in _FORBIDDEN_METHODS:
            raise jinja2.TemplateError(f"the string method {name} is not available in templates")
        if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
            self.budget.charge(max(args[0], 0))
        elif name == "replace" and len(args) >= 2:
            self._charge_replace(owner, args[0], args[1])

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        text: str = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            self._charge_format(text, text.count("{"), [*args, *kwargs.values()])
            return inner(*args, **kwargs)

        return formatted

    def _charge_format(self, text: str, num_fields: int, values: object) -> None:
        if _WIDE_FORMAT.search(text):
            raise jinja2.TemplateError(
                f"a format may ask for less than {_MAX_FORMAT_WIDTH} columns"
            )
        self.budget.charge(
            len(text) + num_fields * (_MAX_FORMAT_WIDTH + self.budget.measure(values)[0])
        )

    def _charge_replace(self, text: Any, old: Any, new: Any) -> None:
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            self.budget.charge(len(text) + text.count(old) * len(new))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.charge()
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
                raise _BoundsExceededError("it computes with integers of over 4,096 bits")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > _MAX_INTEGER_BITS:
                raise _BoundsExceededError("it computes a power of over 4,096 bits")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
                    self.budget.charge(len(sequence) * max(times, 0))
        elif operator == "+" and isinstance(left, (str, bytes, list, tuple)):
            self.budget.charge(len(left) + (len(right) if hasattr(right, "__len__") else 0))
        elif operator == "%" and isinstance(left, (str, bytes)):
            if isinstance(left, bytes):
                raise jinja2.TemplateError("bytes cannot be formatted")
            self._charge_format(left, left.count("%"), right)
        return self.budget.charge_value(super().call_binop(context, operator, left, right))

    def _indent(
        self, text: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        prefix = " " * min(width, _MAX_FORMAT_WIDTH) if isinstance(width, int) else width
        self.budget.charge(len(text) + (text.count("\n") + 1) * len(prefix))
        lines = text.split("\n")
        indented = [
            prefix + line if (line or blank) and (index or first) else line
            for index, line in enumerate(lines)
        ]
        return "\n".join(indented)

    def _int(self, value: Any, default: int = 0, base: int = 10) -> int:
        self.budget.charge()
        if isinstance(value, (str, bytes)) and len(value) > _MAX_FORMAT_WIDTH:
            return default
        result: int = FILTERS["int"](value, default, base)
        return result

    def _join(self, values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
        items = list(_Counted(values, self.budget))
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self.budget.charge(self.budget.measure(items)[0] + len(items) * len(str(between)))
        return str(between).join(str(item) for item in items)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = (str(self.budget.charge_value(value)) for value in (text, old, new))
        self._charge_replace(text, old, new)
        return text.replace(old, new, -1 if count is None else count)  # type: ignore[no-any-return]

    def _round(self, value: float, precision: int = 0, method: str = "common") -> float:
        self.budget.charge()
        if not -20 <= precision <= 20:
            raise jinja2.TemplateError("round takes a precision from -20 to 20")
        result: float = FILTERS["round"](value, precision, method)
        return result

    def _sum(self, values: Iterable[Any], attribute: str | None = None, start: float = 0) -> float:
        total = start
        for item in _Counted(values, self.budget):
            number = item if attribute is None else self.getitem(item, attribute)
            if not isinstance(number, (int, float)) or not isinstance(total, (int, float)):
                raise jinja2.TemplateError("sum adds numbers only")
            total += number
        return total

    def _tojson(
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


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"\d{3,}", pattern):
        raise jinja2.TemplateError("strftime_now takes a short pattern")
    return datetime.datetime.now().strftime(pattern)


def compile_template(source: str) -> CodeType:
    """Compile a chat template.

    Raises:
        ChatTemplateError: Its syntax is wrong, or it nests too deeply.
    """
    environment = _Environment(_Budget(len(source) * 100, seconds=5.0))
    try:
        code: CodeType = environment.compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from None
    return code


def render(
    code: CodeType,
    variables: dict[str, Any],
    *,
    base_work: int,
    work_per_input: int,
    seconds: float,
) -> str:
    """Run a compiled template in an environment of its own.

    Args:
        code: What `compile_template` returned.
        variables: Plain data that the template sees.
        base_work: Units of work that are always allowed.
        work_per_input: Further units for each character or entry of `variables`.
        seconds: How long it may take.

    Raises:
        ChatTemplateError: It fails, refuses, or exceeds a bound.
    """
    size, _ = _Budget(1 << 62, seconds=3600).measure(variables)
    budget = _Budget(base_work + work_per_input * size, seconds)
    environment = _Environment(budget)
    template = jinja2.Template.from_code(environment, code, dict(environment.globals))
    try:
        return "".join(template.generate(**variables))
    except _BoundsExceededError as error:
        raise ChatTemplateError(f"the chat template exceeds its bounds: {error}") from None
    except (RecursionError, MemoryError):
        raise ChatTemplateError(
            "the chat template exceeds its bounds: it nests too deeply"
        ) from None
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template refuses: {error.message}") from None
    except Exception as error:  # whatever its expressions run into
        raise ChatTemplateError(
            f"the chat template fails: {type(error).__name__}: {str(error)[:200]}"
        ) from None
