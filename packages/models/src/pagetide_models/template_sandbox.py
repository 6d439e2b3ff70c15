"""A Jinja environment in which every operation pays for what it makes, from one budget.

Jinja's sandbox keeps a template from Python's internals, but not from looping 10^15 times or
doubling a string 40 times. Here the parsed template is rewritten so that loops, calls, filters,
operators, literals, comparisons and output all charge a budget: one unit each and one for each
character or entry of the result, nested containers counted as if written out (so a list of lists
that share one list costs what printing it would). What can grow a value by a factor charges before
it runs. Filters outside `_FILTERS` and the few methods whose cost cannot be told beforehand do not
exist.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pagetide_models.errors import ChatTemplateError
from pagetide_models.template_budget import BoundsExceededError, Budget, Counted
from pagetide_models.template_filters import MAX_FORMAT_WIDTH, BoundedFilters, charge_replace
from pagetide_models.template_syntax import Generation, Rewriter

__all__ = ["compile_template", "render"]

# Jinja's own filters whose cost is linear in what goes in and comes out.
_FILTERS: Final = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse",
    "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
_FORBIDDEN_METHODS: Final = frozenset({"translate", "expandtabs", "encode"})
_MAX_INTEGER_BITS: Final = 4096
_WIDE_FORMAT: Final = re.compile(r"\d{4,}|\*|\{[^{}]*\{")


class _OpaqueNamespace(Namespace):
    """Jinja's namespace, printed without its content: it could hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """One rendering's environment: it holds that rendering's budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimiser would run filters and operators while compiling
            extensions=[Generation, loopcontrols],
            finalize=pass_context(lambda _, value: budget.charge_value(value)),
        )
        self.budget = budget
        self.filters = {name: self._charged(FILTERS[name]) for name in _FILTERS}
        self.filters |= BoundedFilters(budget, self.getitem).by_name()
        del self.globals["lipsum"]
        self.globals["namespace"] = _OpaqueNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Rewriter().visit(super()._parse(source, name, filename))
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
            args = (Counted(args[0], budget), *args[1:])
        return budget.charge_value(super().call(__context, __obj, *args, **kwargs))

    def _charge_method(self, owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
        if name in _FORBIDDEN_METHODS:
            raise jinja2.TemplateError(f"the string method {name} is not available in templates")
        if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
            self.budget.charge(max(args[0], 0))
        elif name == "replace" and len(args) >= 2:
            charge_replace(self.budget, owner, args[0], args[1])

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
            raise jinja2.TemplateError(f"a format may ask for less than {MAX_FORMAT_WIDTH} columns")
        self.budget.charge(
            len(text) + num_fields * (MAX_FORMAT_WIDTH + self.budget.measure(values)[0])
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.charge()
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
                raise BoundsExceededError("it computes with integers of over 4,096 bits")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > _MAX_INTEGER_BITS:
                raise BoundsExceededError("it computes a power of over 4,096 bits")
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
    environment = _Environment(Budget(len(source) * 100, seconds=5.0))
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
    size, _ = Budget(1 << 62, seconds=3600).measure(variables)
    budget = Budget(base_work + work_per_input * size, seconds)
    environment = _Environment(budget)
    template = jinja2.Template.from_code(environment, code, dict(environment.globals))
    try:
        return "".join(template.generate(**variables))
    except BoundsExceededError as error:
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
