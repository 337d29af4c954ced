"""Bounds on the work and the size of a rendered chat template, which is untrusted.

A template comes with a model. Jinja's sandbox separates it from the rest of the program, but does
not keep it from running forever or filling the memory. Steps are counted, so that all ranks and
machines refuse the same templates; a clock is the second bound.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.environment import Template
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from reinforce_rl.data.conversation import DATE_FUNCTION

logger = logging.getLogger(__name__)

MAX_SOURCE_CHARS = 1 << 17  # of a template; the longest of known models have about 30,000
MAX_STEPS = 1_000_000  # of one rendering, plus one for each character of the input
MAX_SECONDS = 30.0
MIN_CHARS = 16 << 20  # characters that a text may always have
CHARS_RATIO = 8  # for a longer input, a text may be this many times as long
# Elements that a list may always hold, including the elements of inner lists. For a longer input,
# as many as it has characters.
MIN_ELEMENTS = 1 << 20
_MAX_BITS = 10_000  # of an integer
_MAX_DEPTH = 100  # of lists in lists
_MAX_DATE_FORMAT = 1000  # characters
_STEPS_BETWEEN_CLOCKS = 8  # few, as a step may be a search in a long text
_CHARS_PER_STEP = 256
_SPLIT_CHARS_PER_STEP = 16
_ELEMENTS_PER_STEP = 16
_STEPS_PER_CALL = 10  # an iteration of a loop is one step
# Methods and filters of lists and objects that do not look into their elements.
_WITHOUT_TEXT = frozenset(
    {"items", "get", "keys", "values", "length", "count", "default", "first", "last", "list"}
)
_FILLING = frozenset({"batch", "slice"})  # they pad to a given number of elements
# Methods that split a text into at most as many parts as it has characters.
_SPLITTING = frozenset({"split", "rsplit", "splitlines"})
# Methods and filters whose result is never larger than their input.
_NEVER_LARGER = frozenset(
    {
        *("trim", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "lower"),
        *(*_SPLITTING, "partition", "rpartition", "startswith", "endswith", "find"),
        *(
            "get",
            "items",
            "keys",
            "values",
            "length",
            "first",
            "last",
            "default",
            "int",
            "float",
            "abs",
        ),
    }
)
# Their time grows faster than the text; chat templates have no use for them.
_UNBOUNDED_FILTERS = ("urlize", "wordwrap", "pprint", "xmlattr")
# Filters that turn a text into a list of its characters.
_LISTING = frozenset({"list", "sort", "unique", "batch", "slice"})
_ENCODINGS = frozenset({"utf-8", "utf8", "ascii", "latin-1", "utf-16", "utf-32"})
# Tests that compare their value with another value.
_COMPARING_TESTS = frozenset(
    {
        "eq",
        "equalto",
        "==",
        "ne",
        "!=",
        "lt",
        "lessthan",
        "<",
        "le",
        "<=",
        "gt",
        ">",
        "ge",
        ">=",
        "in",
    }
)
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (list, tuple, dict, set, frozenset, *_VIEWS)
_LONG_LITERAL = 256  # characters; shorter ones are bounded by the steps
_WIDE_FIELD = re.compile(r"[0-9]{7}")
# Width and precision of a %-field, after a key in brackets, which may itself hold brackets.
_PERCENT_FIELD = re.compile(r"[%)][-+ #0]*([0-9]*)(?:\.([0-9]*))?")
_MAX_WIDTH_DIGITS = 6


class TemplateBoundError(Exception):
    """A chat template exceeds a bound. The message names the bound."""


class _Budget:
    """The remaining steps, characters and time of one rendering."""

    def __init__(self, inputs: Any = None):
        self._inputs = inputs
        self._steps = 0
        self._chars = 0
        self._next_clock = _STEPS_BETWEEN_CLOCKS
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps >= self._next_clock:
            self._check_time()

    def _check_time(self) -> None:
        self._next_clock = self._steps + _STEPS_BETWEEN_CLOCKS
        if self._steps > MAX_STEPS and self._steps > MAX_STEPS + self._input_size:
            raise TemplateBoundError(f"takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise TemplateBoundError(f"takes longer than {MAX_SECONDS:.0f} s")

    def write(self, chars: int) -> None:
        """Count characters of output, also of macros and blocks, which may be written again."""
        self._chars += chars
        if self._chars > MIN_CHARS:
            self.check_size(self._chars)

    def check_size(self, size: int) -> None:
        if size > MIN_CHARS and size > CHARS_RATIO * self._input_size:
            raise TemplateBoundError(f"makes a value of {size} characters")

    def check_elements(self, count: int) -> None:
        if count > MIN_ELEMENTS and count > self._input_size:
            raise TemplateBoundError(f"makes a list of {count} elements")

    @functools.cached_property
    def _input_size(self) -> int:
        return _size_of(self._inputs)

    def check(self, value: Any) -> None:
        """Check the size of a computed value."""
        if isinstance(value, str | bytes):
            self.step(len(value) // _CHARS_PER_STEP)
            self.check_size(len(value))
        elif isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise TemplateBoundError(f"makes an integer of {value.bit_length()} bits")
        elif isinstance(value, _CONTAINERS):
            self.step(len(value) // _ELEMENTS_PER_STEP)
            self.check_elements(len(value))

    def check_result(self, value: Any) -> None:
        """Check a value made of other values, with all its contents.

        Comparing and hashing visit all of them.
        """
        if isinstance(value, (*_CONTAINERS, Namespace)):
            # Its texts are not copied, so they cost no steps.
            _size_of(value, self)
        else:
            self.check(value)

    def charge(self, text: Any, name: str) -> None:
        """Count the work of a method or filter of `_NEVER_LARGER` on a text, before the call."""
        if isinstance(text, str | bytes):
            chars_per_step = _SPLIT_CHARS_PER_STEP if name in _SPLITTING else _CHARS_PER_STEP
            self.step(len(text) // chars_per_step)

    def check_written(self, value: Any) -> int:
        """Return the minimum number of characters of a value as text, and check it.

        A list that holds one other list twice, and so on, is small in memory and large as text.
        """
        size = _size_of(value, self)
        self.step(size // _CHARS_PER_STEP)
        return size


def _size_of(value: Any, budget: _Budget | None = None) -> int:
    if isinstance(value, str):
        return len(value)
    size = 0
    elements = 0
    stack = [(value, 0)]
    while stack:
        current, depth = stack.pop()
        elements += 1
        size += len(current) if isinstance(current, str) else 1
        if budget is not None and elements % _ELEMENTS_PER_STEP == 0:
            budget.step()
            budget.check_size(size)
            budget.check_elements(elements)
        if depth > _MAX_DEPTH:
            raise TemplateBoundError(f"nests lists more than {_MAX_DEPTH} levels deep")
        if isinstance(current, dict):
            stack.extend((key, depth + 1) for key in current)
            stack.extend((child, depth + 1) for child in current.values())
        elif isinstance(current, _CONTAINERS):
            stack.extend((child, depth + 1) for child in current)
        elif isinstance(current, Namespace):
            # A namespace prints its attributes. Ordinary attribute access would look names up
            # among them.
            fields = object.__getattribute__(current, "__dict__")
            stack.extend((attributes, depth + 1) for attributes in fields.values())
    return size


_budget: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)


def _current() -> _Budget:
    return _budget.get() or _Budget()


class _Counted:
    """An iterable whose iterations are steps."""

    def __init__(self, values: Any):
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        step = _current().step
        for value in self._values:
            step()
            yield value

    def __len__(self) -> int:
        return len(self._values)


@pass_context
def _finalize(context: Any, value: Any) -> Any:
    """Count a value of the output.

    As it takes the context, Jinja does not apply it at compile time.
    """
    budget = _current()
    if type(value) is str:
        budget.write(len(value))
    else:
        budget.write(budget.check_written(value))
    return value


@pass_context
def _literal(context: Any, text: str) -> str:
    return text


def _joined(values: Iterable[Any]) -> str:
    budget = _current()
    parts = []
    size = 0
    for value in values:
        size += budget.check_written(value)
        budget.check_size(size)
        parts.append(str(value))
    return "".join(parts)


def _checked_literal(value: Any) -> Any:
    """Check a list, tuple or dictionary written in the template."""
    _current().check_result(value)
    return value


def _compared(value: Any) -> Any:
    """Count a comparison, by the size of the value that is compared."""
    budget = _current()
    budget.step()
    if isinstance(value, _CONTAINERS):
        budget.check_written(value)
    return value


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "_counted": _Counted,
    "_compared": _compared,
    "_joined": _joined,
    "_literal": _literal,
    "_checked_literal": _checked_literal,
}


class _Formatter(SandboxedFormatter):
    _size = 0  # of all fields of a text so far

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDE_FIELD.search(format_spec):
            raise TemplateBoundError(f"formats a field as wide as {format_spec[:40]!r}")
        field = super().format_field(value, format_spec)
        self._size += len(field)
        budget = _current()
        budget.step()
        budget.check_size(self._size)
        return field


class _Template(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        token = _budget.set(_Budget((args, kwargs)))
        try:
            return super().render(*args, **kwargs)
        finally:
            _budget.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on each rendering.

    Raises TemplateBoundError while it renders or compiles.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%", "//"))
    template_class = _Template

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.finalize = _finalize
        self.globals.pop("lipsum", None)  # random text of any length
        for name in _UNBOUNDED_FILTERS:
            self.filters.pop(name, None)
        self._bounded_filters: set[str] = set()

    def compile(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        # Parsing ten thousand expressions takes a second and 100 MiB, and has no steps to
        # count.
        if isinstance(source, str) and len(source) > MAX_SOURCE_CHARS:
            raise TemplateBoundError(f"has {len(source)} characters, more than {MAX_SOURCE_CHARS},")
        # Filters are added after the constructor. Constants are computed while compiling.
        for name, function in self.filters.items():
            if name not in self._bounded_filters:
                bounded = _charged_filter if name in _NEVER_LARGER else _bounded_filter
                self.filters[name] = bounded(name, function)
                self._bounded_filters.add(name)
        for name, function in _OWN_FILTERS.items():
            self.filters[name] = function
            self._bounded_filters.add(name)
        token = _budget.set(_Budget())
        try:
            return super().compile(source, *args, **kwargs)
        finally:
            _budget.reset(token)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "_counted")
        for output in source.find_all(nodes.Output):
            output.nodes = [_counted_literal(node) for node in output.nodes]
        _replace_makers(source)
        return super()._generate(source, *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current()
        budget.step(_STEPS_PER_CALL)
        if isinstance(__obj, LoopContext):  # the next level of a recursive loop
            args = tuple(map(_Counted, args))
        elif isinstance(__obj, types.FunctionType) and __obj.__name__ == DATE_FUNCTION:
            _check_date_format(args)
        elif isinstance(__obj, types.BuiltinMethodType):
            if __obj.__name__ in _NEVER_LARGER:
                budget.charge(__obj.__self__, __obj.__name__)
                return super().call(__context, __obj, *args, **kwargs)
            # Jinja passes the variables of loops and blocks as these keyword arguments.
            given = {
                name: value
                for name, value in kwargs.items()
                if name not in ("_loop_vars", "_block_vars")
            }
            _, args = _with_listed(__obj.__self__, __obj.__name__, args)
            _check_method(budget, __obj.__self__, __obj.__name__, args, given)
        for value in (*args, *kwargs.values()):
            budget.check(value)
        value = super().call(__context, __obj, *args, **kwargs)
        budget.check_result(value)
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _current()
        if operator == "%" and isinstance(left, str):
            _check_percent(budget, left, right)
        elif operator in ("*", "**"):
            _check_product(budget, operator, left, right)
        value = super().call_binop(context, operator, left, right)
        budget.check_result(value)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget = _current()
        budget.step()
        if isinstance(argument, tuple):  # which is hashed
            budget.check_written(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        is_map = value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            budget = _current()
            budget.check_written((args, kwargs))
            # Jinja's own wrapper checks the arguments of format_map.
            if is_map and (kwargs or len(args) != 1):
                return wrapped(*args, **kwargs)
            values = args[0] if is_map else kwargs
            formatted = _Formatter(self).vformat(text, () if is_map else args, values)
            return type(text)(formatted)

        return bounded


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted_literal(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData) and len(node.data) > _LONG_LITERAL:
        return _filter(nodes.Const(node.data, lineno=node.lineno), "_literal")
    return node


def _replace_makers(node: nodes.Node) -> None:
    """Wrap `a ~ b`, lists and compared values below a node in filters that check sizes."""
    for name, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for place, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _replace_makers(child)
            if isinstance(child, nodes.Concat):
                checked = _filter(nodes.List(child.nodes, lineno=child.lineno), "_joined")
            elif _holds_values(child):
                checked = _filter(child, "_checked_literal")
            else:
                if isinstance(child, nodes.Compare):
                    child.expr = _filter(child.expr, "_compared")
                elif isinstance(child, nodes.Test) and child.name in _COMPARING_TESTS:
                    child.node = _filter(child.node, "_compared")
                continue
            if isinstance(value, list):
                value[place] = checked
            else:
                setattr(node, name, checked)


def _holds_values(node: nodes.Node) -> bool:
    """Tell whether a node is a list, tuple or dictionary of more than constants.

    The target of an assignment is not.
    """
    if isinstance(node, nodes.Tuple) and node.ctx != "load":
        return False
    if isinstance(node, nodes.Dict):
        return not all(isinstance(pair.value, nodes.Const) for pair in node.items)
    return isinstance(node, nodes.List | nodes.Tuple) and not all(
        isinstance(item, nodes.Const) for item in node.items
    )


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _current()
        budget.step(_STEPS_PER_CALL)
        subject = args[leading]
        given = args[leading + 1 :]
        subject, given = _with_listed(subject, name, given)
        _check_method(budget, subject, name, given, kwargs)
        value = function(*args[:leading], subject, *given, **kwargs)
        if isinstance(value, types.GeneratorType):
            return _counted_generator(value)
        budget.check_result(value)
        return value

    return bounded


def _charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        budget = _current()
        if len(args) > leading:
            budget.charge(args[leading], name)
        value = function(*args, **kwargs)
        if type(value) is int:
            budget.check(value)
        return value

    return charged


def _counted_generator(values: Iterator[Any]) -> Iterator[Any]:
    step = _current().step
    for value in values:
        step()
        yield value


def _check_method(
    budget: _Budget, subject: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Check the size of the result of a method or filter of a text or list, before the call."""
    if isinstance(subject, str | bytes | int | float) or kwargs or name in _FILLING:
        for value in (*args, *kwargs.values()):
            if type(value) is int:
                budget.check_size(abs(value))
    if name in ("encode", "decode"):
        _check_encoding(args, kwargs)
    elif name in _LISTING and isinstance(subject, str):
        budget.check_elements(len(subject))
    if name in ("replace", "join", "indent", "expandtabs", "translate") and (args or kwargs):
        budget.check_size(_size_made(budget, subject, name, args, kwargs))
    elif name == "format" and isinstance(subject, str):
        _check_percent(budget, subject, args or kwargs)
    elif name == "sum" and not isinstance(
        args[1] if len(args) > 1 else kwargs.get("start", 0), int | float
    ):
        raise TemplateBoundError("sums values that are not numbers")
    elif name not in _WITHOUT_TEXT and isinstance(subject, (*_CONTAINERS, Namespace)):
        budget.check_written(subject)
        if name == "tojson":
            budget.check_size(_json_spaces(subject, [*args, *kwargs.values()]))


