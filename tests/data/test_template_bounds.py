"""Chat templates that would run forever or exhaust memory raise an error.

Others render as before.
"""

from __future__ import annotations

import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from helpers.chat_templates import TEMPLATES, write_chat_tokenizer
from helpers.errors import raises_error
from jinja2.exceptions import TemplateAssertionError, UndefinedError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reinforce_rl.data import template_bounds
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.template_bounds import BoundedEnvironment, TemplateBoundError
from reinforce_rl.errors import ConfigError

pytestmark = pytest.mark.timeout(60)

OPTIONS = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [loopcontrols]}
DOUBLED = (
    "{% set ns = namespace(a=A) %}{% for i in range(60) %}{% set ns.a = NEXT %}{% endfor %}"
    "{{ ns.a|length }}"
)
LIST_OF_LISTS = DOUBLED.replace("A", "[1]").replace("NEXT", "[ns.a, ns.a]")
# Few iterations: without the bound, rendering still ends, with a gigabyte at most.
LONG_TEXT = (
    "{% set a = 'x' * 10**7 %}{% set ns = namespace(l=[]) %}{% for i in range(99) %}WORK"
    "{% endfor %}"
)
COSTLY = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "loops with output": (
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    ),
    "filters of ranges": (
        "{% for a in range(99999) %}{{ range(99999)|map('upper')|list|length }}{% endfor %}"
    ),
    "lists of ranges": "{% for a in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{{ f(n+1) }}{{ f(n+1) }}{% endmacro %}{{ f(0) }}"
    ),
    "macros that call twice": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}"
    ),
    "a recursive loop": "{% for a in range(99) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "a product of text": "{{ 'a' * 10**9 }}",
    "a product of a list": "{{ ([1] * 10**9)|length }}",
    "a power": "{{ 10**(10**10) }}",
    "a product of integers": DOUBLED.replace("A", "3").replace("NEXT", "ns.a * ns.a"),
    "a wide percent field": "{{ '%99999999999d' % 1 }}",
    "a percent field of thousands of digits": "{{ ('%' ~ '9' * 5000 ~ 'd') % 1 }}",
    "a wide percent field of a filter": "{{ '%99999999999d'|format(1) }}",
    "a percent field of a given width": "{{ '%*d' % (99999999999, 1) }}",
    "a wide field": "{{ '{:99999999999}'.format(1) }}",
    "a wide field of a name": "{{ '{a:99999999999}'.format_map({'a': 1}) }}",
    "a field of a given width": "{{ '{:{w}}'.format(1, w=99999999999) }}",
    "centred": "{{ 'a'|center(10**11) }}",
    "centred by a method": "{{ 'a'.center(10**11) }}",
    "padded": "{{ 'a'.ljust(10**11) }}",
    "indented": "{{ 'a\nb'|indent(10**11) }}",
    "bytes of an integer": "{{ (1).to_bytes(10**11, 'big') }}",
    "doubled text": DOUBLED.replace("A", "'x'").replace("NEXT", "ns.a ~ ns.a"),
    "added text": DOUBLED.replace("A", "'x'").replace("NEXT", "ns.a + ns.a"),
    "added lists": DOUBLED.replace("A", "[1]").replace("NEXT", "ns.a + ns.a"),
    "replaced text": DOUBLED.replace("A", "'xx'").replace("NEXT", "ns.a.replace('x', ns.a)"),
    "replaced text by a filter": DOUBLED.replace("A", "'xx'").replace(
        "NEXT", "ns.a|replace('x', ns.a)"
    ),
    "joined text": DOUBLED.replace("A", "'xx'").replace("NEXT", "ns.a.join([ns.a, ns.a])"),
    "lists in each other": DOUBLED.replace("A", "[1]")
    .replace("range(60)", "range(200)")
    .replace("NEXT", "[ns.a]"),
    "slices of a long text": LONG_TEXT.replace("WORK", "{% set ns.l = [a[i:], ns.l] %}"),
    "splits of a long text": LONG_TEXT.replace("WORK", "{% set ns.l = a.split('x')|length %}"),
    "a batch of any width": "{{ [1]|batch(10**9, 0)|list|length }}",
    "capital ligatures": "{% set a = '\ufb03' * 10**7 %}{{ a.upper()|length }}",
    "capital ligatures by a filter": "{% set a = '\ufb03' * 10**7 %}{{ (a|upper)|length }}",
    "joined text by a filter": DOUBLED.replace("A", "'xx'").replace(
        "NEXT", "[ns.a, ns.a]|join(ns.a)"
    ),
    "a list of itself twice, written": DOUBLED.replace("A", "[1]")
    .replace("NEXT", "[ns.a, ns.a]")
    .replace("|length", ""),
    "a list of itself twice, as JSON": DOUBLED.replace("A", "[1]")
    .replace("NEXT", "[ns.a, ns.a]")
    .replace("length", "tojson"),
    "a list of itself twice, as text": DOUBLED.replace("A", "[1]")
    .replace("NEXT", "[ns.a, ns.a]")
    .replace("length", "string"),
    "a list of itself twice, joined": LIST_OF_LISTS + "{{ 'x' ~ ns.a }}",
    "a list of itself twice, compared": DOUBLED.replace("A", "[1]")
    .replace("for i", "set ns.b = [1] %}{% for i")
    .replace("%}{% endfor", "%}{% set ns.b = [ns.b, ns.b] %}{% endfor")
    .replace("NEXT", "[ns.a, ns.a]")
    .replace("ns.a|length", "ns.a == ns.b"),
    "a tuple of itself twice as a key": DOUBLED.replace("A", "(1,)")
    .replace("NEXT", "(ns.a, ns.a)")
    .replace("ns.a|length", "{ns.a: 1}|length"),
    "a sum of itself twice as a key": DOUBLED.replace("A", "(1,)")
    .replace("NEXT", "(ns.a,) + (ns.a,)")
    .replace("ns.a|length", "{ns.a: 1}|length"),
    "a product of itself as a key": DOUBLED.replace("A", "(1,)")
    .replace("NEXT", "(ns.a,) * 2")
    .replace("ns.a|length", "{ns.a: 1}|length"),
    "a dictionary of itself twice": DOUBLED.replace("A", "1")
    .replace("NEXT", "dict(a=ns.a, b=ns.a)")
    .replace("|length", " == 1"),
    "a dictionary literal of itself twice": DOUBLED.replace("A", "1")
    .replace("NEXT", "{'a': ns.a, 'b': ns.a}")
    .replace("|length", " == 1"),
    "a list of itself twice by a filter": DOUBLED.replace("A", "[1]")
    .replace("NEXT", "[1, 1]|map(attribute='a', default=ns.a)|list")
    .replace("|length", " == [1]"),
    "sums of a with": (
        "{% with a='x' * 10**6 %}{% with b=a+a+a+a+a %}{% with c=b+b+b+b %}{{ c|length }}"
    )
    + "{% endwith %}" * 3,
    "sums of a macro's defaults": (
        "{% macro f(a='x' * 10**6, b=a+a+a+a+a, c=b+b+b+b) %}{{ c|length }}{% endmacro %}"
    )
    + "{{ f() }}",
    "a long integer of a text": "{{ ('f' * 10000)|int(0, 16) > 1 }}",
    "tests of long lists": "{% set a = [1] * 10**6 %}{% set b = [1] * 10**6 %}"
    + "{% if a is eq b %}{% endif %}" * 999,
    "comparisons of long lists": "{% set a = [1] * 10**6 %}{% set b = [1] * 10**6 %}"
    + "{% if a == b %}{% endif %}" * 999,
    "searches of long keys": "{% set a = (1,) * 10**6 %}{% set b = {} %}"
    + "{% if b[a] %}{% endif %}" * 999,
    "sums of lists": "{{ (range(99999)|map('string')|map('list')|list * 99)|sum(start=[]) }}",
    "values of dictionaries in each other": "{% set ns = namespace(a={'b': 1}) %}"
    "{% for i in range(60) %}"
    "{% set ns.a = dict(b=ns.a.values(), c=ns.a.values()) %}{% endfor %}{{ ns.a|length }}",
    "items of dictionaries in each other, compared": "{% set ns = namespace(a={'b': 1}) %}"
    "{% for i in range(60) %}"
    "{% set ns.a = dict(b=ns.a.items(), c=ns.a.items()) %}{% endfor %}{{ ns.a == {} }}",
    "namespaces in each other, written": "{% set ns = namespace(a=1) %}{% for i in range(60) %}"
    "{% set ns.a = namespace(b=ns.a, c=ns.a) %}{% endfor %}{{ ns.a }}",
    "namespaces in each other, as text": "{% set ns = namespace(a=1) %}{% for i in range(60) %}"
    "{% set ns.a = namespace(b=ns.a, c=ns.a) %}{% endfor %}{{ ns.a|string|length }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "indented JSON of many values": "{% set a = [1] * 100000 %}{{ a|tojson(indent=9000) }}",
    "deep indented JSON": "{% set ns = namespace(a=1) %}{% for i in range(90) %}"
    "{% set ns.a = [ns.a] %}"
    "{% endfor %}"
    "{{ ns.a|tojson(indent=1000000) }}",
    "JSON with long separators": "{{ ([1] * 1000)|tojson(separators=['x' * 100000, ':']) }}",
    "many wide fields": "{{ ('{0:999999}' * 10000).format(1)|length }}",
    "many fields of one value": "{{ ('{a}' * 100000).format(a='x' * 10000)|length }}",
    "many fields of control characters": "{{ ('{0!r}' * 10000).format('\\0' * 10000)|length }}",
    "many wide percent fields": "{{ ('%(a)999999d' * 10000) % {'a': 1} }}",
    "many percent fields of one value": "{{ ('%(a)s' * 100000) % {'a': 'x' * 10000} }}",
    "a wide percent field of a key in brackets": "{{ '%((a))9999999d' % {'(a)': 1} }}",
    "a list of a long text": "{{ ('x' * 10**7)|list|length }}",
    "a range joined by a long text": "{{ range(99999)|join('x' * 10**6)|length }}",
    "a generator joined by a long text": (
        "{{ range(99999)|select('defined')|join('x' * 10**6)|length }}"
    ),
    "keys joined by a long text": (
        "{% set d = dict.fromkeys(range(999)) %}{{ d|join('x' * 10**5)|length }}"
    ),
    "joined by a named separator": (
        "{{ ([1] * 10**4)|join(attribute='real', d='x' * 10**6)|length }}"
    ),
    "replaced by a named text": "{{ ('a' * 10**6)|replace(new='x' * 10**6, old='a')|length }}",
    "translated by a list": "{{ ('a' * 10**6).translate(['x' * 10**5] * 100)|length }}",
    "a slow encoding": "{{ ('a' * 10**6).encode().decode('punycode')|length }}",
    "another slow encoding": "{{ ('\u20ac' * 10**6).encode(encoding='idna')|length }}",
    "a long format of a date": "{{ strftime_now('%999999999Y' ~ 'x' * 10**7)|length }}",
    "a long template": "x" * (template_bounds.MAX_SOURCE_CHARS + 1),
    "many expressions": "{{ a }}" * 100_000,
    "long literals": "{% for a in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "a text of a block": "{% set a %}{% for i in range(9999) %}"
    + "x" * 5000
    + "{% endfor %}{% endset %}{{ a|length }}",
}