def _check_encoding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the name of an encoding: punycode and idna take quadratic time."""
    for name in (*args[:1], kwargs.get("encoding", "utf-8")):
        if str(name).lower().replace("_", "-") not in _ENCODINGS:
            raise TemplateBoundError(f"uses the encoding {str(name)[:40]!r}")


def _check_date_format(args: tuple[Any, ...]) -> None:
    """Check a format of strftime, where a wide field takes up to 256 bytes a character."""
    for text in args:
        if isinstance(text, str) and len(text) > _MAX_DATE_FORMAT:
            raise TemplateBoundError(f"formats a date by a text of {len(text)} characters")


def _json_spaces(value: Any, options: list[Any]) -> int:
    """Return the maximum number of characters that JSON has between values.

    They depend on its options `indent` and `separators`.
    """
    indents = [option for option in options if type(option) is int]
    indents += [len(option) for option in options if isinstance(option, str)]
    separators = [option for option in options if isinstance(option, list | tuple)]
    width = max(indents, default=0)
    between = sum(len(text) for pair in separators for text in pair if isinstance(text, str))
    count = 0
    stack = [(value, 1)]
    while stack:
        current, depth = stack.pop()
        if isinstance(current, dict):
            children = list(current.values())
        elif isinstance(current, list | tuple):
            children = list(current)
        else:
            continue
        count += (len(children) + 1) * (depth * width + between)
        stack.extend((child, depth + 1) for child in children)
    return count


def _size_made(
    budget: _Budget, subject: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    values = [*args, *kwargs.values()]
    sizes = [len(value) if isinstance(value, str) else 0 for value in values]
    if name == "join":
        is_method = isinstance(subject, str) and args and not isinstance(args[0], str)
        parts = args[0] if is_method else subject
        separator = len(subject) if is_method else max(sizes, default=0)
        if not isinstance(parts, (str, range, *_CONTAINERS)):
            return 0
        return _size_of(parts, budget) + separator * len(parts)
    if not isinstance(subject, str):
        return 0
    if name == "replace":
        given = dict(zip(("old", "new"), args, strict=False)) | kwargs
        old = str(given.get("old", ""))
        count = subject.count(old) if old else len(subject) + 1
        return len(subject) + count * len(str(given.get("new", "")))
    if name == "translate":
        table = values[0].values() if isinstance(values[0], dict) else values[0]
        texts = table if isinstance(table, _CONTAINERS) else ()
        longest = max((len(value) for value in texts if isinstance(value, str)), default=1)
        return len(subject) * longest
    width = max([*sizes, *(value for value in values if type(value) is int)])
    return len(subject) + (subject.count("\n") + subject.count("\t") + 1) * width


def _with_listed(subject: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the subject and arguments of a join, with a generator turned into a list.

    The size of a list can be checked before the join.
    """
    if name != "join":
        return subject, args
    if isinstance(subject, Iterator):
        return list(subject), args
    if isinstance(subject, str) and args and isinstance(args[0], Iterator):
        return subject, (list(args[0]), *args[1:])
    return subject, args