def strftime_now(text: str) -> str:
    return datetime.now().strftime(text)


def environment_of_transformers() -> BoundedEnvironment:
    """Return an environment with transformers' own filter and function."""
    environment = BoundedEnvironment(**OPTIONS)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
    environment.globals["strftime_now"] = strftime_now
    return environment


@pytest.mark.parametrize("kind", COSTLY)
def test_a_costly_template_is_refused_within_seconds(kind):
    start = time.monotonic()
    environment = environment_of_transformers()
    with pytest.raises((TemplateBoundError, RecursionError)):
        environment.from_string(COSTLY[kind]).render(messages=[])
    assert time.monotonic() - start < 40


@pytest.mark.parametrize(
    "kind",
    [
        "indented JSON of many values",
        "JSON with long separators",
        "many wide fields",
        "many fields of one value",
        "many fields of control characters",
        "many percent fields of one value",
        "a list of a long text",
        "keys joined by a long text",
    ],
)
def test_a_large_value_is_refused_before_it_is_made(kind):
    tracemalloc.start()
    try:
        with pytest.raises(TemplateBoundError, match=r"makes a (value|list)"):
            environment_of_transformers().from_string(COSTLY[kind]).render(messages=[])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


class SearchedText:
    searches = 0

    def __contains__(self, part: object) -> bool:
        self.searches += 1
        return False


def test_the_clock_is_read_between_searches_of_a_long_text(monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", -1.0)
    template = "{% for i in range(999) %}{% if 'x' in text %}{% endif %}{% endfor %}"
    text = SearchedText()
    with pytest.raises(TemplateBoundError):
        BoundedEnvironment(**OPTIONS).from_string(template).render(text=text)
    assert text.searches <= 8


SOUND = {
    "loop variables": "{% for a in items %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} "
    "{{ loop.previtem }}"
    "{{ loop.nextitem }} {{ loop.revindex0 }};{% endfor %}",
    "filtered loops": "{% for a in items if a.n > 1 %}{{ a.n }}{% else %}none{% endfor %}",
    "empty loops": "{% for a in missing %}{{ a }}{% else %}none{% endfor %}",
    "pairs": "{% for k, v in items[0].items() %}{{ k }}={{ v }}{% endfor %}",
    "generators": "{% for a in items|map(attribute='n') %}{{ a }}{{ loop.last }}{% endfor %}",
    "recursion": "{% for a in tree recursive %}{{ a.n }}({{ loop(a.below) }}){% endfor %}",
    "break": "{% for a in items %}{% if a.n == 2 %}{% break %}{% endif %}{{ a.n }}{% endfor %}",
    "concatenation": (
        "{{ 'a' ~ 1 ~ none ~ missing ~ [1, 'x'] ~ ('b' ~ 'c') }}{% set x = 'p' ~ 'q' %}{{ x }}"
    ),
    "literals": "{% if true %}" + "long text " * 100 + "{% endif %}",
    "operators": "{{ 3 * 4 }} {{ 2 ** 8 }} {{ 'x' * 3 }} {{ '%s-%d' % ('a', 2) }} {{ [1] + [2] }} "
    "{{ 7 % 4 }}"
    " {{ 1.5 * 2 }} {{ 1 ** 100000 }} {{ (-1) ** 100001 }} {{ 2 ** 4000 % 7 }}",
    "comparisons": "{{ [1, [2]] == [1, [2]] }} {{ (1, 2) in [(1, 2)] }} "
    "{{ {'a': items} == {'a': items} }}"
    " {{ {(1, 2): 3}[(1, 2)] }} {% if items[0] != items[1] and 1 < 2 <= 2 %}x{% endif %}"
    "{% for a, (b, c) in [(1, (2, 3))] %}{{ a + b + c }}{% endfor %}{% set a, b = [items, 1] %}"
    "{{ a|length + b }}",
    "filters": "{{ items|tojson }} {{ 'a b'|title|replace('A', 'c') }} {{ [3, 1]|sort|join(', ') }}"
    " {{ 'x'|indent(2, true) }}"
    " {{ items|sum(attribute='n') }} {{ items|selectattr('n', 'equalto', 2)|list }} "
    "{{ '%s'|format('y') }}",
    "methods": "{{ 'a,b'.split(',') }} {{ ' x '.strip() }} {{ '{} {b!r:>4}'.format(1, b=2) }}"
    " {{ 'x'.join(['a', 'b']) }}"
    " {{ '{a}'.format_map({'a': 3}) }} {{ 'abab'.replace('a', 'c', 1) }} {{ 'a' in 'abc' }}",
    "macros": "{% macro f(n) %}[{{ n }}{{ caller() if caller else '' }}]{% endmacro %}{{ f(1) }}"
    "{% call f(2) %}in{% endcall %}",
    "sets": "{% set ns = namespace(n=0) %}{% for a in items %}{% set ns.n = ns.n + a.n %}"
    "{% endfor %}"
    "{{ ns.n }}"
    "{% set b %}text {{ ns.n }}{% endset %}{{ b|upper }}{% filter lower %}ABC{{ 'D' }}"
    "{% endfilter %}",
    "views": "{{ items[0].keys() }}{{ items[0].values()|join }}{{ items[0].items()|list }}"
    "{{ ','.join(items[0]) }}"
    "{{ namespace(a=[1], b='x') }}{{ items[0].items() == items[0].items() }}",
    "generators joined": "{{ items|map(attribute='n')|join(', ') }}"
    "{{ ';'.join(items|map('string')) }}"
    "{{ range(3)|join('-') }}{{ items|join('+', attribute='n') }}"
    "{{ items|join(d='+', attribute='n') }}",
    "fields": "{{ '%(n)5d|%(n)s' % items[0] }}{{ '%5.1f%%' % 2.25 }}{{ '{0:>5}{0}'.format('a') }}"
    "{{ '%*d' % (5, 1) }}"
    "{{ 'a-a'|replace(new='b', old='a') }}{{ 'ab'.encode('utf-8').decode() }}{{ 'abc'|list }}"
    "{{ items|tojson(indent=2) }}",
    "numbers": "{{ 1.0 }} {{ true }} {{ none }} {{ [1.5, none, true] }} {{ {'a': (1, 2)} }}",
}
VALUES = {
    "items": [{"n": 1}, {"n": 2}, {"n": 3}],
    "tree": [{"n": 1, "below": [{"n": 2, "below": []}]}, {"n": 3, "below": []}],
}


@pytest.mark.parametrize("kind", SOUND)
def test_other_templates_render_as_in_jinjas_sandbox(kind):
    expected = ImmutableSandboxedEnvironment(**OPTIONS).from_string(SOUND[kind]).render(**VALUES)
    assert BoundedEnvironment(**OPTIONS).from_string(SOUND[kind]).render(**VALUES) == expected


def test_there_is_no_random_text():
    assert ImmutableSandboxedEnvironment(**OPTIONS).from_string("{{ lipsum(n=1) }}").render()
    with pytest.raises(UndefinedError):
        BoundedEnvironment(**OPTIONS).from_string("{{ lipsum(n=1) }}").render()


@pytest.mark.parametrize("name", ["urlize", "wordwrap", "pprint", "xmlattr"])
def test_filters_without_a_bound_are_missing(name):
    with pytest.raises(TemplateAssertionError, match=name):
        BoundedEnvironment(**OPTIONS).from_string("{{ 'a'|" + name + " }}")


def test_each_rendering_has_bounds_of_its_own(monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 1000)
    template = BoundedEnvironment().from_string("{% for a in range(n) %}{{ a }}{% endfor %}")
    with pytest.raises(TemplateBoundError, match="more than 1000 steps"):
        template.render(n=1300)
    with ThreadPoolExecutor(4) as pool:
        lengths = list(pool.map(lambda _: len(template.render(n=700)), range(16)))
    expected = [len("".join(map(str, range(700))))] * 16
    assert lengths == expected
    assert threading.active_count() < 10


def test_a_long_conversation_is_within_the_bounds():
    """40 MB of text, which a template doubles."""
    template = BoundedEnvironment().from_string(
        "{% for m in messages %}{% set text = m.content ~ '!' %}{{ text }}{{ m.content|trim }}"
        "{% endfor %}"
    )
    messages = [{"content": "y" * 40_000}] * 1000
    assert len(template.render(messages=messages)) == 1000 * 80_001


def test_a_conversation_may_be_collected_in_a_list():
    template = BoundedEnvironment().from_string(
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}"
        "{% endfor %}{{ ns.l|length }}"
    )
    messages = [{"role": "user", "content": "y" * 2000}] * 1000
    assert template.render(messages=messages) == "1000"


def test_time_is_bounded_too(monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.2)
    template = BoundedEnvironment().from_string(
        "{% for a in range(9999) %}{{ 'b' in text }}{% endfor %}"
    )
    with pytest.raises(TemplateBoundError, match="takes longer than"):
        template.render(text="a" * 8_000_000)


def test_a_renderer_names_the_folder_of_a_costly_template(tmp_path):
    tokenizer = write_chat_tokenizer(
        tmp_path / "model", COSTLY["nested loops"] + TEMPLATES["llama3"]
    )
    values = (tmp_path / "model", template_bounds.MAX_STEPS)
    with raises_error("chat_template.bound.exceeded", *values) as caught:
        ChatRenderer(tokenizer).prompt(Conversation(({"role": "user", "content": "hi"},)))
    assert isinstance(caught.value, ConfigError)