def _check_percent(budget: _Budget, text: str, values: Any) -> None:
    size = budget.check_written(values)
    made = len(text) + size
    fields = _PERCENT_FIELD.findall(text)
    if isinstance(values, dict):
        # Each field may take the same value.
        made = len(text) + size * len(fields)
    for digits in filter(None, itertools.chain.from_iterable(fields)):
        if len(digits) > _MAX_WIDTH_DIGITS:
            raise TemplateBoundError("formats a field that is wider than a million characters")
        made += int(digits)
    if "*" in text and isinstance(values, list | tuple):
        made += sum(abs(value) for value in values if type(value) is int)
    budget.check_size(made)


def _check_product(budget: _Budget, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = (
            left.bit_length() * max(right, 0)
            if operator == "**"
            else left.bit_length() + right.bit_length()
        )
        if bits > _MAX_BITS and abs(left) > 1:
            raise TemplateBoundError(f"computes an integer of about {bits} bits")
    elif operator == "*":
        for values, times in ((left, right), (right, left)):
            if isinstance(values, str | list | tuple | bytes) and isinstance(times, int):
                count = len(values) * max(times, 0)
                if isinstance(values, str | bytes):
                    budget.check_size(count)
                else:
                    budget.check_elements(count)


def bound_chat_templates() -> None:
    """Let transformers render chat templates in a `BoundedEnvironment`.

    transformers has no argument for its environment, so its class is replaced.
    """
    from transformers.utils import chat_template_utils

    if not hasattr(chat_template_utils, "ImmutableSandboxedEnvironment"):
        import transformers

        logger.warning(
            "chat templates have no bounds under transformers %s", transformers.__version__
        )
    # setattr, as transformers does not export the name.
    setattr(chat_template_utils, "ImmutableSandboxedEnvironment", BoundedEnvironment)  # noqa: B010
